"""One rollout: the model thinks, writes Python, reads the result, and continues (arXiv:2508.20722 section 2.1).

A coroutine over two functions; it knows neither Ray nor vLLM. Its state is a record, from which any other replica can
continue after each turn.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from rstar_ray.chat.template import ChatFormat
from rstar_ray.errors import JudgeError
from rstar_ray.lines import line_sizes
from rstar_ray.outcome import Outcome
from rstar_ray.reward.find import Place, count_answers
from rstar_ray.reward.judge import JudgeFn, Judgement, RolloutJudge
from rstar_ray.seeds import derive_seed
from rstar_ray.tools.environment import ENVIRONMENT, EndedFn, Reply
from rstar_ray.trajectory import (
    Completion,
    Placement,
    RolloutRequest,
    Sampling,
    StopReason,
    ToolCall,
    ToolMemory,
    ToolResult,
    Trajectory,
    TrajectorySummary,
    Transcript,
    TranscriptTurn,
    Turn,
)

MAX_ANSWER_CHARS = 200
"""Most characters stored of an answer, because a model may write a long text into its box."""


class GenerateFn(Protocol):
    """Samples one completion. Raises `EngineError` if the engine is lost; never returns part of a turn."""

    async def __call__(
        self,
        prompt_ids: Sequence[int],
        *,
        request_id: str,
        max_tokens: int,
        seed: int,
        sampling: Sampling,
        cache_salt: str = "",
    ) -> Completion: ...


ExecuteFn = Callable[[ToolCall], Awaitable[ToolResult]]
"""Runs one tool call. Raises `SandboxError` or `ToolError` for our own failures only."""


ConverseFn = Callable[[str], Awaitable[tuple[Reply, ToolMemory]]]
"""Passes a turn's text to the rollout's environment.

Returns the reply and the environment's new state. Raises `ToolError` for our own failures only.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutState:
    """The state of a rollout between two turns. Legend: T tokens after the prompt."""

    request: RolloutRequest
    prompt_ids: list[int]  # [P]
    response_ids: list[int]  # [T]
    loss_mask: list[bool]  # [T]
    logprobs: list[float]  # [T] 0 where not sampled
    policy_versions: list[int]  # [T] -1 where not sampled
    turns: tuple[Turn, ...] = ()
    final_text: str = ""  # the last completion, decoded, without its reasoning
    num_answers: int = 0  # `<answer>` tags in all turns so far
    stop_reason: StopReason | None = None
    memories: Mapping[str, ToolMemory] = field(default_factory=dict[str, ToolMemory])  # of tools with state, by name
    reward: float | None = None  # from an environment
    restarts: int = 0
    placements: tuple[Placement, ...] = ()  # as of the last report to the balancer
    admitted: "RolloutState | None" = None  # the start, if the first request of an agent replaced its prompt

    @classmethod
    def start(cls, request: RolloutRequest, prompt_ids: list[int]) -> "RolloutState":
        fits = len(prompt_ids) < request.limits.max_context_tokens
        return cls(
            request=request,
            prompt_ids=prompt_ids,
            response_ids=[],
            loss_mask=[],
            logprobs=[],
            policy_versions=[],
            stop_reason=None if fits else StopReason.REFUSED,
        )

    def restarted(self) -> "RolloutState":
        """The same rollout from the prompt that it was admitted with, after the loss of a tool's state."""
        first = self.admitted or self
        afresh = RolloutState.start(first.request, first.prompt_ids)
        return replace(afresh, restarts=self.restarts + 1, placements=self.placements)

    def with_prompt(self, prompt_ids: list[int]) -> "RolloutState":
        """Before the first turn: replace the prompt. Its additional tokens count against the length budget, because
        the rollout was admitted without them.
        """
        limits, more = self.request.limits, len(prompt_ids) - len(self.prompt_ids)
        limits = replace(limits, max_response_tokens=limits.max_response_tokens - more)
        return replace(self, prompt_ids=prompt_ids, request=replace(self.request, limits=limits), admitted=self)

    @property
    def room_tokens(self) -> int:
        """The tokens that the length budget and the engine's context still allow."""
        limits = self.request.limits
        in_context = limits.max_context_tokens - len(self.prompt_ids) - len(self.response_ids)
        return min(limits.max_response_tokens - len(self.response_ids), in_context)


