"""A rollout driven by a user's agent: each completion that the agent requests is one turn.

Like `run_rollout`, a coroutine over two functions. The agent sends requests to its host (`rstar_ray.agent.session`),
which matches messages to tokens; this module handles tokens only. Completion n has the seed of turn n.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rstar_ray.agent.rollout import GenerateFn, RolloutState, with_completion, with_context
from rstar_ray.chat.answer import TextOfTokens
from rstar_ray.chat.template import ChatFormat
from rstar_ray.errors import ToolError
from rstar_ray.lines import NEW, line_positions, line_to, parents_of, spans_of
from rstar_ray.seeds import derive_seed
from rstar_ray.trajectory import Completion, StopReason, ToolResult, Turn

TurnResult = tuple[int, ToolResult]
"""A tool result, with the number of the turn that called the tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """A request that waits for its completion."""

    number: int  # unique number of the request
    continues: int  # the turn whose tokens it continues, or `NEW`
    context_ids: list[int]  # tokens after that turn's; for a new line the whole prompt
    why_new: str = ""  # why it begins another line, or continues an earlier turn
    after_tools: bool = False  # the newest message is a tool's result
    max_tokens: int = 0  # 0: the agent sets no limit
    stop: tuple[str, ...] = ()
    results: tuple[TurnResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnd:
    """The end of an agent."""

    reward: float | None = None  # None: the configured reward judges the last answer
    failure: str = ""  # the agent's error
    timed_out: bool = False
    fault: str = ""  # our failure: the rollout is dropped
    lost: bool = False  # its process was lost and must be restarted
    refused: StopReason | None = None  # the budget that refused one of its requests
    cut: bool = False  # the last completion was cut before its end
    called: bool = False  # the last completion called a tool
    results: tuple[TurnResult, ...] = ()


class AgentLink(Protocol):
    """The agent of one rollout.

    Raises `ToolError` for our own failures, `ToolStateLost` if the agent's requests differ from the recorded turns.
    """

    async def next(self, state: RolloutState) -> AgentRequest | AgentEnd:
        """Send the newest completion and wait for the next request."""
        ...

    async def refuse(self, state: RolloutState, request: AgentRequest, reason: StopReason, text: str) -> None: ...


async def run_agent_rollout(
    state: RolloutState,
    *,
    generate: GenerateFn,
    agent: AgentLink,
    chat: ChatFormat,
    may_continue: Callable[[RolloutState], bool] = lambda _: True,
) -> RolloutState:
    """Answer the agent's requests until it ends, or until `may_continue`, called after every turn, returns False."""
    while state.stop_reason is None:
        waited_s = time.monotonic()
        asked = await agent.next(state)
        answered = _with_results(state, asked.results, time.monotonic() - waited_s)
        if isinstance(asked, AgentEnd):
            return _ended(answered, asked)
        started = answered
        if not started.turns and asked.context_ids != state.prompt_ids:
            started = state.with_prompt(asked.context_ids)
        prompt_ids, context_ids = _prompt(started, asked)
        room = _room(started, prompt_ids, context_ids)
        if (refusal := _refusal(started, len(prompt_ids), room)) is not None:
            await agent.refuse(state, asked, *refusal)
            continue
        state = await _completed(started, asked, prompt_ids, context_ids, room, generate=generate, chat=chat)
        if not may_continue(state):
            break
    return state


def _prompt(state: RolloutState, asked: AgentRequest) -> tuple[list[int], list[int]]:
    """All tokens before the completion, and those of them that the rollout does not have yet."""
    if not state.turns:
        return state.prompt_ids, []
    held: list[int] = []
    if asked.continues != NEW:
        line = line_to(parents_of(state.turns), asked.continues)
        places = line_positions(spans_of(state.turns, state.loss_mask), line, len(state.prompt_ids))
        tokens = [*state.prompt_ids, *state.response_ids]
        held = [tokens[place] for place in places]
    return [*held, *asked.context_ids], asked.context_ids


def _room(state: RolloutState, prompt_ids: Sequence[int], context_ids: Sequence[int]) -> int:
    """The length budget counts the tokens of all lines; the engine's context counts one line."""
    limits = state.request.limits
    in_budget = limits.max_response_tokens - len(state.response_ids) - len(context_ids)
    return min(in_budget, limits.max_context_tokens - len(prompt_ids))


def _refusal(state: RolloutState, num_prompt: int, room: int) -> tuple[StopReason, str] | None:
    limits = state.request.limits
    if len(state.turns) >= limits.max_turns:
        text = f"this rollout has used its {limits.max_turns} completions (--rollout.max-turns)"
        return StopReason.MAX_TURNS, text
    if room <= 0:
        text = f"the messages have {num_prompt} tokens, which leaves no room in the rollout's budget"
        return StopReason.TRUNCATED, f"{text} (--rollout.max-response-tokens)"
    return None


async def _completed(
    state: RolloutState,
    asked: AgentRequest,
    prompt_ids: list[int],
    context_ids: list[int],
    room: int,
    *,
    generate: GenerateFn,
    chat: ChatFormat,
) -> RolloutState:
    request, number = state.request, len(state.turns)
    started_s = time.monotonic()
    completion = await generate(
        prompt_ids,
        request_id=f"{request.rollout_id}/turn-{number}",
        max_tokens=min(room, asked.max_tokens or room),
        seed=derive_seed(request.seed, "turn", number),
        sampling=request.sampling,
        cache_salt=request.cache_salt,
    )
    completion = until_stop(completion, asked.stop, chat)
    spoken = chat.read(completion.token_ids, after_tools=asked.after_tools).spoken
    state = with_completion(with_context(state, context_ids), completion, spoken)
    turn = Turn(
        num_tokens=len(completion.token_ids),
        generate_s=time.monotonic() - started_s,
        continues=None if asked.continues == number - 1 else asked.continues,
        why_new=asked.why_new,
    )
    return replace(state, turns=(*state.turns, turn))


def until_stop(completion: Completion, stop: Sequence[str], chat: ChatFormat) -> Completion:
    """The tokens up to the one that completes a stop string."""
    text, decoder = "", TextOfTokens(chat.decode)
    longest = max(map(len, stop), default=0)
    for count, token in enumerate(completion.token_ids if stop else (), 1):
        text = text[-longest:] + decoder.after([token])
        if any(one in text for one in stop):
            return replace(
                completion,
                token_ids=completion.token_ids[:count],
                logprobs=completion.logprobs[:count],
                policy_versions=completion.policy_versions[:count],
                ended=completion.ended and count == len(completion.token_ids),
            )
    return completion


def _with_results(state: RolloutState, results: Sequence[TurnResult], waited_s: float) -> RolloutState:
    """The tool results of the agent, with the turns that called the tools, and the agent's time since the last turn."""
    if not state.turns:
        return state
    turns = list(state.turns)
    for number, result in results:
        turns[number] = replace(turns[number], tool_results=(*turns[number].tool_results, result))
    turns[-1] = replace(turns[-1], tool_s=turns[-1].tool_s + waited_s)
    return replace(state, turns=tuple(turns))


def _ended(state: RolloutState, end: AgentEnd) -> RolloutState:
    """Raises `ToolError` where the end says nothing about the policy."""
    if end.fault:
        raise ToolError(f"agent: {end.fault}")
    if not state.turns:
        why = end.failure or "it never asked for one"
        if end.refused is not None:
            budgets = "--rollout.max-response-tokens or --engine.max-context-tokens"
            why = f"its first request was refused, because it leaves no room in {budgets}"
        raise ToolError(f"agent: it ended without a completion ({why})")
    reason = StopReason.ANSWERED
    if end.refused is not None:
        reason = end.refused
    elif end.timed_out:
        reason = StopReason.AGENT_TIMEOUT
    elif end.failure:
        reason = StopReason.AGENT_FAILED
    elif end.reward is None and end.cut and state.room_tokens <= 0:
        reason = StopReason.TRUNCATED
    elif end.reward is None and end.called:
        reason = StopReason.MAX_TURNS
    return replace(state, stop_reason=reason, reward=end.reward)
