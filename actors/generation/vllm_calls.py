"""vLLM's tool parsers as call syntaxes, for model families without a parser here (`--chat.parser vllm:NAME`)."""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rstar_ray.chat.call_syntax import HERMES, WrittenCall
from rstar_ray.chat.resolve import VLLM_PARSERS
from rstar_ray.errors import ConfigError, one_line


class VllmCalls:
    """`CallSyntax` with one of vLLM's parsers, which can only read; the chat template writes calls."""

    typed = True

    def __init__(self, name: str, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> None:
        """Raises `ConfigError` for a name that vLLM does not know, or a tokenizer that does not fit."""
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
        self._request_type = ChatCompletionRequest
        self._request = self._request_with(tools)
        begins = next((begins for begins, parser in VLLM_PARSERS.items() if parser == name), "")
        try:
            parser = self._parser(tokenizer, self._request.tools)
            parser.extract_tool_calls("", self._request)
            self.opens = _marker(parser) or begins
        except Exception as failed:  # such as a token of the calls that is not in the vocabulary
            problem = f"vLLM's tool parser {name!r} cannot be used ({one_line(failed)})"
            raise ConfigError("--chat.parser", problem, "give the parser of the model's family") from failed

    def for_tools(self, tools: Sequence[Mapping[str, Any]]) -> "VllmCalls":
        made = copy.copy(self)
        made._request = self._request_with(tools)
        return made

    def _request_with(self, tools: Sequence[Mapping[str, Any]]) -> Any:
        """A request as parsers read it; of a tool they read the name and the parameters."""
        read = [
            {"type": "function", "function": {name: tool["function"].get(name) for name in ("name", "parameters")}}
            for tool in tools
        ]
        asked = {"messages": [{"role": "user", "content": ""}], "tools": read}
        return self._request_type.model_validate(asked)

    def attempts(self, text: str) -> bool:
        """Whether the text has the parser's marker; True if the parser has none."""
        return self.opens in text

    def read(self, text: str) -> list[WrittenCall]:
        """The parsed calls; a marker without a parsed call gives a malformed call."""
        wrong = f"{self.name} cannot read what follows {self.opens}"
        try:
            found = self._parser(self._tokenizer, self._request.tools).extract_tool_calls(text, self._request)
        except Exception as failed:  # vLLM's parsers raise various ones for malformed calls
            return [WrittenCall(error=f"{wrong} ({one_line(failed)})")]
        if found.tool_calls:
            return [_call(call.function.name, call.function.arguments) for call in found.tool_calls]
        return [WrittenCall(error=wrong)] if self.opens and self.opens in text else []

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
    except (ValueError, RecursionError) as error:
        return WrittenCall(name, error=f"not valid JSON: {error}")
    return (
        WrittenCall(name, value) if isinstance(value, dict) else WrittenCall(name, error='"arguments" is not an object')
    )