async def run_rollout(
    state: RolloutState,
    *,
    generate: GenerateFn,
    execute: ExecuteFn,
    chat: ChatFormat,
    converse: ConverseFn | None = None,
    ended: EndedFn | None = None,
    may_continue: Callable[[RolloutState], bool] = lambda _: True,
) -> RolloutState:
    """Play turns until the rollout stops, or until `may_continue`, called after every unfinished turn, returns False.

    `converse` and `ended` belong to the rollout's environment. `ended` is called once, in the turn that a limit ends.
    A state that has already stopped is returned unchanged.
    """
    while state.stop_reason is None:
        state = await play_turn(state, generate=generate, execute=execute, chat=chat, converse=converse)
        reason = state.stop_reason
        if ended is not None and (reason is StopReason.TRUNCATED or reason is StopReason.MAX_TURNS):
            state = await _with_end(state, reason, ended)
        if state.stop_reason is None and not may_continue(state):
            break
    return state


async def _with_end(state: RolloutState, reason: StopReason, ended: EndedFn) -> RolloutState:
    """Add the environment's reward for a rollout that a limit ended; 0 if it gives none."""
    started_s = time.monotonic()
    reward, memory = await ended(reason)
    *before, last = state.turns
    last = replace(last, tool_s=last.tool_s + time.monotonic() - started_s)
    memories = {**state.memories, ENVIRONMENT: memory}
    return replace(state, turns=(*before, last), memories=memories, reward=0.0 if reward is None else reward)


async def play_turn(
    state: RolloutState,
    *,
    generate: GenerateFn,
    execute: ExecuteFn,
    chat: ChatFormat,
    converse: ConverseFn | None = None,
) -> RolloutState:
    """One completion and the results of its calls; without a call, the environment's reply if there is one.

    `max_turns` counts all completions; with an environment, which has a separate limit, only those that call a tool.
    """
    if state.room_tokens <= 0:
        return replace(state, stop_reason=StopReason.TRUNCATED)
    request, turn_number = state.request, len(state.turns)
    started_s = time.monotonic()
    completion = await generate(
        [*state.prompt_ids, *state.response_ids],
        request_id=f"{request.rollout_id}/turn-{turn_number}",
        max_tokens=state.room_tokens,
        seed=derive_seed(request.seed, "turn", turn_number),
        sampling=request.sampling,
        cache_salt=request.cache_salt,
    )
    generated_s = time.monotonic()
    reading = chat.read(completion.token_ids, after_tools=_after_tools(state.turns))
    turn = Turn(num_tokens=len(completion.token_ids), generate_s=generated_s - started_s)
    state = with_completion(state, completion, reading.spoken)
    if not completion.ended:
        return replace(state, turns=(*state.turns, turn), stop_reason=StopReason.TRUNCATED)
    if not reading.calls:
        state = replace(state, turns=(*state.turns, turn))
        return (
            replace(state, stop_reason=StopReason.ANSWERED) if converse is None else await _said(state, converse, chat)
        )
    num_replied = 0 if converse is None else _num_replies(state)
    if turn_number + 1 - num_replied >= request.limits.max_turns:  # no turn would read the results
        return replace(state, turns=(*state.turns, turn), stop_reason=StopReason.MAX_TURNS)
    results = await answer_calls(reading.calls, execute, most=request.limits.max_calls_per_turn)
    memories = {**state.memories, **dict(result.memory for result in results if result.memory is not None)}
    results = [
        replace(result, memory=None, tool="" if call.parse_error else call.tool)
        for call, result in zip(reading.calls, results, strict=True)
    ]
    turn = replace(turn, tool_results=tuple(results), tool_s=time.monotonic() - generated_s)
    state = replace(state, turns=(*state.turns, turn), memories=memories)
    return _with_answer(state, chat.tool_answer_ids(results))


