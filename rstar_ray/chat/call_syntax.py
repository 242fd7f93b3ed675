"""How the families of chat models write a tool call as text, and how such text is read back.

A syntax reads every call of a completion, in order. What stands where a call should and cannot be read is still a
call, with its error: the model is told. A call that the text only quotes, between backticks, is none.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call as it stands in the text, before anybody asks whether there is such a tool."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    error: str | None = None  # why it could not be read


class CallSyntax(Protocol):
    """One way of writing calls."""

    @property
    def name(self) -> str: ...
    @property
    def typed(self) -> bool:
        """Arguments come as JSON values; otherwise all of them are text, and the tool's schema has to say more."""
        ...

    def read(self, text: str) -> list[WrittenCall]: ...
    def write(self, name: str, arguments: Mapping[str, Any]) -> str: ...


class _Unreadable(ValueError):
    """Why the text between two markers is no call."""


def _json_call(body: str, arguments_key: str = "arguments") -> WrittenCall:
    """`{"name": ..., "arguments": {...}}`; raises `_Unreadable`."""
    call = _json(body)
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
    if isinstance(value, str):  # some models write the object as a string once more
        value = _json(value)
    if not isinstance(value, dict):
        raise _Unreadable(f'"{what}" is not an object')
    return cast(dict[str, Any], value)


def _json_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# ---------------------------------------------------------------- between two markers


@dataclass(frozen=True, slots=True)
class Marked:
    """Calls between an opening and a closing marker.

    `whole` matches a well-formed call from its opening marker on: the closing marker may then stand in an argument too.
    """

    name: str
    typed: bool
    opens: str
    closes: str
    body: Callable[[str], WrittenCall]  # raises `_Unreadable`
    written: Callable[[str, Mapping[str, Any]], str]
    whole: Callable[[str, int], int | None]  # end of the well-formed call that opens here
    around: tuple[str, str] = ("", "")  # of a turn's calls together

    def read(self, text: str) -> list[WrittenCall]:
        calls: list[WrittenCall] = []
        position = 0
        while (start := text.find(self.opens, position)) >= 0:
            call, position = self._at(text, start)
            if call is not None and not _quoted(text, start, position):
                calls.append(call)
        return calls

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return self.around[0] + self.written(name, arguments) + self.around[1]

    def _at(self, text: str, start: int) -> tuple[WrittenCall | None, int]:
        """The call that opens at `start`, and where it ends; None where prose only names the marker."""
        inside = start + len(self.opens)
        end = self.whole(text, inside)
        if end is None:
            end = text.find(self.closes, inside)
            again = text.find(self.opens, inside)
            if end < 0 or 0 <= again < end:
                until = again if again >= 0 else len(text)
                unclosed = WrittenCall(error=f"{self.opens} without {self.closes}")
                return (unclosed if _tries_a_call(text, start, text[inside:until]) else None), until
        try:
            call = self.body(text[inside:end])
        except _Unreadable as error:
            call = WrittenCall(error=str(error))
        return call, end + len(self.closes)


def _tries_a_call(text: str, start: int, rest: str) -> bool:
    """Rather than prose that names the marker: it begins a line, or nothing follows, or what calls begin with."""
    begins_line = not text[text.rfind("\n", 0, start) + 1 : start].strip()
    rest = rest.lstrip()
    return begins_line or not rest or rest[0] in "{[<"


def _quoted(text: str, start: int, end: int) -> bool:
    """Between backticks, or inside a fence that closes again: shown, not made."""
    if text[:start].endswith("`") and text[end:].startswith("`"):
        return True
    fences_before = len(re.findall(r"^\s*```", text[:start], re.MULTILINE))
    return fences_before % 2 == 1 and re.search(r"^\s*```", text[end:], re.MULTILINE) is not None


_DECODER = json.JSONDecoder()


def _json_whole(closes: str) -> Callable[[str, int], int | None]:
    """Where a JSON value from `position` on ends right before `closes`."""

    def end(text: str, position: int) -> int | None:
        begin = _past_space(text, position)
        try:
            _, stop = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError):
            return None
        stop = _past_space(text, stop)
        return stop if text.startswith(closes, stop) else None

    return end


def _past_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _pattern_whole(pattern: str) -> Callable[[str, int], int | None]:
    """Where the pattern, which must match up to the closing marker, ends."""
    compiled = re.compile(pattern, re.DOTALL)

    def end(text: str, position: int) -> int | None:
        found = compiled.match(text, position)
        return found.end() if found else None

    return end


# ---------------------------------------------------------------- families


