"""Checkpoints beside the steps: a copy is taken between two of them, and written while the next one runs."""

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
"""In a checkpoint: what the balancer had learned by then."""
BALANCER_STATE_S = 10.0
"""How long a checkpoint waits for the balancer, without which it is whole too."""


class Saving:
    """The newest checkpoint of a stage, at most one of which is being written."""

    def __init__(self, config: RunConfig, context: RunContext) -> None:
        self._config = config
        self._context = context
        self._writing: asyncio.Task[None] | None = None
        self._step = 0  # of it

    async def take(self, progress: StageProgress, *, finishes: bool = False) -> None:
        """Return once the copy is taken; where it `finishes` the stage, once all of it is on disk.

        Waits for the checkpoint before, and raises what kept that one or this one's copy from being whole.
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
        """Raise what kept the newest checkpoint from being written, where that is known by now."""
        if self._writing is not None and self._writing.done():
            task, self._writing = self._writing, None
            task.result()

    async def settled(self) -> None:
        """Wait until the newest checkpoint is whole; raises what kept it from that."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
            self.refuse_failed()

    async def end(self) -> None:
        """As `settled`, beside another error that ends the stage: what kept it from being whole is shown."""
        try:
            await self.settled()
        except Exception as failed:
            self._log_failure(failed)

    async def drop(self) -> None:
        """Give up what is not whole yet: the checkpoint before stays the newest."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.cancel()
            await asyncio.wait({writing})
            if not writing.cancelled() and (failed := writing.exception()) is not None:
                self._log_failure(failed)

    def _log_failure(self, failed: BaseException) -> None:
        log.warning(f"the checkpoint after step {self._step} of {self._config.stage} is not written: {failed}")

    async def _write(self, progress: StageProgress, taken: asyncio.Event) -> None:
        """Learner state, progress, what the balancer has learned, and the policy as a Hugging Face folder: a whole
        checkpoint, or none."""
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
        """A checkpoint is whole without it."""
        with best_effort(f"{BALANCER_STATE} of the checkpoint after step {self._step}"):
            asking = self._context.services.balancer_state()
            return await within(asking, BALANCER_STATE_S, waiter="driver", owner="balancer", reason="its state")
        return None


async def _to_its_end(work: Awaitable[None]) -> None:
    """A thread cannot be cancelled: it is waited for even then."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


@asynccontextmanager
async def saving(config: RunConfig, context: RunContext) -> AsyncGenerator[Saving]:
    """For one stage: whatever ends it, a checkpoint that is being written then is brought to its end first, except
    where the stage is cancelled, as it is when a rank is lost."""
    saves = Saving(config, context)
    try:
        yield saves
        await saves.settled()
    except Exception:
        await saves.end()  # the stage's own reason is the one to be raised
        raise
    finally:
        await saves.drop()