async def _said(state: RolloutState, converse: ConverseFn, chat: ChatFormat) -> RolloutState:
    """The environment's reply to a turn without a call; if the reply has a reward, the rollout ends."""
    started_s = time.monotonic()
    reply, memory = await converse(state.final_text)
    turn = replace(state.turns[-1], tool_s=time.monotonic() - started_s)
    memories = {**state.memories, ENVIRONMENT: memory}
    state = replace(state, turns=(*state.turns[:-1], turn), memories=memories)
    if reply.reward is not None:
        return replace(state, stop_reason=StopReason.ANSWERED, reward=reply.reward)
    most = state.request.limits.max_environment_turns
    if most is not None and _num_replies(state) >= most:
        return replace(state, stop_reason=StopReason.MAX_TURNS)
    return _with_answer(state, chat.user_answer_ids(reply.text))


def _num_replies(state: RolloutState) -> int:
    """Number of the environment's replies: one to every finished turn without a call."""
    return sum(not turn.tool_results for turn in state.turns)


async def answer_calls(calls: Sequence[ToolCall], execute: ExecuteFn, *, most: int) -> list[ToolResult]:
    """Run at most `most` calls concurrently. A single call, the usual case, is awaited directly: another task would let
    every other rollout run first.

    If a call fails for our reasons, the others are cancelled, because no turn would read their results.
    """
    if len(calls) == 1:
        return [await _answer_call(calls[0], execute)]
    tasks = [asyncio.ensure_future(_answer_call(call, execute)) for call in calls[:most]]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    beyond = ToolResult(outcome=Outcome.INVALID, text=f"Error: not run; at most {most} calls in one turn.")
    return [*results, *[beyond] * (len(calls) - len(tasks))]


async def _answer_call(call: ToolCall, execute: ExecuteFn) -> ToolResult:
    if call.parse_error is not None:
        return ToolResult(outcome=Outcome.INVALID, text=f"Error: the tool call could not be read: {call.parse_error}")
    return await execute(call)


def with_completion(state: RolloutState, completion: Completion, spoken: str) -> RolloutState:
    count = len(completion.token_ids)
    return replace(
        state,
        response_ids=[*state.response_ids, *completion.token_ids],
        loss_mask=[*state.loss_mask, *[True] * count],
        logprobs=[*state.logprobs, *completion.logprobs],
        policy_versions=[*state.policy_versions, *completion.policy_versions],
        final_text=spoken,
        num_answers=state.num_answers + count_answers(spoken, "answer"),
    )


def _with_answer(state: RolloutState, answer_ids: list[int]) -> RolloutState:
    """Append text of others (tools, environment), masked from the loss; text beyond the budget is dropped."""
    if len(answer_ids) >= state.room_tokens:
        return replace(state, stop_reason=StopReason.TRUNCATED)
    return with_context(state, answer_ids)


def with_context(state: RolloutState, token_ids: list[int]) -> RolloutState:
    """Append tokens of others (tools, environment), masked from the loss."""
    count = len(token_ids)
    return replace(
        state,
        response_ids=[*state.response_ids, *token_ids],
        loss_mask=[*state.loss_mask, *[False] * count],
        logprobs=[*state.logprobs, *[0.0] * count],
        policy_versions=[*state.policy_versions, *[-1] * count],
    )


async def score(
    state: RolloutState, judge: JudgeFn, chat: ChatFormat | None = None, *, own_tools: bool = False
) -> Trajectory:
    """The finished record with its reward.

    A rollout that a limit ended gets 0, unless its environment gave a reward or the judge reads whole rollouts, for
    which it needs `chat`, and `own_tools` as in `TokenizerChat.read`. A rollout that the judge cannot judge is
    `unjudged`. Raises `SandboxError` like `judge`.
    """
    assert state.stop_reason is not None
    started_s = time.monotonic()
    judgement, unjudged = Judgement(0.0), ""
    if state.reward is not None:
        judgement = Judgement(state.reward, place=None)  # an environment does not read marked answers
    elif state.stop_reason is not StopReason.REFUSED:
        try:
            judgement = await _judged(state, state.stop_reason, judge, chat, own_tools)
        except JudgeError as failed:
            unjudged = f"judging: {failed}"
    trajectory = _trajectory(state, state.stop_reason, judgement, time.monotonic() - started_s)
    return replace(trajectory, summary=replace(trajectory.summary, unjudged=unjudged)) if unjudged else trajectory


