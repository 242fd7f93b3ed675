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
