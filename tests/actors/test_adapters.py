"""LoRA on real learner ranks: only adapters are trained, and what leaves the learner is weights plus adapters."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.weights.model_folder import refuse_other_parameters
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

    def started(**changes: Any) -> Any:
        from actors.learner.rank import LearnerRank

        rank = LearnerRank(derived.learner(folder, lora_rank=RANK, lora_alpha=ALPHA, **changes))
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


def saved(folder: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_step_moves_the_served_policy_by_its_adapters_alone(start: Start, folder: Path, tmp_path: Path, zero: int):
    import torch

    rank, base = start(zero=zero), saved(folder)
    fresh = published(rank)
    assert fresh.keys() == base.keys() and all(torch.equal(fresh[name], base[name]) for name in base)
    assert update(rank).applied and update(rank).applied
    served = published(rank)
    entries = [entry for bucket in rank.served_weights().on_host() for entry in bucket.entries]
    refuse_other_parameters(folder, entries)  # what an engine looks at first
    for name, weight in base.items():
        layer = name.removesuffix(".weight")
        if f"{layer}.base_layer.weight" not in rank.state.shapes:
            assert torch.equal(served[name], weight), name  # norms, embeddings and the head are frozen
            continue
        a, b = (rank.state.get(f"{layer}.lora_{part}.default.weight") for part in "AB")
        assert a.shape[0] == RANK and float(b.abs().max()) > 0
        torch.testing.assert_close(served[name], weight + ALPHA / RANK * b @ a, atol=1e-6, rtol=0)
        assert torch.equal(rank.state.get(f"{layer}.base_layer.weight"), weight)
    rank.export(tmp_path)
    rank.written()
    assert all(torch.equal(served[name], value) for name, value in saved(tmp_path).items())
    (ours,) = rank.logprobs([ROWS[:1]])
    torch.testing.assert_close(ours, _logprobs(tmp_path, ROWS[0]), atol=1e-5, rtol=0)


def _logprobs(folder: Path, row: Any) -> Any:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    ids = torch.from_numpy(row.token_ids.astype(np.int64))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0][torch.from_numpy(row.loss_mask[1:])]


@pytest.mark.parametrize("zero", [1, 3])
def test_a_run_on_adapters_goes_on_from_its_checkpoint(start: Start, tmp_path: Path, zero: int):
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


def test_a_policy_taken_over_is_served_as_it_is(start: Start, tmp_path: Path):
    import torch

    first = start(zero=1)
    update(first)
    first.export(tmp_path)
    first.written()
    second = start(zero=1)
    update(second)
    second.set_policy(tmp_path)
    served = published(second)
    assert all(torch.equal(served[name], value) for name, value in saved(tmp_path).items())


@pytest.mark.parametrize("zero", [0, 3])
def test_biases_of_adapted_layers_leave_and_come_back_under_their_own_names(start: Start, tmp_path: Path, zero: int):
    """As Qwen2 has them."""
    import torch
    from transformers import AutoModelForCausalLM

    biased = save_policy(tmp_path / "biased", attention_bias=True)
    model: Any = AutoModelForCausalLM.from_pretrained(biased)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_()
    model.save_pretrained(biased)
    rank = start(model=str(biased), zero=zero)
    rank.set_policy(biased)
    assert update(rank).applied
    served, base = published(rank), saved(biased)
    biases = [name for name in base if name.endswith(".bias")]
    assert biases and served.keys() == base.keys()
    assert all(torch.equal(served[name], base[name]) for name in biases)
    rank.export(tmp_path / "out")
    rank.written()
    assert all(torch.equal(served[name], value) for name, value in saved(tmp_path / "out").items())


def test_only_adapters_have_moments_and_masters(start: Start):
    rank = start(zero=1, dtype="bfloat16")
    update(rank)
    trained = [name for name in rank.state.shapes if len(rank.state.parts(name)) > 1]
    assert trained and all(".lora_" in name for name in trained)
    assert {str(value.dtype) for value in published(rank).values()} == {"torch.bfloat16"}
