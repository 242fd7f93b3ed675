import json
from pathlib import Path

import pytest
import torch

from rstar_ray.tiny.model import CONTEXT_TOKENS, make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


def test_transformers_loads_the_folder_as_a_small_qwen3(folder: Path):
    from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, Qwen3ForCausalLM)
    assert 500_000 < sum(weight.numel() for weight in model.parameters()) < 750_000
    assert model.dtype is torch.float32
    assert model.config.max_position_embeddings == CONTEXT_TOKENS


def test_model_and_tokenizer_agree_on_vocabulary_and_end_of_turn(folder: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    logits = model(torch.tensor([tokenizer.encode("What is 3 + 4?")])).logits
    assert logits.shape[-1] == len(tokenizer)


def test_a_seed_fixes_the_weights_and_leaves_the_global_generator_alone(folder: Path, tmp_path: Path):
    torch.manual_seed(77)
    before = torch.random.get_rng_state()
    again = make_tiny_model(tmp_path / "again", seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    other = make_tiny_model(tmp_path / "other", seed=2)
    weights = [(path / "model.safetensors").read_bytes() for path in (folder, again, other)]
    assert weights[0] == weights[1] != weights[2]


def test_its_sizes_and_its_first_weights(folder: Path):
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "head_dim", "max_position_embeddings")  # fmt: skip
    assert [config[name] for name in sizes] == [128, 256, 3, 8, 4, 32, 2_048]
    assert config["rope_parameters"]["rope_theta"] == 300.0 and config["tie_word_embeddings"] is True
    embeddings = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.std(embeddings).item() == pytest.approx(0.05, rel=0.02)
