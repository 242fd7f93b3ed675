"""Where in a completion the answer stands. Only the policy's own final turn is read, never tool output."""

import re
from typing import Literal

Place = Literal["answer", "boxed", "anywhere"]
r"""answer: the last `\boxed{}` in the last `<answer>`; boxed: the last `\boxed{}`; anywhere: that, or declared"""

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_THOUGHT_ENDS = re.compile(r"</(?:think|reason|reasoning|thought)>")
_THOUGHT_BEGINS = re.compile(r"<(?:think|reason|reasoning|thought)>")
_DECLARED = re.compile(r"(?:final answer|answer)\s*(?:is|:|=)[ \t:]*\**[ \t]*([^\n]+)", re.IGNORECASE)
_FENCED = re.compile(r"```[ \t]*([\w+#-]*)[ \t]*\n(.*?)```", re.DOTALL)
_INTEGER = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+|[+-]?\d+")


def count_answers(completion: str, place: Place) -> int:
    """Number of answers written in that place, for the format penalty (arXiv:2508.20722 Eq. 5)."""
    if place == "answer":
        return completion.count("<answer>")
    said = spoken(completion)
    boxed = said.count("\\boxed{")
    if boxed or place == "boxed":
        return boxed
    return len(_ANSWER.findall(said)) or len(_DECLARED.findall(said))


def find_answer(completion: str, place: Place) -> str | None:
    """The answer as it was written, or None where it does not stand in that place."""
    if place == "answer":
        return boxed_answer(completion)
    said = spoken(completion)
    boxed = last_boxed(said)
    if boxed is not None or place == "boxed":
        return boxed
    tagged = _ANSWER.findall(said)
    if tagged:
        return tagged[-1].strip()
    declared = _DECLARED.findall(said)
    return declared[-1].strip().rstrip(".*").strip() if declared else None


def spoken(completion: str) -> str:
    """What comes after the thought; nothing where the thought never ends."""
    ends = [found.end() for found in _THOUGHT_ENDS.finditer(completion)]
    if ends:
        return completion[ends[-1] :]
    return "" if _THOUGHT_BEGINS.search(completion) else completion


def boxed_answer(completion: str) -> str | None:
    r"""What stands in the last `\boxed{}` inside the last closed `<answer>` of a completion; None without one."""
    answers = _ANSWER.findall(completion)
    return last_boxed(answers[-1]) if answers else None


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{}` whose brace is closed; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return None


def last_program(completion: str) -> str | None:
    """The program in the last fenced block, else what stands in the last `<answer>`; None without either."""
    said = spoken(completion)
    blocks = _FENCED.findall(said)
    if blocks:
        return blocks[-1][1]
    tagged = _ANSWER.findall(said)
    return tagged[-1].strip() or None if tagged else None


def as_integer(text: str) -> int | None:
    """The integer a text spells (sign and thousands commas allowed), or None; bounded, for it comes from a model."""
    text = text.strip()
    if len(text) > 400 or not _INTEGER.fullmatch(text) or not text.isascii():
        return None
    return int(text.replace(",", ""))
