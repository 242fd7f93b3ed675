"""One rollout: think, write Python, read what it did, go on (arXiv:2508.20722 section 2.1).

A coroutine over two Protocols; it knows neither Ray nor vLLM. Its state is a record that any other replica can
go on from after each turn, and from within one that was begun.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from rstar_ray.chat.template import ChatFormat
from rstar_ray.errors import JudgeError
from rstar_ray.outcome import Outcome
from rstar_ray.reward.find import Place, count_answers
from rstar_ray.reward.judge import JudgeFn, Judgement
from rstar_ray.seeds import derive_seed
from rstar_ray.tools.environment import ENVIRONMENT, Reply
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
    Turn,
)

MAX_ANSWER_CHARS = 200
"""Kept of an answer; a model may put a book into its box."""


class GenerateFn(Protocol):
    """Samples one completion. Raises `EngineError` when the engine is gone, never returns half a turn.

    `begun`: how it begins, sampled before by an engine that is gone; it counts among `max_tokens`, and is returned too.
    """

    async def __call__(
        self,
        prompt_ids: Sequence[int],
        *,
        request_id: str,
        max_tokens: int,
        seed: int,
        sampling: Sampling,
        begun: Completion | None = None,
    ) -> Completion: ...


class ExecuteFn(Protocol):
    """Runs one tool call. Raises `SandboxError` or `ToolError` for our own failures only."""

    async def __call__(self, call: ToolCall) -> ToolResult: ...


class ConverseFn(Protocol):
    """Says a turn to the rollout's environment: its reply, and where the rollout now stands with it.

    Raises `ToolError` for our own failures only.
    """

    async def __call__(self, said: str) -> tuple[Reply, ToolMemory]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutState:
    """What a rollout is between two turns, and what there is of the next. Legend: T tokens after the prompt."""

    request: RolloutRequest
    prompt_ids: list[int]  # [P]
    response_ids: list[int]  # [T]
    loss_mask: list[bool]  # [T]
    logprobs: list[float]  # [T] 0 where not sampled
    policy_versions: list[int]  # [T] -1 where not sampled
    turns: tuple[Turn, ...] = ()
    begun: Completion | None = None  # of the next turn, what was sampled of it before its engine was lost
    final_text: str = ""  # the last completion, decoded, without what it only thought
    num_answers: int = 0  # `<answer>` tags in all turns so far
    stop_reason: StopReason | None = None
    memories: Mapping[str, ToolMemory] = field(default_factory=dict[str, ToolMemory])  # of tools with state, by name
    reward: float | None = None  # what an environment gave
    restarts: int = 0
    placements: tuple[Placement, ...] = ()  # as far as it was played where they were told

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

    def begun_again(self) -> "RolloutState":
        """The same rollout from its prompt: what a tool kept for it is gone."""
        afresh = RolloutState.start(self.request, self.prompt_ids)
        return replace(afresh, restarts=self.restarts + 1, placements=self.placements)

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
    converse: ConverseFn | None = None,
    go_on: Callable[[RolloutState], bool] = lambda _: True,
) -> RolloutState:
    """Play turns until the rollout stops, or until `go_on`, asked after every unfinished turn, says no."""
    while state.stop_reason is None:
        state = await play_turn(state, generate=generate, execute=execute, chat=chat, converse=converse)
        if state.stop_reason is None and not go_on(state):
            break
    return state


async def play_turn(
    state: RolloutState,
    *,
    generate: GenerateFn,
    execute: ExecuteFn,
    chat: ChatFormat,
    converse: ConverseFn | None = None,
) -> RolloutState:
    """One completion and the answers to its calls; without a call what the environment says, if there is one."""
    if state.room_tokens <= 0:
        return replace(state, stop_reason=StopReason.TRUNCATED)
    request, turn_number = state.request, len(state.turns)
    started_s = time.monotonic() - (state.begun.spent_s if state.begun else 0.0)
    completion = await generate(
        [*state.prompt_ids, *state.response_ids],
        request_id=f"{request.rollout_id}/turn-{turn_number}",
        max_tokens=state.room_tokens,
        seed=derive_seed(request.seed, "turn", turn_number),
        sampling=request.sampling,
        begun=state.begun,
    )
    generated_s = time.monotonic()
    reading = chat.read(completion.token_ids, after_tools=turn_number > 0)
    turn = Turn(num_tokens=len(completion.token_ids), generate_s=generated_s - started_s)
    state = _with_completion(state, completion, reading.spoken)
    if not completion.ended:
        return replace(state, turns=(*state.turns, turn), stop_reason=StopReason.TRUNCATED)
    if not reading.calls:
        state = replace(state, turns=(*state.turns, turn))
        return (
            replace(state, stop_reason=StopReason.ANSWERED) if converse is None else await _said(state, converse, chat)
        )
    if turn_number + 1 >= request.limits.max_turns:  # nobody would read the answers
        return replace(state, turns=(*state.turns, turn), stop_reason=StopReason.MAX_TURNS)
    results = await answer_calls(reading.calls, execute, most=request.limits.max_calls_per_turn)
    memories = {**state.memories, **dict(result.memory for result in results if result.memory is not None)}
    results = [replace(result, memory=None) for result in results]
    turn = replace(turn, tool_results=tuple(results), tool_s=time.monotonic() - generated_s)
    state = replace(state, turns=(*state.turns, turn), memories=memories)
    return _with_told(state, chat.tool_answer_ids(results))


async def _said(state: RolloutState, converse: ConverseFn, chat: ChatFormat) -> RolloutState:
    """The environment's answer to a turn that called nothing; with its reward the rollout ends."""
    started_s = time.monotonic()
    reply, memory = await converse(state.final_text)
    turn = replace(state.turns[-1], tool_s=time.monotonic() - started_s)
    memories = {**state.memories, ENVIRONMENT: memory}
    state = replace(state, turns=(*state.turns[:-1], turn), memories=memories)
    if reply.reward is not None:
        return replace(state, stop_reason=StopReason.ANSWERED, reward=reply.reward)
    if len(state.turns) >= state.request.limits.max_turns:
        return replace(state, stop_reason=StopReason.MAX_TURNS)
    return _with_told(state, chat.user_answer_ids(reply.text))


