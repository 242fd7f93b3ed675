"""How weights are sent from the learner's ranks to engines: the senders' halves against fake engines, without a GPU.

The engines' half is the product's (`Arrivals`) wherever a CPU has what it needs.
"""

import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.weights import collective
from actors.weights.arrivals import Arrivals
from actors.weights.buckets import (
    BucketPlan,
    WeightBucket,
    WeightEntry,
    as_rows,
    checksum,
    from_rows,
    size_of,
    sum_of_bytes,
)
from actors.weights.collective import CollectiveTransfer
from actors.weights.ipc import IpcTransfer
from actors.weights.tensors import ServedWeights, TensorBucket, add_checksum, filled, sum_of_tensor
from actors.weights.transfer import EngineSeat, LoadedWeights, Publication, put_into_store
from rstar_ray.errors import DeadlineExceeded, EngineError, TransferError

CPU = torch.device("cpu")
BUCKET_BYTES = 4_096
DEADLINE_S = 60.0


def model(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        "embed": torch.randn(40, 16, dtype=torch.bfloat16),
        "norm": torch.randn(16),
        "scale": torch.tensor(2.0),
        "large": torch.randn(50, 40),
        "last": torch.randn(7, 3, dtype=torch.float16),
    }


class Gathered(ServedWeights):
    """The weights of a model that lies whole in this process."""

    def __init__(self, seed: int = 0, events: list[str] | None = None) -> None:
        self.parameters = model(seed)
        self.events = [] if events is None else events
        super().__init__(self._rows, self._all, BUCKET_BYTES, everywhere=True)

    def _rows(self) -> Iterator[WeightEntry]:
        for name, one in self.parameters.items():
            yield WeightEntry(name, tuple(one.shape), str(one.dtype).removeprefix("torch."), 0)

    def _all(self, group_bytes: int, *, everywhere: bool) -> Iterator[tuple[str, Tensor]]:
        yield from self.parameters.items()
        self.events.append("all gathered")

    @property
    def checksum(self) -> int:
        return checksum(list(self.on_host()))


@dataclass
class SharedTensors:
    """`CudaExporter` of one process; vLLM's end has it in `tests.actors.test_transfer_real`."""

    events: list[str]
    lent: Callable[[], Tensor | None] = lambda: None
    exported: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def room(self, num_bytes: int) -> Tensor:
        self.events.append("room")
        room = torch.zeros(num_bytes, dtype=torch.uint8)
        self.lent = weakref.ref(room)
        return room

    def export(self, room: Tensor) -> dict[str, Any]:
        self.events.append("exported")
        self.exported["it"] = room
        return {"it": 1}

    def ready(self) -> None:
        self.events.append("ready")

    def release(self) -> None:
        self.exported.clear()
        self.events.append("released" if self.lent() is None else "released, and still held")

    def copied(self, rows: Sequence[Any]) -> TensorBucket:
        """As an engine takes a bucket."""
        entries = from_rows(rows)
        return TensorBucket(entries, self.exported["it"][: size_of(entries)].clone())


class FakeEngine:
    """An `EngineLine` whose engine is a dictionary; `fails` says at which call it does, and how."""

    def __init__(self, name: str, memory: SharedTensors, events: list[str], *, sender: int = 0) -> None:
        self.seat = EngineSeat(name=name, incarnation="1", ranks=1, sender=sender)
        self.memory = memory
        self.events = events
        self.fails: dict[str, Callable[[], None]] = {}
        self.serves: dict[str, Tensor] = {}
        self.versions: list[int] = []
        self._came: list[TensorBucket] = []
        self._version = 0
        self._thread = ThreadPoolExecutor(1)

    def join(self, meeting: Mapping[str, Any]) -> "Future[None]":
        return self._do("join", lambda: None)

    def begin(self, version: int, plan: BucketPlan) -> "Future[None]":
        def begin() -> None:
            self._came, self._version = [], version

        return self._do("begin", begin)

    def take(self, parcel: Mapping[str, Any]) -> "Future[None]":
        def take() -> None:
            assert (parcel["by"], parcel["handle"]) == ("ipc", {"it": 1})
            self._came += map(self.memory.copied, parcel["buckets"])

        return self._do("take", take)

    def end(self) -> "Future[LoadedWeights]":
        def end() -> LoadedWeights:
            self.versions.append(self._version)
            self.serves = {name: weight for bucket in self._came for name, weight in bucket.weights()}
            total = 0
            for bucket in self._came:
                total = add_checksum(bucket.weights(), total)
            return LoadedWeights(checksum=total, load_s=0.1)

        return self._do("end", end)

    def _do(self, what: str, work: Callable[[], Any]) -> "Future[Any]":
        def run() -> Any:
            self.events.append(what)
            self.fails.get(what, lambda: None)()
            return work()

        return self._thread.submit(run)


