"""The run's detector at work: it probes every actor that something waits for, ends what is wedged, and ends the run
when nothing in it gets on any more.

The rules are `rstar_ray.stall_detector`'s. What is ended fails over by the same paths as what dies by itself.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from actors.cluster.process_start import birth
from actors.health.head import HeadProbe
from actors.health.heartbeat import Sign, own_memory_bytes, starved_s, waits_for_cores_s
from actors.health.lost_nodes import NodesSeen
from rstar_ray.config import DetectorConfig
from rstar_ray.deadline import waits
from rstar_ray.errors import RStarError
from rstar_ray.logs import relay
from rstar_ray.run_dir.best_effort import best_effort
from rstar_ray.run_dir.durable import write_json
from rstar_ray.stall_detector import Detector, Limit, Wedged
from rstar_ray.telemetry.meter import NO_METER, Meter

log = logging.getLogger(__name__)

T = TypeVar("T")

THE_RUN, FIRST_WORD = "the run", "the run, as far as a first word"
FIRST_WORD_SHARE = 0.25
"""Of `still_s`: after so long without anything getting on, a line names the oldest wait."""
BACK_S = 120.0
"""An actor that served and cannot be reached may take so much longer to answer: Ray starts another process for it."""

EndFn = Callable[[Any, Sign | None], Awaitable[None]]
DeathFn = Callable[[str, Exception], None]


class Follow(Protocol):
    """What those who start actors need of a `Watch`."""

    def follow_start(self, name: str, handle: Any, *, silent_s: float) -> None: ...
    def follow(self, name: str, handle: Any, *, silent_s: float, on_death: DeathFn | None = None) -> None: ...
    def leave(self, name: str) -> None: ...


class Guard(Follow, Protocol):
    """And of those for whom a run may have to end before it waits for them."""

    def end_run(self, fault: Exception) -> None: ...


@dataclass(slots=True)
class _Followed:
    handle: Any
    limit: Limit
    on_death: DeathFn | None
    starts: bool = False  # it may not be there yet, and is none of the run's processes before it is up
    away: bool = False  # it cannot be reached
    asking: asyncio.Task[None] | None = None
    sign: Sign | None = None  # the latest
    fault: str = ""  # of its probe, as it was shown
    waits_s: dict[str, float] | None = None  # of its threads for a core, when its silence was first noticed


class Watch:
    """One for a run, in its driver. `start` first, `close` last."""

    def __init__(
        self,
        config: DetectorConfig,
        *,
        end: EndFn | None = None,
        record: Path | None = None,
        meter: Meter = NO_METER,
        head: HeadProbe | None = None,
        nodes: NodesSeen | None = None,
    ) -> None:
        """`record`: a file that tells people which processes are the run's, as they come and go. `head`: asks Ray's for
        its nodes, and `nodes` says what becomes of them."""
        self._meter = meter
        self._head = head
        self._nodes = nodes
        self._at: dict[str, str] = {}  # the node's id of each process, the last that it was seen on
        self._record = record
        self._config = config
        self._end_process = end or end_process
        self._detector = Detector(tick_s=config.probe_every_s)
        self._followed: dict[str, _Followed] = {}
        self._progress = -1
        self._over: asyncio.Future[None] | None = None  # what ends the run
        self._ticking: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._over = asyncio.get_running_loop().create_future()
        if self._head is not None:
            self._head.start()
        self._ticking = asyncio.create_task(self._tick_for_ever())
        self._ticking.add_done_callback(self._end_if_failed)

    async def close(self) -> None:
        if self._head is not None:
            self._head.close()
        tasks = [one.asking for one in self._followed.values() if one.asking] + list(self._ending)
        tasks += [self._ticking] if self._ticking else []
        self._followed.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._over is not None and not self._over.cancel() and not self._over.cancelled():
            self._over.exception()  # whoever waited was told by other means

    def follow(self, name: str, handle: Any, *, silent_s: float, on_death: DeathFn | None = None) -> None:
        """Probe this actor, which answers now, from now on; `on_death` hears when it is gone for good."""
        one = self._begin(name, _Followed(handle, Limit(silent_s=silent_s), on_death))
        self._detector.watch(name, one.limit)

    def follow_start(self, name: str, handle: Any, *, silent_s: float) -> None:
        """Probe this actor, which may not be there yet, from its first answer on, until it is up: then `follow` it."""
        self._begin(name, _Followed(handle, Limit(silent_s=silent_s), None, starts=True))

    def _begin(self, name: str, one: _Followed) -> _Followed:
        self.leave(name)
        self._followed[name] = one
        one.asking = asyncio.create_task(self._ask(name, one))
        one.asking.add_done_callback(self._end_if_failed)
        return one

    def leave(self, name: str) -> None:
        """It is not waited for any more, or starts again."""
        self._detector.forget(name)
        one = self._followed.pop(name, None)
        if one is not None and one.asking is not None and one.asking is not _current_task():
            one.asking.cancel()

    async def guard(self, work: Awaitable[T]) -> T:
        """The result of `work`, unless the run has to end before: raises `RStarError` with what was waited for."""
        assert self._over is not None, "start() comes first"
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._over}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task}, timeout=self._config.probe_every_s)
            self._over.result()
        return await task

    def memory_bytes(self) -> dict[str, int]:
        """Of the run's processes by what they are: `generation`, `learner`, ..., `driver`; all of a kind together.

        `learner_device` is the most that any rank has held on its GPU.
        """
        held = {"driver": own_memory_bytes(os.getpid())}
        for name, one in self._followed.items():
            if one.sign is not None:
                kind = name.partition("/")[0]
                held[kind] = held.get(kind, 0) + one.sign.memory_bytes
                if one.sign.device_bytes:
                    held[f"{kind}_device"] = max(held.get(f"{kind}_device", 0), one.sign.device_bytes)
        return held

    def signs(self) -> list[Sign]:
        """The latest of each process."""
        return [one.sign for one in self._followed.values() if one.sign is not None]

    async def _ask(self, name: str, one: _Followed) -> None:
        """An actor that Ray says is unavailable starts again, or is cut off: that is no silence."""
        while True:
            try:
                sign: Sign = await one.handle.probe.remote()
            except RayTaskError as failed:  # it answers; before the next, for it may be both
                self._tell_fault(name, one, failed)
                self._heard(name, one)
            except RayError as lost:
                if isinstance(lost, RayActorError) and not isinstance(lost, ActorUnavailableError):
                    self.leave(name)
                    if one.on_death is not None:
                        one.on_death(name, lost)
                    elif not one.starts:
                        log.warning(f"{name} is gone for good: {_last_line(lost)}")
                    return
                if not one.away:
                    one.away = True
                    log.warning(f"{name} cannot be reached: it starts again, or is cut off")
                    self._let_come_back(name, one)
            else:
                before, one.sign, one.waits_s = one.sign, sign, None
                self._tell(name, before, sign, away=one.away)
                self._heard(name, one, work=sign.work, progress=sign.progress)
            await asyncio.sleep(self._config.probe_every_s)

    def _heard(self, name: str, one: _Followed, *, work: int = 0, progress: int = 0) -> None:
        if one.away or not self._detector.watches(name):
            one.away = False
            self._detector.watch(name, one.limit)
        self._detector.heard(name, work=work, progress=progress)

    def _let_come_back(self, name: str, one: _Followed) -> None:
        """What starts may be wedged before its first answer; whoever started an actor bounds its first start."""
        self._detector.forget(name)
        if not one.starts:
            self._detector.watch(name, Limit(silent_s=one.limit.silent_s + BACK_S))

    def _tell_fault(self, name: str, one: _Followed, failed: Exception) -> None:
        """Once: it is asked again and again."""
        fault = _last_line(failed)
        if fault != one.fault:
            one.fault = fault
            log.warning(f"{name} answers, and cannot say how it is: {fault}")

    def _tell(self, name: str, before: Sign | None, sign: Sign, *, away: bool) -> None:
        """What is new about an actor that answers."""
        self._at[name] = sign.node_id
        if before is None or (before.life, before.children) != (sign.life, sign.children):
            self._write_record()
        if before is not None and before.life != sign.life:
            with_it = f"; with it went {before.loses}" if before.loses else ""
            log.warning(f"{name} died: process {before.pid} is gone, and process {sign.pid} in its place{with_it}")
        elif away:
            log.warning(f"{name} answers again")
        relay(sign.records, component=name)

    def _write_record(self) -> None:
        """None of a run's decisions depends on it."""
        if self._record is None:
            return
        up = {name: one.sign for name, one in sorted(self._followed.items()) if not one.starts}
        signs = {name: asdict(sign) for name, sign in up.items() if sign}
        for sign in signs.values():
            for of_now in ("work", "progress", "memory_bytes", "device_bytes", "records", "loses"):
                del sign[of_now]
        with best_effort(self._record.name):
            write_json(self._record, signs)

    async def _tick_for_ever(self) -> None:
        while True:
            for wedged in self.tick():
                ending = asyncio.create_task(self._end(wedged))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
            await asyncio.sleep(self._config.probe_every_s)

    def _end_if_failed(self, task: "asyncio.Task[None]") -> None:
        """Nobody awaits its tasks, and a run whose detector is gone would wait for a wedge for ever."""
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._end_run(f"the detector has failed: {type(fault).__name__}: {fault}")

    def end_run(self, fault: Exception) -> None:
        """With this, whatever is waited for now."""
        if self._over is not None and not self._over.done():
            self._over.set_exception(fault)

    def _end_run(self, why: str) -> None:
        self.end_run(RStarError(why))

    def tick(self) -> list[Wedged]:
        """Judge once; the actors to end. What concerns the whole run is dealt with here."""
        progress = waits.num_answered + sum(one.sign.progress for one in self._followed.values() if one.sign)
        if progress != self._progress:
            self._progress = progress
            self._detector.watch(THE_RUN, Limit(silent_s=self._config.still_s))
            self._detector.watch(FIRST_WORD, Limit(silent_s=self._config.still_s * FIRST_WORD_SHARE))
        if self._head is not None:
            self._head.look()
            if fault := self._head.fault():
                self._end_run(fault)
            if self._nodes is not None and self._head.answer:
                self._nodes.see(self._head.answer, self._at)
        self._excuse_starved()
        wedged = self._detector.tick(time.monotonic())
        for found in wedged:
            if found.name == FIRST_WORD:
                log.warning(f"no progress: {found.seen}; {self._oldest_wait()}")
            elif found.name == THE_RUN:
                self._end_run(f"no progress, {found.seen}; {self._oldest_wait()}")
        self._export()
        return [found for found in wedged if found.name not in (THE_RUN, FIRST_WORD)]

    def _excuse_starved(self) -> None:
        """What is silent for want of a core is not wedged; on other nodes than this one nobody can tell."""
        for name, silent_s in self._detector.silences_s().items():
            one = self._followed.get(name)
            if one is None or one.sign is None or silent_s < 2 * self._config.probe_every_s or not is_here(one.sign):
                continue
            waits_s = waits_for_cores_s(one.sign.pid)
            if one.waits_s is None:
                one.waits_s = waits_s
            self._detector.starved(name, starved_s(one.waits_s, waits_s))

    def _export(self) -> None:
        self._meter.set("rstar_detector_processes", len(self._followed))
        oldest = waits.oldest()
        self._meter.set("rstar_detector_oldest_wait_seconds", time.monotonic() - oldest.since_s if oldest else 0.0)
        for name, silent_s in self._detector.silences_s().items():
            if name in self._followed:
                self._meter.set("rstar_detector_silence_seconds", silent_s, process=name)
                if (sign := self._followed[name].sign) is not None:
                    self._meter.set("rstar_process_memory_bytes", sign.memory_bytes, process=name)
        self._meter.set("rstar_process_memory_bytes", own_memory_bytes(os.getpid()), process="driver")

    def _oldest_wait(self) -> str:
        oldest = waits.oldest()
        return oldest.line(time.monotonic()) if oldest else "nobody waits for another process"

    async def _end(self, wedged: Wedged) -> None:
        one = self._followed.get(wedged.name)
        if one is None:
            return
        sign = None if one.away else one.sign  # that of a process that is gone, or cannot be reached
        if one.away:
            log.warning(f"{wedged.name} did not come back, {wedged.seen}: what starts in its place is killed")
            self._let_come_back(wedged.name, one)
        else:
            where = f"process {sign.pid}" if sign else "its process"
            log.warning(f"{wedged.name} was {wedged.seen}: {where} is killed, and fails over")
        self._meter.add("rstar_detector_killed_total", 1)
        try:
            await self._end_process(one.handle, sign)
        except Exception as failed:  # nobody awaits this: it is judged, and tried, once more
            log.warning(f"{wedged.name} could not be killed: {type(failed).__name__}: {failed}")
            self._detector.watch(wedged.name, one.limit)


async def end_process(handle: Any, sign: Sign | None) -> None:
    """Kill an actor's process, a stopped one too; Ray starts it again where it is told to."""
    if sign is not None and is_here(sign):
        kill_here(sign)
    else:
        await asyncio.to_thread(ray.kill, handle, no_restart=False)


def is_here(sign: Sign) -> bool:
    return ray.is_initialized() and sign.node_id == ray.get_runtime_context().get_node_id()


def kill_here(sign: Sign) -> None:
    """At once, and none that merely has the same id."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(sign.pid)
        if birth(sign.pid) == sign.birth:
            process.kill()


def _last_line(fault: Exception) -> str:
    """Where Ray tells of a failure elsewhere, it says there what it was."""
    return str(fault).strip().rpartition("\n")[2]


def _current_task() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
