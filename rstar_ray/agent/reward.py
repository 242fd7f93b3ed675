"""The outcome-only reward (arXiv:2508.20722 section 2.2): 1 if the boxed answer is equivalent to the truth, else 0."""

import re
from typing import Protocol

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_INTEGER = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+|[+-]?\d+")


class VerifyFn(Protocol):
    """Says whether two mathematical expressions are equivalent; runs in the sandbox."""

    async def __call__(self, answer: str, truth: str) -> bool: ...


def count_answers(policy_text: str) -> int:
    """Answer tags the policy opened, for the format penalty (Eq. 5)."""
    return policy_text.count("<answer>")


def boxed_answer(completion: str) -> str | None:
    r"""What stands in the last `\boxed{}` inside the last closed `<answer>` of the final completion; None without one.

    Only the policy's own final turn is read, never tool output.
    """
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


def as_integer(text: str) -> int | None:
    """The integer a text spells (sign and thousands commas allowed), or None; bounded, for it comes from a model."""
    text = text.strip()
    if len(text) > 400 or not _INTEGER.fullmatch(text) or not text.isascii():
        return None
    return int(text.replace(",", ""))


async def answer_reward(answer: str | None, truth: str, verify: VerifyFn) -> float:
    """1.0 for an equivalent answer, else 0.0. Two integers are compared here; anything else goes to `verify`."""
    if answer is None or not answer:
        return 0.0
    ours, theirs = as_integer(answer), as_integer(truth)
    if ours is not None and theirs is not None:
        return float(ours == theirs)
    return float(await verify(answer, truth))
