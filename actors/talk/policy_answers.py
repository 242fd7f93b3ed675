"""Chat completions by the policy. The prompt describes the client's tools, and the client runs the policy's tool calls.

A continued conversation is sampled from the tokens of its earlier turns, as in training, not from the text that the
client sends back for them.
"""

import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from rstar_ray.agent.chat_request import (
    ChatRequest,
    Finished,
    closing_delta,
    finish_reason,
    logprobs_of,
    message_of,
    refuse_too_long,
    too_long,
    usage_of,
)
from rstar_ray.agent.token_lines import Place, TokenLines
from rstar_ray.chat.answer import AnswerReader, Piece
from rstar_ray.chat.streamed import PieceKind
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.trajectory import Completion, Sampling

MAX_LINE_TOKENS = 2_000_000
"""Most tokens of one `TokenLines`; two are kept, and conversations of the dropped older one are encoded again."""
Delta = Mapping[str, Any]


class PolicyAnswers:
    """Answers requests with one engine."""

    def __init__(
        self, chat: TokenizerChat, engine: Any, *, sampling: Sampling, max_tokens: int, context_tokens: int
    ) -> None:
        """`engine`: an `actors.generation.engine.Engine`. `sampling` and `max_tokens` are defaults of a request."""
        self._chat = chat
        self._engine = engine
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._context_tokens = context_tokens
        self._lines = RecentLines(chat)

    async def answer(self, request: ChatRequest) -> AsyncGenerator[Delta | Finished, None]:
        """Yields the deltas of a message as they are sampled (with `logprobs`: all at the end), then `Finished`.

        Raises `BadRequest` for a request that cannot be answered, `ValueError` for messages that the chat template
        refuses, and `EngineError` if the engine has ended.
        """
        refuse_too_long(request, self._context_tokens)
        place = self._lines.place(request)
        room = self._context_tokens - len(place.prompt_ids)
        if room <= 0:
            raise too_long(f"the messages are {len(place.prompt_ids)} tokens, the context {self._context_tokens}")
        tools = request.tools if request.reads_calls else ()
        reader = AnswerReader(self._chat, place.prompt_ids, tools=tools, parallel=request.parallel, stop=request.stop)
        name = secrets.token_hex(12)
        asked: dict[str, Any] = {
            "request_id": f"chat-{name}",
            "max_tokens": min(room, request.max_tokens or self._max_tokens),
            "seed": secrets.randbits(62),
            "sampling": request.sampling(self._sampling),
        }
        token_ids: list[int] = []
        values: list[float] = []
        if request.logprobs:
            completion: Completion = await self._engine.generate(place.prompt_ids, **asked)
            token_ids, values = completion.token_ids, completion.logprobs
            for delta in deltas(reader.feed(token_ids)):
                yield delta
        else:
            async with aclosing(self._engine.stream(place.prompt_ids, **asked)) as pieces:
                async for piece in pieces:
                    token_ids += piece
                    for delta in deltas(reader.feed(piece)):
                        yield delta
                    if reader.stopped_by:
                        break
        last, answer = reader.end()
        token_ids = token_ids[: answer.num_tokens]
        for delta in deltas(last):
            yield delta
        ended = bool(token_ids) and token_ids[-1] in self._chat.profile.stop_token_ids
        message = message_of(answer, name)
        if closing := closing_delta(message):
            yield closing
        called = [call.name for call in answer.calls]
        self._lines.newest.add(place, request, token_ids, message, called=called, ended=ended)
        yield Finished(
            message=message,
            finish=finish_reason(answer, ended=ended),
            usage=usage_of(len(place.prompt_ids), len(token_ids)),
            stopped_by=answer.stopped_by,
            logprobs=self._logprobs(token_ids, values) if request.logprobs else None,
        )

    def _logprobs(self, token_ids: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
        return logprobs_of([self._chat.decode([one]) for one in token_ids], values[: len(token_ids)])


def deltas(pieces: Sequence[Piece]) -> list[Delta]:
    """Pieces of a turn as deltas of OpenAI's chat completions."""
    names = {PieceKind.SAID: "content", PieceKind.THOUGHT: "reasoning_content"}
    return [{names[kind]: text} for kind, text in pieces]


class RecentLines:
    """The token lines of recent conversations; the oldest are dropped."""

    def __init__(self, chat: TokenizerChat) -> None:
        self._chat = chat
        self._older, self._newer = TokenLines(chat), TokenLines(chat)

    def place(self, request: ChatRequest) -> Place:
        """Raises as `TokenLines.place`."""
        if (found := self._newer.find(request)) is not None:
            return found
        return self._older.find(request) or self._newer.place(request)

    @property
    def newest(self) -> TokenLines:
        """The `TokenLines` to add completions to. When it is full, it replaces the older one."""
        if self._newer.num_tokens > MAX_LINE_TOKENS:
            self._older, self._newer = self._newer, TokenLines(self._chat)
        return self._newer
