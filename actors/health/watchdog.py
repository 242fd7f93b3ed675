"""The watchdog of a run: probes every service, kills a process that does not answer, ends a run without progress.

`rstar_ray.stall_detector` decides which silence is too long. A killed process is handled like one that died.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from actors.health.head import HeadProbe
from actors.health.heartbeat import Heartbeat, own_memory_bytes, runnable_wait_s, starved_s
from actors.health.lost_nodes import NodesSeen
from actors.service import Service, State
from rstar_ray.config import DetectorConfig
from rstar_ray.deadline import fail, unless_failed, waits
from rstar_ray.errors import RStarError, last_line
from rstar_ray.logs import relay
from rstar_ray.run_dir.best_effort import best_effort
from rstar_ray.run_dir.durable import write_json
from rstar_ray.stall_detector import Detector, Limit, Stall
from rstar_ray.telemetry.meter import NO_METER, Meter

log = logging.getLogger(__name__)

T = TypeVar("T")

RUN, RUN_WARNING = "the run", "the run, before its warning"
WARNING_SHARE = 0.25
"""Share of `still_s` after which a warning names the oldest wait."""
START_SHOWN_EVERY_S = 30.0
"""Between two lines on what a start waits for. A start takes about a minute on two cores, and several on a cluster."""
RESTART_S = 120.0
"""Additional time for a service that cannot be reached, because Ray starts a new process for it."""
NOT_RECORDED = ("progress", "memory_bytes", "device_bytes", "records", "lost_with_it")
"""Fields of a heartbeat that `processes.json` does not contain."""


@dataclass(slots=True)
class _Probe:
    """The probing of one service."""

    service: Service[Any]
    task: asyncio.Task[None] | None = None
    unreachable: bool = False
    heartbeat: Heartbeat | None = None  # the latest
    fault: str = ""  # the probe's error, as it was logged
    num_kills: int = 0  # since its latest heartbeat
    waited_s: dict[str, float] | None = None  # by thread: wait for a core, when its silence was first noticed

    @property
    def limit_s(self) -> float:
        """How long it may be silent now. Each kill of a process that never answered doubles the time for the next one,
        because a start may be slow or wait for a node."""
        if self.unreachable:
            return (self.service.silent_s + RESTART_S) * 2**self.num_kills
        patience = 1.0 if self.service.state is State.SERVING else self.service.start_patience
        return self.service.silent_s * patience


class Watchdog:
    """One per run, in its driver. Call `start` first, `close` last."""

    def __init__(
        self,
        config: DetectorConfig,
        *,
        record: Path | None = None,
        meter: Meter = NO_METER,
        head: HeadProbe | None = None,
        nodes: NodesSeen | None = None,
    ) -> None:
        """`record`: a file that lists the run's processes. `head` polls Ray for the cluster's nodes; `nodes` logs lost
        and new nodes."""
        self._meter = meter
        self._head = head
        self._nodes = nodes
        self._node_of: dict[str, str] = {}  # node id by service, from its latest heartbeat
        self._record = record
        self._config = config
        self._detector = Detector(tick_s=config.probe_every_s)
        self._probes: dict[str, _Probe] = {}
        self._progress = -1
        self._run_over: asyncio.Future[None] | None = None  # its exception ends the run
        self._ticking: asyncio.Task[None] | None = None
        self._kills: set[asyncio.Task[None]] = set()
        self._start_shown_s: float | None = None  # when processes began to start, or when the latest line was logged

    def start(self) -> None:
        self._run_over = asyncio.get_running_loop().create_future()
        if self._head is not None:
            self._head.start()
        self._ticking = asyncio.create_task(self._tick_forever())
        self._ticking.add_done_callback(self._end_run_if_failed)

    async def close(self) -> None:
        if self._head is not None:
            self._head.close()
        tasks = [probe.task for probe in self._probes.values() if probe.task] + list(self._kills)
        tasks += [self._ticking] if self._ticking else []
        self._probes.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._run_over is not None:
            self._run_over.cancel()

    def follow(self, service: Service[Any]) -> None:
        """Start to probe this service; call it again when the service's state has changed."""
        probe = self._probes.get(service.name)
        if probe is None or probe.service is not service:
            self.leave(service)
            probe = self._probes[service.name] = _Probe(service)
            probe.task = asyncio.create_task(self._probe_forever(probe))
            probe.task.add_done_callback(self._end_run_if_failed)
        if service.state is State.STARTING:  # watched from its first answer on, because the start has a deadline
            self._detector.forget(service.name)
            return
        if service.state is State.LOST:  # a new process is expected
            probe.unreachable, probe.heartbeat = True, None
        elif service.state is State.RETURNING:  # it answers again, and has the time limit of a start
            probe.unreachable, probe.num_kills = False, 0
        self._detector.watch(service.name, Limit(silent_s=probe.limit_s))
        if service.state is State.SERVING:
            self._write_record()

    def leave(self, service: Service[Any]) -> None:
        """Stop probing this service."""
        self._detector.forget(service.name)
        probe = self._probes.pop(service.name, None)
        if probe is not None and probe.task is not None and probe.task is not _current_task():
            probe.task.cancel()

    async def guard(self, work: Awaitable[T]) -> T:
        """The result of `work`. Raises `RStarError` as soon as the run has to end."""
        assert self._run_over is not None, "start() comes first"
        return await unless_failed(work, self._run_over, self._config.probe_every_s)

    def end_run(self, fault: Exception) -> None:
        """Make `guard` raise this error."""
        if self._run_over is not None:
            fail(self._run_over, fault)

    def memory_bytes(self) -> dict[str, int]:
        """Memory of the run's processes, summed by the first part of their names: `generation`, ..., and `driver`.

        `learner_device` is the peak of any rank on its GPU.
        """
        held = {"driver": own_memory_bytes(os.getpid())}
        for name, probe in self._probes.items():
            if probe.heartbeat is not None:
                kind = name.partition("/")[0]
                held[kind] = held.get(kind, 0) + probe.heartbeat.memory_bytes
                if probe.heartbeat.device_bytes:
                    held[f"{kind}_device"] = max(held.get(f"{kind}_device", 0), probe.heartbeat.device_bytes)
        return held

    def heartbeats(self) -> list[Heartbeat]:
        """The latest heartbeat of each service."""
        return [probe.heartbeat for probe in self._probes.values() if probe.heartbeat is not None]

    async def _probe_forever(self, probe: _Probe) -> None:
        """Probe until the actor is dead. A service that Ray reports as unavailable is not counted as silent."""
        service = probe.service
        while True:
            try:
                heartbeat: Heartbeat = await service.methods().probe()
            except RayTaskError as failed:  # it answers; before `RayError`, because an error may be both
                self._report_fault(probe, failed)
                self._answered(probe)
            except RayError as lost:
                if isinstance(lost, RayActorError) and not isinstance(lost, ActorUnavailableError):
                    self._report_death(probe, lost)
                    return
                if not probe.unreachable:
                    probe.unreachable = True
                    log.warning(f"{service.name} cannot be reached: it restarts, or its node is unreachable")
                    self._detector.forget(service.name)
                    if service.state is not State.STARTING:
                        self._detector.watch(service.name, Limit(silent_s=probe.limit_s))
            else:
                before, probe.heartbeat, probe.waited_s, probe.num_kills = probe.heartbeat, heartbeat, None, 0
                self._report_changes(probe, before, heartbeat)
                self._answered(probe)
                if before is not None and before.incarnation != heartbeat.incarnation and service.on_restart:
                    service.on_restart()
            await asyncio.sleep(self._config.probe_every_s)

    def _answered(self, probe: _Probe) -> None:
        name = probe.service.name
        if probe.unreachable or not self._detector.watches(name):
            probe.unreachable = False
            self._detector.watch(name, Limit(silent_s=probe.limit_s))
        self._detector.heard(name)

    def _report_fault(self, probe: _Probe, failed: Exception) -> None:
        """Log the fault once, although every probe fails."""
        fault = last_line(failed)
        if fault != probe.fault:
            probe.fault = fault
            log.warning(f"{probe.service.name} answers, but its probe fails: {fault}")

    def _report_death(self, probe: _Probe, lost: Exception) -> None:
        service = probe.service
        self.leave(service)
        if service.on_death is not None:
            service.on_death(lost)
        elif service.state is not State.STARTING:  # in a start, its caller reports the death
            log.warning(f"{service.name} has ended and is not restarted: {last_line(lost)}")

    def _report_changes(self, probe: _Probe, before: Heartbeat | None, now: Heartbeat) -> None:
        name = probe.service.name
        self._node_of[name] = now.node_id
        if before is None or (before.incarnation, before.children) != (now.incarnation, now.children):
            self._write_record()
        if before is not None and before.incarnation != now.incarnation:
            lost = f"; lost with it: {before.lost_with_it}" if before.lost_with_it else ""
            log.warning(f"{name} died: process {now.pid} replaces process {before.pid}{lost}")
        elif probe.unreachable and not probe.service.is_lost:
            log.warning(f"{name} answers again")
        relay(now.records, component=name)

    def _write_record(self) -> None:
        if self._record is None:
            return
        up = {name: probe for name, probe in sorted(self._probes.items()) if probe.service.state is State.SERVING}
        found = {name: asdict(probe.heartbeat) for name, probe in up.items() if probe.heartbeat}
        for heartbeat in found.values():
            for left_out in NOT_RECORDED:
                del heartbeat[left_out]
        with best_effort(self._record.name):
            write_json(self._record, found)

    async def _tick_forever(self) -> None:
        while True:
            for stall in self.tick():
                kill = asyncio.create_task(self._kill(stall))
                self._kills.add(kill)
                kill.add_done_callback(self._kills.discard)
            await asyncio.sleep(self._config.probe_every_s)

    def _end_run_if_failed(self, task: "asyncio.Task[None]") -> None:
        """End the run if a task of the watchdog fails, because without it the run could wait forever."""
        if not task.cancelled() and (fault := task.exception()) is not None:
            self.end_run(RStarError(f"the watchdog has failed: {type(fault).__name__}: {fault}"))

    def tick(self) -> list[Stall]:
        """Check all services once. Returns those to kill; a stall of the whole run is handled here."""
        progress = waits.num_answered + sum(heartbeat.progress for heartbeat in self.heartbeats())
        if progress != self._progress:
            self._progress = progress
            self._detector.watch(RUN, Limit(silent_s=self._config.still_s))
            self._detector.watch(RUN_WARNING, Limit(silent_s=self._config.still_s * WARNING_SHARE))
        if self._head is not None:
            self._head.look()
            if fault := self._head.fault():
                self.end_run(RStarError(fault))
            if self._nodes is not None and self._head.answer:
                self._nodes.see(self._head.answer, self._node_of)
        self._show_start(time.monotonic())
        self._excuse_starved()
        stalls = self._detector.tick(time.monotonic())
        for stall in stalls:
            if stall.name == RUN_WARNING:
                log.warning(f"no progress: {stall.seen}; {self._oldest_wait()}")
            elif stall.name == RUN:
                self.end_run(RStarError(f"no progress, {stall.seen}; {self._oldest_wait()}"))
        self._export()
        return [stall for stall in stalls if stall.name in self._probes]

    def _show_start(self, now_s: float) -> None:
        """Log what a long start waits for."""
        if all(probe.service.state is not State.STARTING for probe in self._probes.values()):
            self._start_shown_s = None
        elif self._start_shown_s is None:
            self._start_shown_s = now_s
        elif now_s - self._start_shown_s >= START_SHOWN_EVERY_S:
            self._start_shown_s = now_s
            log.info(f"still starting: {self._oldest_wait()}")

    def _excuse_starved(self) -> None:
        """Do not count time in which a process of this node waited for a core: it is slow, not stuck."""
        for name, silent_s in self._detector.silences_s().items():
            probe = self._probes.get(name)
            if probe is None or probe.heartbeat is None or silent_s < 2 * self._config.probe_every_s:
                continue
            if not probe.heartbeat.is_here:
                continue
            waited_s = runnable_wait_s(probe.heartbeat.pid)
            if probe.waited_s is None:
                probe.waited_s = waited_s
            self._detector.starved(name, starved_s(probe.waited_s, waited_s))

    def _export(self) -> None:
        self._meter.set("rstar_detector_processes", len(self._probes))
        oldest = waits.oldest()
        self._meter.set("rstar_detector_oldest_wait_seconds", time.monotonic() - oldest.since_s if oldest else 0.0)
        for name, silent_s in self._detector.silences_s().items():
            if (probe := self._probes.get(name)) is not None:
                self._meter.set("rstar_detector_silence_seconds", silent_s, process=name)
                if probe.heartbeat is not None:
                    self._meter.set("rstar_process_memory_bytes", probe.heartbeat.memory_bytes, process=name)
        self._meter.set("rstar_process_memory_bytes", own_memory_bytes(os.getpid()), process="driver")

    def _oldest_wait(self) -> str:
        oldest = waits.oldest()
        return oldest.line(time.monotonic()) if oldest else "no wait for another process is open"

    async def _kill(self, stall: Stall) -> None:
        probe = self._probes.get(stall.name)
        if probe is None:
            return
        heartbeat = None if probe.unreachable else probe.heartbeat  # of the current process
        if probe.unreachable:
            log.warning(f"{stall.name} did not come back, {stall.seen}: its next process is killed")
            probe.num_kills += 1
            self._detector.watch(stall.name, Limit(silent_s=probe.limit_s))
        else:
            process = f"process {heartbeat.pid}" if heartbeat else "its process"
            log.warning(f"{stall.name} was {stall.seen}: {process} is killed and fails over")
        self._meter.add("rstar_detector_killed_total", 1)
        try:
            if heartbeat is not None and heartbeat.is_here:
                heartbeat.kill()
            else:
                await probe.service.restart()
        except Exception as failed:  # this task is not awaited; the watchdog will try again
            log.warning(f"{stall.name} could not be killed: {type(failed).__name__}: {failed}")
            self._detector.watch(stall.name, Limit(silent_s=probe.limit_s))


def _current_task() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
