"""Swaps that a learner's rank drives, with a fake in vLLM's place: who is waited for, how long, and who ends."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
from torch import Tensor

from actors.generation import weight_swap
from actors.generation.load_meter import LoadMeter
from actors.generation.weight_swap import WeightSwap
from actors.weights.buckets import BucketPlan
from actors.weights.collective import CollectiveTransfer
from actors.weights.ipc import IpcTransfer
from actors.weights.tensors import TensorBucket
from actors.weights.transfer import EngineSeat, LoadedWeights, Publication
from rstar_ray.errors import EngineError, TransferError
from tests.actors.test_transfer import CPU, Gathered, SharedTensors

DEADLINE_S = 2.0


class Vllm:
    """vLLM's processes, of which every answer comes at once."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.serves = ""  # a version
        self.dead = ""
        self.engine_core = self

    def alive(self) -> "Vllm":
        if self.dead:
            raise EngineError(f"the engine does not serve: {self.dead}")
        return self

    def mark_dead(self, why: str) -> None:
        self.dead = self.dead or why

    async def ask(self, answer: Awaitable[Any], what: str) -> Any:
        done = await answer
        self.alive()
        return done

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append("paused")

    async def start_weight_update(self) -> None: ...

    async def finish_weight_update(self, version: str) -> None:
        self.serves = version

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.calls.append(f"sleeps at {level}")

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        self.calls.append(f"wakes {tags}")
        return tags == ["kv_cache"]

    async def resume_generation(self) -> None:
        self.calls.append("resumes")

    async def collective_rpc(self, method: str) -> list[int]:
        return [7]


class Seated:
    """An engine, and the line to it; it never answers the call `hangs`, and its process is gone in `dies`."""

    def __init__(self, number: int, hangs: str = "", dies: str = "") -> None:
        self.seat = EngineSeat(name=f"generation/{number}", incarnation="1", ranks=1, sender=number)
        self.vllm = Vllm()
        self.swap = WeightSwap(self.vllm, LoadMeter(), Path(), DEADLINE_S)  # type: ignore[arg-type]
        self.swap._load = self._load  # type: ignore[method-assign]
        self._hangs, self._dies = hangs, dies
        self._loop = asyncio.get_running_loop()

    async def _load(self, llm: Any, payload: Mapping[str, Any]) -> None:
        self.vllm.calls.append("loaded")

    def join(self, meeting: Mapping[str, Any]) -> "Future[None]":
        return self._ask("join", asyncio.sleep(0))

    def begin(self, version: int, plan: BucketPlan) -> "Future[None]":
        return self._ask("begin", self.swap.begin(version, plan))

    def take(self, parcel: Mapping[str, Any]) -> "Future[None]":
        return self._ask("take", self.swap.take(parcel))

    def end(self) -> "Future[LoadedWeights]":
        return self._ask("end", self.swap.end())

    def _ask(self, method: str, answer: Any) -> "Future[Any]":
        if method == self._hangs:
            answer.close()
            return Future()
        if method == self._dies:
            answer.close()
            gone: Future[Any] = Future()
            gone.set_exception(ConnectionError("its process is gone"))
            return gone
        return asyncio.run_coroutine_threadsafe(answer, self._loop)


