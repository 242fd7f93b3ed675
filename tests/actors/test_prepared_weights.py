"""Weights made ready beside those that serve, on real engines of several architectures, held to the learner's."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.generation import weight_swap
from actors.generation.engine import Engine
from actors.weights.buckets import checksum, pack
from actors.weights.tensors import named_array
from tests import derived
from tests.actors.test_engine import complete, off_by, prompts, weights

pytestmark = [pytest.mark.real]

REPOSITORY = Path(__file__).parents[2]
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
    """Random weights, biases and norms too, which transformers would begin with noughts and ones."""
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
        pytest.param("Llama", UNTIED | BIASED, 1, id="a head of its own", marks=pytest.mark.slow),
        pytest.param("Llama", UNTIED | BIASED | EVEN, 2, id="a split head of its own", marks=pytest.mark.slow),
        pytest.param("Gemma3", TIED, 1, id="other norms", marks=pytest.mark.slow),
        pytest.param("Phi3", UNTIED, 1, id="saved in one", marks=pytest.mark.slow),
        pytest.param("Mistral", UNTIED, 1, id="mistral", marks=pytest.mark.slow),
        pytest.param("Olmo2", UNTIED, 1, id="norms elsewhere", marks=pytest.mark.slow),
        pytest.param("Granite", TIED, 1, id="granite", marks=pytest.mark.slow),
    ],
)
async def test_each_version_answers_as_its_weights_do_however_it_came(
    kind: str, changes: dict[str, Any], ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model_of(kind, 0, **changes).save_pretrained(tmp_path)
    engine = Engine(derived.engine(tmp_path, max_model_len=256, kv_tokens=4_096, tensor_parallel_size=ranks))
    await engine.start()
    try:
        for version, from_bytes in enumerate([0, 0, 2**40, 0], start=1):
            monkeypatch.setattr(weight_swap, "BESIDE_FROM_BYTES", from_bytes)
            model = model_of(kind, version, **changes)
            buckets = weights(model)
            update = await engine.update_weights(version, buckets)
            assert (update.checksum, update.prepared) == (checksum(buckets), from_bytes == 0)
            assert await off_by(engine, model) <= TOLERANCE
    finally:
        await engine.close()


@pytest.mark.slow
async def test_bfloat16_weights_answer_the_same_to_the_last_bit_however_they_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """From the folder, in place, made ready beside others: against each other, since float32 has other sums."""
    model = model_of("Qwen2", 0, **TIED).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    engine = Engine(derived.engine(tmp_path, dtype="bfloat16", max_model_len=256, kv_tokens=4_096))
    await engine.start()
    try:
        answers = [await complete(engine, prompts(1)[0])]
        for version, (seed, from_bytes) in enumerate([(1, 0), (0, 2**40), (1, 2**40), (0, 0)], start=1):
            monkeypatch.setattr(weight_swap, "BESIDE_FROM_BYTES", from_bytes)
            weights_now = model_of("Qwen2", seed, **TIED).to(torch.bfloat16)
            named = (named_array(name, one.detach()) for name, one in weights_now.named_parameters())
            update = await engine.update_weights(version, list(pack(named, 2**20)))
            assert update.prepared == (from_bytes == 0)
            answers.append(await complete(engine, prompts(1)[0]))
        said = [(answer.token_ids, answer.logprobs) for answer in answers]
        assert said[0] == said[2] == said[4] and said[1] == said[3]
        assert said[0] != said[1]
    finally:
        await engine.close()


@pytest.mark.slow
async def test_layers_that_loading_changes_otherwise_are_loaded_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Experts, with which no run begins (`actors.weights.model_folder.refuse_misfit`)."""
    monkeypatch.setattr(weight_swap, "BESIDE_FROM_BYTES", 0)
    experts = UNTIED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    model_of("Qwen3Moe", 0, **experts).save_pretrained(tmp_path)
    engine = Engine(derived.engine(tmp_path, max_model_len=256, kv_tokens=4_096))
    await engine.start()
    try:
        for version in (1, 2):
            update = await engine.update_weights(version, weights(model_of("Qwen3Moe", version, **experts)))
            assert not update.prepared
    finally:
        await engine.close()


@pytest.mark.slow
def test_versions_leave_nothing_in_the_process_and_one_that_cannot_be_handed_over_changes_nothing(tmp_path: Path):
    command = [sys.executable, "-m", "tests.actors.keeps_nothing", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert "nothing is left" in done.stdout and "nothing has changed" in done.stdout, done.stderr[-2_000:]
