"""The lines of tokens of one rollout: conversations that begin with a prompt and continue turn by turn.

Most rollouts have one. An agent of the user may begin others, or continue an earlier turn twice (`Turn.continues`). A
rollout's tokens are in order of time: each completion follows the tokens that its prompt adds to the turn that it
continues.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rstar_ray.trajectory import Turn

NEW = -1
"""Value instead of a turn's number: the turn begins a line with a separate prompt."""


def lines_of(parents: Sequence[int]) -> list[list[int]]:
    """The turns of each line, from its beginning to a turn without a continuation; lines in the order of their ends.

    >>> lines_of([-1, 0, 0, -1])
    [[0, 1], [0, 2], [3]]
    """
    continued = set(parents)
    return [line_to(parents, number) for number in range(len(parents)) if number not in continued]


def line_to(parents: Sequence[int], number: int) -> list[int]:
    """The turns of a line up to and including this one."""
    line = list[int]()
    while number != NEW:
        line.append(number)
        number = parents[number]
    return line[::-1]


def parents_of(turns: Sequence[Turn]) -> list[int]:
    """The turn that each turn continues, or `NEW`."""
    return [number - 1 if turn.continues is None else turn.continues for number, turn in enumerate(turns)]


def spans_of(turns: Sequence[Turn], loss_mask: Sequence[bool] | NDArray[np.bool_]) -> list[tuple[int, int, int]]:
    """For each turn, offsets in the response [T] of its context, its completion, and the end of its completion.

    The context of the first turn is the prompt, which is not in the response: (0, 0, end).
    """
    sampled = np.flatnonzero(np.asarray(loss_mask, np.bool_))
    spans: list[tuple[int, int, int]] = []
    end = count = 0
    for turn in turns:
        begin = int(sampled[count]) if turn.num_tokens else end
        spans.append((end, begin, begin + turn.num_tokens))
        end, count = begin + turn.num_tokens, count + turn.num_tokens
    return spans


def line_positions(spans: Sequence[tuple[int, int, int]], line: Sequence[int], num_prompt: int) -> NDArray[np.int64]:
    """Positions of a line's tokens in the concatenation of prompt and response."""
    parts = [np.arange(num_prompt)] if line and line[0] == 0 else []
    parts += [np.arange(num_prompt + spans[number][0], num_prompt + spans[number][2]) for number in line]
    return np.concatenate(parts).astype(np.int64)


def lines_with_loss(
    turns: Sequence[Turn], loss_mask: Sequence[bool] | NDArray[np.bool_], num_prompt: int
) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """For each line: positions of its tokens (see `line_positions`), and a mask of the tokens with a loss in it.

    Each sampled token has its loss in the first line that contains it.
    """
    spans = spans_of(turns, loss_mask)
    sampled = np.concatenate([np.zeros(num_prompt, np.bool_), np.asarray(loss_mask, np.bool_)])
    rows: list[tuple[NDArray[np.int64], NDArray[np.bool_]]] = []
    for line in lines_of(parents_of(turns)):
        places = line_positions(spans, line, num_prompt)
        rows.append((places, sampled[places]))
        sampled[places] = False
    return rows


def line_sizes(
    turns: Sequence[Turn], loss_mask: Sequence[bool] | NDArray[np.bool_], num_prompt: int
) -> tuple[tuple[int, int], ...]:
    """(tokens, tokens with a loss) of each line; empty if the rollout has one line."""
    if all(turn.continues is None for turn in turns):
        return ()
    return tuple((len(places), int(loss.sum())) for places, loss in lines_with_loss(turns, loss_mask, num_prompt))
