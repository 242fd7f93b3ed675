"""A person's own reward function, in processes of its own: one that hangs is killed, one that raises says so.

The function is `def reward(completion: str, problem: Problem) -> float`, a number in [0, 1]; it may be async.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import asdict

from rstar_ray.config import RewardConfig
from rstar_ray.errors import ConfigError, JudgeError
from rstar_ray.trajectory import Problem

START_DEADLINE_S = 60.0
"""For importing the person's module."""
MAX_LINE_BYTES = 1 << 20


class OwnReward:
    """Spreads completions over a few processes that hold the function; each judges one at a time."""

    def __init__(self, config: RewardConfig, folder: str = "") -> None:
        self._config = config
        self._folder = folder
        self._free: asyncio.Queue[_Process | None] = asyncio.Queue()
        for _ in range(config.processes):
            self._free.put_nowait(None)

    async def __call__(self, completion: str, problem: Problem) -> float:
        """Raises `JudgeError` with what the function did where it gave no number in [0, 1] in time."""
        process = await self._free.get()
        kept: _Process | None = None
        try:
            process = process or await _Process.start(self._config.name, self._folder)
            said = await process.ask({"completion": completion, "problem": asdict(problem)}, self._config.deadline_s)
            kept = process
        finally:
            if process is not None and kept is None:
                await process.end()
            self._free.put_nowait(kept)
        return self._as_reward(said)

    def _as_reward(self, said: dict[str, object]) -> float:
        if "error" in said:
            raise JudgeError(f"--reward.name {self._config.name}: {said['error']}")
        reward = said.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not 0 <= reward <= 1:
            raise JudgeError(f"--reward.name {self._config.name}: gave {reward!r:.80}, no number from 0 to 1")
        return float(reward)


class _Process:
    """One child that has imported the function."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process

    @classmethod
    async def start(cls, name: str, folder: str) -> "_Process":
        """Raises `JudgeError` where the function cannot be had."""
        folders = [folder, *sys.path]
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rstar_ray.reward.own_child", name,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MAX_LINE_BYTES,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}, start_new_session=True,
        )  # fmt: skip
        process = cls(name, child)
        try:
            said = await process.hear(START_DEADLINE_S)
            if "error" in said:
                raise JudgeError(f"--reward.name {name}: {said['error']}")
        except BaseException:
            await process.end()
            raise
        return process

    async def ask(self, question: dict[str, object], deadline_s: float) -> dict[str, object]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # it has ended: `hear` says so
            await self._process.stdin.drain()
        return await self.hear(deadline_s)

    async def hear(self, deadline_s: float) -> dict[str, object]:
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), deadline_s)
            return json.loads(line)
        except TimeoutError:
            raise JudgeError(f"--reward.name {self._name}: no answer within {deadline_s:g} s") from None
        except ValueError:
            raise JudgeError(f"--reward.name {self._name}: its process ended without an answer") from None

    async def end(self) -> None:
        """Kill it and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


def check_own_reward(name: str, folder: str) -> None:
    """Import the function in a process of its own and look at what it takes. Raises `ConfigError`."""

    async def once() -> None:
        await (await _Process.start(name, folder)).end()

    try:
        asyncio.run(once())
    except JudgeError as refused:
        option, _, problem = str(refused).partition(": ")
        mend = "give module:function of (completion, problem), and its folder as --own-folder"
        raise ConfigError(option, problem, mend) from None
