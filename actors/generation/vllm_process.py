"""vLLM's processes: every wait for them has a deadline, and the death of any of them raises `EngineError`."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from actors.generation.engine_folder import EngineFolder
from actors.generation.start_log import StartLog
from actors.generation.vllm_private import core_pids, expect_shutdown, is_refusal, starting_cores
from actors.generation.vllm_start import ObserveFn, start_vllm
from actors.weights.adapter_folder import AdapterSettings
from rstar_ray.config import RunConfig
from rstar_ray.deadline import within
from rstar_ray.errors import DeadlineExceeded, EngineError
from rstar_ray.stall_detector import Detector, Limit

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
log = logging.getLogger(__name__)

ENGINE = "vLLM's engine process"
NOTE_EVERY_S = 1.0
LIVENESS_POLL_S = 0.25
CLOSE_GRACE_S = 1.5


class VllmProcess:
    """One `AsyncLLM` and its processes. Call `start` first and `close` last, all from the same event loop."""

    def __init__(self, config: RunConfig, model: Path, adapter: AdapterSettings | None) -> None:
        self._config = config
        self._model = model
        self._adapter = adapter
        self._llm: AsyncLLM | None = None
        self._death: asyncio.Future[str] | None = None  # set to the reason when it no longer serves
        self._watch: asyncio.Task[None] | None = None
        self._folder: EngineFolder | None = None
        self._num_asked = 0  # open calls
        self._progress = 0  # answers and steps
        self.processes: list[psutil.Process] = []

    async def start(self, observe: ObserveFn) -> "AsyncLLM":
        """Start the processes. Raises `EngineError` if they do not start."""
        assert self._llm is None

        def observed(scheduler_stats: Any, iteration_stats: Any) -> None:
            self._progress += 1
            observe(scheduler_stats, iteration_stats)

        self._folder = self._folder or EngineFolder()
        noting = asyncio.create_task(_note_shared(self._folder, {core.pid for core in starting_cores()}))
        output = StartLog()
        starting = asyncio.to_thread(start_vllm, self._config, self._model, self._adapter, observed)
        try:
            self._llm = await self._within(starting, self._config.engine.start_deadline_s, "start")
        except (RuntimeError, ValueError, OSError) as failed:
            raise EngineError(f"the engine for {self._model} did not start: {_cause(failed, output)}") from failed
        finally:
            noting.cancel()
        self.processes = _with_workers([psutil.Process(pid) for pid in core_pids(self._llm)])
        self._folder.note_shared(process.pid for process in self.processes)
        self._death = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._watch_for_death(self._llm))
        return self._llm

    @property
    def folder(self) -> Path:
        """Folder for files that vLLM's processes read; removed by `close`."""
        assert self._folder is not None, "it was not started"
        return self._folder.path

    async def close(self) -> None:
        """End the processes; safe to call twice."""
        folder, self._folder = self._folder, None
        try:
            await self._end()
        finally:
            if folder is not None:
                await asyncio.to_thread(folder.remove)

    async def _end(self) -> None:
        llm, self._llm = self._llm, None
        if llm is None:
            return
        self.mark_dead("it was closed")
        assert self._watch is not None
        self._watch.cancel()
        expect_shutdown(llm)
        shutting = asyncio.to_thread(_end_processes, llm, self.processes)
        await self._within(shutting, self._config.engine.answer_deadline_s, "shut down")

    def alive(self) -> "AsyncLLM":
        """The `AsyncLLM`. Raises `EngineError` with the reason if it does not serve."""
        if self._death is None:
            raise EngineError("the engine was not started")
        self._notice_death()
        if self._death.done() or self._llm is None:
            raise EngineError(f"the engine does not serve: {self._death.result()}")
        return self._llm

    async def until_dead(self) -> None:
        """Wait until it no longer serves; then raise `EngineError` with the reason."""
        assert self._death is not None
        await asyncio.shield(self._death)
        self.alive()

    def mark_dead(self, why: str) -> None:
        """Make every later call raise `EngineError` with this reason."""
        assert self._death is not None
        if not self._death.done():
            self._death.set_result(why)

    async def ask(
        self, awaitable: Awaitable[T], what: str, seconds: float | None = None, *, may_refuse: bool = False
    ) -> T:
        """Wait for an answer; raises `EngineError` if the engine dies. `seconds`: default `--engine.answer-deadline-s`.

        `may_refuse`: raise `ValueError` if the engine refuses only this request and continues to serve.
        """
        self._num_asked += 1
        try:
            return await self._within(self._or_death(awaitable), seconds or self._config.engine.answer_deadline_s, what)
        except (EngineError, DeadlineExceeded):
            raise
        except Exception as failed:
            self._notice_death()
            assert self._death is not None
            if may_refuse and not self._death.done() and is_refusal(failed):
                raise ValueError(f"the engine refused to {what}: {failed.__cause__ or failed}") from failed
            raise EngineError(f"the engine could not {what}: {failed}") from failed
        finally:
            self._num_asked -= 1
            self._progress += 1

    async def _watch_for_death(self, llm: "AsyncLLM") -> None:
        """Detect the end or a hang of vLLM's processes, for which vLLM leaves calls waiting forever."""
        detector = Detector(tick_s=LIVENESS_POLL_S)
        detector.watch(ENGINE, Limit(silent_s=math.inf, stuck_s=self._config.detector.engine_step_s))
        while not llm.errored:
            await asyncio.sleep(LIVENESS_POLL_S)
            detector.heard(ENGINE, work=self._num_asked, progress=self._progress)
            for wedged in detector.tick(time.monotonic()):
                self.mark_dead(f"{ENGINE} was stuck: {wedged.seen}; killed")
                _kill(self.processes)
                return
        self._notice_death()

    def _notice_death(self) -> None:
        if self._llm is not None and self._llm.errored:
            self.mark_dead("vLLM's engine process died")

    async def _or_death(self, awaitable: Awaitable[T]) -> T:
        assert self._death is not None
        answer = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait({answer, self._death}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not answer.done():
                answer.cancel()
        if answer.cancelled() or not answer.done():
            self.alive()
        return await answer

    async def _within(self, awaitable: Awaitable[T], seconds: float, what: str) -> T:
        return await within(awaitable, seconds, waiter="engine", owner=ENGINE, reason=what)


async def _note_shared(folder: EngineFolder, others: set[int | None]) -> None:
    """Record shared memory files during the start, in case it is killed."""
    while True:
        await asyncio.sleep(NOTE_EVERY_S)
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            started = [psutil.Process(core.pid) for core in starting_cores() if core.pid not in others]
            folder.note_shared(process.pid for process in _with_workers(started))


def _with_workers(cores: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [process for core in cores for process in (core, *core.children(recursive=True))]


def _kill(processes: Sequence[psutil.Process]) -> None:
    """Kill the processes, also suspended ones; psutil detects a reused id."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _end_processes(llm: "AsyncLLM", processes: list[psutil.Process]) -> None:
    """Shut vLLM down, and kill processes that have not ended after the grace time."""
    llm.shutdown(timeout=CLOSE_GRACE_S)
    _, alive = psutil.wait_procs(processes, timeout=CLOSE_GRACE_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=CLOSE_GRACE_S)


def _cause(failed: Exception, output: StartLog) -> str:
    """The cause of a failed start, from the output of vLLM's processes if that has an error."""
    wrote = output.wrote()
    if wrote is None:
        return str(failed)
    log.error("output of vLLM before it failed (%s):\n%s", wrote.path, "\n".join(wrote.tail))
    return f"{wrote.cause} (vLLM's output: {wrote.path})"
