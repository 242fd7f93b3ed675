"""Reads a completion as the message of a chat API, while its tokens arrive: content, reasoning and tool calls.

A call that cannot be read stays text, as servers of chat completions return it; its reason is kept for the record.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rstar_ray.chat.call_syntax import Marked, WrittenCall
from rstar_ray.chat.streamed import PieceKind, Streamed, where_calls_stand
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.chat.tool_calls import written_calls
from rstar_ray.tools.schema import typed

Piece = tuple[PieceKind, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion as a message."""

    content: str
    reasoning: str
    calls: tuple[WrittenCall, ...] = ()  # the calls that could be parsed
    unreadable: tuple[str, ...] = ()  # parse errors of the other calls
    num_tokens: int  # tokens of the completion, up to the one that completed a stop string
    stopped_by: str = ""  # the stop string that ended it


class AnswerReader:
    """Reads one completion token by token.

    Content and reasoning come as pieces while they are written. Calls are read at the end, and so is the content where
    the call syntax has no closing marker, since any word may then be the beginning of a call.
    """

    def __init__(
        self,
        chat: TokenizerChat,
        prompt_ids: Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        parallel: bool = True,
        stop: Sequence[str] = (),
    ) -> None:
        """`tools` are those whose calls are read, as `{"type": "function", "function": {...}}`; without `parallel` only
        the first call of a turn counts.
        """
        self._chat = chat
        self._tools = {str(tool["function"]["name"]): tool["function"] for tool in tools}
        self._syntax = chat.syntax.for_tools(tools) if tools else chat.syntax
        self._parallel = parallel
        self._stop = [text for text in stop if text]
        self._inside = inside_thought(chat, prompt_ids)
        self._held = bool(tools) and not isinstance(self._syntax, Marked)
        self._view = Streamed(
            chat.profile.thought, inside=self._inside, call_markers=chat.call_markers if tools else ()
        )
        self._decoder = TextOfTokens(chat.decode)
        self._text, self._shown = "", 0
        self._parts: dict[PieceKind, list[str]] = {PieceKind.SAID: [], PieceKind.THOUGHT: []}
        self._unshown: list[str] = []  # content held back until the end
        self._num_tokens = 0
        self.stopped_by = ""  # the stop string that has ended it

    def feed(self, token_ids: Sequence[int]) -> list[Piece]:
        """The text that can be shown now. Tokens after a stop string are ignored."""
        for token in [[one] for one in token_ids] if self._stop else [list(token_ids)]:
            if self.stopped_by:
                break
            self._num_tokens += len(token)
            before = len(self._text)
            self._text += self._decoder.after([one for one in token if one not in self._chat.profile.stop_token_ids])
            self._cut_at_stop(before)
        until = len(self._text) if self.stopped_by else len(self._text) - self._may_begin_stop()
        new, self._shown = self._text[self._shown : until], max(until, self._shown)
        return self._pieces(self._view.feed(new))

    def end(self) -> tuple[list[Piece], Answer]:
        """The last pieces, and the message, whose content is the concatenated pieces of content."""
        new, self._shown = self._text[self._shown :], len(self._text)
        pieces = self._pieces([*self._view.feed(new), *self._view.end()])
        written = self._written()
        calls = self._typed([call for call in written if call.error is None])
        rest = self._rest([call for call in written if call.error is None])
        if rest:
            self._parts[PieceKind.SAID].append(rest)
            pieces.append((PieceKind.SAID, rest))
        content, reasoning = ("".join(self._parts[kind]) for kind in (PieceKind.SAID, PieceKind.THOUGHT))
        return pieces, Answer(
            content=content,
            reasoning=reasoning,
            calls=calls,
            unreadable=tuple(call.error for call in written if call.error is not None),
            num_tokens=self._num_tokens,
            stopped_by=self.stopped_by,
        )

    def _pieces(self, heard: Any) -> list[Piece]:
        pieces: list[Piece] = []
        for kind, text in heard:
            if kind is PieceKind.SAID and self._held:
                self._unshown.append(text)
                continue
            if not self._parts[kind] and (kind is PieceKind.THOUGHT or self._parts[PieceKind.THOUGHT]):
                text = text.lstrip("\n")  # line breaks that templates write after the markers of a thought
            if text:
                self._parts[kind].append(text)
                pieces.append((kind, text))
        return pieces

    def _written(self) -> list[WrittenCall]:
        if not self._tools:
            return []
        text = where_calls_stand(self._text, self._chat.profile.thought, inside=self._inside)
        return written_calls(text, self._syntax, self._tools)

    def _typed(self, read: Sequence[WrittenCall]) -> tuple[WrittenCall, ...]:
        if not self._syntax.typed:
            read = [
                WrittenCall(call.name, typed(call.arguments, self._tools.get(call.name, {}).get("parameters") or {}))
                for call in read
            ]
        return tuple(read if self._parallel else read[:1])

    def _rest(self, read: Sequence[WrittenCall]) -> str:
        """Content that was held back and is not part of a call."""
        if self._held:
            said = "".join(self._unshown)
            before, marker, _ = said.partition(self._syntax.opens) if self._syntax.opens else ("", "", "")
            return said if not read else before if marker else ""
        rest: list[str] = []
        left = [(call.name, call.arguments) for call in read]
        around = [opens for opens, closes in self._chat.call_markers if not closes]
        for text in self._view.call_texts:
            if text in around:
                continue
            found = [(call.name, call.arguments, call.error) for call in self._syntax.read(text)]
            if found and all(error is None and (name, given) in left for name, given, error in found):
                for name, given, _ in found:
                    left.remove((name, given))
            else:  # malformed, or only quoted
                rest.append(text)
        return "".join(rest)

    def _cut_at_stop(self, before: int) -> None:
        """Cut the text, of which `before` characters were searched already."""
        longest = max(map(len, self._stop), default=0)
        begin = max(0, before - longest)
        found = ((at, text) for text in self._stop if (at := self._text.find(text, begin)) >= 0)
        at, text = min(found, default=(-1, ""))
        if text:
            self._text, self.stopped_by = self._text[:at], text

    def _may_begin_stop(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        ends = range(min(longest, len(self._text)), 0, -1)
        return next((n for n in ends if any(text.startswith(self._text[-n:]) for text in self._stop)), 0)


def inside_thought(chat: TokenizerChat, prompt_ids: Sequence[int]) -> bool:
    """Whether a prompt ends inside an open thought."""
    opens = chat.profile.thought.opens
    text = chat.decode(prompt_ids[-2 * len(opens) - 8 :])
    return re.sub(r"\s+\Z", "", text).endswith(opens)


class TextOfTokens:
    """Decodes tokens that arrive in pieces in linear time: only the last two pieces are decoded again."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._before: list[int] = []  # the previous piece, as context, because some tokenizers drop a leading space
        self._pending: list[int] = []
        self._shown = 0  # characters of the text of both

    def after(self, piece: Sequence[int]) -> str:
        """The text that these tokens add. An incomplete character waits for its last token."""
        if not piece:
            return ""
        self._pending += piece
        text = self._decode([*self._before, *self._pending])
        whole, known = text.rstrip("\ufffd"), len(self._pending)
        if len(text) - len(whole) > 3:  # not one incomplete character, but one of the last three tokens may begin one
            known = max(0, known - 3)
            for end in range(len(self._pending) - 1, known - 1, -1):
                decoded = self._decode([*self._before, *self._pending[:end]])
                if end and (end == known or not decoded.endswith("\ufffd")):
                    whole, known = decoded, end
                    break
        new = whole[self._shown :]
        self._shown = max(self._shown, len(whole))
        if known > 0 and (whole == text or known < len(self._pending)):
            self._before, self._pending = self._pending[:known], self._pending[known:]
            self._shown = len(self._decode(self._before))
        return new
