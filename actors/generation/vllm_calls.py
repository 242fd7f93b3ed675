"""vLLM's tool parsers as call syntaxes, for model families without a parser here (`--chat.parser vllm:NAME`)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rstar_ray.chat.call_syntax import HERMES, WrittenCall
from rstar_ray.errors import ConfigError


class VllmCalls:
    """`CallSyntax` with one of vLLM's parsers, which can only read; the chat template writes calls."""

    typed = True

    def __init__(self, name: str, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> None:
        """Raises `ConfigError` for a name that vLLM does not know."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        self.name = f"vllm:{name}"
        try:
            self._parser = ToolParserManager.get_tool_parser(name)
        except KeyError as unknown:
            raise ConfigError(
                "--chat.parser", f"vLLM has no tool parser {name!r}", "see its documentation"
            ) from unknown
        self._tokenizer = tokenizer
        asked = {"messages": [{"role": "user", "content": ""}], "tools": [dict(tool) for tool in tools]}
        self._request: Any = ChatCompletionRequest.model_validate(asked)

    def attempts(self, text: str) -> bool:
        """Whether the text has the parser's marker; True if the parser has none."""
        marker = _marker(self._parser(self._tokenizer, self._request.tools))
        return not marker or marker in text

    def read(self, text: str) -> list[WrittenCall]:
        """The parsed calls; a marker without a parsed call gives a malformed call."""
        parser = self._parser(self._tokenizer, self._request.tools)
        found = parser.extract_tool_calls(text, self._request)
        if found.tools_called:
            return [_call(call.function.name, call.function.arguments) for call in found.tool_calls]
        marker = _marker(parser)
        tried = marker and marker in text
        return [WrittenCall(error=f"{self.name} cannot read what follows {marker}")] if tried else []

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call in hermes syntax, for templates that do not write calls."""
        return HERMES.write(name, arguments)


def _marker(parser: Any) -> str:
    """The token that begins a call for one of vLLM's parsers; empty if unknown."""
    marker = getattr(parser, "tool_call_start_token", None) or getattr(parser, "bot_token", None)
    return marker if isinstance(marker, str) else ""


def _call(name: str, arguments: str) -> WrittenCall:
    try:
        value = json.loads(arguments)
    except ValueError as error:
        return WrittenCall(name, error=f"not valid JSON: {error}")
    return (
        WrittenCall(name, value) if isinstance(value, dict) else WrittenCall(name, error='"arguments" is not an object')
    )