async def answer_calls(calls: Sequence[ToolCall], execute: ExecuteFn, *, most: int) -> list[ToolResult]:
    """All at once. One alone, the usual case, is awaited here: a task more would let every other rollout go first.

    Where one fails for our reasons the others are ended: nobody would read their answers.
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


def _with_completion(state: RolloutState, completion: Completion, spoken: str) -> RolloutState:
    count = len(completion.token_ids)
    return replace(
        state,
        response_ids=[*state.response_ids, *completion.token_ids],
        loss_mask=[*state.loss_mask, *[True] * count],
        logprobs=[*state.logprobs, *completion.logprobs],
        policy_versions=[*state.policy_versions, *completion.policy_versions],
        begun=None,
        final_text=spoken,
        num_answers=state.num_answers + count_answers(spoken, "answer"),
    )


def _with_told(state: RolloutState, answer_ids: list[int]) -> RolloutState:
    """Append what others wrote, masked from the loss; text that would overflow the budget is left out."""
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
    """The finished record with its reward; a rollout that did not end by itself gets 0.

    One whose answer the judge cannot judge is `unjudged`. Raises `SandboxError` as `judge` does.
    """
    assert state.stop_reason is not None
    started_s = time.monotonic()
    judgement, unjudged = Judgement(0.0), ""
    if state.reward is not None:
        judgement = Judgement(state.reward, place=None)  # an environment reads no marked answer
    if state.stop_reason is StopReason.ANSWERED and state.reward is None:
        try:
            judgement = await judge(state.final_text, state.request.problem)
        except JudgeError as failed:
            unjudged = f"judging: {failed}"
    trajectory = _trajectory(state, state.stop_reason, judgement, time.monotonic() - started_s)
    return replace(trajectory, summary=replace(trajectory.summary, unjudged=unjudged)) if unjudged else trajectory


def _num_answers(state: RolloutState, place: Place | None) -> int | None:
    """`<answer>` tags count in all turns (Eq. 5); other places are only read in the final turn."""
    if place is None:
        return None
    return state.num_answers if place == "answer" else count_answers(state.final_text, place)


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
            outcomes=outcomes,
            policy_version_min=min(versions, default=0),
            policy_version_max=max(versions, default=0),
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
