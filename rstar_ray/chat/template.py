"""Between text and tokens: the prompt, the tool's answers, and reading what the policy wrote.

What the policy sampled is decoded for parsing only, never encoded again.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from rstar_ray.chat.tool_calls import TOOL_SCHEMA
from rstar_ray.trajectory import Problem, ToolResult

INSTRUCTIONS = (
    "Solve the problem. Think step by step; you may write Python and run it with the tool, look at what it "
    "returns and go on from there. When you are sure, finish with <answer>\\boxed{...}</answer>, once."
)
_MARK = "\u2402rstar\u2403"


class ChatFormat(Protocol):
    """What the agent loop needs of a chat model's text format."""

    def prompt_ids(self, problem: Problem) -> list[int]: ...
    def tool_answer_ids(self, results: Sequence[ToolResult]) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


class TokenizerChat:
    """`ChatFormat` by a Hugging Face tokenizer and its own chat template (hermes style, as Qwen's).

    `instruct` puts the tool's schema and the answer format before the problem; off where SFT taught them.
    """

    def __init__(self, tokenizer: Any, *, instruct: bool) -> None:
        self._tokenizer = tokenizer
        self._instruct = instruct
        self._prompt_head, self._prompt_tail = map(self._encode, self._prompt_frame())
        self._answer_head, self._answer_tail = map(self._encode, self._tool_answer_frame())
        self._answer_separator = self._encode("\n</tool_response>\n<tool_response>\n")

    def prompt_ids(self, problem: Problem) -> list[int]:
        """The rendered problem up to where the policy begins, shape [P]."""
        return [*self._prompt_head, *self._encode_plain(problem.problem), *self._prompt_tail]

    def tool_answer_ids(self, results: Sequence[ToolResult]) -> list[int]:
        """All answers of one turn in one user message, up to where the policy goes on."""
        ids = list(self._answer_head)
        for position, result in enumerate(results):
            ids += self._answer_separator if position else []
            ids += self._encode_plain(result.text)
        return ids + self._answer_tail

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def _prompt_frame(self) -> tuple[str, str]:
        """What the template writes around a problem, found by rendering one."""
        messages = [{"role": "user", "content": _MARK}]
        if self._instruct:
            messages.insert(0, {"role": "system", "content": INSTRUCTIONS})
        rendered: str = self._tokenizer.apply_chat_template(
            messages, tools=[TOOL_SCHEMA] if self._instruct else None, add_generation_prompt=True, tokenize=False
        )
        head, tail = rendered.split(_MARK)
        return head, tail

    def _tool_answer_frame(self) -> tuple[str, str]:
        """What the template writes around a tool's answer, found by rendering one."""
        messages = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": f"a{_MARK}"},
            {"role": "tool", "content": _MARK},
        ]
        rendered: str = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        _, between, tail = rendered.split(_MARK)
        end_of_turn: str = self._tokenizer.eos_token
        if not between.startswith(end_of_turn):
            raise ValueError(f"chat template: an assistant turn does not end with the eos token {end_of_turn!r}")
        return between.removeprefix(end_of_turn), tail

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _encode_plain(self, text: str) -> list[int]:
        """Foreign text: whatever it spells, it never becomes a control token."""
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
