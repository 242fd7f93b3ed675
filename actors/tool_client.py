"""The tools of a rollout, for its agent loop: Python and programs in the sandbox, other tools at their hosts."""

import asyncio
import contextlib
import itertools
import json
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Protocol

from ray.exceptions import RayActorError

from actors.remote import MAX_TRIES, Remote, probe_of
from actors.tool_host import HELD_UP_S, START_S, ToolHostActor
from rstar_ray.agent.rollout import RolloutState
from rstar_ray.errors import DeadlineExceeded, ToolError, ToolStateLost, first_line
from rstar_ray.outcome import Outcome
from rstar_ray.seeds import derive_seed
from rstar_ray.tools.environment import ENVIRONMENT, Reply
from rstar_ray.tools.host import HostAnswer, HostCall
from rstar_ray.tools.spec import ToolSpec
from rstar_ray.trajectory import StopReason, ToolCall, ToolMemory, ToolResult

GRACE_S = 5.0
"""Extra time beyond a call's deadline, which its host enforces: a host that stays silent longer is examined."""
LOOK_S = HELD_UP_S + 4.0
"""Deadline for a host to answer whether a call blocks it; it answers in a separate thread."""
KILLED_WITHIN_S = 1.0
"""Extra time after a host was found healthy."""
REST_S = 5.0
"""Pause before a call is repeated that failed because a resource of its tool was gone: most return."""
ENVIRONMENT_DEADLINE_S = 60.0


class Found(Enum):
    """The state of a host that has not answered a call."""

    TURNS = auto()  # healthy: the answer is late, or lost
    HELD_UP = auto()  # blocked by a call
    SILENT = auto()  # altogether


class SandboxCalls(Protocol):
    """The sandbox as tools use it; see `actors.sandbox_executor.SandboxClient`."""

    async def execute(self, call: ToolCall, *, seed: int) -> ToolResult: ...
    async def run_tool(
        self, program: str, stdin: str, *, deadline_s: float, max_chars: int, seed: int
    ) -> ToolResult: ...


def host_silent_s(entry: str, specs: Sequence[ToolSpec], silent_s: float) -> float:
    """How long a host of this entry may be silent before the run's detector ends it.

    Longer than a call's deadline: a call inside C code may hold the interpreter's lock and answer no probe until then.
    It then counts as that call's time-out.
    """
    tools = [spec for spec in specs if spec.entry == entry]
    bounds = [_bound_s(spec.deadline_s, stateful=spec.runs == "actor with state") for spec in tools]
    return max(silent_s, max(bounds or [_bound_s(ENVIRONMENT_DEADLINE_S, stateful=True)]) + LOOK_S + KILLED_WITHIN_S)


def _bound_s(deadline_s: float, *, stateful: bool) -> float:
    """A state may be made before its first call, each within the deadline."""
    return (2 * deadline_s if stateful else deadline_s) + GRACE_S


