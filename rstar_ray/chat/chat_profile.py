"""The chat format of a model, as found from its template, tokenizer and generation config."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Thought:
    """The markers around a model's reasoning."""

    opens: str
    closes: str
    holds_calls: bool = False  # rStar2's `<reason>`: calls inside count, and an answer ends an unclosed one


THOUGHTS = (
    Thought("<think>", "</think>"),
    Thought("<reason>", "</reason>", holds_calls=True),
    Thought("[THINK]", "[/THINK]"),
    Thought("<seed:think>", "</seed:think>"),
    Thought("<thought>", "</thought>"),
)
"""Known markers; the first is searched in every model's text, regardless of its template."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The text that a template writes around a message, and how it changes the message."""

    head: str
    tail: str
    trims: bool = False  # blanks at both ends of the message are removed
    quotes: bool = False  # the message is written as a JSON string

    def words(self, text: str) -> str:
        """The message as the template would write it."""
        import json

        text = text.strip() if self.trims else text
        return json.dumps(text, ensure_ascii=False) if self.quotes else text


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """How a template treats its inputs, found by rendering."""

    has_system: bool  # otherwise a system text precedes the first question
    shows_tools: bool  # otherwise they are described in the system text
    writes_calls: bool  # otherwise calls are written into the text of the assistant
    has_tool_role: bool  # otherwise results come in a user's message
    arguments_as_text: bool  # it needs a call's arguments as JSON text, not as an object
    keeps_thoughts: bool  # it writes `reasoning_content`
    wants_ids: bool = False  # it refuses calls and results without an id, like Mistral's


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatProfile:
    """Beginning and end of turns, stop tokens, syntax of calls, and the model's reasoning."""

    template: TemplateFacts
    template_source: str  # "the tokenizer's own", or a file
    opening: str  # text between the last message and the completion
    answer_end: str  # text that ends an assistant's turn
    call_end: str  # text that ends a turn with a call; usually the same
    stop_tokens: tuple[tuple[int, str], ...]  # (id, text): any of them ends a completion
    syntax: str  # of calls: a name in `SYNTAXES`, or "vllm:<name of a vLLM tool parser>"
    thought: Thought
    thinks: Literal["prefilled", "may", "off", "no"]  # the prompt opens a thought, the model may, the prompt closes it
    has_thinking_switch: bool
    prefill: str = ""  # the part of `opening` that belongs to the sampled turn: an opened thought
    tool_frame: Frame = Frame("", "")  # around a turn's results
    tool_separator: str = ""  # between two of them

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(token_id for token_id, _ in self.stop_tokens)
