"""A model of random weights in the shape of Qwen3, as an ordinary Hugging Face folder."""

import json
from pathlib import Path

import torch
from torch import Tensor

from actors.weights.model_parameters import SavedWeights
from actors.weights.random_weights import write_random_weights

VOCABULARY = 32_000
HIDDEN = 2_048
LAYER_PARAMETERS = 50_335_744


def make_random_model(folder: Path, parameters: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of about so many parameters, a layer at least; returns the weights by name."""
    layers = max(1, round((parameters - VOCABULARY * HIDDEN) / LAYER_PARAMETERS))
    (folder / "config.json").write_text(json.dumps(qwen3_config(layers, str(dtype).removeprefix("torch."))))
    write_random_weights(folder, dtype)
    saved = SavedWeights(folder)
    return {name: saved.tensor(name) for name in saved.shapes()}


def qwen3_config(layers: int, dtype: str) -> dict[str, object]:
    """config.json: Qwen3-1.7B's layers over a small vocabulary."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": dtype,
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 6_144,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 2_048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
