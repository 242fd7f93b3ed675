"""Runs a tool with its deadline, its cap on answers, and its state per rollout. One event loop, no Ray.

A state belongs to a rollout after a number of finished calls. If a call comes from another point (an answer was lost
and the rollout repeats the call, or the host is new), the state is restored from the call's snapshot, or reported as
lost.
"""

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from rstar_ray.errors import ToolError
from rstar_ray.outcome import Outcome
from rstar_ray.reward.value import finite
from rstar_ray.tools.environment import Reply
from rstar_ray.tools.tool import Tool, ToolFailed
from rstar_ray.trajectory import Problem, StopReason, ToolMemory


class Pulse:
    """Measures from another thread how long an event loop has been blocked by a function."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asked_s: float | None = None  # time of the unanswered beat

    def held_up_s(self) -> float:
        """Seconds since the unanswered beat; sends a beat and returns 0 if there is none."""
        asked_s = self._asked_s
        if asked_s is not None:
            return time.monotonic() - asked_s
        self._asked_s = time.monotonic()
        self._loop.call_soon_threadsafe(self._turned)
        return 0.0

    def _turned(self) -> None:
        self._asked_s = None


MAX_STATES = 100_000
"""Most states of one host; the least recently used state is dropped first, and is then lost."""
END_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCall:
    """One call to a host; a tool without state uses only the arguments."""

    arguments: Mapping[str, Any]
    rollout_id: str = ""
    holder: str = ""  # the worker that plays the rollout; only it may end the state
    problem: Problem | None = None
    memory: ToolMemory | None = None  # calls so far and their snapshot; None before the first call
    ended: StopReason | None = None  # for an environment: the limit that ended the rollout; there are no arguments then


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAnswer:
    """The result of a call. `lost`: there is no state to resume from, and nothing was called.

    `fault`: why the call failed for our reasons; if set, the other fields are ignored.
    """

    outcome: Outcome = Outcome.OK
    text: str = ""
    reward: float | None = None  # of an environment's last reply, or of its `ended`
    memory: ToolMemory | None = None
    lost: bool = False
    fault: str = ""


@dataclass(slots=True)
class _Live:
    """A rollout's state, and the number of calls that led to it."""

    state: Any
    holder: str
    calls: int = 0
    running: int = 0  # calls that are not answered yet
    kept: bool = False  # a snapshot has the state after its latest call


@dataclass(frozen=True, slots=True, kw_only=True)
class AtStake:
    """States that would be lost with a host, except those of rollouts without a call, which are created again."""

    states: int = 0
    without_snapshot: int = 0  # of them without a snapshot: their rollouts restart

    def __add__(self, other: "AtStake") -> "AtStake":
        return AtStake(
            states=self.states + other.states, without_snapshot=self.without_snapshot + other.without_snapshot
        )

    def line(self) -> str:
        """A description for the log; empty if there are no states."""
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
        """Run a call. An error of the tool is an outcome, not an exception."""
        if self._tool is not None and self._tool.function is not None:
            return await self._bounded(self._tool.function, call.arguments, self._as_answer)
        if call.ended is not None and not callable(getattr(self._environment, "ended", None)):
            return HostAnswer(memory=call.memory or ToolMemory(calls=0))  # no method to call, so no state is needed
        return await self._with_state(call)

    def take_over(self, rollout_id: str, holder: str) -> None:
        """Record that `holder` plays the rollout now; only it may end the state."""
        if live := self._live.get(rollout_id):
            live.holder = holder

    async def end(self, rollout_id: str, holder: str) -> None:
        """Close a rollout's state, unless another worker plays the rollout now."""
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
        """The states that would be lost with this host now. Thread-safe: copying the list of states is atomic."""
        called = [live for live in list(self._live.values()) if live.calls]
        return AtStake(states=len(called), without_snapshot=sum(not live.kept for live in called))

    async def _with_state(self, call: HostCall) -> HostAnswer:
        calls = call.memory.calls if call.memory else 0
        live = self._live.pop(call.rollout_id, None)
        # A worker makes one call at a time, so a call that still runs is of a lost worker, and its result is ignored.
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
        self._live[call.rollout_id] = live  # the most recently used comes last

        async def ask(**arguments: Any) -> Any:
            if call.ended is not None:
                return await live.state.ended(call.ended)
            if self._tool is None:
                return await live.state.reply(*arguments.values())  # its parameter may have another name
            return await live.state.call(**arguments)

        try:
            await self._make_room()
            answer = await self._bounded(ask, call.arguments, self._as_answer if call.ended is None else self._of_end)
        finally:
            live.calls += 1
            live.running -= 1
        if self._live.get(call.rollout_id) is not live:  # closed meanwhile: the answer may be invalid
            return HostAnswer(lost=True)
        snapshot = _snapshot(live.state)
        live.kept = snapshot is not None
        return replace(answer, memory=ToolMemory(calls=live.calls, snapshot=snapshot))

    async def _make(self, live: _Live, call: HostCall, snapshot: str | None) -> HostAnswer | None:
        """Create the state of `live`; returns an answer if that fails. `live` is registered first, so that later calls
        and `end` find it."""
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
        if not latest:  # another worker plays the rollout now, and this answer is ignored
            self._close_soon(made)
            return HostAnswer(lost=True)
        live.state = made
        return None

    def _close_soon(self, state: Any) -> None:
        """Close a state in the background, because a later call has a separate deadline."""
        closing = asyncio.ensure_future(_close(state))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _made(self, call: HostCall, snapshot: str | None) -> Any:
        """The state, or an answer if it cannot be created."""
        problem = call.problem or Problem(id="", problem="", answer="")

        async def make() -> Any:
            if self._tool is not None:
                assert self._tool.state is not None
                with _exit_is_an_error():
                    made: Any = self._tool.state(problem, snapshot)
                    return await made if inspect.isawaitable(made) else made
            assert self._environment is not None
            with _exit_is_an_error():
                environment = self._environment()
                try:
                    await environment.start(problem)
                    if snapshot is not None:
                        await environment.restore(snapshot)
                except BaseException:  # includes the deadline's cancellation
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
        """Run one call with its deadline, and shorten its answer to the cap."""

        async def run() -> Any:
            with _exit_is_an_error():
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
        """The answer for the value that an environment's `ended` returned."""
        return HostAnswer() if given is None else _of_reward(given, f"{_given_by(self._environment)} at its end")

    def _as_answer(self, answer: Any) -> HostAnswer:
        if self._tool is None:
            return _of_reply(answer, self._environment)
        if not isinstance(answer, str):
            said = f"Error: the tool gave {type(answer).__name__}, not text."
            return HostAnswer(outcome=Outcome.ERROR, text=said)
        try:
            with _exit_is_an_error():
                failed = self._tool.failed is not None and bool(self._tool.failed(answer))
        except Exception as raised:
            said = f"Error: the tool's `failed` ({_named(self._tool.failed)}) raised {_in_one_line(raised, '')}"
            return HostAnswer(outcome=Outcome.ERROR, text=self._short(said))
        return HostAnswer(outcome=Outcome.ERROR if failed else Outcome.OK, text=self._short(str.__str__(answer)))

    def _short(self, text: str) -> str:
        return shortened(text, self._tool.max_chars) if self._tool else text


