"""Prompts that do not fit the engine's context: of such a problem nothing can be sampled, and every sibling fails.

Found before anything starts. A token is at least a byte of the text, so that hardly any prompt has to be tokenized.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rstar_ray.chat.template import ChatFormat
from rstar_ray.trajectory import Problem

MARGIN_TOKENS = 64
"""What normalisation and the borders of parts may add to the bytes of a text; a guess on the safe side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLong:
    """Of a set of problems, those that cannot be asked."""

    num_tokens: Mapping[str, int]  # of each one's prompt, by the problem's id
    num_problems: int  # of the whole set
    context_tokens: int

    def __str__(self) -> str:
        first = next(iter(self.num_tokens))
        return (
            f"{len(self.num_tokens)} of {self.num_problems} prompts do not fit into a context of {self.context_tokens} "
            f"tokens, such as that of problem {first!r} with {self.num_tokens[first]}"
        )


def too_long(problems: Sequence[Problem], chat: ChatFormat, context_tokens: int) -> TooLong | None:
    """Those whose prompts leave no token to sample, in their order; None where there is none."""
    if not problems:
        return None
    around = len(chat.prompt_ids(replace(problems[0], problem="")))
    most_bytes = context_tokens - around - MARGIN_TOKENS
    counted = {
        problem.id: len(chat.prompt_ids(problem))
        for problem in problems
        if len(problem.problem.encode("utf-8")) > most_bytes
    }
    long = {name: count for name, count in counted.items() if count >= context_tokens}
    return TooLong(num_tokens=long, num_problems=len(problems), context_tokens=context_tokens) if long else None
