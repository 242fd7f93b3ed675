"""A conversation rendered by the model's template, in a form that the template supports.

Where a template has no system role, tools, calls or tool results, their text goes into a supported message.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from rstar_ray.chat.call_syntax import CallSyntax
from rstar_ray.chat.chat_profile import TemplateFacts, Thought

Message = Mapping[str, Any]

TOOLS_TEXT = """\
# Tools

You may call these functions:
<tools>
{schemas}
</tools>

"""
EXAMPLE_TEXT = """\
Call one like this:
{example}"""
RESULT_TEXT = "<tool_response>\n{}\n</tool_response>"
RESULT_SEPARATOR = "\n"
CALL_ID = "call00001"
"""The id of every call and its result, for templates that require one: nine letters and digits, as Mistral's do."""


class Renderer:
    """`render(messages, tools)` with one tokenizer's template; raises the template's errors."""

    def __init__(
        self,
        tokenizer: Any,
        facts: TemplateFacts,
        syntax: CallSyntax,
        thought: Thought,
        *,
        switches: Mapping[str, Any] | None = None,
        shows_example: bool = True,
    ) -> None:
        """`shows_example`: the prompt shows a call if the template shows tools but does not write calls."""
        self._tokenizer = tokenizer
        self._facts = facts
        self._syntax = syntax
        self._thought = thought
        self._switches = dict(switches or {})
        self._shows_example = shows_example

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, opens: bool) -> str:
        """The text of a conversation; with `opens`, including the beginning of the assistant's next turn."""
        written = self._written(messages, tools)
        shown = list(tools) if tools and self._facts.shows_tools else None
        text = self._tokenizer.apply_chat_template(
            written, tools=shown, add_generation_prompt=opens, tokenize=False, **self._switches
        )
        return cast(str, text)

    def _written(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[Message]:
        facts = self._facts
        adapted = [self._message(message) for message in _with_names(messages)]
        if not facts.has_tool_role:
            adapted = _results_as_users(adapted)
        if tools and not facts.shows_tools:
            adapted = _with_system(adapted, self._tools_text(tools))
        elif tools and not facts.writes_calls and self._shows_example:
            adapted = _with_system(adapted, EXAMPLE_TEXT.format(example=self._example(tools)))
        return adapted if facts.has_system else _system_into_first_user(adapted)

    def _message(self, message: Message) -> Message:
        if message["role"] == "tool" and self._facts.wants_ids:
            return {**message, "tool_call_id": CALL_ID}
        if message["role"] != "assistant":
            return message
        fields = dict(message)
        if not self._facts.keeps_thoughts and (thought := fields.pop("reasoning_content", None)):
            opens, closes = self._thought.opens, self._thought.closes
            fields["content"] = f"{opens}\n{thought}\n{closes}\n\n{fields['content']}"
        calls = fields.get("tool_calls")
        if not calls:
            return fields
        if not self._facts.writes_calls:
            del fields["tool_calls"]
            written = [self._syntax.write(c["function"]["name"], c["function"]["arguments"]) for c in calls]
            fields["content"] = "\n".join([*([fields["content"]] if fields["content"] else []), *written])
        elif self._facts.arguments_as_text:
            fields["tool_calls"] = [_with_text_arguments(call) for call in calls]
        if self._facts.wants_ids and "tool_calls" in fields:
            fields["tool_calls"] = [{**call, "id": CALL_ID} for call in fields["tool_calls"]]
        return fields

    def _tools_text(self, tools: Sequence[Mapping[str, Any]]) -> str:
        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return TOOLS_TEXT.format(schemas=schemas) + EXAMPLE_TEXT.format(example=self._example(tools))

    def _example(self, tools: Sequence[Mapping[str, Any]]) -> str:
        function = tools[0].get("function", tools[0])
        named = list((function.get("parameters") or {}).get("properties") or {}) or ["argument"]
        return self._syntax.write("name_of_the_function", {named[0]: "..."})


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """Each result with the name of its tool, which some templates write."""
    named: list[Message] = []
    called: list[str] = []
    for message in messages:
        if message["role"] == "assistant":
            called = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        elif message["role"] == "tool" and called:
            message = {"name": called.pop(0), **message}
        named.append(message)
    return named


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _results_as_users(messages: Sequence[Message]) -> list[Message]:
    """The results of one turn in one user message."""
    adapted: list[Message] = []
    follows = False
    for message in messages:
        if message["role"] != "tool":
            adapted.append(message)
            follows = False
            continue
        text = RESULT_TEXT.format(message["content"])
        if follows:
            text = adapted.pop()["content"] + RESULT_SEPARATOR + text
        adapted.append({"role": "user", "content": text})
        follows = True
    return adapted


def _with_system(messages: Sequence[Message], text: str) -> list[Message]:
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _system_into_first_user(messages: Sequence[Message]) -> list[Message]:
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    system, rest = messages[0]["content"], list(messages[1:])
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": f"{system}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{"role": "user", "content": system}, *rest]
