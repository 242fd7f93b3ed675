"""Converts text to tokens and back: the prompt, tool results, and parsing of the policy's text.

Sampled tokens are only decoded, never encoded again.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rstar_ray.chat.call_syntax import HERMES, SYNTAXES, CallSyntax, Marked
from rstar_ray.chat.chat_profile import ChatProfile, Frame
from rstar_ray.chat.encoding import Encoder
from rstar_ray.chat.instructions import opened
from rstar_ray.chat.render import Renderer
from rstar_ray.chat.resolve import PROBE_NAME, SAID, thinking_switches
from rstar_ray.chat.streamed import spoken, where_calls_stand
from rstar_ray.chat.tool_calls import parse_tool_calls
from rstar_ray.tools.spec import PYTHON_TOOL, ToolSpec
from rstar_ray.trajectory import Problem, ToolCall, ToolResult

_MARK = "\u2402rstar\u2403"
_MAX_CONTINUATIONS = 256
_WORDS = "words"
"""Placeholder for a message: no message is ever encoded as a control token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One completion as text."""

    text: str  # the whole text with special tokens, except the one that ended the turn
    spoken: str  # without reasoning
    calls: tuple[ToolCall, ...] = ()


class ChatFormat(Protocol):
    """The agent loop's view of a chat model's text format."""

    def prompt_ids(self, problem: Problem) -> list[int]: ...
    def tool_answer_ids(self, results: Sequence[ToolResult]) -> list[int]: ...
    def user_answer_ids(self, text: str) -> list[int]: ...
    def read(self, token_ids: Sequence[int], *, after_tools: bool, own_tools: bool = False) -> Reading: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


class TokenizerChat:
    """`ChatFormat` with a Hugging Face tokenizer and the profile that `resolve` found.

    `system` and, with `shows_tools`, the tools come before the problem, `before` in its message; empty, they do not.
    """

    def __init__(
        self,
        tokenizer: Any,
        profile: ChatProfile,
        *,
        system: str = "",
        before: str = "",
        tools: Sequence[ToolSpec] = (PYTHON_TOOL,),
        shows_tools: bool = False,
        thinking: str = "auto",
        syntax: CallSyntax | None = None,
    ) -> None:
        self.profile = profile
        self._tokenizer = tokenizer
        self._system = system
        self._before = before
        self._tools = {tool.name: tool for tool in tools}
        self.schemas = [tool.as_schema() for tool in tools]  # of the tools in use, in OpenAI's format
        self._schemas = self.schemas if shows_tools and tools else None
        self.shows_tools = shows_tools
        self.syntax = syntax or SYNTAXES.get(profile.syntax, HERMES)
        self._continuations: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[str, Sequence[Frame]]] = {}
        self.renderer = Renderer(
            tokenizer,
            profile.template,
            self.syntax,
            profile.thought,
            switches=thinking_switches(thinking),
            shows_example=not profile.syntax.startswith("vllm:"),  # the model was trained on that format
        )
        self.encoder = Encoder(tokenizer)
        self._prompt, frame = self._prompt_frame(), profile.tool_frame
        encode = self.encoder.encode
        self._prompt_head, self._prompt_tail = encode(self._prompt.head), encode(self._prompt.tail, after=_WORDS)
        self._answer_head = encode(frame.head, after=profile.call_end)
        self._answer_tail = encode(frame.tail, after=_WORDS)
        self._answer_separator = encode(profile.tool_separator, after=_WORDS)
        control = [re.escape(str(token)) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.control_tokens = re.compile("|".join(control) or r"(?!)")  # text from outside never contains them
        self._thinks_after_tools = frame.tail.rstrip().endswith(profile.thought.opens)

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    def prompt_ids(self, problem: Problem) -> list[int]:
        """The tokens of the rendered problem up to the policy's turn, [P]."""
        return [
            *self._prompt_head,
            *self._words(self._prompt.words(self._before + problem.problem), after=self._prompt.head),
            *self._prompt_tail,
        ]

    def tool_answer_ids(self, results: Sequence[ToolResult]) -> list[int]:
        """The tokens of all results of one turn, up to the policy's next turn."""
        return self._tool_text_ids([result.text for result in results])

    def _tool_text_ids(self, texts: Sequence[str]) -> list[int]:
        ids, frame = list(self._answer_head), self.profile.tool_frame
        for position, text in enumerate(texts):
            ids += self._answer_separator if position else []
            before = (self.profile.tool_separator if position else frame.head) or self.profile.call_end
            ids += self._words(frame.words(text), after=before)
        return ids + self._answer_tail

    def user_answer_ids(self, text: str) -> list[int]:
        """The tokens of the environment's reply, up to the policy's next turn."""
        head, tail = self._user_frame()
        opened = self.encoder.encode(head, after=self.profile.answer_end)
        return [*opened, *self._words(text, after=head), *self.encoder.encode(tail, after=_WORDS)]

    def read(self, token_ids: Sequence[int], *, after_tools: bool, own_tools: bool = False) -> Reading:
        """One completion as text, without its reasoning, and with its calls.

        `own_tools`: an agent of the user defines the tools, so calls are not checked against those of `--tools.use`.
        """
        stops = self.profile.stop_token_ids
        said = list(token_ids[:-1] if token_ids and token_ids[-1] in stops else token_ids)
        text = self.decode(said)
        inside = self.begins_inside_thought(after_tools=after_tools)
        tools = None if own_tools else self._tools
        calls = parse_tool_calls(where_calls_stand(text, self.profile.thought, inside=inside), self.syntax, tools)
        return Reading(text=text, spoken=spoken(text, self.profile.thought, inside=inside), calls=tuple(calls))

    def conversation_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation up to the policy's next turn; messages never become control tokens.

        Raises `ValueError` where the template refuses it.
        """
        return self._rendered_ids(opened(messages, self._system, self._before), self._schemas)

    def request_ids(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Like `conversation_ids`, with a client's own system text and tools.

        Tools are shown only where the policy sees schemas at all: a policy that learned its tools from examples
        does not.
        """
        return self._rendered_ids(messages, list(tools) or None if self.shows_tools else None)

    def continuation_ids(self, called: Sequence[str], messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """What the template writes between a turn that called these tools and the next turn, for new messages of tools,
        the user or the system. Raises `ValueError` where the template cannot write them there.
        """
        contents = [str(message["content"]) for message in messages]
        roles = [str(message["role"]) for message in messages]
        named = any(PROBE_NAME in text for text in (self.profile.tool_frame.head, self.profile.tool_frame.tail))
        if called and set(roles) == {"tool"} and not named:
            return self._tool_text_ids(contents)
        head, frames = self._continuation(tuple(called), tuple(roles))
        ids = self.encoder.encode(head, after=self.profile.call_end if called else self.profile.answer_end)
        before = head or self.profile.answer_end
        for frame, content in zip(frames, contents, strict=True):
            ids += self._words(frame.words(content), after=before)
            ids += self.encoder.encode(frame.tail, after=_WORDS)
            before = frame.tail or _WORDS
        return ids

    def _rendered_ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        if tools and self.control_tokens.search(json.dumps(tools, ensure_ascii=False)):
            raise ValueError("the tools spell a control token of the model")
        spelled: dict[str, str] = {}
        marked: list[Mapping[str, Any]] = []
        for number, message in enumerate(messages):
            content = str(message["content"])
            if self.control_tokens.search(content):
                mark = f"\u2402rstar {number}\u2403"
                spelled[mark] = self._inside_frame(content) if message["role"] == "tool" else content
                message = {**message, "content": mark}
            marked.append(message)
        for number, message in enumerate(messages, 1):
            others = json.dumps([message.get("reasoning_content"), message.get("tool_calls")], ensure_ascii=False)
            if self.control_tokens.search(others):
                raise ValueError(f"message {number} spells a control token of the model in its reasoning or its calls")
        try:
            text = self.renderer.render(marked, tools, opens=True)
        except Exception as error:  # a template may raise any exception
            raise ValueError(f"the chat template refuses this conversation: {error}") from error
        parts = re.split(f"({'|'.join(map(re.escape, spelled))})", text) if spelled else [text]
        ids: list[int] = []
        before = ""
        for part in parts:
            words = spelled.get(part)
            ids += self.encoder.encode(part, after=before) if words is None else self._words(words, after=before)
            before = (part if words is None else _WORDS) or before
        return ids

    def _inside_frame(self, content: str) -> str:
        """A tool's result as the template writes it, between quotes where it is quoted."""
        frame = self.profile.tool_frame
        return frame.words(content)[1:-1] if frame.quotes else content

    def as_content(self, reading: Reading, *, after_tools: bool) -> str:
        """A turn as a message of the conversation, with the thought that the prompt had opened."""
        inside = self.begins_inside_thought(after_tools=after_tools)
        opened = self.profile.prefill or f"{self.profile.thought.opens}\n"
        return (opened if inside else "") + reading.text

    def begins_inside_thought(self, *, after_tools: bool) -> bool:
        """Whether the prompt opens a thought for the policy."""
        return self._thinks_after_tools if after_tools else bool(self.profile.prefill)

    @property
    def call_markers(self) -> list[tuple[str, str]]:
        """The opening and closing markers of a call; empty where the syntax has no markers.

        A marker around all calls of a turn has an empty closing marker.
        """
        if not isinstance(self.syntax, Marked):
            return []
        return [(self.syntax.opens, self.syntax.closes), *[(marker, "") for marker in self.syntax.around if marker]]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode with special tokens, because in some families they mark a call."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _prompt_frame(self) -> Frame:
        """The text that the template writes around a problem, found by rendering one."""
        messages = [{"role": "user", "content": f" \n{_MARK}\n "}]
        if self._system:
            messages.insert(0, {"role": "system", "content": self._system})
        head, tail = self.renderer.render(messages, self._schemas, opens=True).split(_MARK)
        if head.endswith(" \n"):
            return Frame(head.removesuffix(" \n"), tail.removeprefix("\n "))
        return Frame(head, tail, trims=True)

    def _user_frame(self) -> tuple[str, str]:
        """The text that the template writes around a second user message, after the end of the previous turn."""
        said = f"a{_MARK}"
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": said}]
        rendered = self.renderer.render([*messages, {"role": "user", "content": _MARK}], None, opens=True)
        _, between, tail = rendered.split(_MARK)
        return between.partition(self.profile.answer_end)[2], tail

    def _continuation(self, called: tuple[str, ...], roles: tuple[str, ...]) -> tuple[str, Sequence[Frame]]:
        """The text before the first message's words, and for each message a `Frame` whose tail follows its words."""
        if (called, roles) not in self._continuations:
            if len(self._continuations) >= _MAX_CONTINUATIONS:
                self._continuations.clear()
            self._continuations[called, roles] = self._find_continuation(called, roles)
        return self._continuations[called, roles]

    def _find_continuation(self, called: Sequence[str], roles: Sequence[str]) -> tuple[str, Sequence[Frame]]:
        said: dict[str, Any] = {"role": "assistant", "content": "" if called else SAID}
        if called:
            functions = [{"name": name, "arguments": {"code": SAID}} for name in called]
            said["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        padding = ["" if role == "tool" else " \n" for role in roles]
        new = [{"role": role, "content": f"{pad}{_MARK}{pad[::-1]}"} for role, pad in zip(roles, padding, strict=True)]
        try:
            text = self.renderer.render([{"role": "user", "content": "q"}, said, *new], None, opens=True)
        except Exception as error:  # a template may raise any exception
            raise ValueError(f"the chat template refuses these messages after a turn: {error}") from error
        parts = text.split(_MARK)
        _, found, after = parts[0].rpartition(SAID)
        ends = (self.profile.call_end if called else self.profile.answer_end, *dict(self.profile.stop_tokens).values())
        end = next((one for one in ends if one in after), None)
        if len(parts) != len(new) + 1 or not found or end is None:
            raise ValueError("the chat template does not write these messages after a turn")
        parts[0] = after.partition(end)[2]
        return _framed(parts, roles, self.profile.tool_frame)

    def _words(self, text: str, *, after: str) -> list[int]:
        """Encode text from outside, which never becomes control tokens."""
        return self.encoder.encode(text, after=after, plain=True)


def _framed(parts: list[str], roles: Sequence[str], tool_frame: Frame) -> tuple[str, Sequence[Frame]]:
    """What stands before the words of the first message, and a frame for each, from the texts around the marks.

    Blanks that stood around a mark, and quotes that the template wrote around it, belong to the words.
    """
    frames: list[Frame] = []
    parts = list(parts)
    for number, role in enumerate(roles):
        frame = replace(tool_frame, head="", tail="") if role == "tool" else Frame("", "", trims=True)
        if role != "tool" and parts[number].endswith(" \n") and parts[number + 1].startswith("\n "):
            frame = replace(frame, trims=False)
        around = '"' if frame.quotes else "" if frame.trims or role == "tool" else " \n"
        parts[number] = parts[number].removesuffix(around)
        parts[number + 1] = parts[number + 1].removeprefix(around[::-1])
        frames.append(frame)
    return parts[0], [replace(frame, tail=tail) for frame, tail in zip(frames, parts[1:], strict=True)]