def fail() -> None:
    raise EngineError("its process died")


def hang() -> None:
    time.sleep(3)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---------------------------------------------------------------- buckets


@pytest.mark.parametrize("size", [0, 1, 7, 8, 8191, 8192, 8193, 50_001])
def test_a_sum_of_bytes_on_a_device_is_the_hosts(size: int):
    data = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    assert sum_of_tensor(torch.from_numpy(data)) == sum_of_bytes(data)


def test_another_parameter_than_the_layout_has_next_is_refused():
    weights = Gathered()
    reversed_order = iter(reversed(weights.parameters.items()))
    with pytest.raises(ValueError, match="expected parameter embed, got last"):
        filled(weights.plan[0], torch.zeros(BUCKET_BYTES, dtype=torch.uint8), reversed_order)


# ---------------------------------------------------------------- the object store


def test_the_object_store_keeps_every_bucket_and_asks_no_engine():
    stored: list[WeightBucket] = []
    weights = Gathered()
    sent = put_into_store(weights, 1, lambda bucket: stored.append(bucket) or len(stored))
    assert (sent.refs, sent.num_bytes) == ((1, 2, 3), sum(bucket.num_bytes for bucket in stored))
    assert sent.checksum == checksum(stored) == weights.checksum


# ---------------------------------------------------------------- IPC


class Beside:
    """A rank and the engine on its GPU."""

    def __init__(self, deadline_s: float = 60.0) -> None:
        self.events: list[str] = []
        self.memory: Any = SharedTensors(self.events)
        self.engine = FakeEngine("generation/0", self.memory, self.events)
        self.transfer = IpcTransfer(self.memory, deadline_s)

    def send(self, version: int = 1, seed: int = 0) -> tuple[Publication, Gathered]:
        self.events.clear()
        weights = Gathered(seed, self.events)
        return self.transfer.send(weights, version, [self.engine]), weights


def test_versions_by_ipc_follow_each_other():
    beside = Beside()
    for version in (1, 2, 3):
        sent, weights = beside.send(version, seed=version)
        assert sent.took["generation/0"].checksum == weights.checksum
        assert same(beside.engine.serves, weights.parameters)
    assert beside.engine.versions == [1, 2, 3]


@pytest.mark.parametrize("at", ["begin", "take", "end"])
@pytest.mark.parametrize(
    ("how", "deadline_s", "said"),
    [(fail, 60.0, "its process died"), (hang, 0.2, r"learner waited 0\.2 s for generation/0 \(.*\) and gave up")],
)
def test_where_the_engine_fails_or_hangs_the_rank_gathers_to_the_end_and_gives_its_memory_back(
    at: str, how: Callable[[], None], deadline_s: float, said: str
):
    beside = Beside(deadline_s)
    beside.engine.fails[at] = how
    sent, _ = beside.send()
    assert (sent.took, sent.num_bytes) == ({}, 0)
    assert re.search(said, sent.failed["generation/0"])
    assert "all gathered" in beside.events and beside.events[-1] == "released"
    assert beside.memory.exported == {}


