"""Where a tool runs: its deadline, its cap, and the state it keeps for each rollout. One event loop, no Ray.

A state belongs to a rollout at a number of finished calls. A call that comes from another point (the rollout went back
to before a call whose answer was lost, or the host is a new one) gets the state of then from its snapshot, or hears
that it is lost.
"""

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from rstar_ray.errors import ToolError
from rstar_ray.outcome import Outcome
from rstar_ray.reward.value import finite
from rstar_ray.tools.environment import Reply
from rstar_ray.tools.tool import Tool, ToolFailed
from rstar_ray.trajectory import Problem, StopReason, ToolMemory


class Pulse:
    """Of a loop that a function may hold up, and with it all that the loop serves. Asked from one other thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asked_s: float | None = None  # since when a beat is unanswered

    def held_up_s(self) -> float:
        """How long the loop has left the beat unanswered that this was the first to ask for; asks for the next."""
        asked_s = self._asked_s
        if asked_s is not None:
            return time.monotonic() - asked_s
        self._asked_s = time.monotonic()
        self._loop.call_soon_threadsafe(self._turned)
        return 0.0

    def _turned(self) -> None:
        self._asked_s = None


MAX_STATES = 100_000
"""Of one host; the longest unused goes first, as if it were lost."""
END_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCall:
    """One call as it comes to a host; a tool without state reads the arguments alone."""

    arguments: Mapping[str, Any]
    rollout_id: str = ""
    holder: str = ""  # who plays the rollout: only it may end the state
    problem: Problem | None = None
    memory: ToolMemory | None = None  # where the rollout stands; None before its first call
    ended: StopReason | None = None  # of an environment: which limit ended the rollout; nothing else is said then


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAnswer:
    """What came of a call. `lost`: there is no state to resume from, and nothing was called.

    `fault`: why the call failed for our reasons; where there is one, nothing else here counts.
    """

    outcome: Outcome = Outcome.OK
    text: str = ""
    reward: float | None = None  # of an environment's last reply, or of its `ended`
    memory: ToolMemory | None = None
    lost: bool = False
    fault: str = ""


@dataclass(slots=True)
class _Live:
    """A rollout's state and how many calls made it."""

    state: Any
    holder: str
    calls: int = 0
    running: int = 0  # of them not answered yet
    kept: bool = False  # as it was after its latest call: a snapshot has it


@dataclass(frozen=True, slots=True, kw_only=True)
class AtStake:
    """States of rollouts that have been called: what dies with a host. One that has none yet is made like the first."""

    states: int = 0
    without_snapshot: int = 0  # of them: their rollouts start again

    def __add__(self, other: "AtStake") -> "AtStake":
        return AtStake(
            states=self.states + other.states, without_snapshot=self.without_snapshot + other.without_snapshot
        )

    def line(self) -> str:
        """Nothing where there is none."""
        if not self.states:
            return ""
        without = f"of which {self.without_snapshot} had no snapshot: those rollouts start again"
        return f"the states of {self.states} rollouts, {without if self.without_snapshot else 'all with a snapshot'}"


