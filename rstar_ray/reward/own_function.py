"""Reward functions of the user, in separate processes: one that hangs is killed, one that raises is reported.

The function is `def reward(completion: str, problem: Problem) -> float`, or takes the whole rollout as a third argument
(`Transcript`). It returns any finite number, or a dict with the number as `reward` and components that are reported
beside it. An async function judges several completions at once.
"""

import asyncio
import contextlib
import json
import os
import pickle
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

from rstar_ray.config import RewardConfig
from rstar_ray.errors import ConfigError, JudgeError
from rstar_ray.reward.value import Scored, finite
from rstar_ray.trajectory import Problem, Transcript

START_DEADLINE_S = 60.0
"""Longest time for importing the user's module."""
GRACE_S = 5.0
"""Extra time beyond the deadline of an async function, which its process enforces itself; then the process is
killed.
"""
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A process's report on the function, after importing it."""

    is_async: bool
    takes_rollout: bool


class _Interrupted(Exception):
    """The process hung or ended while it judged several completions: any of them may be the cause."""


class OwnReward:
    """Spreads completions over a few processes that hold one function.

    A process judges one completion at a time, and `--reward.concurrency` at once where the function is async. If such a
    process hangs or ends, each of its completions is judged again alone, so that one costs no other its reward.
    """

    def __init__(self, config: RewardConfig, name: str, folder: str = "") -> None:
        """`name` is `module:function`; `folder` is searched for the module first."""
        self._config = config
        self._name = name
        self._signature: Signature | None = None
        self._processes = [_Process(name, folder) for _ in range(config.processes)]
        self._free: asyncio.Queue[_Process] = asyncio.Queue()  # contains a process once per free slot
        for process in self._processes:
            self._free.put_nowait(process)
        self._suspects: set[int] = set()  # completions that are judged alone
        self._alone, self._for_suspects = asyncio.Lock(), _Process(name, folder)

    async def takes_rollout(self) -> bool:
        """Whether the function has the third argument. Raises `JudgeError` where it cannot be imported."""
        if self._signature is None:
            process = await self._free.get()
            try:
                await self._up(process)
            finally:
                self._free.put_nowait(process)
        assert self._signature is not None
        return self._signature.takes_rollout

    async def __call__(self, completion: str, problem: Problem, rollout: Transcript | None = None) -> float:
        """Raises `JudgeError` with the reason where the function returned no finite number in time."""
        question, deadline_s = (completion, problem, rollout), self._config.deadline_s
        this = hash((completion, problem))
        if this not in self._suspects:
            process = await self._free.get()
            try:
                await self._up(process)
                return self._as_reward(await process.ask(question, deadline_s))
            except _Interrupted:
                self._suspects.add(this)
            finally:
                self._free.put_nowait(process)
        async with self._alone:
            await self._for_suspects.up()
            answer = await self._for_suspects.ask(question, deadline_s)
        self._suspects.discard(this)
        return self._as_reward(answer)

    async def close(self) -> None:
        """End the processes."""
        for process in (*self._processes, self._for_suspects):
            await process.close()

    async def _up(self, process: "_Process") -> None:
        self._signature = await process.up()
        if self._signature.is_async and not process.is_shared:
            process.is_shared = True
            for _ in range(self._config.concurrency - 1):
                self._free.put_nowait(process)

    def _as_reward(self, answer: Mapping[str, object]) -> float:
        if "error" in answer:
            raise JudgeError(f"--reward.name {self._name}: {answer['error']}")
        reward = finite(answer.get("reward"))
        if reward is None:
            raise JudgeError(f"--reward.name {self._name}: gave {answer.get('reward')!r:.80}, not a finite number")
        components = cast(dict[str, float], answer.get("components", {}))
        for name, value in components.items():
            if not name:
                raise JudgeError(f"--reward.name {self._name}: gave a component without a name")
            if finite(value) is None:
                raise JudgeError(f"--reward.name {self._name}: gave {value} as component {name!r}, not a finite number")
        return Scored(reward, components)


