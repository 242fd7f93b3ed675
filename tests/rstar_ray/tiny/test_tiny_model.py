import json
from pathlib import Path

import pytest
import torch

from rstar_ray.tiny.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


def test_model_and_tokenizer_agree_on_vocabulary_and_end_of_turn(folder: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    logits = model(torch.tensor([tokenizer.encode("What is 3 + 4?")])).logits
    assert logits.shape[-1] == len(tokenizer)


def test_its_sizes_and_its_first_weights(folder: Path):
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "head_dim", "max_position_embeddings")  # fmt: skip
    assert [config[name] for name in sizes] == [128, 256, 3, 8, 4, 32, 2_048]
    assert config["rope_parameters"]["rope_theta"] == 300.0 and config["tie_word_embeddings"] is True
    embeddings = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.std(embeddings).item() == pytest.approx(0.05, rel=0.02)
