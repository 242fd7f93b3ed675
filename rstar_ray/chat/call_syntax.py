"""Tool calls as text, in the formats of several families of chat models: writing and parsing.

A syntax parses every call of a completion, in order. A malformed call is still a call, with its error, so that
the model receives the reason. A call between backticks is a quotation, not a call. A call in a code fence
counts only where the fence ends the turn (`WrittenCall.fenced`).

A model may write anything. Every parser takes time proportional to the length of the text: it reads from left
to right, and no regular expression here can match the same characters in more than one way.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, cast

from rstar_ray.chat.scan import SPACES, Scan, past


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A parsed call, before it is checked against the tools in use."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    error: str | None = None  # parse error
    fenced: bool = False  # in a code fence at the end of the turn: a call only if it can be read and its tool is known


class CallSyntax(Protocol):
    """One way of writing calls."""

    @property
    def name(self) -> str: ...
    @property
    def typed(self) -> bool:
        """Arguments are JSON values; otherwise all are text, and the tool's schema gives their types."""
        ...

    @property
    def opens(self) -> str:
        """The text that begins a call; empty if unknown."""
        ...

    def for_tools(self, tools: Sequence[Mapping[str, Any]]) -> "CallSyntax":
        """The syntax for calls of these tools, as `{"type": "function", "function": {...}}`."""
        ...

    def attempts(self, text: str) -> bool:
        """Whether the text contains the beginning of a call; much cheaper than `read`."""
        ...

    def read(self, text: str) -> list[WrittenCall]: ...
    def write(self, name: str, arguments: Mapping[str, Any]) -> str: ...


class _Unreadable(ValueError):
    """Why the text between two markers is not a call."""


def _json_call(body: str, arguments_key: str = "arguments") -> WrittenCall:
    """`{"name": ..., "arguments": {...}}`; raises `_Unreadable`."""
    return _call_of(_json(body), arguments_key)


def _call_of(call: Any, arguments_key: str = "arguments") -> WrittenCall:
    if not isinstance(call, dict):
        raise _Unreadable("not a JSON object")
    fields = cast(dict[str, Any], call)
    name = fields.get("name")
    if not isinstance(name, str):
        raise _Unreadable('"name" is missing or not a string')
    return WrittenCall(name, _json_object(fields.get(arguments_key), arguments_key))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _Unreadable(f"not valid JSON: {error}") from error
    except RecursionError:
        raise _Unreadable("not valid JSON: nested too deeply") from None


def _json_object(value: Any, what: str) -> dict[str, Any]:
    if isinstance(value, str):  # some models write the object as a string again
        value = _json(value)
    if not isinstance(value, dict):
        raise _Unreadable(f'"{what}" is not an object')
    return cast(dict[str, Any], value)


def _json_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# ---------------------------------------------------------------- between two markers


WholeFn = Callable[[Scan, int], int | None]
"""Position of the closing marker of a well-formed call whose body begins at a position."""


@dataclass(frozen=True, slots=True)
class Marked:
    """Calls between an opening and a closing marker.

    `whole` finds the end of a well-formed call, so that the closing marker may stand in an argument too.
    """

    name: str
    typed: bool
    opens: str
    closes: str
    body: Callable[[str], WrittenCall]  # raises `_Unreadable`
    written: Callable[[str, Mapping[str, Any]], str]
    whole: WholeFn
    around: tuple[str, str] = ("", "")  # text around all calls of a turn

    def for_tools(self, tools: Sequence[Mapping[str, Any]]) -> Self:
        return self

    def attempts(self, text: str) -> bool:
        return self.opens in text

    def read(self, text: str) -> list[WrittenCall]:
        if not self.attempts(text):
            return []
        found: list[_Found] = []
        scan, position = Scan(text), 0
        while (start := scan.find(self.opens, position)) >= 0:
            call, position = self._at(scan, start)
            if call is not None:
                found.append(_Found(call, start, position))
        return _made(text, found)

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return self.around[0] + self.written(name, arguments) + self.around[1]

    def _at(self, scan: Scan, start: int) -> tuple[WrittenCall | None, int]:
        """The call that opens at `start`, and its end; None if the text only mentions the marker."""
        inside = start + len(self.opens)
        end = self.whole(scan, inside)
        if end is None:
            end = scan.find(self.closes, inside)
            again = scan.find(self.opens, inside)
            if end < 0 or 0 <= again < end:
                until = again if again >= 0 else len(scan.text)
                unclosed = WrittenCall(error=f"{self.opens} without {self.closes}")
                return (unclosed if _tries_a_call(scan.text, start, inside, until) else None), until
        try:
            call = self.body(scan.text[inside:end])
        except _Unreadable as error:
            call = WrittenCall(error=str(error))
        return call, end + len(self.closes)


