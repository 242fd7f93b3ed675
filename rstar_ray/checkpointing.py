"""Writes checkpoints in the background: state is copied between two steps, and written during the next step."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from rstar_ray.chat.load_chat import write_chat_files
from rstar_ray.config import RunConfig
from rstar_ray.context import RunContext
from rstar_ray.deadline import within
from rstar_ray.evaluation.evaluator import best_checkpoint
from rstar_ray.run_dir.best_effort import best_effort
from rstar_ray.run_dir.durable import write_json
from rstar_ray.run_dir.manifest import WrittenFile, own_file
from rstar_ray.stage_progress import StageProgress

log = logging.getLogger(__name__)

BALANCER_STATE = "balancer.json"
"""File of a checkpoint with the balancer's state."""
BALANCER_STATE_S = 10.0
"""Longest wait for the balancer's state, which a checkpoint does not need."""


class Saving:
    """Writes the checkpoints of a stage, one at a time."""

    def __init__(self, config: RunConfig, context: RunContext) -> None:
        self._config = config
        self._context = context
        self._writing: asyncio.Task[None] | None = None
        self._step = 0  # of the newest checkpoint

    async def take(self, progress: StageProgress, *, finishes: bool = False) -> None:
        """Return when the state is copied; if it `finishes` the stage, when everything is on disk.

        Waits for the previous checkpoint, and raises its error or that of this copy.
        """
        began_s = time.monotonic()
        await self.settled()
        taken, self._step = asyncio.Event(), progress.step
        self._writing = asyncio.ensure_future(self._write(progress, taken))
        copied = asyncio.ensure_future(taken.wait())
        try:
            await asyncio.wait({self._writing, copied}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            copied.cancel()
        self._context.meter.set(
            "rstar_checkpoint_blocking_seconds", time.monotonic() - began_s, stage=self._config.stage
        )
        self.refuse_failed()
        if finishes:
            await self.settled()
            self._context.run_dir.finish_stage(self._config.stage, progress.step)

    def refuse_failed(self) -> None:
        """Raise the newest checkpoint's error, if it has failed by now."""
        if self._writing is not None and self._writing.done():
            task, self._writing = self._writing, None
            task.result()

    async def settled(self) -> None:
        """Wait until the newest checkpoint is complete; raises its error."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
            self.refuse_failed()

    async def end(self) -> None:
        """Like `settled`, after another error that ends the stage: a failed write is only logged."""
        try:
            await self.settled()
        except Exception as failed:
            self._log_failure(failed)

    async def drop(self) -> None:
        """Abandon an unfinished checkpoint: the previous one stays the newest."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.cancel()
            await asyncio.wait({writing})
            if not writing.cancelled() and (failed := writing.exception()) is not None:
                self._log_failure(failed)

    def _log_failure(self, failed: BaseException) -> None:
        log.warning(f"the checkpoint after step {self._step} of {self._config.stage} is not written: {failed}")

    async def _write(self, progress: StageProgress, taken: asyncio.Event) -> None:
        """Write a checkpoint atomically: learner state, progress, the balancer's state, and the policy as a Hugging
        Face folder.
        """
        began_s, stage, learner = time.monotonic(), self._config.stage, self._context.learner
        written = dict[Path, WrittenFile]()
        with self._context.run_dir.write_checkpoint(stage, progress.step, written=written) as folder:
            asking = asyncio.ensure_future(self._balancer_state())
            try:
                await learner.save_checkpoint(folder)
                await learner.export(folder / "model")
                balancer_state = await asking
            finally:
                asking.cancel()
            taken.set()
            written.update(await learner.written())
            write_json(folder / "progress.json", progress.as_json())
            own = [folder / "progress.json"]
            if self._context.chat is not None:
                own += write_chat_files(folder / "model", self._context.chat)
            if balancer_state is not None:
                write_json(folder / BALANCER_STATE, balancer_state)
                own.append(folder / BALANCER_STATE)
            written.update((path, own_file(path)) for path in own)
        self._context.meter.set("rstar_checkpoint_seconds", time.monotonic() - began_s, stage=stage)
        with best_effort("the removal of older checkpoints"):
            await _to_its_end(asyncio.to_thread(self._prune))

    def _prune(self) -> None:
        run_dir, stage = self._context.run_dir, self._config.stage
        best = best_checkpoint(run_dir, stage)
        run_dir.prune(stage, self._config.checkpoint.keep, best=best.step if best else None)

    async def _balancer_state(self) -> Mapping[str, object] | None:
        """The balancer's state; None if it cannot be read in time."""
        with best_effort(f"{BALANCER_STATE} of the checkpoint after step {self._step}"):
            asking = self._context.services.balancer_state()
            return await within(asking, BALANCER_STATE_S, waiter="driver", owner="balancer", reason="its state")
        return None


async def _to_its_end(work: Awaitable[None]) -> None:
    """Await `work` to its end even if cancelled, because a thread cannot be cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


@asynccontextmanager
async def saving(config: RunConfig, context: RunContext) -> AsyncGenerator[Saving]:
    """Checkpoints for one stage. On exit an unfinished checkpoint is completed, unless the stage is cancelled, as after
    the loss of a rank.
    """
    saves = Saving(config, context)
    try:
        yield saves
        await saves.settled()
    except Exception:
        await saves.end()  # the stage's error is raised, not that of the checkpoint
        raise
    finally:
        await saves.drop()