class ToolHost:
    """Runs one tool, or one environment, for many rollouts at once."""

    def __init__(
        self, tool: Tool | None = None, *, environment: type[Any] | None = None, deadline_s: float = 60.0
    ) -> None:
        self._tool = tool
        self._environment = environment
        self._deadline_s = tool.deadline_s if tool else deadline_s
        self._live: dict[str, _Live] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def call(self, call: HostCall) -> HostAnswer:
        """Never raises for what the tool does: that is an outcome."""
        if self._tool is not None and self._tool.function is not None:
            return await self._bounded(self._tool.function, call.arguments, self._as_answer)
        if call.ended is not None and not callable(getattr(self._environment, "ended", None)):
            return HostAnswer(memory=call.memory or ToolMemory(calls=0))  # nothing to call: no state is needed
        return await self._with_state(call)

    def take_over(self, rollout_id: str, holder: str) -> None:
        """From now on `holder` plays the rollout, and it alone may end its state."""
        if live := self._live.get(rollout_id):
            live.holder = holder

    async def end(self, rollout_id: str, holder: str) -> None:
        """Close a rollout's state, unless somebody else plays it by now."""
        live = self._live.get(rollout_id)
        if live is not None and live.holder == holder:
            del self._live[rollout_id]
            await _close(live.state)

    async def close(self) -> None:
        states, self._live = list(self._live.values()), {}
        await asyncio.gather(*(_close(live.state) for live in states), *self._closing)

    @property
    def num_states(self) -> int:
        return len(self._live)

    def at_stake(self) -> "AtStake":
        """What would be lost with this host now; from any thread, since a list is made of the states at one stroke."""
        called = [live for live in list(self._live.values()) if live.calls]
        return AtStake(states=len(called), without_snapshot=sum(not live.kept for live in called))

    async def _with_state(self, call: HostCall) -> HostAnswer:
        calls = call.memory.calls if call.memory else 0
        live = self._live.pop(call.rollout_id, None)
        # One player calls once at a time: who asked for what still runs is gone, and nobody hears what it changes.
        if live is not None and (live.calls != calls or live.running):
            self._close_soon(live.state)
            live = None
        if live is None:
            snapshot = call.memory.snapshot if call.memory else None
            if calls and snapshot is None:
                return HostAnswer(lost=True)
            live = _Live(None, call.holder, calls, kept=snapshot is not None)
            if (failed := await self._make(live, call, snapshot)) is not None:
                return failed
        live.holder = call.holder
        live.running += 1
        self._live[call.rollout_id] = live  # the latest used comes last

        async def ask(**arguments: Any) -> Any:
            if call.ended is not None:
                return await live.state.ended(call.ended)
            return await (live.state.call if self._tool else live.state.reply)(**arguments)

        try:
            await self._make_room()
            answer = await self._bounded(ask, call.arguments, self._as_answer if call.ended is None else self._of_end)
        finally:
            live.calls += 1
            live.running -= 1
        if self._live.get(call.rollout_id) is not live:  # it was closed meanwhile, which may be all that this tells
            return HostAnswer(lost=True)
        snapshot = _snapshot(live.state)
        live.kept = snapshot is not None
        return replace(answer, memory=ToolMemory(calls=live.calls, snapshot=snapshot))

    async def _make(self, live: _Live, call: HostCall, snapshot: str | None) -> HostAnswer | None:
        """Give `live` its state, or say why it has none. It stands in its place from the start, so that whoever comes
        after it, and who ends the rollout, finds it."""
        self._live[call.rollout_id] = live
        live.running += 1
        made: Any = None
        try:
            made = await self._made(call, snapshot)
        finally:
            live.running -= 1
            latest = self._live.get(call.rollout_id) is live
            if latest and (made is None or isinstance(made, HostAnswer)):
                del self._live[call.rollout_id]
        if isinstance(made, HostAnswer):
            return made
        if not latest:  # somebody else plays the rollout by now, and nobody hears this answer
            self._close_soon(made)
            return HostAnswer(lost=True)
        live.state = made
        return None

    def _close_soon(self, state: Any) -> None:
        """Nobody waits: a later caller has a separate deadline."""
        closing = asyncio.ensure_future(_close(state))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _made(self, call: HostCall, snapshot: str | None) -> Any:
        """The state, or the answer where it cannot be made."""
        problem = call.problem or Problem(id="", problem="", answer="")

        async def make() -> Any:
            if self._tool is not None:
                assert self._tool.state is not None
                made: Any = self._tool.state(problem, snapshot)
                return await made if inspect.isawaitable(made) else made
            assert self._environment is not None
            environment = self._environment()
            try:
                await environment.start(problem)
                if snapshot is not None:
                    await environment.restore(snapshot)
            except BaseException:  # a deadline too
                self._close_soon(environment)
                raise
            return environment

        try:
            return await asyncio.wait_for(make(), self._deadline_s)
        except ToolError as ours:
            return HostAnswer(outcome=Outcome.ERROR, fault=str(ours) or "it says that it failed")
        except Exception as raised:
            return HostAnswer(outcome=Outcome.ERROR, text=_in_one_line(raised))

    async def _make_room(self) -> None:
        while len(self._live) > MAX_STATES:
            oldest = next(iter(self._live))
            await _close(self._live.pop(oldest).state)

    async def _bounded(
        self, function: Any, arguments: Mapping[str, Any], read: Callable[[Any], HostAnswer]
    ) -> HostAnswer:
        """One call within its deadline, its answer within its cap."""

        async def run() -> Any:
            return await function(**arguments)

        task = asyncio.ensure_future(run())
        try:
            done, _ = await asyncio.wait({task}, timeout=self._deadline_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            task.cancel()
            return HostAnswer(outcome=Outcome.TIMEOUT, text=f"Error: no answer within {self._deadline_s:g} s.")
        if task.cancelled():
            return HostAnswer(outcome=Outcome.ERROR, text="Error: the call was cancelled.")
        error = task.exception()
        if isinstance(error, ToolError):
            return HostAnswer(outcome=Outcome.ERROR, fault=str(error) or "it says that it failed")
        if isinstance(error, ToolFailed):
            return HostAnswer(outcome=Outcome.ERROR, text=self._short(str(error) or "Error."))
        if error is not None:
            return HostAnswer(outcome=Outcome.ERROR, text=self._short(_in_one_line(error)))
        return read(task.result())

    def _of_end(self, given: Any) -> HostAnswer:
        """What an environment's `ended` returned."""
        return HostAnswer() if given is None else _of_reward(given, f"{_given_by(self._environment)} at its end")

    def _as_answer(self, answer: Any) -> HostAnswer:
        if self._tool is None:
            return _of_reply(answer, self._environment)
        if not isinstance(answer, str):
            said = f"Error: the tool gave {type(answer).__name__}, not text."
            return HostAnswer(outcome=Outcome.ERROR, text=said)
        try:
            failed = self._tool.failed is not None and bool(self._tool.failed(answer))
        except Exception as raised:
            said = f"Error: the tool's `failed` ({_named(self._tool.failed)}) raised {_in_one_line(raised, '')}"
            return HostAnswer(outcome=Outcome.ERROR, text=self._short(said))
        return HostAnswer(outcome=Outcome.ERROR if failed else Outcome.OK, text=self._short(answer))

    def _short(self, text: str) -> str:
        return shortened(text, self._tool.max_chars) if self._tool else text


def shortened(text: str, max_chars: int) -> str:
    """Both ends of a text that is too long, with a mark between them that says how much is missing."""
    if len(text) <= max_chars:
        return text
    head = max_chars * 3 // 4
    tail = max_chars - head
    return f"{text[:head]}\n... [{len(text) - max_chars} characters left out] ...\n{text[-tail:]}"


def _of_reply(answer: Any, environment: type[Any] | None) -> HostAnswer:
    """An environment's reply; an invalid one is our user's fault, and ends the rollout as a failure of ours."""
    given = _given_by(environment)
    if not isinstance(answer, Reply):
        return HostAnswer(outcome=Outcome.ERROR, text=f"{given} {type(answer).__name__}, not a Reply")
    text, reward = cast(Any, answer.text), cast(Any, answer.reward)  # whatever its author put there
    if not isinstance(text, str):
        said = f"{given} the text {text!r:.80}, which is {type(text).__name__}"
        return HostAnswer(outcome=Outcome.ERROR, text=said)
    return HostAnswer(text=text) if reward is None else _of_reward(reward, given, text)


def _of_reward(reward: Any, given: str, text: str = "") -> HostAnswer:
    number = finite(reward)
    if number is None:
        return HostAnswer(outcome=Outcome.ERROR, text=f"{given} the reward {reward!r:.80}, not a finite number")
    return HostAnswer(text=text, reward=number)


def _given_by(environment: type[Any] | None) -> str:
    return f"the environment {getattr(environment, '__name__', environment)} gave"


def _named(function: Any) -> str:
    """As a person finds it."""
    return f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', type(function).__name__)}"


def _snapshot(state: Any) -> str | None:
    take = getattr(state, "snapshot", None)
    if take is None:
        return None
    try:
        taken = take()
    except Exception:  # then a rollout that loses it starts again
        return None
    return taken if isinstance(taken, str) else None


async def _close(state: Any) -> None:
    close: Any = getattr(state, "close", None)
    if close is None:
        return
    with contextlib.suppress(Exception):  # whatever it does, the rollout is over
        closing: Awaitable[Any] | None = close()
        if inspect.isawaitable(closing):
            await asyncio.wait_for(closing, END_DEADLINE_S)


def _in_one_line(error: BaseException, begin: str = "Error: ") -> str:
    lines = str(error).strip().splitlines()
    return f"{begin}{type(error).__name__}: {lines[-1] if lines else ''}".rstrip(": ")