@dataclass(frozen=True, slots=True)
class _Found:
    """The text between two markers, with its position."""

    call: WrittenCall
    start: int
    end: int


def _tries_a_call(text: str, start: int, inside: int, until: int) -> bool:
    """Whether it is a call rather than prose that names the marker: it begins a line, or nothing follows, or
    its body begins as calls do.
    """
    before = start - 1
    while before >= 0 and text[before] != "\n" and text[before].isspace():
        before -= 1
    if before < 0 or text[before] == "\n":
        return True
    follows = past(SPACES, text, inside)
    return follows >= until or text[follows] in "{[<"


def _made(text: str, found: Sequence[_Found]) -> list[WrittenCall]:
    """The calls of the text without quoted ones; with `fenced`, those in a fence that ends the turn."""
    fences = _fences(text) if found else []
    made: list[WrittenCall] = []
    ends_turn = True  # only blanks, a fence, or other such calls follow the call
    after = len(text)
    for one in reversed(found):
        ends_turn = ends_turn and _only_fences(text[one.end : after])
        after = one.start
        if text.startswith("`", one.end) and one.start > 0 and text[one.start - 1] == "`":
            ends_turn = False
            continue
        is_open = bisect_left(fences, one.start) % 2 == 1 and bool(fences) and fences[-1] >= one.end
        if not is_open:
            made.append(one.call)
        elif ends_turn:
            made.append(replace(one.call, fenced=True))
    return made[::-1]


def _fences(text: str) -> list[int]:
    """Positions of lines that open or close a code fence."""
    found: list[int] = []
    if "```" not in text:
        return found
    position = 0
    for line in text.split("\n"):
        if line.lstrip().startswith("```"):
            found.append(position)
        position += len(line) + 1
    return found


def _only_fences(text: str) -> bool:
    """Whether the text has only blanks and lines that open or close a code fence."""
    return all(not line or line.startswith("```") for line in map(str.strip, text.split("\n")))


_JSON_OUTSIDE_AND_STRINGS = re.compile(r'(?:[^"<\\]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+', re.DOTALL)
"""Complete strings, and between them JSON text: no `<` and no backslash."""


def _json_whole(scan: Scan, position: int) -> int | None:
    """Where a JSON value ends that is directly followed by the closing marker."""
    stop = past(_JSON_OUTSIDE_AND_STRINGS, scan.text, position)
    if not scan.text.startswith("</tool_call>", stop):
        return None
    try:
        json.loads(scan.text[position:stop])
    except (ValueError, RecursionError):
        return None
    return stop


# ---------------------------------------------------------------- families


