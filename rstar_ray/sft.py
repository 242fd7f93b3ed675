"""Conversations in the usual `messages` form as tokens, with the loss on what the assistant says.

The text is the tokenizer's own chat template's. Each assistant message is found by rendering the
conversation up to it with the generation prompt, and again with it: what the second adds, up to the
end-of-turn token, is what the policy would have sampled. The pieces are tokenized apart, as they are
in a rollout, so no token straddles a border of the loss mask.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from rstar_ray.errors import ConfigError
from rstar_ray.update import SftExample

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One dataset row."""

    name: str  # "<file name>:<row from 1>"
    messages: Sequence[Mapping[str, Any]]  # role, content, and tool_calls where the assistant calls
    tools: Sequence[Mapping[str, Any]] | None = None  # JSON schemas, handed to the template


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a rendered conversation."""

    text: str
    sampled: bool  # the assistant's, end-of-turn token included


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
    for number, row in enumerate(rows, 1):
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
    tools = fields.get("tools")
    return Conversation(
        name=name,
        messages=[_message(message, position) for position, message in enumerate(messages)],
        tools=[_without_none(tool) for tool in _listed(tools, "tools")] if tools else None,
    )


def _jsonl_rows(path: Path) -> Iterator[Any]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError as error:  # no JSON, or no UTF-8
                raise ConfigError("sft.data", f"{path.name}:{number}: no JSON ({error})", "mend the line") from error


def _parquet_rows(path: Path) -> Iterator[Any]:
    from pyarrow import ArrowInvalid, parquet

    try:
        file = parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise ConfigError("sft.data", f"{path.name}: no parquet ({error})", "name a whole file") from error
    with file:
        for batch in file.iter_batches(batch_size=256):
            yield from batch.to_pylist()


def _message(message: Any, position: int) -> dict[str, Any]:
    where = f"message {position + 1}"
    if not isinstance(message, dict):
        raise RowError(f"{where} is no object")
    fields = cast(dict[str, Any], _without_none(message))
    role = fields.get("role")
    if role not in ROLES:
        raise RowError(f"{where} has the role {role!r}, not one of {', '.join(ROLES)}")
    if role != "assistant" and not isinstance(fields.get("content"), str):
        raise RowError(f"{where} ({role}) has no text in `content`")
    if role == "assistant" and not fields.get("content") and not fields.get("tool_calls"):
        raise RowError(f"{where} (assistant) has neither `content` nor `tool_calls`")
    fields.setdefault("content", "")
    if fields.get("tool_calls"):
        fields["tool_calls"] = [_tool_call(call, where) for call in _listed(fields["tool_calls"], where)]
    return fields


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """With `arguments` as an object: kept as JSON text, a template would quote it a second time."""
    function = cast(dict[str, Any], call.get("function", call)) if isinstance(call, dict) else {}
    if not isinstance(function.get("name"), str):
        raise RowError(f"{where} calls a tool without a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise RowError(f"{where} calls {function['name']} with arguments that are no JSON ({error})") from error
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _listed(value: Any, what: str) -> list[Any]:
    """A list, also where the file holds it as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise RowError(f"{what} is no JSON ({error})") from error
    if not isinstance(value, list) or not value:
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
    end-of-turn token.
    """

    def rendered(count: int, prompt: bool) -> str:
        try:
            return tokenizer.apply_chat_template(
                list(conversation.messages[:count]),
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
        end += len(tokenizer.eos_token)
        pieces += [Piece(before[len(done) :], False), Piece(said[:end], True)]
        done = before + said[:end]
    if not pieces:
        raise RowError("no assistant message")
    return pieces


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
    texts = [piece.text for _, pieces in rows for piece in pieces]
    tokenized = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
    examples: list[SftExample] = []
    for name, pieces in rows:
        ids = [cast(list[int], next(tokenized)) for _ in pieces]
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
    ids = cast(list[list[int]], tokenizer([piece.text for piece in pieces], add_special_tokens=False)["input_ids"])
    if (length := sum(len(piece_ids) for piece_ids in ids)) > max_tokens:
        raise ConfigError(
            "sft.data", f"row {row}: {length} tokens, above the context of {max_tokens}", "shorten or remove the row"
        )
    return _example(one.name, pieces, ids)


def _example(name: str, pieces: Sequence[Piece], ids: Sequence[Sequence[int]]) -> SftExample:
    mask = np.repeat([piece.sampled for piece in pieces], [len(piece_ids) for piece_ids in ids])
    return SftExample(np.concatenate(ids).astype(np.int32), mask.astype(np.bool_), name)