class _Process:
    """One child process that has imported the function. It starts when it is needed, again after it was killed."""

    def __init__(self, name: str, folder: str) -> None:
        self.is_shared = False  # judges several completions at once
        self._name = name
        self._folder = folder
        self._child: asyncio.subprocess.Process | None = None
        self._signature: Signature | None = None  # of the living child's function
        self._readers: set[asyncio.Task[None]] = set()
        self._waiting: dict[int, asyncio.Future[Mapping[str, object]]] = {}
        self._accompanied: set[int] = set()  # waiting completions that were judged beside others
        self._numbers = count()
        self._starting, self._writing = asyncio.Lock(), asyncio.Lock()

    async def up(self) -> Signature:
        """Start the child unless it lives. Raises `JudgeError` where the function cannot be imported or called."""
        async with self._starting:
            if self._child is None or self._signature is None:
                reported = await self._start()
                if "error" in reported:
                    await self.end()
                    raise _Unusable(self._name, str(reported["error"]), str(reported.get("hint", "")))
                self._signature = Signature(
                    is_async=bool(reported["is_async"]), takes_rollout=bool(reported["takes_rollout"])
                )
                assert self._child is not None
                reader = asyncio.create_task(self._read(self._child))
                self._readers.add(reader)
                reader.add_done_callback(self._readers.discard)
            return self._signature

    async def _start(self) -> Mapping[str, object]:
        folders = [self._folder, *sys.path]  # -P: not the current folder before them
        self._child = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "rstar_ray.reward.own_function_child", self._name,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MAX_LINE_BYTES,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}, start_new_session=True,
        )  # fmt: skip
        assert self._child.stdout is not None
        try:
            line = await asyncio.wait_for(self._child.stdout.readline(), START_DEADLINE_S)
            return json.loads(line)
        except TimeoutError:
            await self.end()
            raise _Unusable(self._name, f"importing it takes over {START_DEADLINE_S:g} s", "") from None
        except ValueError:
            await self.end()
            raise _Unusable(self._name, "its process ended while importing it", "") from None
        except BaseException:
            await self.end()
            raise

    async def ask(self, question: tuple[str, Problem, Transcript | None], deadline_s: float) -> Mapping[str, object]:
        """The child's answer. Raises `JudgeError` where it does not answer, `_Interrupted` beside other questions."""
        assert self._child is not None and self._signature is not None
        child, signature, number = self._child, self._signature, next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        if len(self._waiting) > 1:
            self._accompanied.update(self._waiting)
        try:
            async with self._writing:
                assert child.stdin is not None
                child.stdin.write(pickle.dumps((number, deadline_s, *question)))
                with contextlib.suppress(ConnectionError):  # the child has ended, which `_read` reports
                    await child.stdin.drain()
            return await asyncio.wait_for(answer, deadline_s + (GRACE_S if signature.is_async else 0.0))
        except TimeoutError:
            await self.end(child)
            if number in self._accompanied:
                raise _Interrupted from None
            raise JudgeError(f"--reward.name {self._name}: no answer within {deadline_s:g} s") from None
        except asyncio.CancelledError:
            if not signature.is_async:  # it would still be busy with this completion
                await self.end(child)
            raise
        finally:
            self._waiting.pop(number, None)
            self._accompanied.discard(number)

    async def _read(self, child: asyncio.subprocess.Process) -> None:
        """Give each answer to its waiter, until the child ends."""
        assert child.stdout is not None
        with contextlib.suppress(ValueError):  # an invalid line: the child is unusable
            while line := await child.stdout.readline():
                answer: dict[str, Any] = json.loads(line)
                waiting = self._waiting.get(answer.pop("id"))
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        await self.end(child, JudgeError(f"--reward.name {self._name}: its process ended without an answer"))

    async def end(self, child: asyncio.subprocess.Process | None = None, reason: JudgeError | None = None) -> None:
        """Kill the child, or this one if it is still the child, with everything it started.

        The waiter of a completion that was judged alone gets the reason, all others `_Interrupted`.
        """
        ended = self._child
        if ended is None or child not in (None, ended):
            return
        self._child = self._signature = None
        for number, waiting in self._waiting.items():
            if not waiting.done():
                waiting.set_exception(_Interrupted() if reason is None or number in self._accompanied else reason)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ended.pid, signal.SIGKILL)
        await ended.wait()
        if ended.stdin is not None:
            ended.stdin.close()

    async def close(self) -> None:
        await self.end()
        await asyncio.gather(*self._readers)


class _Unusable(JudgeError):
    """The function cannot be imported, or not be called as a reward."""

    def __init__(self, name: str, problem: str, hint: str) -> None:
        super().__init__(f"--reward.name {name}: {problem}")
        self.name, self.problem, self.hint = name, problem, hint

    def __reduce__(self) -> tuple[type["_Unusable"], tuple[str, str, str]]:
        return (type(self), (self.name, self.problem, self.hint))


def check_own_reward(name: str, folder: str, *, option: str = "--reward.name") -> None:
    """Import the function in a separate process and check its signature. Raises `ConfigError`."""

    async def once() -> None:
        process = _Process(name, folder)
        await process.up()
        await process.close()

    try:
        asyncio.run(once())
    except _Unusable as refused:
        hint = refused.hint or "give module:function, and its folder as --own-folder"
        raise ConfigError(f"{option} {name}", refused.problem, hint) from None