def _hermes_text(name: str, arguments: Mapping[str, Any]) -> str:
    call = _json_text({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


HERMES = Marked("hermes", True, "<tool_call>", "</tool_call>", _json_call, _hermes_text, _json_whole)
"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Qwen2.5, Qwen3, Hermes, rStar2 (arXiv:2508.20722 3.1)."""

_FUNCTION, _PARAMETER, _ENDS_NAME = "<function=", "<parameter=", re.compile(r"[^>\n]++>")


def _xml_call(body: str) -> WrittenCall:
    body = body.strip()
    name_end = _named(body, _FUNCTION, 0)
    if name_end is None or not body.endswith("</function>", name_end):
        raise _Unreadable("no <function=name> ... </function> inside <tool_call>")
    rest, arguments = Scan(body[name_end : -len("</function>")].strip()), dict[str, Any]()
    position = 0
    while position < len(rest.text):
        inside = _named(rest.text, _PARAMETER, position)
        end = -1 if inside is None else _argument_end(rest, "</parameter>", _PARAMETER, inside)
        if inside is None or end < 0:
            raise _Unreadable("text beside <parameter=name> ... </parameter>, or one that is not closed")
        value = rest.text[inside:end]
        arguments[rest.text[position + len(_PARAMETER) : inside - 1]] = value.removeprefix("\n").removesuffix("\n")
        position = past(SPACES, rest.text, end + len("</parameter>"))
    return WrittenCall(body[len(_FUNCTION) : name_end - 1].strip(), arguments)


def _named(text: str, opens: str, position: int) -> int | None:
    """Where `<...=name>` ends that opens at `position`."""
    if not text.startswith(opens, position):
        return None
    found = _ENDS_NAME.match(text, position + len(opens))
    return found.end() if found else None


def _argument_end(rest: Scan, closes: str, next_opens: str, position: int) -> int:
    """Position of an argument's closing marker: the first one followed by another argument or the end; or -1."""
    text = rest.text
    follows = rest.find_pair(closes, next_opens, position)
    last = len(text) - len(closes) if text.endswith(closes, position) else -1
    return text.rfind(closes, position, follows) if follows >= 0 else last


def _xml_whole(scan: Scan, position: int) -> int | None:
    inside = _named(scan.text, _FUNCTION, past(SPACES, scan.text, position))
    end = -1 if inside is None else scan.find_pair("</function>", "</tool_call>", inside)
    return None if end < 0 else end


def _xml_text(name: str, arguments: Mapping[str, Any]) -> str:
    parts = [f"<parameter={key}>\n{_as_text(value)}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else _json_text(value)


QWEN_XML = Marked(
    "qwen_xml",
    False,
    "<tool_call>",
    "</tool_call>",
    _xml_call,
    _xml_text,
    _xml_whole,
)
"""`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3.5, 3.6, Coder."""

_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_GLM_NAME = re.compile(r"\s*+[\w.-]++\s*+(?=<arg_key>)")


def _glm_call(body: str) -> WrittenCall:
    name, opens, pairs = body.partition(_KEY)
    name = name.strip()
    if not name or "<" in name or "{" in name:
        raise _Unreadable("no name of a tool after <tool_call>")
    rest, arguments = Scan((opens + pairs).strip()), dict[str, Any]()
    position = 0
    while position < len(rest.text):
        starts = rest.text.startswith(_KEY, position)
        value = rest.find_pair(_KEY_END, _VALUE, position + len(_KEY)) if starts else -1
        end = -1 if value < 0 else _argument_end(rest, _VALUE_END, _KEY, value + len(_VALUE))
        if end < 0:
            kinds = "<arg_key> ... </arg_key><arg_value> ... </arg_value>"
            raise _Unreadable(f"text beside {kinds}, or one that is not closed")
        key = rest.text[position + len(_KEY) : rest.text.rfind(_KEY_END, position, value)]
        arguments[key.strip()] = rest.text[value + len(_VALUE) : end]
        position = past(SPACES, rest.text, end + len(_VALUE_END))
    return WrittenCall(name, arguments)


def _glm_whole(scan: Scan, position: int) -> int | None:
    named = _GLM_NAME.match(scan.text, position)
    end = -1 if named is None else scan.find_pair(_VALUE_END, "</tool_call>", named.end())
    return None if end < 0 else end


def _glm_text(name: str, arguments: Mapping[str, Any]) -> str:
    pairs = [
        f"<arg_key>{key}</arg_key>\n<arg_value>{_as_text(value)}</arg_value>\n" for key, value in arguments.items()
    ]
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


GLM = Marked(
    "glm",
    False,
    "<tool_call>",
    "</tool_call>",
    _glm_call,
    _glm_text,
    _glm_whole,
)
"""`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM 4.5 and later."""

_DEEPSEEK_OPEN, _DEEPSEEK_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_FUNCTION = "function<｜tool▁sep｜>"


def _deepseek_call(body: str) -> WrittenCall:
    body = body.strip()
    name, found, arguments = body.removeprefix(_DEEPSEEK_FUNCTION).partition("\n```json\n")
    if body.startswith(_DEEPSEEK_FUNCTION) and found and "\n" not in name and arguments.endswith("\n```"):
        arguments = arguments.removesuffix("\n```")
    else:
        name, found, arguments = body.partition("<｜tool▁sep｜>")
    if not found or not name or "<" in name or "\n" in name:
        raise _Unreadable("no name and arguments around <｜tool▁sep｜>")
    return WrittenCall(name.strip(), _json_object(_json(arguments), "arguments"))


def _deepseek_text(name: str, arguments: Mapping[str, Any]) -> str:
    body = f"function<｜tool▁sep｜>{name}\n```json\n{_json_text(arguments)}\n```"
    return f"{_DEEPSEEK_OPEN}{body}{_DEEPSEEK_CLOSE}"


DEEPSEEK = Marked(
    "deepseek",
    True,
    _DEEPSEEK_OPEN,
    _DEEPSEEK_CLOSE,
    _deepseek_call,
    _deepseek_text,
    lambda scan, position: None,
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
"""Markers of DeepSeek V3, R1 and V3.1; all are special tokens."""


# ---------------------------------------------------------------- without a closing marker


_PYTHON_TAG = "<|python_tag|>"
_LLAMA_BEGINS = re.compile(r'\s*+(?:<\|python_tag\|>|\{\s*+"(?:name|type|function)")')
_DECODER = json.JSONDecoder()
_JSON_SPACES = re.compile(r"[ \t\r\n]*+")


@dataclass(frozen=True, slots=True)
class LlamaJson:
    """Llama 3.1: the whole turn is `{"name": ..., "parameters": {...}}`, optionally after `<|python_tag|>`."""

    name: str = "llama_json"
    typed: bool = True
    opens: str = _PYTHON_TAG

    def for_tools(self, tools: Sequence[Mapping[str, Any]]) -> Self:
        return self

    def attempts(self, text: str) -> bool:
        return _LLAMA_BEGINS.match(text) is not None

    def read(self, text: str) -> list[WrittenCall]:
        if not self.attempts(text):
            return []
        calls: list[WrittenCall] = []
        for part in _json_values(text.strip().removeprefix(_PYTHON_TAG)):
            try:
                key = "arguments" if '"parameters"' not in part and '"arguments"' in part else "parameters"
                calls.append(_json_call(part, key))
            except _Unreadable as error:
                calls.append(WrittenCall(error=str(error)))
        return calls

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f'{{"name": {_json_text(name)}, "parameters": {_json_text(arguments)}}}'


def _json_values(text: str) -> list[str]:
    """The JSON values of a text, separated by `;`; an unparsable rest is one more value, to the end."""
    parts: list[str] = []
    position = past(_JSON_SPACES, text, 0)
    while position < len(text):
        begin = position
        try:
            _, end = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError):
            end = len(text)
        position = past(_JSON_SPACES, text, end)
        if position < len(text) and text[position] != ";":  # text after a call: the turn is not only a call
            return [*parts, text[begin:]]
        parts.append(text[begin:end])
        position = past(_JSON_SPACES, text, position + 1)
    return parts


MISTRAL_MARKER = "[TOOL_CALLS]"
"""The text between a turn's content and its calls."""


@dataclass(frozen=True, slots=True)
class Mistral:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` of later releases, some
    of which have `[CALL_ID]...` before the arguments."""

    name: str = "mistral"
    typed: bool = True
    opens: str = MISTRAL_MARKER

    def for_tools(self, tools: Sequence[Mapping[str, Any]]) -> Self:
        return self

    def attempts(self, text: str) -> bool:
        return MISTRAL_MARKER in text

    def read(self, text: str) -> list[WrittenCall]:
        calls: list[WrittenCall] = []
        for part in text.split(MISTRAL_MARKER)[1:]:
            try:
                calls += self._calls(part.strip())
            except _Unreadable as error:
                calls.append(WrittenCall(error=str(error)))
        return calls

    def _calls(self, part: str) -> Sequence[WrittenCall]:
        name, args, arguments = part.partition("[ARGS]")
        if args:
            return [WrittenCall(name.partition("[CALL_ID]")[0].strip(), _json_object(_json(arguments), "arguments"))]
        listed = _json(part)
        if not isinstance(listed, list):
            raise _Unreadable("no JSON list after [TOOL_CALLS]")
        return [_call_of(call) for call in cast(list[Any], listed)]

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{MISTRAL_MARKER}{_json_text([{'name': name, 'arguments': arguments}])}"


SYNTAXES: Mapping[str, CallSyntax] = {
    syntax.name: syntax for syntax in (HERMES, QWEN_XML, GLM, DEEPSEEK, LlamaJson(), Mistral())
}