def _num_answers(state: RolloutState, place: Place | None) -> int | None:
    """Number of answers for the format penalty: `<answer>` tags in all turns (Eq. 5); other places only in the final
    turn.
    """
    if place is None:
        return None
    return state.num_answers if place == "answer" else count_answers(state.final_text, place)


async def _judged(
    state: RolloutState, stop_reason: StopReason, judge: JudgeFn, chat: ChatFormat | None, own_tools: bool
) -> Judgement:
    problem = state.request.problem
    if chat is not None and isinstance(judge, RolloutJudge) and await judge.reads_rollouts(problem):
        rollout = transcript(state, stop_reason, chat, own_tools=own_tools)
        return await judge.judge_rollout(state.final_text, problem, rollout)
    if stop_reason is StopReason.ANSWERED:
        return await judge(state.final_text, problem)
    return Judgement(0.0)


def transcript(
    state: RolloutState, stop_reason: StopReason, chat: ChatFormat, *, own_tools: bool = False
) -> Transcript:
    """The rollout as text."""
    limits, turns = state.request.limits, list[TranscriptTurn]()
    start = 0
    for number, turn in enumerate(state.turns):
        end = start + turn.num_tokens
        after_tools = _after_tools(state.turns[:number])
        reading = chat.read(state.response_ids[start:end], after_tools=after_tools, own_tools=own_tools)
        turns.append(
            TranscriptTurn(
                completion=reading.text,
                num_tokens=turn.num_tokens,
                calls=reading.calls,
                results=turn.tool_results,
            )
        )
        while end < len(state.loss_mask) and not state.loss_mask[end]:
            end += 1
        start = end
    return Transcript(
        rollout_id=state.request.rollout_id,
        group_id=state.request.group_id,
        stop_reason=stop_reason,
        turns=tuple(turns),
        num_prompt_tokens=len(state.prompt_ids),
        num_response_tokens=len(state.response_ids),
        num_sampled_tokens=sum(state.loss_mask),
        max_response_tokens=limits.max_response_tokens,
        max_turns=limits.max_turns,
    )


def _after_tools(turns: Sequence[Turn]) -> bool:
    """Whether the prompt after these turns ends with results of tools: it may also end with the environment's reply."""
    return bool(turns and turns[-1].tool_results)


def _trajectory(state: RolloutState, stop_reason: StopReason, judgement: Judgement, verify_s: float) -> Trajectory:
    request, turns = state.request, state.turns
    results = [result for turn in turns for result in turn.tool_results]
    outcomes = tuple(result.outcome for result in results)
    versions = Counter(version for version in state.policy_versions if version >= 0)
    return Trajectory(
        summary=TrajectorySummary(
            rollout_id=request.rollout_id,
            group_id=request.group_id,
            problem_id=request.problem.id,
            reward=judgement.reward,
            loose=judgement.loose,
            judge_retries=judgement.retries,
            restarts=state.restarts,
            answer=judgement.answer[:MAX_ANSWER_CHARS],
            num_calls=len(outcomes),
            num_failed=sum(outcome.failed for outcome in outcomes),
            num_answers=_num_answers(state, judgement.place),
            num_turns=len(turns),
            num_prompt_tokens=len(state.prompt_ids),
            num_response_tokens=len(state.response_ids),
            num_sampled_tokens=sum(turn.num_tokens for turn in turns),
            stop_reason=stop_reason,
            lines=line_sizes(turns, state.loss_mask, len(state.prompt_ids)),
            outcomes=outcomes,
            tools=tuple(result.tool for result in results),
            reward_components=judgement.components,
            version_tokens=tuple(sorted(versions.items())),
            generate_s=sum(turn.generate_s for turn in turns),
            tool_s=sum(turn.tool_s for turn in turns),
            verify_s=verify_s,
            turn_s=tuple((turn.generate_s, turn.tool_s) for turn in turns),
            placements=state.placements,
        ),
        problem=request.problem,
        prompt_ids=np.array(state.prompt_ids, dtype=np.int32),
        response_ids=np.array(state.response_ids, dtype=np.int32),
        loss_mask=np.array(state.loss_mask, dtype=np.bool_),
        rollout_logprobs=np.array(state.logprobs, dtype=np.float32),
        policy_versions=np.array(state.policy_versions, dtype=np.int32),
        turns=turns,
    )
