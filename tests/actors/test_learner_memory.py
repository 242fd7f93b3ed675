"""What a learner's rank holds, counted tensor by tensor, against the planner's lines: two ranks, every ZeRO setting."""

import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rstar_ray.algorithm import state_bytes
from rstar_ray.algorithm.loss import token_logprobs
from rstar_ray.algorithm.state_bytes import REDUCE_BUCKET, rank_bytes
from scheduler.planner.capacity import LOGITS_CHUNK_TOKENS, logits_gb
from scheduler.planner.model_shape import GB
from tests import derived
from tests.actors.policies import draw_rows, micro_batches, save_policy, weighted

RANKS = 2
SHAPES: dict[str, dict[str, Any]] = {  # no matrix so small that ZeRO-3 leaves it whole on every rank (1e5 elements)
    "tied": {"hidden_size": 512, "intermediate_size": 1_536, "num_hidden_layers": 2, "num_attention_heads": 8,
             "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 400},
    "untied": {"hidden_size": 384, "intermediate_size": 1_024, "num_hidden_layers": 4, "num_attention_heads": 6,
               "num_key_value_heads": 6, "head_dim": 64, "vocab_size": 1_000, "tie_word_embeddings": False},
}  # fmt: skip
SMALL_BUCKET = 1_000_000
"""Of which the gradients of these models fill several, as those of large models fill several of the learner's own."""
KINDS = {
    "tied": [("float32", 1, REDUCE_BUCKET, False), ("bfloat16", 3, REDUCE_BUCKET, False)],
    "untied": [
        ("float32", 0, REDUCE_BUCKET, False), ("float32", 1, REDUCE_BUCKET, False), ("float32", 1, SMALL_BUCKET, False),
        ("float32", 2, REDUCE_BUCKET, False), ("float32", 3, REDUCE_BUCKET, False),
        ("bfloat16", 1, REDUCE_BUCKET, False), ("bfloat16", 2, REDUCE_BUCKET, False),
        ("bfloat16", 3, REDUCE_BUCKET, False), ("bfloat16", 3, REDUCE_BUCKET, True),
    ],
}  # fmt: skip
"""Dtype, ZeRO stage, gradients of a bucket, and whether the optimizer's state is offloaded, by shape."""


def tensors() -> dict[int, int]:
    """Bytes of everything that a tensor of this process lies in, by its address."""
    found: dict[int, int] = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == "cpu":
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def held(before: dict[int, int]) -> int:
    gc.collect()  # what waits to be collected is not held
    return sum(size for address, size in tensors().items() if address not in before)


def of_rank(rank: int, folder: str) -> None:
    """Rank 0 writes what it holds while gradients are added up, for each kind of learner."""
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    from actors.learner import deepspeed_start
    from actors.learner.rank import LearnerRank

    gc.freeze()  # modules' objects are not looked through for tensors
    rows = weighted(draw_rows(6))
    seen: dict[str, dict[str, float]] = {}
    port = Path(folder) / "port"
    for shape in SHAPES:
        for dtype, zero, bucket, offload in KINDS[shape]:
            deepspeed_start.REDUCE_BUCKET = bucket
            before = tensors()
            config = derived.learner(
                dtype=dtype, zero=zero, offload=offload, ranks=RANKS, activation_checkpointing=False
            )
            one = LearnerRank(config, Path(folder) / shape, rank)
            if rank == 0 and not port.exists():
                new = port.with_suffix(".new")
                new.write_text(str(one.open_store("127.0.0.1")))
                new.rename(port)
            while not port.exists():
                time.sleep(0.05)
            one.start("127.0.0.1", int(port.read_text()))
            peak = 0
            backward: Callable[..., Any] = one.engine.backward

            def counted(loss: Any, back: Callable[..., Any] = backward, first: dict[int, int] = before) -> None:
                nonlocal peak
                back(loss)
                if rank == 0:
                    peak = max(peak, held(first))

            for update in range(2):  # the first makes the optimizer's state
                if update:
                    one.engine.backward = counted
                one.train_rl([micro_batches(rows, 128)], 1e-3)
            moments = sum(
                value.untyped_storage().nbytes()
                for state in one.optimizer.state.values()
                for name, value in state.items()
                if name != "step"
            )
            seen[f"{shape} {dtype} {zero} {bucket} {offload}"] = {
                "parameters": one.facts().num_parameters, "peak": peak, "moments": moments,
            }  # fmt: skip
            one.release()
            del one, backward, counted
            gc.collect()
    if rank == 0:
        (Path(folder) / "seen.json").write_text(json.dumps(seen))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, float]]]:
    folder = tmp_path_factory.mktemp("memory")
    for name, shape in SHAPES.items():
        save_policy(folder / name, **shape)
    torch.multiprocessing.spawn(of_rank, (str(folder),), nprocs=RANKS)
    yield json.loads((folder / "seen.json").read_text())


@pytest.mark.real
@pytest.mark.parametrize(
    ("shape", "dtype", "zero", "bucket", "offload"),
    [(shape, *kind) for shape, kinds in KINDS.items() for kind in kinds],
)
def test_a_rank_holds_what_the_planner_counts(
    monkeypatch: pytest.MonkeyPatch,
    seen: dict[str, dict[str, float]],
    shape: str,
    dtype: Any,
    zero: int,
    bucket: int,
    offload: bool,
):
    monkeypatch.setattr(state_bytes, "REDUCE_BUCKET", bucket)
    counted = seen[f"{shape} {dtype} {zero} {bucket} {offload}"]
    planned = rank_bytes(counted["parameters"], dtype=dtype, zero=zero, ranks=RANKS)
    assert counted["moments"] == pytest.approx(planned.moments, rel=0.05)
    state = planned.state
    if offload:  # in this test host and device are the same memory
        on_host = state_bytes.state_bytes(dtype, zero).offloaded * counted["parameters"] / RANKS
        state += on_host - planned.offloaded
    assert counted["peak"] - planned.bucket == pytest.approx(state, rel=0.05)


class Live(torch.utils._python_dispatch.TorchDispatchMode):
    """The most bytes that lay in tensors made inside, at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor.untyped_storage())
        return made

    def _follow(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self._known:
            return
        import weakref

        self._known.add(address)
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, address, size)

    def _gone(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size


@pytest.mark.long
@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(20_000, torch.float32), (20_000, torch.bfloat16), (50_000, torch.float32)]
)
def test_a_chunk_of_logits_takes_what_the_planner_counts(vocabulary: int, dtype: torch.dtype):
    """With a hidden size so small that the weights' gradients do not count."""
    tokens, chunk = 96, 32
    hidden = torch.randn(tokens, 1, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, 1, dtype=dtype, requires_grad=True)
    with Live() as live:
        logprobs, entropy = token_logprobs(hidden, weight, torch.arange(tokens), chunk_tokens=chunk, temperature=1.0)
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
    planned = logits_gb(vocabulary, chunk) * GB
    assert chunk < LOGITS_CHUNK_TOKENS
    assert live.most == pytest.approx(planned, rel=0.05)
