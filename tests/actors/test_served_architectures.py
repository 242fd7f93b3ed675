"""New weights in real engines of several architectures: log-probs agree with a plain forward pass of each version."""

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.generation.engine import Engine
from actors.weights.buckets import checksum
from tests import derived
from tests.actors.test_engine import off_by, weights

pytestmark = [pytest.mark.real]

TOLERANCE = 1e-4  # of random norms and biases; one layer of another version is off by 0.1 and more
SHAPE = {
    "vocab_size": 97,  # vLLM pads it: a layer larger than what is saved of it
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "float32",
}
UNTIED = {"tie_word_embeddings": False}
TIED = {"tie_word_embeddings": True}
BIASED = {"attention_bias": True, "mlp_bias": True}
EVEN = {"vocab_size": 128}


def model_of(kind: str, seed: int, **changes: Any) -> Any:
    """Random weights. Biases and norms are random too: transformers initializes them with zeros and ones."""
    import transformers

    made: Any = getattr(transformers, f"{kind}ForCausalLM")
    torch.manual_seed(seed)
    model: Any = made(made.config_class(**SHAPE | changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * (0.5 if "bias" in name else 0.05))
    return model


@pytest.mark.parametrize(
    ("kind", "changes", "ranks"),
    [
        pytest.param("Qwen2", TIED, 1, id="biases, a tied head"),
        pytest.param("Qwen2", TIED, 2, id="split over two ranks", marks=pytest.mark.slow),
        pytest.param("Llama", UNTIED | BIASED, 1, id="a separate head", marks=pytest.mark.slow),
        pytest.param("Llama", UNTIED | BIASED | EVEN, 2, id="a separate split head", marks=pytest.mark.slow),
        pytest.param("Gemma3", TIED, 1, id="other norms", marks=pytest.mark.slow),
        pytest.param("Phi3", UNTIED, 1, id="saved in one", marks=pytest.mark.slow),
        pytest.param("Mistral", UNTIED, 1, id="mistral", marks=pytest.mark.slow),
        pytest.param("Olmo2", UNTIED, 1, id="norms elsewhere", marks=pytest.mark.slow),
        pytest.param("Granite", TIED, 1, id="granite", marks=pytest.mark.slow),
    ],
)
async def test_each_version_is_served_as_loaded(kind: str, changes: dict[str, Any], ranks: int, tmp_path: Path):
    model_of(kind, 0, **changes).save_pretrained(tmp_path)
    engine = Engine(derived.engine(max_context_tokens=256, kv_tokens=4_096, tensor_parallel=ranks), tmp_path)
    await engine.start()
    try:
        for version in (1, 2):
            model = model_of(kind, version, **changes)
            buckets = weights(model)
            update = await engine.weights.update(version, buckets)
            assert update.checksum == checksum(buckets)
            assert await off_by(engine, model) <= TOLERANCE
    finally:
        await engine.close()
