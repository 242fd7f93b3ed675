"""One rollout: think, write Python, read what it did, go on (arXiv:2508.20722 section 2.1).

A coroutine over two Protocols; it knows neither Ray nor vLLM. Its state is a record that any other replica can
go on from after each finished turn.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from rstar_ray.chat.template import ChatFormat
from rstar_ray.outcome import Outcome
from rstar_ray.reward.find import count_answers
from rstar_ray.reward.judge import JudgeFn, Judgement
from rstar_ray.seeds import derive_seed
from rstar_ray.trajectory import (
    Completion,
    RolloutRequest,
    Sampling,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    TrajectorySummary,
    Turn,
)

MAX_ANSWER_CHARS = 200
"""Kept of an answer; a model may put a book into its box."""


class GenerateFn(Protocol):
    """Samples one completion. Raises `EngineError` when the engine is gone, never returns half a turn."""

    async def __call__(
        self, prompt_ids: Sequence[int], *, request_id: str, max_tokens: int, seed: int, sampling: Sampling
    ) -> Completion: ...


class ExecuteFn(Protocol):
    """Runs one tool call. Raises `SandboxError` for our own failures only."""

    async def __call__(self, call: ToolCall) -> ToolResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutState:
    """What a rollout is between two turns. Legend: T tokens after the prompt."""

    request: RolloutRequest
    prompt_ids: list[int]  # [P]
    response_ids: list[int]  # [T]
    loss_mask: list[bool]  # [T]
    logprobs: list[float]  # [T] 0 where not sampled
    policy_versions: list[int]  # [T] -1 where not sampled
    turns: tuple[Turn, ...] = ()
    final_text: str = ""  # the last completion, decoded, without what it only thought
    num_answers: int = 0
    stop_reason: StopReason | None = None

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

    @property
    def room_tokens(self) -> int:
        """What the length budget and the engine's context still allow."""
        limits = self.request.limits
        in_context = limits.max_context_tokens - len(self.prompt_ids) - len(self.response_ids)
        return min(limits.max_response_tokens - len(self.response_ids), in_context)


async def run_rollout(
    state: RolloutState,
    *,
    generate: GenerateFn,
    execute: ExecuteFn,
    chat: ChatFormat,
    go_on: Callable[[RolloutState], bool] = lambda _: True,
) -> RolloutState:
    """Play turns until the rollout stops, or until `go_on`, asked after every unfinished turn, says no."""
    while state.stop_reason is None:
        state = await play_turn(state, generate=generate, execute=execute, chat=chat)
        if state.stop_reason is None and not go_on(state):
            break
    return state


async def play_turn(state: RolloutState, *, generate: GenerateFn, execute: ExecuteFn, chat: ChatFormat) -> RolloutState:
    """One completion and, if it calls the tool, the answers to its calls."""
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
    )
    generated_s = time.monotonic()
    reading = chat.read(completion.token_ids, after_tools=turn_number > 0)
    turn = Turn(num_tokens=len(completion.token_ids), generate_s=generated_s - started_s)
    state = _with_completion(state, completion, reading.spoken)
    if not completion.ended:
        return replace(state, turns=(*state.turns, turn), stop_reason=StopReason.TRUNCATED)
    if not reading.calls:
        return replace(state, turns=(*state.turns, turn), stop_reason=StopReason.ANSWERED)
    if turn_number + 1 >= request.limits.max_turns:  # nobody would read the answers
        return replace(state, turns=(*state.turns, turn), stop_reason=StopReason.MAX_TURNS)
    results = await _answer_calls(reading.calls, execute)
    turn = replace(turn, tool_results=tuple(results), tool_s=time.monotonic() - generated_s)
    return _with_tool_answers(replace(state, turns=(*state.turns, turn)), chat.tool_answer_ids(results))


async def _answer_calls(calls: Sequence[ToolCall], execute: ExecuteFn) -> list[ToolResult]:
    """All at once. One alone, the usual case, is awaited here: a task more would let every other rollout go first."""
    if len(calls) == 1:
        return [await _answer_call(calls[0], execute)]
    return await asyncio.gather(*(_answer_call(call, execute) for call in calls))


async def _answer_call(call: ToolCall, execute: ExecuteFn) -> ToolResult:
    if call.parse_error is not None:
        return ToolResult(outcome=Outcome.INVALID, text=f"Error: the tool call could not be read: {call.parse_error}")
    return await execute(call)


def _with_completion(state: RolloutState, completion: Completion, spoken: str) -> RolloutState:
    count = len(completion.token_ids)
    return replace(
        state,
        response_ids=[*state.response_ids, *completion.token_ids],
        loss_mask=[*state.loss_mask, *[True] * count],
        logprobs=[*state.logprobs, *completion.logprobs],
        policy_versions=[*state.policy_versions, *completion.policy_versions],
        final_text=spoken,
        num_answers=state.num_answers + count_answers(spoken),
    )


def _with_tool_answers(state: RolloutState, answer_ids: list[int]) -> RolloutState:
    """Append the tool's text, masked from the loss; text that would overflow the budget is left out."""
    if len(answer_ids) >= state.room_tokens:
        return replace(state, stop_reason=StopReason.TRUNCATED)
    count = len(answer_ids)
    return replace(
        state,
        response_ids=[*state.response_ids, *answer_ids],
        loss_mask=[*state.loss_mask, *[False] * count],
        logprobs=[*state.logprobs, *[0.0] * count],
        policy_versions=[*state.policy_versions, *[-1] * count],
    )


async def score(state: RolloutState, judge: JudgeFn) -> Trajectory:
    """The finished record with its reward; a rollout that did not end by itself gets 0. Raises as `judge` does."""
    assert state.stop_reason is not None
    started_s = time.monotonic()
    judgement = Judgement(0.0)
    if state.stop_reason is StopReason.ANSWERED:
        judgement = await judge(state.final_text, state.request.problem)
    return _trajectory(state, state.stop_reason, judgement, time.monotonic() - started_s)


def _trajectory(state: RolloutState, stop_reason: StopReason, judgement: Judgement, verify_s: float) -> Trajectory:
    request, turns = state.request, state.turns
    outcomes = tuple(result.outcome for turn in turns for result in turn.tool_results)
    versions = [version for version in state.policy_versions if version >= 0]
    return Trajectory(
        summary=TrajectorySummary(
            rollout_id=request.rollout_id,
            group_id=request.group_id,
            problem_id=request.problem.id,
            reward=judgement.reward,
            judge_retries=judgement.retries,
            answer=judgement.answer[:MAX_ANSWER_CHARS],
            num_calls=len(outcomes),
            num_failed=sum(outcome.failed for outcome in outcomes),
            num_answers=state.num_answers,
            num_turns=len(turns),
            num_prompt_tokens=len(state.prompt_ids),
            num_response_tokens=len(state.response_ids),
            num_sampled_tokens=sum(turn.num_tokens for turn in turns),
            stop_reason=stop_reason,
            outcomes=outcomes,
            policy_version_min=min(versions, default=0),
            policy_version_max=max(versions, default=0),
            generate_s=sum(turn.generate_s for turn in turns),
            tool_s=sum(turn.tool_s for turn in turns),
            verify_s=verify_s,
        ),
        problem=request.problem,
        prompt_ids=np.array(state.prompt_ids, dtype=np.int32),
        response_ids=np.array(state.response_ids, dtype=np.int32),
        loss_mask=np.array(state.loss_mask, dtype=np.bool_),
        rollout_logprobs=np.array(state.logprobs, dtype=np.float32),
        policy_versions=np.array(state.policy_versions, dtype=np.int32),
        turns=turns,
    )