def shortened(text: str, max_chars: int) -> str:
    """A text above the limit reduced to its beginning and end, with the number of missing characters between them."""
    if len(text) <= max_chars:
        return text
    head = max_chars * 3 // 4
    tail = max_chars - head
    return f"{text[:head]}\n... [{len(text) - max_chars} characters left out] ...\n{text[-tail:]}"


def _of_reply(answer: Any, environment: type[Any] | None) -> HostAnswer:
    """The answer for an environment's reply; an invalid reply is an error of the user's code and drops the rollout."""
    given = _given_by(environment)
    if not isinstance(answer, Reply):
        return HostAnswer(outcome=Outcome.ERROR, text=f"{given} {type(answer).__name__}, not a Reply")
    text, reward = cast(Any, answer.text), cast(Any, answer.reward)  # types are not guaranteed
    if not isinstance(text, str):
        said = f"{given} the text {text!r:.80}, which is {type(text).__name__}"
        return HostAnswer(outcome=Outcome.ERROR, text=said)
    text = str.__str__(text)  # a subclass may refer to what Ray cannot send
    return HostAnswer(text=text) if reward is None else _of_reward(reward, given, text)


def _of_reward(reward: Any, given: str, text: str = "") -> HostAnswer:
    number = finite(reward)
    if number is None:
        return HostAnswer(outcome=Outcome.ERROR, text=f"{given} the reward {reward!r:.80}, not a finite number")
    return HostAnswer(text=text, reward=number)


def _given_by(environment: type[Any] | None) -> str:
    return f"the environment {getattr(environment, '__name__', environment)} gave"


def _named(function: Any) -> str:
    """The function as `module:name`."""
    return f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', type(function).__name__)}"


def _snapshot(state: Any) -> str | None:
    take = getattr(state, "snapshot", None)
    if take is None:
        return None
    try:
        with _exit_is_an_error():
            taken = take()
    except Exception:  # without a snapshot, a rollout that loses the state restarts
        return None
    return str.__str__(taken) if isinstance(taken, str) else None


async def _close(state: Any) -> None:
    close: Any = getattr(state, "close", None)
    if close is None:
        return
    with contextlib.suppress(Exception), _exit_is_an_error():  # the rollout is over, so errors do not matter
        closing: Awaitable[Any] | None = close()
        if inspect.isawaitable(closing):
            async with asyncio.timeout(END_DEADLINE_S):  # not `wait_for`, which may start a task
                await closing


@contextlib.contextmanager
def _exit_is_an_error() -> Generator[None]:
    """A tool that exits, as argparse does for wrong arguments, fails: otherwise its host would end."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as ends:
        raise RuntimeError(f"{type(ends).__name__}: {ends}") from ends


def _in_one_line(error: BaseException, begin: str = "Error: ") -> str:
    lines = str(error).strip().splitlines()
    return f"{begin}{type(error).__name__}: {lines[-1] if lines else ''}".rstrip(": ")