def _hermes_text(name: str, arguments: Mapping[str, Any]) -> str:
    call = _json_text({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


HERMES = Marked("hermes", True, "<tool_call>", "</tool_call>", _json_call, _hermes_text, _json_whole("</tool_call>"))
"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Qwen2.5, Qwen3, Hermes, rStar2 (arXiv:2508.20722 3.1)."""

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)


def _xml_call(body: str) -> WrittenCall:
    found = _FUNCTION.fullmatch(body)
    if found is None:
        raise _Unreadable("no <function=name> ... </function> inside <tool_call>")
    rest, arguments = found[2], dict[str, Any]()
    for name, value in _PARAMETER.findall(rest):
        arguments[name] = value.removeprefix("\n").removesuffix("\n")
    if _PARAMETER.sub("", rest).strip():
        raise _Unreadable("text beside <parameter=name> ... </parameter>, or one that is not closed")
    return WrittenCall(found[1].strip(), arguments)


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
    _pattern_whole(r"\s*<function=[^>\n]+>.*?</function>\s*(?=</tool_call>)"),
)
"""`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3.5, 3.6, Coder."""

_GLM_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _glm_call(body: str) -> WrittenCall:
    name = body.partition("<arg_key>")[0].strip()
    if not name or "<" in name or "{" in name:
        raise _Unreadable("no name of a tool after <tool_call>")
    rest = body[body.index(name) + len(name) :]
    if _GLM_PAIR.sub("", rest).strip():
        raise _Unreadable("text beside <arg_key> ... </arg_key><arg_value> ... </arg_value>, or one that is not closed")
    return WrittenCall(name, {key.strip(): value for key, value in _GLM_PAIR.findall(rest)})


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
    _pattern_whole(r"\s*[\w.-]+\s*(?:<arg_key>.*?</arg_key>\s*<arg_value>.*?</arg_value>\s*)+(?=</tool_call>)"),
)
"""`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM 4.5 and later."""

_DEEPSEEK_OPEN, _DEEPSEEK_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_NAME = re.compile(
    r"(?:function<｜tool▁sep｜>([^\n]+)\n```json\n(.*)\n```|([^<\n]+)<｜tool▁sep｜>(.*))", re.DOTALL
)


def _deepseek_call(body: str) -> WrittenCall:
    found = _DEEPSEEK_NAME.fullmatch(body.strip())
    if found is None:
        raise _Unreadable("no name and arguments around <｜tool▁sep｜>")
    name, arguments = (found[1], found[2]) if found[1] else (found[3], found[4])
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
    lambda text, position: None,
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
"""DeepSeek V3's, R1's and V3.1's markers, all of them special tokens."""


# ---------------------------------------------------------------- without a closing marker


@dataclass(frozen=True, slots=True)
class LlamaJson:
    """Llama 3.1's: the whole turn is `{"name": ..., "parameters": {...}}`, perhaps after `<|python_tag|>`."""

    name: str = "llama_json"
    typed: bool = True

    def read(self, text: str) -> list[WrittenCall]:
        body = text.strip()
        tagged = body.startswith("<|python_tag|>")
        body = body.removeprefix("<|python_tag|>").strip()
        if not tagged and not re.match(r'\{\s*"(?:name|type|function)"', body):
            return []
        calls: list[WrittenCall] = []
        for part in _json_values(body):
            try:
                key = "arguments" if '"parameters"' not in part and '"arguments"' in part else "parameters"
                calls.append(_json_call(part, key))
            except _Unreadable as error:
                calls.append(WrittenCall(error=str(error)))
        return calls

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f'{{"name": {_json_text(name)}, "parameters": {_json_text(arguments)}}}'


def _json_values(text: str) -> list[str]:
    """The JSON values of a text, `;` between them; what cannot be read is one more, to the end."""
    parts: list[str] = []
    position = 0
    while (position := _past_space(text, position)) < len(text):
        try:
            _, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            end = len(text)
        parts.append(text[position:end])
        position = _past_space(text, end)
        if position < len(text) and text[position] == ";":
            position += 1
        elif position < len(text):
            parts[-1] = text[text.index(parts[-1]) :]  # prose after a call: the turn is not a call alone
            break
    return parts


@dataclass(frozen=True, slots=True)
class Mistral:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` of later releases, some
    of which have `[CALL_ID]...` before the arguments."""

    name: str = "mistral"
    typed: bool = True

    def read(self, text: str) -> list[WrittenCall]:
        calls: list[WrittenCall] = []
        for part in text.split("[TOOL_CALLS]")[1:]:
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
        return [_json_call(json.dumps(call)) for call in cast(list[Any], listed)]

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"[TOOL_CALLS]{_json_text([{'name': name, 'arguments': arguments}])}"


SYNTAXES: Mapping[str, CallSyntax] = {
    syntax.name: syntax for syntax in (HERMES, QWEN_XML, GLM, DEEPSEEK, LlamaJson(), Mistral())
}
