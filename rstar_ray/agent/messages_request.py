"""Anthropic's Messages: a request as a `ChatRequest`, and the response in that format.

The body is converted to a chat completions request and parsed by the same code, so that both formats behave alike and
conversations match in either. https://docs.anthropic.com/en/api/messages
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from rstar_ray.agent.chat_request import (
    NEUTRAL,
    UNREADABLE,
    BadRequest,
    ChatRequest,
    Finished,
    read_object,
    request_of,
)

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
CHOICES = {"any": "required", "tool": "a tool by name"}  # OpenAI's names; other names are the same
ALIKE = ("model", "temperature", "top_p", "stream", *NEUTRAL)
UNSUPPORTED = ("mcp_servers", "container", "context_management", "output_format")


def read_messages(body: bytes) -> ChatRequest:
    """Parse a request body. Raises `BadRequest` that names the field."""
    fields = read_object(body)
    if fields.get("max_tokens") is None:
        raise BadRequest("max_tokens: it is required")
    for name in UNSUPPORTED:
        if fields.get(name):
            raise BadRequest(f"{name}: not supported by this server. Hint: leave it out")
    if _object(fields.get("output_config"), "output_config").get("format"):
        raise BadRequest("output_config.format: not supported by this server. Hint: leave it out")
    choice = _object(fields.get("tool_choice"), "tool_choice")
    kind = choice.get("type", "auto")
    messages = [{"role": "system", "content": fields["system"]}] if fields.get("system") else []
    for number, message in enumerate(_objects(fields.get("messages"), "messages"), 1):
        messages += _as_chat(message, f"messages: message {number}")
    return request_of(
        {name: fields.get(name) for name in ALIKE}
        | {
            "messages": messages,
            "tools": [_tool(tool) for tool in _objects(fields.get("tools"), "tools")],
            "tool_choice": CHOICES.get(kind, kind) if isinstance(kind, str) else kind,
            "parallel_tool_calls": not choice.get("disable_parallel_tool_use"),
            "max_tokens": fields["max_tokens"],
            "stop": fields.get("stop_sequences"),
        }
    )


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise BadRequest(f"tools: {str(tool['type'])[:80]!r} would run at the server. Hint: define your own tools")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _as_chat(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """An Anthropic message as OpenAI messages: tool results become messages; reasoning and calls become fields."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str) or role not in ("user", "assistant"):
        return [{"role": role, "content": content}]
    texts: list[str] = []
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in _objects(content, f"{where}, content"):
        match role, block.get("type"):
            case _, "text":
                texts.append(_text(block, "text", where))
            case "user", "tool_result":
                said = block.get("content") or ""
                result = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said}
                results.append(result | ({"rstar_failed": True} if block.get("is_error") else {}))
            case "assistant", "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "assistant", "thinking":
                thoughts.append(_text(block, "thinking", where))
            case _, other:
                raise BadRequest(f"{where} ({role}) has a part {str(other)[:80]!r}, which is not supported")
    if role == "user":
        return [*results, *([{"role": "user", "content": "".join(texts)}] if texts or not results else [])]
    said = {"role": role, "content": "".join(texts), "tool_calls": calls or None}
    return [said | ({"reasoning_content": "".join(thoughts)} if thoughts else {})]


def _text(block: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(block.get(name), str):
        raise BadRequest(f"{where} has a part without its {name}")
    return block[name]


def _objects(value: Any, name: str) -> Sequence[Mapping[str, Any]]:
    if value is None and name == "tools":
        return []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in cast(list[Any], value)):
        raise BadRequest(f"{name}: must be a list of objects")
    return cast(list[dict[str, Any]], value)


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict | None):
        raise BadRequest(f"{name}: must be an object")
    return cast(dict[str, Any], value or {})


# ---------------------------------------------------------------- response


def whole(name: str, model: str, end: Finished) -> dict[str, Any]:
    """The whole response, a `message`."""
    said = end.message
    blocks: list[dict[str, Any]] = []
    if thought := said.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if text := said.get("content"):
        blocks.append({"type": "text", "text": text})
    for call in said.get("tool_calls") or ():
        blocks.append({**_call(call), "input": json.loads(call["function"]["arguments"])})
    return _message(name, model) | {"content": blocks, "usage": _usage(end), **_stop(end), **_unreadable(end)}


def error_body(status: int, text: str, code: str = "") -> dict[str, Any]:
    """An error in Anthropic's format. Clients recognise a full context by the text."""
    kind = ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    said = f"prompt is too long: {text}" if code == "context_length_exceeded" else text
    return {"type": "error", "error": {"type": kind, "message": said}}


class Events:
    """The events of a streamed response, from OpenAI's deltas. The last event has the prompt token count."""

    def __init__(self, name: str, model: str) -> None:
        self._start = _message(name, model) | {"usage": {"input_tokens": 0, "output_tokens": 0}}
        self._index = -1  # index of the open block
        self._open = ""  # kind of the open block

    def begin(self) -> bytes:
        return _event("message_start", message=self._start)

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        events = b""
        if thought := delta.get("reasoning_content"):
            events += self._block("thinking", {"thinking": "", "signature": ""})
            events += self._part("thinking_delta", thinking=thought)
        if text := delta.get("content"):
            events += self._block("text", {"text": ""}) + self._part("text_delta", text=text)
        for call in delta.get("tool_calls") or ():
            events += self._close() + self._block("tool_use", _call(call))
            events += self._part("input_json_delta", partial_json=call["function"]["arguments"])
        return events

    def end(self, end: Finished) -> bytes:
        last = _event("message_delta", delta=_stop(end) | _unreadable(end), usage=_usage(end))
        return self._close() + last + _event("message_stop")

    def failed(self, text: str) -> bytes:
        return _event("error", **error_body(500, text))

    def _block(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        """Open a block of this kind, unless it is already open."""
        if kind == self._open:
            return b""
        closed = self._close()
        self._index, self._open = self._index + 1, kind
        return closed + _event("content_block_start", index=self._index, content_block={"type": kind, **fields})

    def _close(self) -> bytes:
        was_open, self._open = self._open, ""
        return _event("content_block_stop", index=self._index) if was_open else b""

    def _part(self, kind: str, **fields: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})


def _message(name: str, model: str) -> dict[str, Any]:
    made = {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": model, "content": []}
    return made | {"stop_reason": None, "stop_sequence": None}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}


def _stop(end: Finished) -> dict[str, Any]:
    if end.stopped_by and end.finish == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stopped_by}
    return {"stop_reason": STOP_REASONS[end.finish], "stop_sequence": None}


def _unreadable(end: Finished) -> dict[str, Any]:
    return {UNREADABLE: end.message[UNREADABLE]} if UNREADABLE in end.message else {}


def _usage(end: Finished) -> dict[str, int]:
    return {"input_tokens": end.usage["prompt_tokens"], "output_tokens": end.usage["completion_tokens"]}


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind} | fields)}\n\n".encode()
