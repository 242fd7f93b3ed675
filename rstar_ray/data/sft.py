"""Conversations in the usual `messages` form as tokens, with the loss on what the assistant says.

The text is the tokenizer's own chat template's. Each assistant message is found by rendering the
conversation up to it with the generation prompt, and again with it: what the second adds, up to the
end-of-turn token, is what the policy would have sampled. The pieces are tokenized apart, as they are
in a rollout, so no token straddles a border of the loss mask. What others say never becomes a control token,
whatever it spells; it cannot end a turn or open one for the assistant.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from rstar_ray.algorithm.update import SftExample
from rstar_ray.errors import ConfigError

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One dataset row."""

    name: str  # "<file name>:<line, or parquet row, from 1>"
    messages: Sequence[Mapping[str, Any]]  # role, content, and tool_calls where the assistant calls
    tools: Sequence[Mapping[str, Any]] | None = None  # JSON schemas, handed to the template


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a rendered conversation."""

    text: str
    sampled: bool  # the assistant's, end-of-turn token included
    foreign: bool = False  # somebody else's words that spell a control token, and must not become one


@dataclass(frozen=True, slots=True)
class RowProblem:
    """Why a row cannot be trained on."""

    name: str
    problem: str

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}"


class RowError(ValueError):
    """A conversation that cannot be rendered or read; becomes a `RowProblem`."""


# ---------------------------------------------------------------- files


def load_conversations(path: str | Path) -> list[Conversation]:
    """Rows of a jsonl or parquet file with a `messages` column and perhaps `tools`, both also as JSON text.

    Raises ConfigError, naming file and row, for what is no conversation.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError("sft.data", f"no file {str(path)!r}", "name a jsonl or parquet file")
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path)
    conversations: list[Conversation] = []
    for number, row in rows:
        name = f"{path.name}:{number}"
        try:
            conversations.append(conversation(row, name))
        except RowError as error:
            raise ConfigError("sft.data", f"{name}: {error}", "mend or remove the row") from error
    if not conversations:
        raise ConfigError("sft.data", f"{path.name} has no row", "name a file with conversations")
    return conversations


def conversation(row: Any, name: str) -> Conversation:
    """One row as a conversation; raises RowError saying what is wrong with it."""
    if not isinstance(row, dict) or "messages" not in row:
        raise RowError("no `messages`")
    fields = cast(dict[str, Any], row)
    messages = _listed(fields["messages"], "messages")
    if not messages:
        raise RowError("messages is no list, or empty")
    tools = _listed(fields.get("tools"), "tools")
    if not all(isinstance(tool, dict) for tool in tools):
        raise RowError("tools holds what is no object")
    return Conversation(
        name=name,
        messages=[_message(message, position) for position, message in enumerate(messages)],
        tools=tools or None,
    )


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Every line that is not blank, with its number in the file."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or nested beyond reason
                raise ConfigError("sft.data", f"{path.name}:{number}: no JSON ({error})", "mend the line") from error
            yield number, row


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=256))
            yield from enumerate((_without_none(row) for batch in batches for row in batch), 1)
    except (ArrowException, OSError, ValueError) as error:  # no parquet, damaged pages, text that is no UTF-8
        raise ConfigError("sft.data", f"{path.name}: no parquet ({error})", "name a whole file") from error


def _message(message: Any, position: int) -> dict[str, Any]:
    where = f"message {position + 1}"
    if not isinstance(message, dict):
        raise RowError(f"{where} is no object")
    fields = {name: value for name, value in cast(dict[str, Any], message).items() if value is not None}
    role = fields.get("role")
    if role not in ROLES:
        raise RowError(f"{where} has the role {role!r}, not one of {', '.join(ROLES)}")
    if role != "assistant" and "content" not in fields:
        raise RowError(f"{where} ({role}) has no text in `content`")
    fields["content"] = _text(fields.get("content", ""), f"{where} ({role})")
    calls = _listed(fields.pop("tool_calls", None), f"{where}'s tool_calls")
    if calls:
        fields["tool_calls"] = [_tool_call(call, where) for call in calls]
    if role == "assistant" and not fields["content"] and not calls:
        raise RowError(f"{where} (assistant) has neither `content` nor `tool_calls`")
    return fields


def _text(content: Any, where: str) -> str:
    """Plain, or in parts that are all text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(f"{where} has no text in `content`")
    texts: list[str] = []
    for part in cast(list[Any], content):
        text = cast(dict[str, Any], part).get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise RowError(f"{where} has a part in `content` that is no text")
        texts.append(text)
    return "".join(texts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """With `arguments` as an object: kept as JSON text, a template would quote it a second time."""
    function: Any = cast(dict[str, Any], call).get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(cast(dict[str, Any], function).get("name"), str):
        raise RowError(f"{where} calls a tool without a name")
    function = cast(dict[str, Any], function)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise RowError(f"{where} calls {function['name']} with arguments that are no JSON ({error})") from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RowError(f"{where} calls {function['name']} with arguments that are no object")
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _listed(value: Any, what: str) -> list[Any]:
    """A list, also where the file holds it as JSON text; nothing, or null, is an empty one."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (json.JSONDecodeError, RecursionError) as error:
            raise RowError(f"{what} is no JSON ({error})") from error
    if value is None or value == "":
        return []
    if not isinstance(value, list):
        raise RowError(f"{what} is no list, or empty")
    return cast(list[Any], value)


def _without_none(value: Any) -> Any:
    """Parquet fills the fields a struct does not have with None; templates would print them."""
    if isinstance(value, dict):
        fields = cast(dict[str, Any], value)
        return {name: _without_none(field) for name, field in fields.items() if field is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in cast(list[Any], value)]
    return value


# ---------------------------------------------------------------- rendering and tokens


