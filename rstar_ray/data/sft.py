"""Conversations as tokens, with the loss on what the assistant says: each of its turns as it is seen when sampled.

The text is the model's own chat template's. An assistant's turn is found by rendering the conversation up to it, opened
for the assistant, and again with it: what the second adds, up to the token that ends the turn, is what the policy would
have sampled. A template that rewrites earlier text when more comes (Qwen3's drops earlier thoughts) makes several rows
of one conversation: each turn has its loss once, in a row that shows what the policy sees before it. Within a row, the
results of tools follow as they do in a rollout. Pieces are tokenized apart, as there, so no token straddles a border of
the loss mask. What others say never becomes a control token, whatever it spells.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rstar_ray.algorithm.update import SftExample
from rstar_ray.chat.encoding import Encoder
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.data.conversation import Conversation, RowError
from rstar_ray.errors import one_line


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a rendered conversation."""

    text: str
    sampled: bool  # of the assistant, end-of-turn token included
    foreign: bool = False  # text of others that spells a control token, and must not become one


Row = list[Piece]


@dataclass(frozen=True, slots=True)
class RowProblem:
    """Why a conversation cannot be trained on."""

    name: str
    problem: str

    @property
    def kind(self) -> str:
        """The problem without row-specific details, for grouping."""
        return re.sub(r"\d+|'[^']*'|\"[^\"]*\"", "_", self.problem)[:120]

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}"


def encode(
    chat: TokenizerChat, conversations: Iterable[Conversation], *, max_tokens: int
) -> tuple[list[SftExample], list[RowProblem]]:
    """All conversations as rows of tokens, in order, and those that could not be used, with the reason.

    `max_tokens` is the model's context; a conversation with a longer row is a problem, not cut.
    """
    rendered: list[tuple[str, list[Row]]] = []
    problems: list[RowProblem] = []
    for one in conversations:
        try:
            rendered.append((one.name, render(chat, one)))
        except RowError as error:
            problems.append(RowProblem(one.name, str(error)))
    tokenized = iter(_tokenized(chat.encoder, [row for _, rows in rendered for row in rows]))
    examples: list[SftExample] = []
    for name, rows in rendered:
        made = [_example(name, row, [next(tokenized) for _ in row]) for row in rows]
        longest = max(len(example.token_ids) for example in made)
        if longest > max_tokens:
            problems.append(RowProblem(name, f"{longest} tokens, above the context of {max_tokens}"))
        else:
            examples += made
    return examples, problems


def render(chat: TokenizerChat, one: Conversation) -> list[Row]:
    """The rows of a conversation; raises `RowError` where there is nothing to train on or the template refuses it."""
    return _Renderer(chat, one).rows()


