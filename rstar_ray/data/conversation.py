"""Parses one conversation from a row: `messages` with `tools`, ShareGPT, or Glaive's text.

The result is `messages` that chat templates know, or a `RowError` with the reason.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

ROLES = ("system", "user", "assistant", "tool")
_OTHER_NAMES = {"developer": "system", "function": "tool", "ipython": "tool"}
_SHAREGPT = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant", "function_call": "calls",
    "tool_call": "calls", "observation": "tool", "tool": "tool", "function": "tool", "function_response": "tool",
    "tool_response": "tool",
}  # fmt: skip
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One dataset row."""

    name: str  # "<file name>:<line, or parquet row, from 1>"
    messages: Sequence[Mapping[str, Any]]
    """role and content; the assistant's also tool_calls, reasoning_content, and weight (0: no loss)"""
    tools: Sequence[Mapping[str, Any]] | None = None  # JSON schemas, handed to the template


class RowError(ValueError):
    """A conversation that cannot be read or trained on, with the reason."""


def conversation(row: Any, name: str, *, empty_turns: bool = False) -> Conversation:
    """One row as a conversation; raises `RowError` with the reason. `empty_turns`: the assistant's turns may be
    empty.
    """
    if not isinstance(row, dict):
        raise RowError("no object")
    fields = cast(dict[str, Any], row)
    for column, read in _FORMS.items():
        if fields.get(column) is not None:
            messages, tools = read(fields)
            break
    else:
        raise RowError("no `messages`, `conversations` or `chat`")
    if not messages:
        raise RowError("messages is not a list, or empty")
    return Conversation(
        name=name,
        messages=[_message(message, position, empty_turns) for position, message in enumerate(messages)],
        tools=[_tool(tool) for tool in tools] or None,
    )


# ---------------------------------------------------------------- forms: (messages, tools), not yet checked


def _messages_form(fields: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """`messages` of {"role", "content"}, perhaps with `system` and `tools`."""
    messages = _listed(fields["messages"], "messages")
    first: Any = messages[0] if messages else None
    if not isinstance(first, dict) or _OTHER_NAMES.get(str(first.get("role")), first.get("role")) != "system":
        messages = [*_system(fields), *messages]
    return messages, _listed(fields.get("tools"), "tools")


def _system(fields: dict[str, Any]) -> list[Any]:
    """The message of a `system` column; none where the column is missing or blank."""
    text = fields.get("system")
    return [{"role": "system", "content": text}] if isinstance(text, str) and text.strip() else []


def _sharegpt_form(fields: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """`conversations` of {"from", "value"}, perhaps with `system` and `tools`."""
    messages = _system(fields)
    for position, turn in enumerate(_listed(fields["conversations"], "conversations")):
        messages.append(_sharegpt_message(turn, position))
    return messages, _listed(fields.get("tools"), "tools")


def _sharegpt_message(turn: Any, position: int) -> Any:
    if not isinstance(turn, dict) or "from" not in turn:
        return turn  # in the usual form, or refused like one
    turn = cast(dict[str, Any], turn)
    role = _SHAREGPT.get(str(turn["from"]).lower())
    if role is None:
        raise RowError(f"message {position + 1} is from {turn['from']!r}, who is unknown")
    if role != "calls":
        return {"role": role, "content": turn.get("value"), "weight": turn.get("weight")}
    calls = turn.get("value")
    if isinstance(calls, str):
        try:
            calls = json.loads(calls)
        except (ValueError, RecursionError) as error:
            raise RowError(f"message {position + 1} calls with text that is not JSON") from error
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "tool_calls": calls, "weight": turn.get("weight")}


_GLAIVE_TURN = re.compile(r"(?:\A|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):")
_GLAIVE_CALL = re.compile(r"""\{\s*"name":\s*"([^"]+)"\s*(?:,\s*"arguments":\s*(.*?))?\s*\}\s*\Z""", re.DOTALL)
_GLAIVE_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}


