"""A Qwen3 of about 0.6M random weights, as an ordinary Hugging Face folder.

torch and transformers are imported when a model is made: a command that only refuses or shows its help need not wait.
"""

from pathlib import Path
from typing import Any, cast

CONTEXT_TOKENS = 2048


TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT_TOKENS,
}


def make_tiny_model(folder: Path, seed: int) -> Path:
    """Write model and tokenizer to `folder`; the weights depend only on the seed."""
    return make_random_model(folder, seed, **TINY)


def make_random_model(folder: Path, seed: int, **shape: Any) -> Path:
    """As `make_tiny_model`, with another shape: fields of a `Qwen3Config`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rstar_ray.tiny.tokenizer import save_tokenizer

    tokenizer = save_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},  # conversations are short
        initializer_range=0.05,
        tie_word_embeddings=True,
        eos_token_id=cast(int, tokenizer.eos_token_id),
        pad_token_id=cast(int, tokenizer.pad_token_id),
        bos_token_id=None,
        dtype="float32",
        **shape,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return folder
