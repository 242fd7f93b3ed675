"""LoRA on real learner ranks: only adapters are trained, engines receive them, an exported model has them merged."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.weights.adapter_folder import adapter_name, adapter_shapes
from actors.weights.model_parameters import refuse_other_parameters
from tests import derived
from tests.actors.policies import draw_rows, micro_batches, save_policy, weighted
from tests.actors.unpacked import unpack

pytestmark = pytest.mark.real

ROWS = draw_rows(8)
RANK, ALPHA = 4, 8
Start = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    ranks: list[Any] = []

    def started(model: Path = folder, **changes: Any) -> Any:
        from actors.learner.rank import LearnerRank

        rank = LearnerRank(derived.learner(lora_rank=RANK, lora_alpha=ALPHA, **changes), model)
        rank.start()
        ranks.append(rank)
        return rank

    yield started
    for rank in ranks:
        rank.release()


def update(rank: Any, lr: float = 1e-2) -> Any:
    return rank.train_rl([micro_batches(weighted(ROWS), 512)], lr)


def published(rank: Any) -> dict[str, Any]:
    """By name, as an engine would get them."""
    from tests.actors.unpacked import as_tensor

    return {one.name: as_tensor(one).clone() for one in unpack(list(rank.served_weights().on_host()))}


def saved(folder: Path, dtype: str = "auto") -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def matrices(rank: Any, layer: str) -> tuple[Any, Any]:
    """The float32 masters of a layer's A and B."""
    a, b = (rank.state.get(f"{layer}.lora_{matrix}.default.weight") for matrix in "AB")
    return a, b


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_engines_receive_the_adapters_and_an_exported_model_has_them_merged(
    start: Start, folder: Path, tmp_path: Path, zero: int
):
    import torch

    rank, base = start(zero=zero), saved(folder)
    assert update(rank).applied and update(rank).applied
    served = published(rank)
    entries = [entry for bucket in rank.served_weights().on_host() for entry in bucket.entries]
    refuse_other_parameters(folder, entries, adapter_shapes(folder, RANK))  # what an engine looks at first
    rank.export(tmp_path / "model")
    rank.written()
    exported = saved(tmp_path / "model")
    assert exported.keys() == base.keys()
    for name, weight in base.items():
        layer = name.removesuffix(".weight")
        if adapter_name(layer, "A") not in served:
            assert torch.equal(exported[name], weight), name  # norms, embeddings and the head are frozen
            continue
        a, b = matrices(rank, layer)
        assert a.shape[0] == RANK and float(b.abs().max()) > 0
        assert torch.equal(served[adapter_name(layer, "A")], a) and torch.equal(served[adapter_name(layer, "B")], b)
        torch.testing.assert_close(exported[name], weight + ALPHA / RANK * b @ a, atol=1e-6, rtol=0)
        assert torch.equal(rank.state.get(f"{layer}.base_layer.weight"), weight)
    (ours,) = rank.logprobs([ROWS[:1]])
    torch.testing.assert_close(ours, _logprobs(tmp_path / "model", ROWS[0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(ours, _logprobs_by_peft(tmp_path / "adapter", ROWS[0]), atol=1e-5, rtol=0)


def test_in_bfloat16_the_served_weights_carry_the_adapters_change(start: Start, tmp_path: Path):
    """At a learning rate whose changes are far below the steps of bfloat16 around a weight."""

    rank = start(zero=1, dtype="bfloat16")
    for _ in range(5):
        assert update(rank, lr=1e-5).applied
    served = published(rank)
    rank.export(tmp_path / "model")
    rank.written()
    exported = saved(tmp_path / "model", dtype="float32")
    layers = [
        name.removesuffix(".weight") for name in exported if adapter_name(name.removesuffix(".weight"), "A") in served
    ]
    assert layers
    for layer in layers:
        a, b = matrices(rank, layer)
        change = ALPHA / RANK * b @ a
        theirs = [served[adapter_name(layer, matrix)].float() for matrix in "AB"]
        by_engine = ALPHA / RANK * theirs[1] @ theirs[0]
        by_export = exported[f"{layer}.weight"] - rank.state.get(f"{layer}.base_layer.weight")
        for carried in (by_engine, by_export):
            assert float((carried * change).sum() / (change * change).sum()) > 0.9


def _logprobs(folder: Path, row: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return _logprobs_by(AutoModelForCausalLM.from_pretrained(folder), row)


def _logprobs_by_peft(adapter: Path, row: Any) -> Any:
    """Of the adapter on the base model that its folder names."""
    from peft import AutoPeftModelForCausalLM

    return _logprobs_by(AutoPeftModelForCausalLM.from_pretrained(adapter), row)


def _logprobs_by(model: Any, row: Any) -> Any:
    import numpy as np
    import torch

    ids = torch.from_numpy(row.token_ids.astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0][torch.from_numpy(row.loss_mask[1:])]


@pytest.mark.parametrize("zero", [1, 3])
def test_a_run_on_adapters_resumes_from_its_checkpoint(start: Start, tmp_path: Path, zero: int):
    import torch

    whole, first = start(zero=zero), start(zero=zero)
    for rank in (whole, first):
        update(rank)
    first.save_checkpoint(tmp_path, {})
    first.written()
    again = start(zero=zero)
    again.load_checkpoint(tmp_path)
    for rank in (whole, again):
        update(rank)
    ours, theirs = published(again), published(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_weights_that_engines_do_not_start_from_are_published_too(start: Start, folder: Path, tmp_path: Path):
    """Of a policy that is taken over, and of a checkpoint with it; the adapter begins again with it."""
    import torch

    first = start(zero=1)
    update(first)
    first.export(tmp_path / "first" / "model")
    first.written()
    second = start(zero=1)
    update(second)
    second.set_policy(folder)  # what it has already
    assert published(second).keys() == published(first).keys()
    second.set_policy(tmp_path / "first" / "model")
    base = saved(tmp_path / "first" / "model")
    assert all(torch.equal(published(second)[name], value) for name, value in base.items())
    update(second)
    second.save_checkpoint(tmp_path / "checkpoint", {})
    second.export(tmp_path / "second" / "model")
    second.written()
    third = start(zero=1)
    third.load_checkpoint(tmp_path / "checkpoint")
    served = published(third)
    assert served.keys() - published(first).keys() == base.keys()
    assert all(torch.equal(served[name], value) for name, value in published(second).items())
    (ours,) = third.logprobs([ROWS[:1]])
    torch.testing.assert_close(ours, _logprobs_by_peft(tmp_path / "second" / "adapter", ROWS[0]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("zero", [0, 3])
def test_biases_of_adapted_layers_leave_and_come_back_under_their_own_names(start: Start, tmp_path: Path, zero: int):
    """As Qwen2 has them."""
    import torch
    from transformers import AutoModelForCausalLM

    biased = save_policy(tmp_path / "biased", attention_bias=True)
    other = save_policy(tmp_path / "other", attention_bias=True)
    model: Any = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_()
    model.save_pretrained(other)
    rank = start(model=biased, zero=zero)
    rank.set_policy(other)
    assert update(rank).applied
    served, base = published(rank), saved(other)
    biases = [name for name in base if name.endswith(".bias")]
    assert biases and all(torch.equal(served[name], base[name]) for name in base)
    rank.export(tmp_path / "out" / "model")
    rank.written()
    exported = saved(tmp_path / "out" / "model")
    assert exported.keys() == base.keys() and all(torch.equal(exported[name], base[name]) for name in biases)


def test_only_adapters_have_moments_and_masters(start: Start):
    rank = start(zero=1, dtype="bfloat16")
    update(rank)
    trained = [name for name in rank.state.shapes if len(rank.state.parts(name)) > 1]
    assert trained and all(".lora_" in name for name in trained)
    assert {str(value.dtype) for value in published(rank).values()} == {"torch.bfloat16"}