def test_a_time_that_ran_out_in_the_engine_is_reported_as_the_engines():
    beside = Beside(deadline_s=5.0)

    def give_up() -> None:
        raise TimeoutError("no memory handle for 1 s")

    beside.engine.fails["take"] = give_up
    sent, _ = beside.send()
    assert sent.failed == {"generation/0": "generation/0 failed in loading bucket 1 of 3: no memory handle for 1 s"}


def test_a_rank_whose_engine_is_gone_only_gathers():
    beside = Beside()
    weights = Gathered()
    sent = beside.transfer.send(weights, 1, [])
    assert (sent.num_bytes, sent.took, sent.failed) == (0, {}, {})
    assert weights.events == ["all gathered"] and beside.events == []


# ---------------------------------------------------------------- a broadcast; between processes in test_transfer_real


class Listening(FakeEngine):
    """Receives nothing: no process is behind it."""

    def take(self, parcel: Mapping[str, Any]) -> "Future[None]":
        assert parcel["by"] == "nccl"
        return self._do("take", lambda: None)


def test_a_group_is_formed_once_and_again_where_engines_change_or_one_fails(monkeypatch: pytest.MonkeyPatch):
    formed: list[int] = []

    class Group:
        def __init__(self, store: Any, place: int, size: int, *_: Any) -> None:
            formed.append(size)

        def broadcast(self, *_: Any) -> None: ...

        def leave(self) -> None: ...

    monkeypatch.setattr(collective, "Collective", Group)
    memory = SharedTensors([])
    engines = [Listening(f"generation/{number}", memory, memory.events) for number in range(2)]
    transfer = CollectiveTransfer("127.0.0.1", CPU, DEADLINE_S)
    for version in (1, 2):
        assert transfer.send(Gathered(seed=version), version, engines).took.keys() == {"generation/0", "generation/1"}
    assert (formed, memory.events.count("join")) == ([3], 2)
    transfer.send(Gathered(), 3, engines[:1])
    engines[0].fails["take"] = fail
    assert "its process died" in transfer.send(Gathered(), 4, engines[:1]).failed["generation/0"]
    engines[0].fails.clear()
    assert transfer.send(Gathered(), 5, engines[:1]).failed == {} and formed == [3, 2, 2]


@pytest.mark.long
def test_engines_that_do_not_come_are_waited_for_until_the_deadline():
    """The sender is alone: nobody joins."""
    events: list[str] = []
    engine = FakeEngine("generation/0", SharedTensors(events), events)
    engine.fails["join"] = fail
    weights = Gathered()
    sent = CollectiveTransfer("127.0.0.1", CPU, 1.0).send(weights, 1, [engine])
    assert "did not form a group for new weights" in sent.failed["generation/0"]
    assert weights.events[-1] == "all gathered"


def test_a_group_whose_members_do_not_all_come_is_not_left_for_torch_to_end_the_process_for(
    monkeypatch: pytest.MonkeyPatch,
):
    class Frozen:
        """A group of which one member stands still."""

        aborted = False

        def broadcast(self, *_: Any) -> Any:
            return self

        def is_completed(self) -> bool:
            return False

        def abort(self) -> None:
            self.aborted = True

    group = Frozen()
    monkeypatch.setattr(collective, "_group", lambda *_: group)
    with pytest.raises(DeadlineExceeded, match="the connection test"):
        collective.Collective(collective.open_store("127.0.0.1", 2, 1.0), 0, 2, CPU, 0.05)
    assert group.aborted


def test_weights_by_a_way_that_nobody_knows_or_without_a_group_are_refused():
    arrivals = Arrivals(CPU, 0)
    rows: Sequence[Any] = as_rows(Gathered().plan)
    with pytest.raises(TransferError, match="has not joined a group"):
        list(arrivals.parcel("nccl", rows))
    with pytest.raises(TransferError, match="unknown way of weight transfer 'pigeon'"):
        list(arrivals.parcel("pigeon", rows))