class Tools:
    """What one generation worker calls. `hosts` by entry are the same for all workers."""

    def __init__(
        self,
        specs: Sequence[ToolSpec],
        sandbox: SandboxCalls,
        hosts: Mapping[str, Sequence[Remote[ToolHostActor]]],
        *,
        caller: str,
        environment: str = "",
    ) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.sandbox = sandbox
        self.hosts = hosts
        self.caller = caller
        self.environment = environment
        self._tasks: set[asyncio.Task[None]] = set()
        start = zlib.crc32(caller.encode())  # callers start at different hosts
        self._next_host = {entry: itertools.count(start) for entry in hosts}  # for calls without state

    def open(self, state: RolloutState) -> "RolloutTools":
        """The tools of one rollout, from its current state: the states it has belong to this player from now on."""
        tools = RolloutTools(self, state)
        rollout_id = state.request.rollout_id
        for entry in sorted(tools.entries):
            self._notify(entry, rollout_id, lambda host: host.take_over(rollout_id, self.caller))
        return tools

    async def ask(self, entry: str, tool: str, call: HostCall, deadline_s: float) -> HostAnswer:
        """One call at a host: calls of a rollout with state stay at one host, others take the hosts in turn.

        Raises `ToolError` where our side failed on every try, or `ToolStateLost`.
        """
        hosts = self.hosts[entry]
        first = zlib.crc32(call.rollout_id.encode()) if call.rollout_id else next(self._next_host[entry])
        reason, gone, silences = "", False, 0
        for tried in range(MAX_TRIES):
            host = hosts[(first if call.rollout_id else first + tried) % len(hosts)]
            if gone:  # possibly this call
                await self._wait_for(host, entry)
            try:
                answer = await self._asked(host, entry, tool, call, deadline_s)
            except RayActorError as lost:
                reason, gone = first_line(lost), True
                continue
            if isinstance(answer, Found):
                if answer is not Found.TURNS:
                    await host.restart()
                silences += answer is Found.SILENT
                if answer is not Found.SILENT or silences > 1:  # twice at one call: this call blocks it
                    return HostAnswer(outcome=Outcome.TIMEOUT, text=f"Error: no answer within {deadline_s:g} s.")
                reason, gone = "its host was silent", True
                continue
            if answer.lost:
                raise ToolStateLost(f"{tool or entry} has lost its state")
            if not answer.fault:
                return answer
            reason, gone = answer.fault, False
            if tried + 1 < MAX_TRIES:
                await asyncio.sleep(REST_S)
        raise ToolError(f"{tool or entry}: failed {MAX_TRIES} times, last: {reason}")

    async def _asked(
        self, host: Remote[ToolHostActor], entry: str, tool: str, call: HostCall, deadline_s: float
    ) -> HostAnswer | Found:
        """The answer, or why there is none. Raises `RayActorError` for a host that is gone."""
        bound_s = _bound_s(deadline_s, stateful=bool(call.rollout_id))
        try:
            return await host.call(
                lambda h: h.call(tool, call), deadline_s=bound_s, reason=f"a call of {tool or entry}"
            )
        except DeadlineExceeded:
            pass
        try:
            held_up = await host.call(lambda h: h.held_up(), deadline_s=LOOK_S, reason="whether a call holds it up")
        except DeadlineExceeded:
            return Found.SILENT
        return Found.HELD_UP if held_up else Found.TURNS

    def end(self, rollout_id: str, entries: Sequence[str]) -> None:
        """Have the hosts close a rollout's states, without waiting."""
        for entry in entries:
            self._notify(entry, rollout_id, lambda host: host.end(rollout_id, self.caller))

    def _notify(self, entry: str, rollout_id: str, ask: Callable[[ToolHostActor], Awaitable[None]]) -> None:
        hosts = self.hosts[entry]
        task = asyncio.create_task(self._notified(hosts[zlib.crc32(rollout_id.encode()) % len(hosts)], rollout_id, ask))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settled(self) -> None:
        """Wait until every ended state is closed, and every new player is known."""
        await asyncio.gather(*self._tasks)

    async def _notified(
        self, host: Remote[ToolHostActor], rollout_id: str, ask: Callable[[ToolHostActor], Awaitable[None]]
    ) -> None:
        with contextlib.suppress(RayActorError, DeadlineExceeded):  # a host that is gone holds no state
            await host.call(ask, deadline_s=START_S, reason=f"the state of {rollout_id}")

    async def _wait_for(self, host: Remote[ToolHostActor], entry: str) -> None:
        try:
            await host.call(probe_of, deadline_s=START_S, reason="its host", retry=True)
        except (RayActorError, DeadlineExceeded) as lost:
            raise ToolError(f"{entry}: its host does not come back ({first_line(lost)})") from lost


