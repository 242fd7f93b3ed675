"""How weights are sent from the learner's ranks to engines: the senders' halves against fake engines, without a GPU.

The engines' half is the product's (`Arrivals`) wherever a CPU has what it needs.
"""

import multiprocessing
import os
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
START_S = 300.0  # of a process that imports torch, on a machine with much else to do
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


# ---------------------------------------------------------------- a broadcast between real processes


def receive(meetings: Any, plan: list[Any], answers: Any, dies_at: int | None) -> None:
    """An engine's process: the product's end, as vLLM's worker runs it."""
    arrivals = Arrivals(CPU, 0)
    answers.put("up")
    arrivals.join(meetings.get(timeout=START_S))
    answers.put("joined")
    for _ in range(2):
        total = 0
        try:
            for number, bucket in enumerate(arrivals.parcel("nccl", plan)):
                total = add_checksum(bucket.weights(), total)
                if number == dies_at:
                    os._exit(1)
        except Exception as failed:  # sent to the test by name
            answers.put(f"{type(failed).__name__}: {failed}")
            return
        answers.put(total)


class FarEngine:
    """An `EngineLine` of a separate process."""

    def __init__(self, name: str, plan: BucketPlan, dies_at: int | None = None) -> None:
        self.seat = EngineSeat(name=name, incarnation="1", ranks=1, sender=0)
        spawn = multiprocessing.get_context("spawn")
        self._meetings: Any = spawn.Queue()
        self._answers: Any = spawn.Queue()
        self._plan = as_rows(plan)
        self._thread = ThreadPoolExecutor(1)
        arguments = (self._meetings, self._plan, self._answers, dies_at)
        self.process = spawn.Process(target=receive, args=arguments, daemon=True)
        self.process.start()
        self.calls: list[Any] = []
        self._answer()  # it is up: no deadline below counts its start

    def join(self, meeting: Mapping[str, Any]) -> "Future[None]":
        self.calls.append("join")
        self._meetings.put(dict(meeting))
        return self._thread.submit(self._answer)

    def begin(self, version: int, plan: BucketPlan) -> "Future[None]":
        self.calls.append(version)
        return self._thread.submit(lambda: None)

    def take(self, parcel: Mapping[str, Any]) -> "Future[None]":
        assert parcel == {"by": "nccl", "buckets": self._plan}
        return self._thread.submit(self._answer)

    def end(self) -> "Future[LoadedWeights]":
        return self._thread.submit(lambda: LoadedWeights(checksum=self.last))

    def _answer(self) -> None:
        until = time.monotonic() + START_S
        while self._answers.empty():
            if self.process.exitcode:
                raise EngineError(f"its process ended with {self.process.exitcode}")
            assert time.monotonic() < until
            time.sleep(0.01)
        self.last = self._answers.get()


@pytest.mark.slow
def test_by_broadcast_every_engine_has_the_senders_weights_version_by_version():
    plan = Gathered().plan
    engines = [FarEngine(f"generation/{number}", plan) for number in range(2)]
    transfer = CollectiveTransfer("127.0.0.1", CPU, DEADLINE_S)
    for version in (1, 2):
        weights = Gathered(seed=version)
        sent = transfer.send(weights, version, engines)
        assert sent.failed == {}
        assert sent.checksum == weights.checksum
        assert {pulled.checksum for pulled in sent.took.values()} == {weights.checksum}
    assert [engine.calls for engine in engines] == [["join", 1, 2]] * 2  # the group was made once
    transfer.leave()


@pytest.mark.slow
def test_an_engine_that_dies_in_a_broadcast_ends_it_for_all_with_a_name_inside_the_deadline():
    weights = Gathered()
    engines = [FarEngine("generation/0", weights.plan), FarEngine("generation/1", weights.plan, dies_at=0)]
    transfer = CollectiveTransfer("127.0.0.1", CPU, DEADLINE_S)
    sent = transfer.send(weights, 1, engines)
    assert sent.took == {} and sent.num_bytes == 0
    assert sent.failed.keys() == {"generation/0", "generation/1"}
    assert any(said in sent.failed["generation/0"] for said in ("failed", "generation/1 failed", "gave up"))
    assert weights.events[-1] == "all gathered"
    engines[0].process.join(2 * DEADLINE_S)
    assert engines[0].process.exitcode == 0  # it waited no longer than that, and said why
    engines[0]._thread.submit(lambda: None).result(START_S)  # the answer has been read
    assert any(kind in str(engines[0].last) for kind in ("TransferError", "DeadlineExceeded"))


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
