"""Replaces functions in the run under test, so that the harness can inject faults.

The folder in CHAOS_CONTROL controls all of it: a file there is an injected fault, and the run writes its phase there.
All parts of the run are the real ones.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from random import random
from typing import Any

from actors.cluster.process_start import start_time

VARIABLE = "CHAOS_CONTROL"
PHASE = "phase"
LOOK_AGAIN_S = 0.2
ODD_SHARE = 0.6
"""Share of an executor's answers with a fault: one call in five gets three faulty answers in a row."""


def control(name: str) -> Path:
    return Path(os.environ[VARIABLE]) / name


def asked(name: str) -> str | None:
    """The text of an injected fault; None if it is not injected."""
    try:
        return control(name).read_text()
    except FileNotFoundError:
        return None


def in_driver() -> None:
    """Write the run's phase, make long prompts, and call `in_worker` in every worker process.

    A phase does not begin while there is a file `hold PHASE`.
    """
    import ray

    import actors.system as system
    import rstar_ray.stages as stages
    import rstar_ray.train_loop as train_loop
    from actors.learner.gang import Learner
    from rstar_ray.chat.template import TokenizerChat
    from rstar_ray.checkpointing import Saving

    system.TrainingActors.publish = _phase("publish", system.TrainingActors.publish)
    Learner.train_rl = _phase("update", Learner.train_rl)
    train_loop.resample = _short_phase("resampling", train_loop.resample)
    Saving._write = _phase("checkpoint", Saving._write)  # pyright: ignore[reportPrivateUsage]
    stages.run_evaluation = _phase("evaluation", stages.run_evaluation)
    TokenizerChat.prompt_ids = _long_prompts(TokenizerChat.prompt_ids)
    ray.init = _with_hook(ray.init)
    stages._balancer_stats = _filling(stages._balancer_stats)  # pyright: ignore[reportPrivateUsage]
    shift_clock()


def in_worker() -> None:
    """Runs in each of Ray's worker processes, before its actor is created."""
    import actors.generation.generation_actor as generation
    from actors.sandbox_executor import SandboxExecutor

    shift_clock()
    generation.GenerationActor.start = _starting(generation.GenerationActor.start)
    SandboxExecutor.run = _odd_answers(SandboxExecutor.run)
    SandboxExecutor._answer = _odd_programs(SandboxExecutor._answer)  # pyright: ignore[reportPrivateUsage]


def shift_clock() -> None:
    """Shift this process's wall clock, as read through Python's `time`, by the seconds in `clock`."""
    real_s, real_ns = time.time, time.time_ns
    latest, shift = 0.0, 0.0

    def shifted() -> float:
        nonlocal latest, shift
        if time.monotonic() > latest + LOOK_AGAIN_S:
            latest, shift = time.monotonic(), float(asked("clock") or 0)
        return shift

    time.time = lambda: real_s() + shifted()
    time.time_ns = lambda: real_ns() + int(shifted() * 1e9)


def _with_hook(init: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(init)
    def started(*args: Any, runtime_env: dict[str, Any], **options: Any) -> Any:
        hook = {"worker_process_setup_hook": "tests.chaos.seams.in_worker"}
        return init(*args, runtime_env=runtime_env | hook, **options)

    return started


def _filling(before: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """After each step, the driver puts `fill` MiB into the object store and retains them."""
    kept: list[Any] = []

    @wraps(before)
    async def filled(*args: Any) -> Any:
        import ray

        size = asked("fill")
        if size is None:
            kept.clear()
        elif not kept:
            kept.extend(ray.put(b"x" * 2**20) for _ in range(int(size)))
        return await before(*args)

    return filled


def _phase(name: str, work: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(work)
    async def announced(*args: Any, **options: Any) -> Any:
        control(PHASE).write_text(name)
        try:
            while asked(f"hold {name}") is not None:
                await asyncio.sleep(0.05)
            return await work(*args, **options)
        finally:
            with contextlib.suppress(FileNotFoundError):
                if asked(PHASE) == name:  # checkpoints are written during other phases
                    control(PHASE).unlink()

    return announced


def _short_phase(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """A phase that blocks the process's event loop."""

    @wraps(work)
    def announced(*args: Any, **options: Any) -> Any:
        if asked(f"hold {name}") is not None:
            control(PHASE).write_text(name)
            while asked(f"hold {name}") is not None:
                time.sleep(0.01)
            control(PHASE).unlink(missing_ok=True)
        return work(*args, **options)

    return announced


def _long_prompts(prompt_ids: Callable[..., list[int]]) -> Callable[..., list[int]]:
    @wraps(prompt_ids)
    def asked_for(self: Any, problem: Any) -> list[int]:
        ids = prompt_ids(self, problem)
        return ids * 1_000 if asked("long prompt") == "all" or asked("long prompt") == problem.id else ids

    return asked_for


def _starting(start: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(start)
    async def announced(self: Any) -> Any:
        control("starting").write_text(json.dumps({"pid": os.getpid(), "start_time": start_time(os.getpid())}))
        return await start(self)

    return announced


def _odd_answers(run: Callable[..., Any]) -> Callable[..., Any]:
    """The executor answers twice, to calls that were not made, with a malformed answer, or not at all."""

    @wraps(run)
    async def answers(self: Any, batch: Any, caller: str) -> Any:
        odd = asked("answers")
        async for ready in run(self, batch, caller):
            if odd == "twice":
                yield ready
            elif odd == "strange":
                yield [(number + 1_000_000, answer) for number, answer in ready]
            elif odd == "garbage" and random() < ODD_SHARE:
                yield [(number, {"stdout": "\ud800" * 3}) for number, _ in ready]
                continue
            elif odd == "swapped" and random() < ODD_SHARE:  # an answer to another kind of request
                from rstar_ray.outcome import Outcome
                from rstar_ray.trajectory import ToolResult

                yield [(number, ToolResult(outcome=Outcome.OK, text="")) for number, _ in ready]
                continue
            elif odd == "none":
                await asyncio.sleep(3_600)
            yield ready

    return answers


def _odd_programs(answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Replace the program of every call; its isolation is real."""

    @wraps(answer)
    async def answered(self: Any, work: Any, caller: str) -> Any:
        from dataclasses import replace

        from sandbox.request import ExecutionRequest

        program = asked("program")
        if program is not None and isinstance(work, ExecutionRequest):
            work = replace(work, code=program)
        return await answer(self, work, caller)

    return answered
