"""The session of one agent at its host: matches its requests to tokens and waits for the completions.

Requests of a rollout are answered one after the other, because the rollout was admitted with the memory for one. An
agent that restarts after its host was lost is answered from the recorded turns, as long as it sends the same requests.
No network and no threads here: see `actors.agents`.
"""

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import chain, repeat
from typing import Any

from rstar_ray.agent.agent_rollout import AgentEnd, AgentRequest, TurnResult
from rstar_ray.agent.chat_request import (
    BadRequest,
    ChatRequest,
    Finished,
    call_ids,
    finish_reason,
    logprobs_of,
    message_of,
    refuse_too_long,
    usage_of,
)
from rstar_ray.agent.rollout import RolloutState
from rstar_ray.agent.token_lines import Place, TokenLines
from rstar_ray.chat.answer import AnswerReader
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.errors import ToolError
from rstar_ray.lines import NEW, parents_of, spans_of
from rstar_ray.outcome import Outcome
from rstar_ray.trajectory import Problem, StopReason, ToolResult

MAX_WAITING = 64
"""Most waiting requests of one rollout."""
MAX_REFUSED = 200
"""Refused requests of one rollout that count as progress of its agent."""
MAX_BODY_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """One turn of the rollout as its worker stores it."""

    continues: int
    context_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    invalid_known: bool  # the rollout has the results of its calls that could not be read


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCall:
    """A worker's call: the newest turn, or the reason why there is none, and a wait for the next request."""

    rollout_id: str
    restarts: int
    holder: str  # the worker that plays the rollout
    opens: bool  # the worker's first call, which takes over the rollout
    problem: Problem
    seed: int
    num_turns: int
    last: SampledTurn | None
    record: tuple[SampledTurn, ...] | None = None  # all turns, if the host requested them
    refused: tuple[int, StopReason, str] | None = None  # number of a request, the exhausted budget, a message
    wait_s: float


class Other(Enum):
    """Replies to a worker besides a request and the agent's end."""

    WAIT = auto()  # the agent has not sent a request yet
    SEND_RECORD = auto()  # this host does not have the rollout's turns
    LOST = auto()  # the agent's requests differ from the recorded turns, or another worker plays the rollout


AgentReply = AgentRequest | AgentEnd | Other


@dataclass(slots=True, eq=False)
class Pending:
    """A request of the agent until its answer has been delivered."""

    request: ChatRequest
    number: int
    answer: "asyncio.Future[Finished]"
    clients: int = 0  # number of clients that wait for it


@dataclass(slots=True)
class _Asked:
    """The request whose completion is being sampled."""

    pending: Pending
    place: Place
    request: AgentRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calls:
    """The tool calls of one turn."""

    ids: frozenset[str]  # as the agent received them
    names: list[str]
    offered: frozenset[str]  # names of the tools in the turn's request
    unreadable: bool  # others could not be read


