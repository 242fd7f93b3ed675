"""What is known of a model's way to talk, once its template, tokenizer and generation config have been looked at."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Thought:
    """What a model puts around what it thinks before it speaks."""

    opens: str
    closes: str
    holds_calls: bool = False  # rStar2's `<reason>`: its calls are made, and an answer ends one that is never closed


THOUGHTS = (
    Thought("<think>", "</think>"),
    Thought("<reason>", "</reason>", holds_calls=True),
    Thought("[THINK]", "[/THINK]"),
    Thought("<seed:think>", "</seed:think>"),
    Thought("<thought>", "</thought>"),
)
"""Known ways; the first is looked for in every model's text, whatever its template says."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What a template writes around somebody's words, and what it does to them."""

    head: str
    tail: str
    trims: bool = False  # blanks at both ends of the words are dropped
    quotes: bool = False  # the words are written as a JSON string

    def words(self, text: str) -> str:
        """As the template would write them."""
        import json

        text = text.strip() if self.trims else text
        return json.dumps(text, ensure_ascii=False) if self.quotes else text


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a template does with what it is given, found by rendering."""

    has_system: bool  # otherwise a system text is put before the first question
    shows_tools: bool  # otherwise they are described in the system text
    writes_calls: bool  # otherwise calls are written into the text of the assistant
    has_tool_role: bool  # otherwise results come in a user's message
    arguments_as_text: bool  # it wants a call's arguments as JSON text, not as an object
    keeps_thoughts: bool  # it writes `reasoning_content`
    wants_ids: bool = False  # it refuses calls and results without an id, as Mistral's do


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatProfile:
    """How turns begin and end, which tokens stop, how calls are written, whether the model thinks and where."""

    template: TemplateFacts
    template_source: str  # "the tokenizer's own", or a file
    opening: str  # what stands between the last message and what is sampled
    answer_end: str  # what ends an assistant's turn
    call_end: str  # what ends one that calls a tool; the same nearly everywhere
    stop_tokens: tuple[tuple[int, str], ...]  # (id, text): any of them ends a completion
    syntax: str  # of calls: a name in `SYNTAXES`, or "vllm:<name of a vLLM tool parser>"
    thought: Thought
    thinks: Literal["prefilled", "may", "off", "no"]  # where a thought begins: opened for it, by itself, closed for it
    has_thinking_switch: bool
    prefill: str = ""  # of `opening`, what belongs to the turn that is sampled: an opened thought
    tool_frame: Frame = Frame("", "")  # around a turn's results
    tool_separator: str = ""  # between two of them

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(token_id for token_id, _ in self.stop_tokens)
