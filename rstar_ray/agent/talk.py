"""A conversation with a user, streamed: the same turns as a rollout's, reported piece by piece.

A coroutine over two Protocols, without vLLM or a terminal.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rstar_ray.agent.rollout import ExecuteFn, answer_calls
from rstar_ray.chat.answer import AnswerReader, TextOfTokens
from rstar_ray.chat.streamed import Streamed
from rstar_ray.chat.template import Reading, TokenizerChat
from rstar_ray.trajectory import StopReason, ToolCall

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkEvent:
    """One event for the listener."""

    kind: Literal["thought", "said", "call", "result", "end"]
    text: str = ""  # a piece of a thought or of what is said, a call, its result; at the end the `StopReason`
    failed: bool = False  # of a result
    prompt_tokens: int = 0  # at the end: prompt tokens of the conversation
    num_tokens: int = 0  # at the end: number of sampled tokens
    messages: tuple[Message, ...] = field(default_factory=tuple[Message, ...])  # at the end: the text of the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkLimits:
    """Budgets of one answer."""

    max_tokens: int  # everything after the prompt, results included
    max_turns: int
    max_calls_per_turn: int
    context_tokens: int


class StreamFn(Protocol):
    """Samples one completion, some tokens at a time. Raises `EngineError` if the engine is lost."""

    def __call__(self, prompt_ids: Sequence[int], *, max_tokens: int) -> AsyncGenerator[list[int], None]: ...


async def talk(
    messages: Sequence[Message], *, chat: TokenizerChat, stream: StreamFn, execute: ExecuteFn, limits: TalkLimits
) -> AsyncGenerator[TalkEvent, None]:
    """The policy's answer to a conversation that ends with a user message, with tool calls in between."""
    ids = chat.conversation_ids(messages)
    prompt_tokens = len(ids)
    room = min(limits.max_tokens, limits.context_tokens - len(ids))
    spoken: list[Message] = []
    sampled = 0
    stop = StopReason.REFUSED if room <= 0 else StopReason.TRUNCATED
    for turn in range(limits.max_turns if room > 0 else 0):
        said: list[int] = []
        async with aclosing(_one_turn(ids, said, chat, stream, max_tokens=room, after_tools=turn > 0)) as pieces:
            async for heard in pieces:
                yield heard
        sampled += len(said)
        reading = chat.read(said, after_tools=turn > 0)
        spoken.append(_as_message(ids, said, reading, chat, after_tools=turn > 0))
        if not said or said[-1] not in chat.profile.stop_token_ids:
            stop = StopReason.TRUNCATED
            break
        if not reading.calls:
            stop = StopReason.ANSWERED
            break
        stop = StopReason.MAX_TURNS
        if turn + 1 == limits.max_turns:
            break
        results = await answer_calls(reading.calls, execute, most=limits.max_calls_per_turn)
        for call, result in zip(reading.calls, results, strict=True):
            yield TalkEvent(kind="call", text=as_written(call))
            yield TalkEvent(kind="result", text=result.text, failed=result.outcome.failed)
            spoken.append({"role": "tool", "content": result.text})
        answered = chat.tool_answer_ids(results)
        ids, room = [*ids, *said, *answered], room - len(said) - len(answered)
        if room <= 0:
            stop = StopReason.TRUNCATED
            break
    yield TalkEvent(
        kind="end", text=stop.value, prompt_tokens=prompt_tokens, num_tokens=sampled, messages=tuple(spoken)
    )


def _as_message(
    prompt_ids: Sequence[int], said: Sequence[int], reading: Reading, chat: TokenizerChat, *, after_tools: bool
) -> Message:
    """A completion as a message: its whole text, or separate calls if control tokens mark them.

    The text of a message never becomes control tokens.
    """
    message = {"role": "assistant", "content": chat.as_content(reading, after_tools=after_tools)}
    if not reading.calls or not chat.control_tokens.search(reading.text) or not chat.profile.template.writes_calls:
        return message
    reader = AnswerReader(chat, prompt_ids, tools=chat.schemas)
    reader.feed(said)
    _, answer = reader.end()
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in answer.calls]
    if len(calls) != len(reading.calls):
        return message
    thought = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    shown = [{"type": "function", "function": function} for function in calls]
    made = {"role": "assistant", "content": answer.content, **thought, "tool_calls": shown}
    try:
        chat.conversation_ids([{"role": "user", "content": "?"}, made])
    except ValueError:  # a control token in the arguments, or a template that allows one call only
        return message
    return made


def as_written(call: ToolCall) -> str:
    """A call in readable form: the program, or the tool's name and arguments as a Python call."""
    if said := call.code or call.parse_error:
        return said
    return f"{call.tool}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"


async def _one_turn(
    ids: Sequence[int],
    said: list[int],
    chat: TokenizerChat,
    stream: StreamFn,
    *,
    max_tokens: int,
    after_tools: bool,
) -> AsyncGenerator[TalkEvent, None]:
    """Yields a completion while it arrives, and leaves its tokens in `said`."""
    view = Streamed(
        chat.profile.thought, inside=chat.begins_inside_thought(after_tools=after_tools), call_markers=chat.call_markers
    )
    text = TextOfTokens(chat.decode)
    async with aclosing(stream(ids, max_tokens=max_tokens)) as pieces:
        async for piece in pieces:
            said += piece
            new = text.after([token for token in piece if token not in chat.profile.stop_token_ids])
            for kind, words in view.feed(new):
                yield TalkEvent(kind=kind.value, text=words)
    for kind, words in view.end():
        yield TalkEvent(kind=kind.value, text=words)
