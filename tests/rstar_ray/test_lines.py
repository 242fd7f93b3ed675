"""Lines of tokens as rows, over random trees of turns."""

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.learner.shares import rl_shares
from rstar_ray.config.algorithm import Normalisation
from rstar_ray.lines import NEW, line_sizes, lines_with_loss
from rstar_ray.rollouts import TrainingRow
from rstar_ray.trajectory import Turn
from tests import derived
from tests.actors.test_shares import training_row


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[Turn], list[bool], list[list[int]]]:
    """Turns with the loss mask of the response, and for each turn all tokens up to its end, as its engine had them."""
    turns: list[Turn] = []
    mask: list[bool] = []
    tokens = [[0, 1, 2]]  # of the prompt, then of each turn
    num_prompt, total = 3, 3
    seen: list[list[int]] = []
    for number in range(draw(st.integers(1, 12))):
        parent = NEW if number == 0 else draw(st.integers(NEW, number - 1))
        num_context = 0 if number == 0 else draw(st.integers(1, 4))
        num_sampled = draw(st.integers(1, 4))
        new = [*range(total, total + num_context + num_sampled)]
        total += len(new)
        before = tokens[0] if number == 0 else [] if parent == NEW else seen[parent]
        seen.append([*before, *new])
        mask += [False] * num_context + [True] * num_sampled
        linear = parent == number - 1
        turns.append(Turn(num_tokens=num_sampled, continues=None if linear else parent))
    assert num_prompt + len(mask) == total
    return turns, mask, seen


@given(trees())
def test_each_sampled_token_is_trained_once_and_each_row_is_an_engines_prompt(
    tree: tuple[list[Turn], list[bool], Any],
):
    turns, mask, seen = tree
    rows = lines_with_loss(turns, mask, 3)
    trained = np.concatenate([places[loss] for places, loss in rows])
    assert sorted(trained.tolist()) == [3 + place for place, sampled in enumerate(mask) if sampled]
    assert all(places.tolist() in seen for places, _ in rows)
    covered = {place for places, _ in rows for place in places.tolist()}
    assert covered == set(range(3 + len(mask)))
    assert all(loss.any() for _, loss in rows)
    sizes = line_sizes(turns, mask, 3)
    assert sizes == (() if len(rows) == 1 else tuple((len(places), int(loss.sum())) for places, loss in rows))


@pytest.mark.parametrize("mode", get_args(Normalisation))
def test_tokens_of_a_rollout_weigh_the_same_in_one_row_and_in_several(mode: Normalisation):
    def rows(*sizes: tuple[str, int, int]) -> list[TrainingRow]:
        return [
            replace(training_row(name, group=name[0], tokens=sampled + 3, sampled=sampled), line=line)
            for name, sampled, line in sizes
        ]

    def weights(given: list[TrainingRow]) -> dict[str, set[float]]:
        config = derived.learner(ranks=1, micro_batch_tokens=100, normalisation=mode, updates_per_step=1)
        found: dict[str, set[float]] = {}
        for work in rl_shares(given, config, attention_tokens=math.inf):
            for share in (share for update in work for batch in update for share in batch):
                found.setdefault(share.row.rollout_id, set()).add(share.token_weight)
        return found

    whole = rows(("a1", 8, 0), ("a2", 3, 0), ("b1", 5, 0))
    split = rows(("a1", 5, 0), ("a1", 2, 1), ("a1", 1, 2), ("a2", 3, 0), ("b1", 4, 0), ("b1", 1, 1))
    assert weights(split) == weights(whole)
