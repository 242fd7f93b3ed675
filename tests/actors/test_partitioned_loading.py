"""Under ZeRO-3 a model is loaded in partitions: weights, buffers and an update are those of one loaded whole."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import derived
from tests.actors.policies import draw_rows, micro_batches, save_policy, weighted

pytestmark = pytest.mark.real

RANKS = 2
KINDS: dict[str, dict[str, Any]] = {  # of a folder, with the learner's changes
    "tied": {"dtype": "bfloat16", "activation_checkpointing": True},
    "untied": {"dtype": "float32", "lora_rank": 4, "lora_alpha": 8},
}


@contextlib.contextmanager
def whole(*_: Any) -> Iterator[None]:
    yield


def loaded(folder: Path, name: str, rank: int) -> tuple[list[Any], dict[str, Any], float]:
    """Parameters after loading as (elements, elements of the partition), everything after an update, and its loss."""
    from actors.learner.rank import LearnerRank

    one = LearnerRank(derived.learner(**KINDS[name], zero=3, ranks=RANKS), folder / name, rank)
    port = folder / "port"
    if rank == 0 and not port.exists():
        new = port.with_suffix(".new")
        new.write_text(str(one.open_store("127.0.0.1")))
        new.rename(port)
    while not port.exists():
        time.sleep(0.05)
    start_engine, held = one._start_engine, list[Any]()

    def noted(policy: Any) -> None:
        held.extend((p.numel(), p.ds_tensor.numel() if hasattr(p, "ds_tensor") else 0) for p in policy.parameters())
        start_engine(policy)

    one._start_engine = noted
    one.start("127.0.0.1", int(port.read_text()))
    seen: dict[str, Any] = {f"{name} at first": one.state.get(name).clone() for name in one.state.shapes}
    result = one.train_rl([micro_batches(weighted(draw_rows(6)[rank::RANKS]), 128)], 1e-3)
    seen |= {name: one.state.get(name).clone() for name in one.state.shapes}
    seen |= dict(one.policy.named_buffers())
    one.release()
    return held, seen, result.metrics["loss"]


def of_rank(rank: int, folder: str) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    from actors.learner import deepspeed_start

    in_partitions: Any = deepspeed_start.partitioned_loading
    for name in KINDS:
        deepspeed_start.partitioned_loading = whole
        before, expected, loss = loaded(Path(folder), name, rank)
        deepspeed_start.partitioned_loading = in_partitions
        held, seen, same_loss = loaded(Path(folder), name, rank)
        assert seen.keys() == expected.keys() and same_loss == loss
        for key, value in expected.items():
            assert seen[key].dtype == value.dtype and torch.equal(seen[key], value), key
        base = [(numel, own) for numel, own in held if own]  # without adapters, which are made afterwards
        assert base and all(numel == 0 for numel, _ in base)
        of_base = sum(numel for numel, _ in before) - sum(numel for numel, own in held if not own)
        assert sum(own for _, own in base) == pytest.approx(of_base / RANKS, rel=0.01)


def test_a_model_loaded_in_partitions_is_the_one_loaded_whole_and_learns_the_same(tmp_path: Path):
    save_policy(tmp_path / "tied", attention_bias=True)
    save_policy(tmp_path / "untied", tie_word_embeddings=False)
    torch.multiprocessing.spawn(of_rank, (str(tmp_path),), nprocs=RANKS)