@dataclass(slots=True)
class AgentSession:
    """The requests of one rollout; use it from one event loop."""

    chat: TokenizerChat
    call: AgentCall  # the call that started the session
    context_tokens: int
    failed: Callable[[str], bool] | None = None  # whether a tool result counts as failed
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    _lines: TokenLines = field(init=False)
    _record: dict[int, SampledTurn] = field(init=False)  # recorded turns that the agent has not requested again
    _turn_of: list[int] = field(default_factory=list[int])  # by the number of a completion in `_lines`
    _calls: dict[int, _Calls] = field(default_factory=dict[int, _Calls])  # by turn, the newest last
    _reported: set[int] = field(default_factory=set[int])  # turns whose results are known
    _results: list[TurnResult] = field(default_factory=list[TurnResult])  # to report
    _queue: deque[Pending] = field(default_factory=deque[Pending])
    _undelivered: list[Pending] = field(default_factory=list[Pending])  # the oldest first
    _delivered: dict[str, Pending] = field(default_factory=dict[str, Pending])  # by digest, the newest
    _not_queued: Counter[str] = field(default_factory=Counter[str])  # by digest, requests refused by `MAX_WAITING`
    _asked: _Asked | None = None
    _end: AgentEnd | None = None
    _latest: AgentEnd = field(default_factory=AgentEnd)  # facts about the last completion, for the end
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _num_requests: int = 0
    _num_refused: int = 0
    _num_turns: int = 0
    _poll: int = 0
    _holder: str = ""
    _busy_since_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._lines = TokenLines(self.chat)
        self._record = dict(enumerate(self.call.record or ()))
        self._num_turns = len(self._record)
        self._holder = self.call.holder

    # -- the agent's side ---------------------------------------------------------------------------------------------
    @property
    def over(self) -> bool:
        return self._end is not None

    @property
    def lost(self) -> bool:
        return self._end is not None and self._end.lost

    def ask(self, request: ChatRequest, *, retry: bool = False) -> Pending:
        """Queue a request. A repeated request joins the oldest earlier one that was not delivered and has no client.

        If there is none, a `retry` joins an earlier one with a client, or one that was delivered, unless the limit of
        waiting requests refused its first attempt. Raises `BadRequest`.
        """
        if self.over:
            raise BadRequest("this rollout has ended", code="rollout_ended")
        same = [one for one in self._undelivered if one.request.digest == request.digest]
        if abandoned := [one for one in same if not one.clients]:
            return abandoned[0]
        if retry and self._not_queued[request.digest]:
            self._not_queued[request.digest] -= 1
        elif retry and (known := same[0] if same else self._delivered.get(request.digest)):
            return known
        if len(self._queue) >= MAX_WAITING:
            self._not_queued[request.digest] += 1
            raise BadRequest(f"{MAX_WAITING} requests of this rollout wait already", code="too_many_requests")
        self._num_requests += 1
        answer: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        pending = Pending(request=request, number=self._num_requests, answer=answer)
        self._undelivered.append(pending)
        self._queue.append(pending)
        self._changed.set()
        return pending

    async def answer_of(self, pending: Pending) -> Finished:
        """Wait for the answer. Raises `BadRequest` for a request that cannot be answered."""
        pending.clients += 1
        try:
            return await asyncio.shield(pending.answer)
        finally:
            pending.clients -= 1

    def delivered(self, pending: Pending) -> None:
        """Record that the client has the answer; a repeated request is then a new sample."""
        if pending in self._undelivered:
            self._undelivered.remove(pending)
        self._delivered[pending.request.digest] = pending
        pending.request = replace(pending.request, messages=(), tools=())  # a retry needs only the answer
        self._busy_since_s = time.monotonic()

    def end(self, end: AgentEnd) -> None:
        """Record the agent's end; its open requests are refused."""
        if self._end is None:
            self._end = end
            while self._queue:
                self._refuse(self._queue.popleft(), BadRequest("this rollout has ended", code="rollout_ended"))
            self._changed.set()

    def release(self) -> None:
        """Drop the tokens of an ended rollout; its key stays valid."""
        if self._asked is not None:  # a client that blocks waits for it
            self._refuse(self._asked.pending, BadRequest("this rollout has ended", code="rollout_ended"))
        self._lines = TokenLines(self.chat)
        self._record, self._asked = {}, None
        self._undelivered, self._delivered = [], {}
        self.call = replace(self.call, record=None, last=None)

    @property
    def num_tokens(self) -> int:
        """Stored tokens; those in several lines count more than once."""
        return self._lines.num_tokens

    def thinks_for_s(self) -> float:
        """Seconds since the agent was answered, if it has not sent a request or ended since."""
        waits = self._queue or self._asked is not None or self.over
        return 0.0 if waits else time.monotonic() - self._busy_since_s

    # -- the worker's side --------------------------------------------------------------------------------------------
    def fits(self, call: AgentCall) -> bool:
        """Whether this session is at the same turn as the caller's rollout."""
        given = self._asked is not None and call.last is not None and call.num_turns == self._num_turns + 1
        return not self.lost and call.restarts == self.call.restarts and (given or call.num_turns == self._num_turns)

    async def next(self, call: AgentCall) -> AgentReply:
        """Process the worker's call, then wait for the next request or the end."""
        if call.opens:
            self._holder = call.holder
        if call.holder != self._holder:
            return Other.LOST
        self._poll += 1
        mine = self._poll
        self._changed.set()  # an earlier call, whose reply is lost, ends
        self._take(call)
        until_s = time.monotonic() + call.wait_s
        while mine == self._poll:
            if self._asked is None:
                self._advance()
            if self._asked is not None:
                return self._asked.request
            if self._end is not None:
                return self._end_report(self._end)
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), until_s - time.monotonic())
            except TimeoutError:
                return Other.WAIT
        return Other.WAIT

    def _end_report(self, end: AgentEnd) -> AgentReply:
        if end.lost:
            return Other.SEND_RECORD
        if self._record:
            return Other.LOST
        known = self._latest
        return replace(end, refused=known.refused, cut=known.cut, called=known.called, results=tuple(self._results))

    def _take(self, call: AgentCall) -> None:
        asked = self._asked
        if asked is None:
            return
        if call.refused is not None and call.refused[0] == asked.request.number:
            _, reason, text = call.refused
            self._asked, self._latest = None, replace(self._latest, refused=reason)
            code = "context_length_exceeded" if reason is StopReason.TRUNCATED else "max_turns"
            # As in the built-in loop: results that exceed the budget count, calls of a last or cut turn do not.
            counts = reason is StopReason.TRUNCATED and not self._latest.cut
            self._results = list(asked.request.results) if counts else []
            self._refuse(asked.pending, BadRequest(f"{text}. Hint: end the rollout", code=code))
        elif call.last is not None and call.num_turns == self._num_turns + 1:
            self._asked = None
            self._num_turns += 1
            self._results = []
            with self._refusing(asked.pending):
                self._finish(asked.pending, asked.place, call.last, call.num_turns - 1)

    def _advance(self) -> None:
        """Prepare the next request for the worker; recorded turns are answered from the record."""
        while self._queue and self._asked is None and not self.over:
            pending = self._queue.popleft()
            if not pending.clients:  # the client has disconnected
                self._refuse(pending, BadRequest("its client has disconnected"))
                continue
            with self._refusing(pending):
                try:
                    refuse_too_long(pending.request, self.context_tokens)
                    place = self._lines.place(pending.request)
                except ValueError as refused:
                    if isinstance(refused, BadRequest) and refused.code == "context_length_exceeded":
                        if not self._latest.cut:  # results that exceed the budget count
                            self._results += self._results_in(pending.request, NEW)
                        self._latest = replace(self._latest, refused=StopReason.TRUNCATED)
                    bad = refused if isinstance(refused, BadRequest) else BadRequest(str(refused))
                    self._refuse(pending, bad)
                    continue
                continues = NEW if place.parent == NEW else self._turn_of[place.parent]
                results = self._results_in(pending.request, continues)
                recorded = self._recorded(continues, place)
                if recorded is not None:
                    self._finish(pending, place, self._record.pop(recorded), recorded)
                    continue
                self._asked = _Asked(
                    pending,
                    place,
                    request=AgentRequest(
                        number=pending.number,
                        continues=continues,
                        context_ids=place.context_ids,
                        why_new=place.why_new,
                        after_tools=pending.request.messages[-1]["role"] == "tool",
                        max_tokens=pending.request.max_tokens,
                        stop=pending.request.stop,
                        results=(*self._results, *results),
                    ),
                )

    def _recorded(self, continues: int, place: Place) -> int | None:
        """The recorded turn that matches this request."""
        return next(
            (
                number
                for number, turn in self._record.items()
                if turn.continues == continues and turn.context_ids == place.context_ids
            ),
            None,
        )

    def _results_in(self, request: ChatRequest, continues: int) -> list[TurnResult]:
        """Results of tools at the end of the messages, once for each turn that called them."""
        called: list[str] = []
        replies: list[Mapping[str, Any]] = []
        for message in reversed(request.messages):
            if message["role"] == "assistant":
                called = _names_of(message)
                break
            if message["role"] == "tool":  # others are a reminder beside the results
                replies.append(message)
        caller = continues if continues != NEW else self._caller(request.last_call_ids, called)
        if not replies or caller is None or caller in self._reported:
            return []
        self._reported.add(caller)
        calls = self._calls[caller]
        results = [(str(reply.get("tool_call_id") or ""), self._result(reply)) for reply in reversed(replies)]
        if calls.unreadable:  # replies to these calls, which count already, come last
            del results[len(called) :]
        names = [name if name in calls.offered else "" for name in called]
        ids = request.last_call_ids
        name_of = {one: name for one, name in zip(ids, names, strict=False) if one and ids.count(one) == 1}
        in_order = chain(names, repeat(""))  # a result without a known id belongs to the call at its position
        return [
            (caller, replace(result, tool=name_of.get(of_call, name)))
            for (of_call, result), name in zip(results, in_order, strict=False)
        ]

    def _result(self, reply: Mapping[str, Any]) -> ToolResult:
        text = str(reply["content"])
        try:
            failed = bool(reply.get("rstar_failed")) or (self.failed is not None and self.failed(text))
        except Exception as raised:  # of any kind, because it is the user's code
            raise ToolError(f"--agent.failed: {type(raised).__name__}: {raised}") from raised
        return ToolResult(outcome=Outcome.ERROR if failed else Outcome.OK, text=text)

    def _caller(self, ids: Sequence[str], called: list[str]) -> int | None:
        """The turn whose calls a new line answers: by their ids, or the newest turn if it called the same tools."""
        newest_first = list(reversed(self._calls.items()))
        by_id = [number for number, calls in newest_first if not calls.ids.isdisjoint(ids)]
        by_name = [number for number, calls in newest_first[:1] if calls.names == called]
        return next(iter(by_id or by_name), None)

    def _finish(self, pending: Pending, place: Place, turn: SampledTurn, number: int) -> None:
        request, chat = pending.request, self.chat
        tools = request.tools if request.reads_calls else ()
        reader = AnswerReader(chat, place.prompt_ids, tools=tools, parallel=request.parallel, stop=request.stop)
        reader.feed(turn.token_ids)
        _, answer = reader.end()
        ended = turn.token_ids[-1] in chat.profile.stop_token_ids
        cut = not (ended or answer.stopped_by)
        if cut:  # its last call is incomplete rather than unreadable
            answer = replace(answer, unreadable=())
        message = message_of(answer, f"{self.call.rollout_id}/{number}")
        called = [call.name for call in answer.calls]
        self._lines.add(place, request, turn.token_ids, message, called=called, ended=ended)
        self._turn_of.append(number)
        self._calls[number] = _Calls(
            ids=call_ids([message]),
            names=_names_of(message),
            offered=frozenset(str(tool["function"]["name"]) for tool in request.tools),
            unreadable=bool(answer.unreadable),
        )
        if not turn.invalid_known:
            invalid = [ToolResult(outcome=Outcome.INVALID, text=error) for error in answer.unreadable]
            self._results += [(number, result) for result in invalid]
        self._latest = AgentEnd(cut=cut, called=bool(answer.calls or answer.unreadable))
        texts = [chat.decode([token]) for token in turn.token_ids] if request.logprobs else []
        finished = Finished(
            message=message,
            finish=finish_reason(answer, ended=ended),
            usage=usage_of(len(place.prompt_ids), len(turn.token_ids)),
            stopped_by=answer.stopped_by,
            logprobs=logprobs_of(texts, turn.logprobs) if request.logprobs else None,
        )
        self._busy_since_s = time.monotonic()
        if not pending.answer.done():
            pending.answer.set_result(finished)

    @contextmanager
    def _refusing(self, pending: Pending) -> Generator[None, None, None]:
        """Refuse a request whose processing raises, because the rollout is dropped and its client may block."""
        try:
            yield
        except BaseException:
            self._refuse(pending, BadRequest("this rollout has ended", code="rollout_ended"))
            raise

    def _refuse(self, pending: Pending, refused: BadRequest) -> None:
        if pending in self._undelivered:
            self._undelivered.remove(pending)
        self._num_refused += 1
        if self._num_refused <= MAX_REFUSED:  # an agent that asks again and again makes no progress
            self._busy_since_s = time.monotonic()
        if not pending.answer.done():
            pending.answer.set_exception(refused)
            pending.answer.exception()  # avoids asyncio's warning if the client has disconnected


def _names_of(message: Mapping[str, Any]) -> list[str]:
    """Names of the tools that a message of the assistant calls."""
    return [str(call["function"]["name"]) for call in message.get("tool_calls") or ()]


def sampled_turns(state: RolloutState, first: int = 0) -> tuple[SampledTurn, ...]:
    """The turns of a rollout, starting with turn `first`."""
    return tuple(
        SampledTurn(
            continues=parent,
            context_ids=state.response_ids[begin:sampled] if number else state.prompt_ids,
            token_ids=state.response_ids[sampled:end],
            logprobs=state.logprobs[sampled:end],
            invalid_known=any(result.outcome is Outcome.INVALID for result in state.turns[number].tool_results),
        )
        for number, (parent, (begin, sampled, end)) in enumerate(
            zip(parents_of(state.turns), spans_of(state.turns, state.loss_mask), strict=True)
        )
        if number >= first
    )