class RolloutTools:
    """`ExecuteFn`, `ConverseFn` and `EndedFn` of one rollout. Calls of a tool with state go one after the other."""

    def __init__(self, tools: Tools, state: RolloutState) -> None:
        self._tools = tools
        self._rollout_id = state.request.rollout_id
        self._seed = state.request.seed
        self._num_runs: Counter[tuple[int | str, ...]] = Counter()
        self._problem = state.request.problem
        self._environment = self._problem.environment or tools.environment
        self._memories = dict(state.memories)
        self._locks: dict[str, asyncio.Lock] = {}
        self.entries = {self._entry(name) for name in state.memories}

    async def execute(self, call: ToolCall, *, turn: int = 0) -> ToolResult:
        """`turn`: the number of turns before it. Raises `SandboxError` or `ToolError` for our own failures only."""
        spec = self._tools.specs.get(call.tool)
        if spec is None or spec.runs == "python":
            return await self._tools.sandbox.execute(call, seed=self._seed_of(turn, call.code, call.stdin))
        started_s = time.monotonic()
        if spec.runs == "sandbox":
            arguments = json.dumps(call.arguments)
            return await self._tools.sandbox.run_tool(
                spec.program,
                arguments,
                deadline_s=spec.deadline_s,
                max_chars=spec.max_chars,
                seed=self._seed_of(turn, spec.name, arguments),
            )
        if spec.runs == "actor":
            plain = HostCall(arguments=call.arguments)
            answer = await self._tools.ask(spec.entry, spec.name, plain, spec.deadline_s)
            return ToolResult(outcome=answer.outcome, text=answer.text, wall_s=time.monotonic() - started_s)
        answer = await self._with_memory(spec.name, spec.entry, call.arguments, spec.deadline_s)
        memory = None if answer.memory is None else (spec.name, answer.memory)
        wall_s = time.monotonic() - started_s
        return ToolResult(outcome=answer.outcome, text=answer.text, wall_s=wall_s, memory=memory)

    def _seed_of(self, turn: int, *program: str) -> int:
        """32 bits: the same for a repeated or moved rollout; another for a sibling, and if the program runs again."""
        self._num_runs[turn, *program] += 1
        return derive_seed(self._seed, "program", *program, turn, self._num_runs[turn, *program]) >> 31

    async def converse(self, said: str) -> tuple[Reply, ToolMemory]:
        """Raises `ToolError` where the environment failed: its replies are not part of the training data."""
        answer, memory = await self._of_environment({"said": said})
        return Reply(text=answer.text, reward=answer.reward), memory

    async def ended(self, reason: StopReason) -> tuple[float | None, ToolMemory]:
        """Raises as `converse`."""
        answer, memory = await self._of_environment({}, ended=reason)
        return answer.reward, memory

    async def _of_environment(
        self, arguments: Mapping[str, Any], *, ended: StopReason | None = None
    ) -> tuple[HostAnswer, ToolMemory]:
        entry = self._environment
        answer = await self._with_memory(ENVIRONMENT, entry, arguments, ENVIRONMENT_DEADLINE_S, ended=ended)
        if answer.outcome is not Outcome.OK or answer.memory is None:
            raise ToolError(f"environment {entry}: {answer.text}")
        return answer, answer.memory

    def close(self) -> None:
        """The rollout is over here: close its states, unless another player has taken over."""
        self._tools.end(self._rollout_id, sorted(self.entries))

    async def _with_memory(
        self,
        name: str,
        entry: str,
        arguments: Mapping[str, Any],
        deadline_s: float,
        *,
        ended: StopReason | None = None,
    ) -> HostAnswer:
        async with self._locks.setdefault(name, asyncio.Lock()):
            self.entries.add(entry)
            call = HostCall(
                arguments=arguments,
                rollout_id=self._rollout_id,
                holder=self._tools.caller,
                problem=self._problem,
                memory=self._memories.get(name),
                ended=ended,
            )
            tool = "" if name == ENVIRONMENT else name
            answer = await self._tools.ask(entry, tool, call, deadline_s)
            if answer.memory is not None:
                self._memories[name] = answer.memory
            return answer

    def _entry(self, name: str) -> str:
        return self._environment if name == ENVIRONMENT else self._tools.specs[name].entry