def _glaive_form(fields: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """`system` and `chat` of Glaive's function-calling set: all turns in one text."""
    chat = fields["chat"]
    if not isinstance(chat, str):
        raise RowError("chat is not text")
    system, tools = _glaive_system(str(fields.get("system") or ""))
    parts = _GLAIVE_TURN.split(chat.replace("<|endoftext|>", ""))
    if len(parts) < 3 or parts[0].strip():
        raise RowError("chat does not begin with USER: or ASSISTANT:")
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    for who, text in zip(parts[1::2], parts[2::2], strict=True):
        messages.append(_glaive_message(_GLAIVE_ROLES[who], text.strip()))
    return messages, tools


def _glaive_system(text: str) -> tuple[str, list[Any]]:
    text = text.removeprefix("SYSTEM:").strip()
    begin = text.find("{")
    if begin < 0:
        return text, []
    decoder, tools, position = json.JSONDecoder(), list[Any](), begin
    try:
        while position < len(text):
            tool, position = decoder.raw_decode(text, position)
            tools.append(tool)
            while position < len(text) and text[position] in " \r\n\t,":
                position += 1
    except (ValueError, RecursionError) as error:
        raise RowError("the functions in system are not JSON") from error
    said = re.sub(r"\s*with access to the following functions\..*", ".", text[:begin].strip(), flags=re.DOTALL)
    return said, tools


def _glaive_message(role: str, text: str) -> dict[str, Any]:
    said, marker, called = text.partition("<functioncall>")
    if role != "assistant" or not marker:
        return {"role": role, "content": text}
    found = _GLAIVE_CALL.search(called.strip())
    if found is None:
        raise RowError("a <functioncall> cannot be read")
    arguments = (found[2] or "{}").strip()
    if arguments[:1] == arguments[-1:] == "'":
        arguments = arguments[1:-1].replace("\\'", "'")
    call = {"name": found[1], "arguments": arguments}
    return {"role": role, "content": said.strip(), "tool_calls": [call]}


_FORMS: Mapping[str, Callable[[dict[str, Any]], tuple[list[Any], list[Any]]]] = {
    "messages": _messages_form,
    "conversations": _sharegpt_form,
    "chat": _glaive_form,
}
"""Parse by the first column that identifies the format."""


# ---------------------------------------------------------------- messages, checked


def _message(message: Any, position: int, empty_turns: bool) -> dict[str, Any]:
    where = f"message {position + 1}"
    if not isinstance(message, dict):
        raise RowError(f"{where} is not an object")
    fields = {name: value for name, value in cast(dict[str, Any], message).items() if value is not None}
    role = fields["role"] = _OTHER_NAMES.get(str(fields.get("role")), fields.get("role"))
    if role not in ROLES:
        raise RowError(f"{where} has the role {role!r}, not one of {', '.join(ROLES)}")
    if role != "assistant" and "content" not in fields:
        raise RowError(f"{where} ({role}) has no text in `content`")
    fields["content"] = _text(fields.get("content", ""), f"{where} ({role})")
    calls = _listed(fields.pop("tool_calls", None), f"{where}'s tool_calls")
    if "function_call" in fields:
        calls.append(fields.pop("function_call"))
    if calls:
        fields["tool_calls"] = [_tool_call(call, where) for call in calls]
    if role == "assistant":
        if fields.get("weight", 1) not in (0, 1):
            raise RowError(f"{where} (assistant) has the weight {fields['weight']!r}, not 0 or 1")
        thoughts = [fields.pop(name) for name in _THOUGHTS if isinstance(fields.get(name), str)]
        if thoughts and thoughts[0].strip():
            fields["reasoning_content"] = thoughts[0]
        if not fields["content"] and not calls and not empty_turns:
            raise RowError(f"{where} (assistant) has neither `content` nor `tool_calls`")
    return fields


def _text(content: Any, where: str) -> str:
    """Text, or a list of parts that are all text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(f"{where} has no text in `content`")
    texts: list[str] = []
    for part in cast(list[Any], content):
        text = cast(dict[str, Any], part).get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise RowError(f"{where} has a part in `content` that is not text")
        texts.append(text)
    return "".join(texts)


def _tool(tool: Any) -> dict[str, Any]:
    """In OpenAI's form; a bare function is wrapped."""
    if not isinstance(tool, dict):
        raise RowError("tools holds what is not an object")
    fields = cast(dict[str, Any], tool)
    return fields if "function" in fields or "name" not in fields else {"type": "function", "function": fields}


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """With `arguments` as an object: a template would quote JSON text a second time."""
    function: Any = cast(dict[str, Any], call).get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(cast(dict[str, Any], function).get("name"), str):
        raise RowError(f"{where} calls a tool without a name")
    function = cast(dict[str, Any], function)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise RowError(f"{where} calls {function['name']} with arguments that are not JSON") from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RowError(f"{where} calls {function['name']} with arguments that are not an object")
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _listed(value: Any, what: str) -> list[Any]:
    """A list, given as such or as JSON text; empty for a missing value or null."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(f"{what} is not JSON") from error
    if value is None or value == "":
        return []
    if not isinstance(value, list):
        raise RowError(f"{what} is not a list, or empty")
    return list(cast(list[Any], value))