class Together(Gathered):
    """Of two ranks, which gather every bucket together."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self._barrier = barrier

    def on_device(self, data: Tensor) -> Iterator[TensorBucket]:
        for bucket in super().on_device(data):
            self._barrier.wait(60)
            yield bucket


@pytest.fixture(autouse=True)
async def any_parameters(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(weight_swap, "refuse_other_parameters", lambda *_: None)
    yield


async def test_a_swap_comes_bit_by_bit_and_the_next_waits_for_its_end():
    engine = Seated(0)
    await engine.swap.begin(1, ())
    later = asyncio.ensure_future(engine.swap.begin(2, ()))
    await engine.swap.take({})
    assert not later.done() and engine.vllm.calls == ["paused", "loaded"]
    assert (await engine.swap.end()).checksum == 7
    await later
    assert engine.swap.policy_version == 1 and engine.vllm.calls == ["paused", "loaded", "resumes", "paused"]


async def test_an_engine_that_sleeps_wakes_its_weights_to_load_new_ones_and_its_kv_cache_after_them():
    engine = Seated(0)
    for version in (1, 2):
        await engine.swap.sleep()
        await engine.swap.sleep()  # several updates may follow each other
        await engine.swap.begin(version, ())
        await engine.swap.take({})
        await engine.swap.end()
    once = ["sleeps at 2", "wakes ['weights']", "loaded", "wakes ['kv_cache']", "resumes"]
    assert engine.vllm.calls == once * 2 and engine.swap.policy_version == 2
    await engine.swap.begin(3, ())
    assert engine.vllm.calls[-1] == "paused"  # awake, it is paused as ever


async def test_an_engine_that_cannot_sleep_ends(monkeypatch: pytest.MonkeyPatch):
    async def out_of_memory(**_: int) -> None:
        raise EngineError("memory usage increased after sleeping")

    engine = Seated(0)
    monkeypatch.setattr(engine.vllm, "sleep", out_of_memory)
    with pytest.raises(EngineError, match="memory usage increased"):
        await engine.swap.sleep()
    assert engine.vllm.dead


async def test_an_engine_whose_sender_says_nothing_more_ends_and_lets_the_next_learn_that():
    engine = Seated(0)
    await engine.swap.begin(1, ())
    later = asyncio.ensure_future(engine.swap.begin(2, ()))
    with pytest.raises(EngineError, match="a swap of weights began, and no weights arrived for 4 s"):
        await asyncio.wait_for(later, 60)
    with pytest.raises(EngineError, match="no swap of weights has begun here"):
        await engine.swap.take({})


@pytest.mark.parametrize("hangs", ["begin", "take", "end"])
async def test_where_one_engine_hangs_those_beside_it_outlast_the_rank_that_waits_for_it(hangs: str):
    barrier = threading.Barrier(2)
    engines = [Seated(0), Seated(1, hangs)]

    def send(engine: Seated) -> Publication:
        return IpcTransfer(cast(Any, SharedTensors([])), DEADLINE_S).send(Together(barrier), 1, [engine])

    sent = await asyncio.gather(*(asyncio.to_thread(send, engine) for engine in engines))
    assert [sorted(one.failed) for one in sent] == [[], ["generation/1"]]
    assert sent[0].took["generation/0"].checksum == 7
    assert engines[0].vllm.dead == "" and engines[0].vllm.calls[-1] == "resumes"


@pytest.mark.parametrize("fault", ["hangs", "dies"])
@pytest.mark.parametrize("place", [0, 1])
async def test_where_one_engine_does_not_begin_the_others_continue_with_the_weights_they_had(
    monkeypatch: pytest.MonkeyPatch, fault: str, place: int
):
    healthy, other = Seated(1 - place), Seated(place, **{fault: "begin"})
    transfer = CollectiveTransfer("127.0.0.1", CPU, DEADLINE_S)
    monkeypatch.setattr(transfer, "_meet", lambda _: None)
    sent = await asyncio.to_thread(transfer.send, Gathered(), 5, [healthy, other] if place else [other, healthy])
    assert sorted(sent.failed) == ["generation/0", "generation/1"] and not sent.took
    await healthy.swap.begin(5, ())  # once the swap before has ended
    assert healthy.vllm.calls == ["paused", "resumes", "paused"]
    assert (healthy.vllm.dead, healthy.vllm.serves, healthy.swap.policy_version) == ("", "0", 0)
    await healthy.swap.take({})
    assert (await healthy.swap.end()).checksum == 7 and healthy.vllm.serves == "5"


async def test_an_update_without_weights_is_an_error_of_the_transfer_and_never_a_new_version():
    engine = Seated(0)
    await engine.swap.begin(3, ())
    with pytest.raises(TransferError, match="no weights of version 3 were sent; version 0 still serves"):
        await engine.swap.end()