def render(tokenizer: Any, conversation: Conversation) -> list[Piece]:
    """The conversation's text in pieces, up to the end of its last assistant message.

    Raises RowError where the template refuses the messages, rewrites earlier ones as later ones come
    (so that no training text equals what a rollout sees), or does not end an assistant's turn with the
    end-of-turn token, or where an assistant's turn ends before its text does.
    """
    foreign = _foreign(tokenizer, conversation.messages)
    marked = [
        {**message, "content": _mark(position)} if _mark(position) in foreign else message
        for position, message in enumerate(conversation.messages)
    ]

    def rendered(count: int, prompt: bool, messages: Sequence[Mapping[str, Any]] = marked) -> str:
        try:
            return tokenizer.apply_chat_template(
                list(messages[:count]),
                tools=list(conversation.tools) if conversation.tools else None,
                add_generation_prompt=prompt,
                tokenize=False,
            )
        except Exception as error:  # a template may raise anything
            raise RowError(f"the chat template refuses message {count}: {error}") from error

    pieces: list[Piece] = []
    done = ""
    for position, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        before, after = rendered(position, True), rendered(position + 1, False)
        if not before.startswith(done) or not after.startswith(before):
            raise RowError(f"the chat template changes earlier text when message {position + 1} comes")
        said = after[len(before) :]
        end = said.rfind(tokenizer.eos_token)
        if end < 0:
            raise RowError(f"the chat template ends message {position + 1} without {tokenizer.eos_token!r}")
        if said.find(tokenizer.eos_token) < end:
            raise RowError(f"message {position + 1} (assistant) spells {tokenizer.eos_token!r}: a rollout ends there")
        end += len(tokenizer.eos_token)
        pieces += [*_cut(before[len(done) :], foreign), Piece(said[:end], True)]
        done = before + said[:end]
    if not pieces:
        raise RowError("no assistant message")
    if foreign:
        count = len(marked)
        text = "".join(piece.text for piece in _cut(rendered(count, False), foreign))
        if text != rendered(count, False, conversation.messages):
            raise RowError("a message spells a control token, and the chat template changes its text")
    return pieces


def _foreign(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What others than the assistant say, where it spells a control token, by the mark to render in its place."""
    control = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return {
        _mark(position): message["content"]
        for position, message in enumerate(messages)
        if message["role"] != "assistant" and any(token in message["content"] for token in control)
    }


def _mark(position: int) -> str:
    return f"\u2402rstar {position}\u2403"


def _cut(text: str, foreign: Mapping[str, str]) -> list[Piece]:
    """Rendered text with the marks' own texts put back, as pieces of their own."""
    if not foreign:
        return [Piece(text, False)]
    parts = re.split(f"({'|'.join(map(re.escape, foreign))})", text)
    return [Piece(foreign.get(part, part), False, part in foreign) for part in parts if part]


def encode(
    tokenizer: Any, conversations: Iterable[Conversation], *, max_tokens: int
) -> tuple[list[SftExample], list[RowProblem]]:
    """All conversations as tokens, in order, and the rows that could not be used, with the reason.

    `max_tokens` is the model's context; a longer conversation is a problem, not cut.
    """
    rows: list[tuple[str, list[Piece]]] = []
    problems: list[RowProblem] = []
    for one in conversations:
        try:
            rows.append((one.name, render(tokenizer, one)))
        except RowError as error:
            problems.append(RowProblem(one.name, str(error)))
    tokenized = iter(_tokenized(tokenizer, [piece for _, pieces in rows for piece in pieces]))
    examples: list[SftExample] = []
    for name, pieces in rows:
        ids = [next(tokenized) for _ in pieces]
        length = sum(len(piece_ids) for piece_ids in ids)
        if length > max_tokens:
            problems.append(RowProblem(name, f"{length} tokens, above the context of {max_tokens}"))
            continue
        examples.append(_example(name, pieces, ids))
    return examples, problems


def to_example(
    one: Conversation | Sequence[Mapping[str, Any]], tokenizer: Any, row: int, *, max_tokens: int = 10**9
) -> SftExample:
    """One conversation, or its bare `messages`, as tokens; raises ConfigError naming the row."""
    try:
        if not isinstance(one, Conversation):
            one = conversation({"messages": [dict(message) for message in one]}, f"conversation {row}")
        pieces = render(tokenizer, one)
    except RowError as error:
        raise ConfigError("sft.data", f"row {row}: {error}", "mend or remove the row") from error
    ids = _tokenized(tokenizer, pieces)
    if (length := sum(len(piece_ids) for piece_ids in ids)) > max_tokens:
        raise ConfigError(
            "sft.data", f"row {row}: {length} tokens, above the context of {max_tokens}", "shorten or remove the row"
        )
    return _example(one.name, pieces, ids)


def _tokenized(tokenizer: Any, pieces: Sequence[Piece]) -> list[list[int]]:
    """The tokens of every piece; control tokens only where the piece is not foreign."""
    ids: list[list[int]] = [[] for _ in pieces]
    for foreign in (False, True):
        places = [place for place, piece in enumerate(pieces) if piece.foreign is foreign]
        if not places:
            continue
        texts = [pieces[place].text for place in places]
        encoded = tokenizer(texts, add_special_tokens=False, split_special_tokens=foreign)["input_ids"]
        for place, piece_ids in zip(places, encoded, strict=True):
            ids[place] = piece_ids
    return ids


def _example(name: str, pieces: Sequence[Piece], ids: Sequence[Sequence[int]]) -> SftExample:
    mask = np.repeat([piece.sampled for piece in pieces], [len(piece_ids) for piece_ids in ids])
    return SftExample(np.concatenate(ids).astype(np.int32), mask.astype(np.bool_), name)
