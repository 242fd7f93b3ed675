"""The tokens behind a client's messages: sampled tokens are found again, and only new messages are encoded.

A client sends its whole conversation with every request, in its own form: call arguments serialised again, ids
renumbered, reasoning dropped. `TokenLines` matches such a request to the longest stored line of tokens by a canonical
form of the messages, and encodes the rest with the chat template. A request that differs begins a new line, which
costs tokens but is never wrong. Completions form a tree: a completion continues another one, or begins a line.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rstar_ray.agent.chat_request import ChatRequest, call_ids, canonical
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.lines import NEW


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a request in the stored tokens."""

    parent: int  # the completion that it continues, or `NEW`
    context_ids: list[int]  # tokens between that completion and the requested one; for a new line the whole prompt
    prompt_ids: list[int]  # everything before the requested completion
    reasonings: tuple[str, ...] = ()  # of the sampled turns before
    call_ids: frozenset[str] = frozenset()  # of the sampled turns before
    why_new: str = ""  # why it begins a line although others exist


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampled:
    """One completion with the tokens before it."""

    line_ids: list[int]  # from the beginning of its line to the completion's end
    ended: bool
    called: tuple[str, ...]  # names of the tools that it called
    reasonings: tuple[str, ...]  # of this turn and the sampled ones before it
    call_ids: frozenset[str]  # of the calls in these turns, as clients receive them


class TokenLines:
    """The lines of one rollout, or of one server."""

    def __init__(self, chat: TokenizerChat) -> None:
        self._chat = chat
        self._sampled: list[_Sampled] = []
        self._by_key: dict[str, list[int]] = {}  # completion numbers, by the key of a conversation with its answer
        self._known: set[str] = set()  # keys of all conversations, from the tools alone to the answer
        self._continued: set[int] = set()
        self.num_tokens = 0  # stored tokens; shared prefixes count for each completion

    def __len__(self) -> int:
        return len(self._sampled)

    def place(self, request: ChatRequest) -> Place:
        """Raises `ValueError` for a conversation that the chat template refuses."""
        if (found := self.find(request)) is not None:
            return found
        prompt = self._chat.request_ids(request.messages, request.tools)
        why_new = self._divergence(request) if self._sampled else ""
        return Place(parent=NEW, context_ids=prompt, prompt_ids=prompt, why_new=why_new)

    def find(self, request: ChatRequest) -> Place | None:
        """The place after the longest stored conversation that the request continues, or None."""
        keys = _keys(request.messages, request.tools)
        for length in range(len(request.messages) - 1, 0, -1):
            if keys[length] not in self._by_key:
                continue  # before its messages are copied: otherwise the time is quadratic in their number
            numbers = self._meant(keys[length], request.messages[:length], request.call_ids)
            if len({self._sampled[number].reasonings for number in numbers}) != 1:
                continue  # no candidate, or turns that differ in parts that the client dropped
            before = self._sampled[numbers[-1]]
            try:
                context = self._context(before, request.messages[length:])
            except ValueError:  # `_divergence` gives the reason
                continue
            return Place(
                parent=numbers[-1],
                context_ids=context,
                prompt_ids=[*before.line_ids, *context],
                reasonings=before.reasonings,
                call_ids=before.call_ids,
                why_new="an earlier turn is continued in another way" if numbers[-1] in self._continued else "",
            )
        return None

    def _meant(self, key: str, messages: Sequence[Mapping[str, Any]], given: frozenset[str]) -> list[int]:
        """The completions that end this conversation; of several, those whose calls have the ids `given`."""
        numbers = [
            number
            for number in self._by_key.get(key, ())
            if not _reasoning_differs(self._sampled[number].reasonings, messages)
        ]
        most = max((len(given & self._sampled[number].call_ids) for number in numbers), default=0)
        return [number for number in numbers if len(given & self._sampled[number].call_ids) == most]

    def add(
        self,
        place: Place,
        request: ChatRequest,
        token_ids: Sequence[int],
        message: Mapping[str, Any],
        *,
        called: Sequence[str] = (),
        ended: bool = True,
    ) -> int:
        """Store a completion and the message that the client receives for it. Returns the completion's number."""
        number = len(self._sampled)
        keys = _keys([*request.messages, message], request.tools)
        self._sampled.append(
            _Sampled(
                line_ids=[*place.prompt_ids, *token_ids],
                ended=ended,
                called=tuple(called),
                reasonings=(*place.reasonings, _reasoning(message)),
                call_ids=place.call_ids | call_ids([message]),
            )
        )
        self._continued.add(place.parent)
        self.num_tokens += len(self._sampled[-1].line_ids)
        self._by_key.setdefault(keys[-1], []).append(number)
        self._known.update(keys)
        return number

    def _context(self, sampled: _Sampled, new: Sequence[Mapping[str, Any]]) -> list[int]:
        if any(message["role"] == "assistant" for message in new):
            raise ValueError("it contains a message of the assistant that the policy did not write")
        profile = self._chat.profile
        end = profile.call_end if sampled.called else profile.answer_end
        closing = [] if sampled.ended else self._chat.encoder.encode(end, after="x")
        return [*closing, *self._chat.continuation_ids(sampled.called, new)]

    def _divergence(self, request: ChatRequest) -> str:
        """Why a conversation continues none of the stored ones, as a sentence."""
        keys = _keys(request.messages, request.tools)
        if keys[0] not in self._known:
            return "the tools differ"
        for length in range(len(request.messages) - 1, 0, -1):
            if numbers := self._by_key.get(keys[length]):
                before = [self._sampled[number] for number in numbers]
                if all(_reasoning_differs(one.reasonings, request.messages[:length]) for one in before):
                    return "the reasoning of an earlier turn was rewritten"
                if (
                    len(
                        {
                            self._sampled[number].reasonings
                            for number in self._meant(keys[length], request.messages[:length], request.call_ids)
                        }
                    )
                    > 1
                ):
                    return "several turns with this text had different reasoning, which is omitted"
                try:
                    self._context(before[-1], request.messages[length:])
                except ValueError as refused:
                    return str(refused)
        length = next((number for number, key in enumerate(keys) if key not in self._known), len(keys))
        if length == len(keys):
            return f"message {length - 1} is answered again"
        return f"message {length} ({request.messages[length - 1]['role']}) differs"


def _reasoning_differs(reasonings: Sequence[str], messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a client rewrote the reasoning of a recent turn; a message without reasoning matches the stored turn."""
    given = [_reasoning(message) for message in messages if message["role"] == "assistant"]
    pairs = zip(reversed(given), reversed(reasonings), strict=False)
    return any(said and said != stored for said, stored in pairs)


def _keys(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Digests of a conversation's canonical form: of its tools alone, then up to each message."""
    keys = [canonical(list(tools))]
    for message in messages:
        keys.append(f"{_digest(keys[-1])} {_key(message)}")
    return [_digest(key) for key in keys]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _key(message: Mapping[str, Any]) -> str:
    """The message without ids, reasoning and surrounding whitespace; a call by its name and its arguments' values."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(function["name"], _arguments(function.get("arguments"))) for function in functions]
    return canonical([message["role"], str(message.get("content") or "").strip(), calls])


def _arguments(value: Any) -> Any:
    """Numbers are compared by value: JavaScript writes 2.0 as 2."""
    return json.loads(value if isinstance(value, str) else json.dumps(value), parse_int=float)


def _reasoning(message: Mapping[str, Any]) -> str:
    return str(message.get("reasoning_content") or "").strip()