class _Renderer:
    """Renders one conversation turn by turn."""

    def __init__(self, chat: TokenizerChat, one: Conversation) -> None:
        self._chat = chat
        self._profile = chat.profile
        self._one = one
        self._foreign = _foreign(chat.control_tokens, one.messages)
        self._messages: list[Mapping[str, Any]] = [
            {**message, "content": _mark(position)} if _mark(position) in self._foreign else message
            for position, message in enumerate(one.messages)
        ]

    def rows(self) -> list[Row]:
        rows: list[Row] = []
        seen: str | None = ""  # the row's text as the template wrote it; None once the row diverged from it
        last = -1  # the assistant's latest turn
        added = ""  # the end of that turn, where the template writes it with the next message
        for position, message in enumerate(self._messages):
            if message["role"] != "assistant":
                continue
            before = self._rendered(position, opens=True)
            said, written = self._said(position, before)
            if seen is not None and before.startswith(seen):
                between, seen = before[len(seen) :].removeprefix(added), before + written
            elif last >= 0 and self._only_tools_between(last, position):
                between, seen = self._tool_text(last, position), None
            else:
                rows.append([])
                between, seen = before, before + written
            if not rows:
                rows.append([])
            rows[-1] += [*self._cut(between), Piece(said, message.get("weight") != 0)]
            last, added = position, said[len(written) :]
        rows = [row for row in rows if any(piece.sampled for piece in row)]
        if not rows:
            raise RowError("no assistant message to train on")
        self._check_foreign()
        return rows

    def _rendered(self, count: int, *, opens: bool, messages: Sequence[Mapping[str, Any]] | None = None) -> str:
        try:
            return self._chat.renderer.render((messages or self._messages)[:count], self._one.tools, opens=opens)
        except Exception as error:  # a template may raise any exception
            raise RowError(f"the chat template refuses message {count}: {one_line(error)}") from error

    def _said(self, position: int, before: str) -> tuple[str, str]:
        """(what the policy would have sampled, what the template writes for it)."""
        number, message = position + 1, self._messages[position]
        if self._profile.thinks == "off" and message.get("reasoning_content"):
            raise RowError(
                f"message {number} thinks, where the prompt closes the thought (--chat.thinking on opens it)"
            )
        self._refuse_spelled_end(message, number)
        after = self._rendered(number, opens=False)
        prefill = self._profile.prefill
        if after.startswith(before):
            written = after[len(before) :]
        elif prefill and before.endswith(prefill) and after.startswith(before.removesuffix(prefill)):
            return self._with_thought(message, after[len(before) - len(prefill) :]), ""
        elif (apart := self._without_system(number)) is not None:
            written = apart
        else:
            raise RowError(f"the chat template changes earlier text when message {number} comes")
        return self._ended(message, written)

    def _without_system(self, number: int) -> str | None:
        """What is written of a turn where there is no system text: Mistral's templates move it later."""
        if self._messages[0]["role"] != "system" or number < 3:
            return None
        talk = self._messages[1:]
        try:
            before = self._rendered(number - 2, opens=True, messages=talk)
            after = self._rendered(number - 1, opens=False, messages=talk)
        except RowError:
            return None
        return after[len(before) :] if after.startswith(before) else None

    def _ended(self, message: Mapping[str, Any], written: str) -> tuple[str, str]:
        """Up to the token that ends the turn, which templates may write with the next message."""
        end = self._end_of(message)
        position = written.find(end)
        if position >= 0:
            cut = written[: position + len(end)]
            return cut, cut
        kept = written.rstrip()
        return kept + end, kept

    def _end_of(self, message: Mapping[str, Any]) -> str:
        return (self._profile.call_end if message.get("tool_calls") else self._profile.answer_end).strip()

    def _with_thought(self, message: Mapping[str, Any], written: str) -> str:
        """The turn after the thought that the prompt opened, where the template left the thought out of `written`."""
        thought, (said, _) = self._profile.thought, self._ended(message, written)
        content = str(message.get("content", ""))
        if said.startswith(thought.opens):
            return said.removeprefix(thought.opens)
        if thought.closes in said or (thought.holds_calls and message.get("tool_calls")):
            return said
        inner = str(message.get("reasoning_content", ""))
        if thought.closes in content:
            inner = content.split(thought.closes)[0].split(thought.opens)[-1]
        return f"{inner.strip()}\n{thought.closes}\n\n{said.lstrip()}"

    def _refuse_spelled_end(self, message: Mapping[str, Any], number: int) -> None:
        calls = json.dumps(message.get("tool_calls", []), ensure_ascii=False, default=str)
        said = f"{message.get('content', '')}{message.get('reasoning_content', '')}{calls}"
        for _, stop in self._profile.stop_tokens:
            if stop in said:
                raise RowError(f"message {number} (assistant) spells {stop!r}: a rollout ends there")

    def _only_tools_between(self, last: int, position: int) -> bool:
        between = self._messages[last + 1 : position]
        return bool(between) and all(message["role"] == "tool" for message in between)

    def _tool_text(self, last: int, position: int) -> str:
        frame = self._profile.tool_frame
        results = [frame.words(str(message["content"])) for message in self._messages[last + 1 : position]]
        return frame.head + self._profile.tool_separator.join(results) + frame.tail

    def _cut(self, text: str) -> list[Piece]:
        """Rendered text with the marks' own texts put back, as separate pieces."""
        if not self._foreign:
            return [Piece(text, False)]
        parts = re.split(f"({'|'.join(map(re.escape, self._foreign))})", text)
        return [Piece(self._foreign.get(part, part), False, part in self._foreign) for part in parts if part]

    def _check_foreign(self) -> None:
        if not self._foreign:
            return
        count = len(self._messages)
        text = "".join(piece.text for piece in self._cut(self._rendered(count, opens=False)))
        if text != self._rendered(count, opens=False, messages=self._one.messages):
            raise RowError("a message spells a control token, and the chat template changes its text")


def _foreign(control: re.Pattern[str], messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Messages of others than the assistant that spell a control token, by the placeholder to render instead."""
    return {
        _mark(position): message["content"]
        for position, message in enumerate(messages)
        if message["role"] != "assistant" and control.search(message["content"])
    }


def _mark(position: int) -> str:
    return f"\u2402rstar {position}\u2403"


def _tokenized(encoder: Encoder, rows: Sequence[Row]) -> list[list[int]]:
    """The tokens of every piece of all rows; control tokens only where the piece is not foreign."""
    pieces = [piece for row in rows for piece in row]
    before = [before for row in rows for before in ["", *("words" if one.foreign else one.text for one in row[:-1])]]
    ids: list[list[int]] = [[] for _ in pieces]
    for foreign in (False, True):
        places = [place for place, piece in enumerate(pieces) if piece.foreign is foreign]
        encoded = encoder.encode_all(
            [pieces[place].text for place in places], after=[before[place] for place in places], plain=foreign
        )
        for place, piece_ids in zip(places, encoded, strict=True):
            ids[place] = piece_ids
    return ids


def _example(name: str, pieces: Sequence[Piece], ids: Sequence[Sequence[int]]) -> SftExample:
    mask = np.repeat([piece.sampled for piece in pieces], [len(piece_ids) for piece_ids in ids])
    return SftExample(np.concatenate(ids).astype(np.int32), mask.astype(np.bool_), name)
