"""A request in the format of OpenAI's chat completions, and its response.

`rstar_ray.agent.messages_request` does the same for Anthropic's Messages.
"""

import hashlib
import json
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rstar_ray.chat.answer import Answer
from rstar_ray.config.rollout import MAX_TEMPERATURE
from rstar_ray.data.conversation import Conversation, RowError, conversation
from rstar_ray.trajectory import Sampling

MAX_STOP_STRINGS = 16
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
    "top_logprobs": (0,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    # vLLM's
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "stop_token_ids": ([],),
    "structural_tag": (),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Fields that would change the prompt or sampling in an unsupported way, with the values (besides null) that have no
effect.
"""


UNREADABLE = "rstar_unreadable"


class BadRequest(ValueError):
    """A request that cannot be answered, with the reason. `code` is OpenAI's error code, where one exists."""

    def __init__(self, text: str, code: str = "") -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A validated request."""

    model: str = ""  # as named by the client
    messages: Sequence[Mapping[str, Any]]  # arguments of calls are objects; tool results follow the order of the calls
    call_ids: frozenset[str] = frozenset()  # of all calls in the messages
    last_call_ids: tuple[str, ...] = ()  # of the calls in the assistant's last message; empty for a call without one
    tools: Sequence[Mapping[str, Any]] = ()
    reads_calls: bool = True  # False if `tool_choice` is "none"
    parallel: bool = True  # False: only the first call of a turn counts
    max_tokens: int = 0  # 0: the client sets no limit
    temperature: float | None = None  # None: the client did not choose
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    tells_usage: bool = False  # whether a stream ends with the token usage
    digest: str = ""  # of the whole body, independent of the order of keys
    num_chars: int = 0  # of the whole body

    def sampling(self, default: Sampling) -> Sampling:
        """The client's sampling settings, with `default` for those it did not set."""
        return Sampling(
            temperature=default.temperature if self.temperature is None else self.temperature,
            top_p=default.top_p if self.top_p is None else self.top_p,
        )


MAX_TOKEN_CHARS = 64
"""Upper bound of a text's average characters per token."""


def refuse_too_long(request: ChatRequest, context_tokens: int) -> None:
    """Raises `BadRequest` for messages that do not fit for certain: encoding them would take seconds.

    The whole body counts, because a template writes calls, reasoning and tools too. A message is at least one token.
    """
    if request.num_chars > MAX_TOKEN_CHARS * context_tokens or len(request.messages) > context_tokens:
        raise too_long("the request is longer than the context")


def too_long(problem: str) -> BadRequest:
    return BadRequest(f"{problem}. Hint: shorten them", code="context_length_exceeded")


def read_request(body: bytes) -> ChatRequest:
    """Parse a request body. Raises `BadRequest` that names the field."""
    return request_of(read_object(body))


def request_of(fields: Mapping[str, Any]) -> ChatRequest:
    """Like `read_request`, for a body that is already parsed."""
    try:
        text = canonical(fields)
        digest = hashlib.sha256(text.encode()).hexdigest()
    except RecursionError as deep:
        raise BadRequest("the body is nested too deeply") from deep
    except UnicodeEncodeError as half:
        raise BadRequest("the body holds half a character (a lone surrogate)") from half
    for name, without_effect in NEUTRAL.items():
        if fields.get(name) is not None and fields[name] not in without_effect:
            raise BadRequest(f"{name}: not supported by this server (got {_short(fields[name])}). Hint: leave it out")
    read = _conversation(fields)
    max_tokens = _number(fields, "max_completion_tokens", _number(fields, "max_tokens", 0, 1, 10**9), 1, 10**9)
    model, options = fields.get("model"), fields.get("stream_options") or {}
    if not isinstance(model, str | None):
        raise BadRequest(f"model: must be a string (got {_short(model)})")
    if not isinstance(options, dict):
        raise BadRequest("stream_options: must be an object")
    return ChatRequest(
        model=model or "",
        messages=read.messages,
        call_ids=call_ids(fields["messages"]),
        last_call_ids=_last_call_ids(fields["messages"]),
        tools=tuple(read.tools or ()),
        reads_calls=_reads_calls(fields.get("tool_choice")),
        parallel=_flag(fields, "parallel_tool_calls", default=True),
        max_tokens=int(max_tokens),
        temperature=_choice(fields, "temperature", 0.0, MAX_TEMPERATURE),
        top_p=_choice(fields, "top_p", 1e-6, 1.0),
        stop=_stop(fields.get("stop")),
        logprobs=_flag(fields, "logprobs"),
        stream=_flag(fields, "stream"),
        tells_usage=bool(cast(dict[str, Any], options).get("include_usage")),
        digest=digest,
        num_chars=len(text),
    )


def canonical(value: Any) -> str:
    """JSON text that does not depend on the order of keys or on whitespace."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


# ---------------------------------------------------------------- fields


def read_object(body: bytes) -> dict[str, Any]:
    """Raises `BadRequest` for a body that is not a JSON object."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest("the body is not valid JSON") from error
    if not isinstance(fields, dict):
        raise BadRequest("the body is not an object")
    return cast(dict[str, Any], fields)


def _conversation(fields: Mapping[str, Any]) -> Conversation:
    messages, tools = fields.get("messages"), fields.get("tools")
    if not isinstance(messages, list):
        raise BadRequest("messages: must be a list")
    try:
        row = {"messages": _in_order_of_calls(cast(list[Any], messages)), "tools": tools}
        read = conversation(row, "request", empty_turns=True)
    except RowError as error:
        raise BadRequest(f"messages: {error}") from error
    for tool in read.tools or ():
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(cast(Mapping[str, Any], function).get("name"), str):
            raise BadRequest("tools: each must be a function with a name")
        if not isinstance(cast(Mapping[str, Any], function).get("parameters") or {}, Mapping):
            raise BadRequest("tools: parameters must be a JSON schema")
    if read.messages[-1]["role"] == "assistant":
        raise BadRequest("messages: the last one must be of the user, a tool or the system")
    return read


def call_ids(messages: Sequence[Any]) -> frozenset[str]:
    """The ids of all calls in validated messages."""
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    return frozenset(str(call["id"]) for call in calls if isinstance(call, dict) and "id" in call)


def _last_call_ids(messages: Sequence[Any]) -> tuple[str, ...]:
    said = next((message for message in reversed(messages) if message.get("role") == "assistant"), {})
    return tuple(str(call.get("id") or "") for call in said.get("tool_calls") or () if isinstance(call, dict))


def _in_order_of_calls(messages: Sequence[Any]) -> list[Any]:
    """The messages, with the tool results of each turn in the order of its calls."""
    ordered: list[Any] = []
    places: dict[str, int] = {}
    run: list[tuple[int, int, Any]] = []  # tool results: position of the call, of the message, message
    for number, message in enumerate(messages):
        fields = cast(dict[str, Any], message) if isinstance(message, dict) else {}
        if fields.get("role") == "tool":
            run.append((places.get(str(fields.get("tool_call_id")), len(places)), number, message))
            continue
        ordered += [result for *_, result in sorted(run, key=lambda one: one[:2])]
        run = []
        ordered.append(message)
        if fields.get("role") == "assistant":
            calls = fields.get("tool_calls")
            listed = cast(list[Any], calls) if isinstance(calls, list) else []
            ids = [str(cast(dict[str, Any], call).get("id")) for call in listed if isinstance(call, dict)]
            places = {one: place for place, one in enumerate(ids)}
    return ordered + [result for *_, result in sorted(run, key=lambda one: one[:2])]


def _reads_calls(choice: Any) -> bool:
    if choice in (None, "auto"):
        return True
    if choice == "none":
        return False
    problem = f"tool_choice: only auto and none (got {_short(choice)})"
    raise BadRequest(f"{problem}: a forced call would not be sampled by the policy. Hint: ask for it in a message")


def _stop(value: Any) -> tuple[str, ...]:
    listed = [] if value is None else [value] if isinstance(value, str) else value
    texts = cast(list[Any], listed) if isinstance(listed, list) else [None]
    if len(texts) > MAX_STOP_STRINGS or not all(isinstance(text, str) for text in texts):
        raise BadRequest(f"stop: must be a string or up to {MAX_STOP_STRINGS} strings (got {_short(value)})")
    return tuple(text for text in texts if text)


def _flag(fields: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequest(f"{name}: must be true or false (got {_short(value)})")
    return value


def _choice(fields: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    return None if fields.get(name) is None else float(_number(fields, name, low, low, high))


def _number(fields: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadRequest(f"{name}: must be between {low:g} and {high:g} (got {_short(value)})")
    if isinstance(default, int) and not isinstance(value, int):
        raise BadRequest(f"{name}: must be an integer (got {_short(value)})")
    return value


def _short(value: Any) -> str:
    return repr(value)[:80]


# ---------------------------------------------------------------- response


def message_of(answer: Answer, name: str) -> dict[str, Any]:
    """The assistant's message in OpenAI's format; call ids derive from `name`, the completion's name.

    `rstar_unreadable` has the parse errors of calls that could not be read, whose text is in the content.
    """
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or (None if answer.calls else "")}
    if answer.unreadable:
        message[UNREADABLE] = list(answer.unreadable)
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": f"call_{zlib.crc32(name.encode()):08x}{number:04x}",
                "type": "function",
                "function": {
                    "name": _whole(call.name),
                    "arguments": _whole(json.dumps(call.arguments, ensure_ascii=False)),
                },
            }
            for number, call in enumerate(answer.calls)
        ]
    return message


def _whole(text: str) -> str:
    """The text without halves of surrogate pairs, which clients cannot send back."""
    return text.encode("utf-8", "replace").decode()


def closing_delta(message: Mapping[str, Any]) -> dict[str, Any]:
    """The last delta of a streamed message: its calls."""
    calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls") or ())]
    unreadable = {UNREADABLE: message[UNREADABLE]} if UNREADABLE in message else {}
    return ({"tool_calls": calls} if calls else {}) | unreadable


def finish_reason(answer: Answer, *, ended: bool) -> str:
    """The finish reason in OpenAI's terms; `ended`: the policy ended the turn itself."""
    if not (ended or answer.stopped_by):
        return "length"
    return "tool_calls" if answer.calls else "stop"


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def logprobs_of(texts: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    """Log-probs of the sampled tokens with the text of each; without alternatives."""
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(texts, logprobs, strict=True)
    ]
    return {"content": content}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last fields of a response, in OpenAI's format."""

    message: Mapping[str, Any]
    finish: str
    usage: Mapping[str, int]
    stopped_by: str = ""  # the stop string that ended it
    logprobs: Mapping[str, Any] | None = None


def whole(name: str, model: str, end: Finished) -> dict[str, Any]:
    """The whole response, a `chat.completion`."""
    choice = {"index": 0, "message": end.message, "finish_reason": end.finish, "logprobs": end.logprobs}
    return _made(name, model, "chat.completion") | {"choices": [choice], "usage": end.usage}


class Chunks:
    """The events of a streamed response. A delta is a part of the assistant's message in OpenAI's format."""

    def __init__(self, name: str, model: str, *, tells_usage: bool) -> None:
        self._made = _made(name, model, "chat.completion.chunk")
        self._tells_usage = tells_usage

    def begin(self) -> bytes:
        return self.delta({"role": "assistant", "content": ""})

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        return self._chunk(delta)

    def end(self, end: Finished) -> bytes:
        last = self._chunk({}, end.finish, end.logprobs)
        usage = _event(self._made | {"choices": [], "usage": end.usage}) if self._tells_usage else b""
        return last + usage + b"data: [DONE]\n\n"

    def failed(self, text: str) -> bytes:
        return _event({"error": {"message": text}}) + b"data: [DONE]\n\n"

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return _event(self._made | {"choices": [choice]})


def model_entry(name: str) -> dict[str, Any]:
    """The served model in the list of models."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "rstar_ray"}


def _made(name: str, model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{name}", "object": kind, "created": int(time.time()), "model": model}


def _event(fields: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def error_body(status: int, text: str, code: str = "") -> dict[str, Any]:
    """An error in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": text, "type": kind, "param": None, "code": code or None}}
