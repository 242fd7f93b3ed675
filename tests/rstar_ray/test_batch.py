"""Plans: every row once, padding small, ranks balanced. Micro batches: the tokens where they belong."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar_ray.algorithm.batch import TokenRow, collate, rl_row
from rstar_ray.algorithm.batch_plan import (
    cheapest_cut,
    cut,
    padding_waste,
    plan_ranks,
    row_work,
)
from rstar_ray.config import LearnerConfig
from rstar_ray.outcome import Outcome
from rstar_ray.trajectory import Problem
from tests import derived
from tests.rstar_ray.fabricate import trajectory

LIMITS = derived.limits(micro_batch_tokens=2_048)


def plan_of(
    lengths: list[int], ranks: int, learner: LearnerConfig, attention_tokens: float = math.inf
) -> list[list[list[int]]]:
    return plan_ranks(lengths, replace(learner, ranks=ranks), attention_tokens=attention_tokens)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 3_000), max_size=60),
    world_size=st.integers(1, 7),
    tokens=st.integers(1, 5_000),
)
def test_every_row_is_planned_once_and_all_ranks_get_as_many_micro_batches(
    lengths: list[int], world_size: int, tokens: int
):
    plan = plan_of(lengths, world_size, derived.limits(micro_batch_tokens=tokens))
    assert sorted(i for batches in plan for batch in batches for i in batch) == list(range(len(lengths)))
    assert len({len(batches) for batches in plan}) == 1
    for batches in plan:
        for batch in batches:
            padded = len(batch) * max((lengths[i] for i in batch), default=0)
            assert padded <= tokens or len(batch) == 1


def test_the_cut_is_the_cheapest_there_is():
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = sorted(rng.integers(1, 40, 9).tolist(), reverse=True)

        def cost(parts: list[range], lengths: list[int] = lengths) -> int:
            return sum(len(part) * lengths[part[0]] + 13 for part in parts)

        allowed: list[list[range]] = []
        for chosen in range(2**8):
            borders = [0, *(place for place in range(1, 9) if chosen >> (place - 1) & 1), 9]
            parts = [range(*pair) for pair in pairwise(borders)]
            if all(len(part) * lengths[part[0]] <= 90 for part in parts):
                allowed.append(parts)
        assert cost(cheapest_cut(lengths, 90, 13)) == min(map(cost, allowed))


@given(st.lists(st.integers(1, 90), max_size=40), st.integers(20, 200))
def test_packed_micro_batches_hold_every_row_once_within_the_budget(lengths: list[int], budget: int):
    limits = derived.limits(micro_batch_tokens=budget, attention="rows")
    batches = cut(lengths, range(len(lengths)), limits)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[i] for i in batch) <= budget for batch in batches)
    assert batches == cut(lengths, range(len(lengths)), limits)


def tiny_lengths(count: int) -> list[int]:
    return np.random.default_rng(1).normal(110, 30, count).clip(40, 250).astype(int).tolist()


def long_lengths(count: int) -> list[int]:
    """Log-normal, mostly 1K to 12K."""
    return np.exp(np.random.default_rng(2).normal(np.log(3_500), 0.6, count)).clip(1_000, 12_288).astype(int).tolist()


@pytest.mark.parametrize(
    ("lengths", "world_size", "limits"),
    [
        (tiny_lengths(128), 1, LIMITS),
        (tiny_lengths(128), 2, LIMITS),
        (tiny_lengths(64), 2, LIMITS),
        (long_lengths(8_192), 64, derived.limits(micro_batch_tokens=32_768)),
        (long_lengths(512), 8, derived.limits(micro_batch_tokens=32_768)),
    ],
)
def test_padding_is_at_most_five_per_cent(lengths: list[int], world_size: int, limits: LearnerConfig):
    assert padding_waste(lengths, plan_of(lengths, world_size, limits)) <= 0.05


def test_ranks_are_balanced_by_work_attention_included():
    lengths = long_lengths(8_192)
    plan = plan_of(lengths, 64, derived.limits(micro_batch_tokens=32_768), attention_tokens=8_000)
    work = [sum(row_work(lengths[i], 8_000) for batch in batches for i in batch) for batches in plan]
    assert max(work) / min(work) < 1.01


@pytest.mark.parametrize("packed", [False, True])
def test_rows_without_a_token_are_planned_too(packed: bool):
    plan = plan_of([0, 0, 0, 0], 2, derived.limits(attention="rows" if packed else "sdpa"))
    assert sorted(i for batches in plan for batch in batches for i in batch) == [0, 1, 2, 3]
    assert plan_of([], 2, derived.limits(attention="rows" if packed else "sdpa")) == [[], []]


# ---------------------------------------------------------------- tensors


def row(ids: list[int], mask: list[int], advantage: float = 1.0, weight: float = 1.0) -> TokenRow:
    logprobs = -np.arange(len(ids), dtype=np.float32)
    return TokenRow("r", np.array(ids, np.int32), np.array(mask, np.bool_), advantage, logprobs, weight)


ROWS = [row([5, 6, 7, 8], [0, 1, 0, 1], 0.5, 0.25), row([9, 3], [0, 1], -2.0, 0.5), row([1, 2, 4], [0, 0, 0])]


@pytest.mark.parametrize("packed", [False, True])
def test_each_sampled_token_meets_the_input_before_it_and_its_own_advantage(packed: bool):
    batch = collate(ROWS, packed=packed)
    before = batch.input_ids_BT.flatten()[batch.positions_N]
    assert before.tolist() == [5, 7, 9]
    assert batch.targets_N.tolist() == [6, 8, 3]
    assert batch.rows_N.tolist() == [0, 0, 1]
    assert batch.advantages_N.tolist() == [0.5, 0.5, -2.0]
    assert batch.rollout_logprobs_N.tolist() == [-1.0, -3.0, -1.0]
    assert batch.weights_N.tolist() == [0.25, 0.25, 0.5]
    assert batch.num_input_tokens == 6


@pytest.mark.parametrize("packed", [False, True])
def test_token_advantages_go_to_each_sampled_token(packed: bool):
    tokens = row([5, 6, 7, 8], [0, 1, 0, 1], np.array([0.5, -1.0], np.float32))
    assert collate([*ROWS[1:], tokens], packed=packed).advantages_N.tolist() == [-2.0, 0.5, -1.0]


def test_packed_rows_lie_end_to_end_with_positions_that_start_again():
    batch = collate(ROWS, packed=True)
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 9, 1, 2]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 0, 0, 1]]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [[], [row([3], [1])], [row([1, 2], [0, 0])]])
def test_a_micro_batch_without_a_token_to_train_on_still_has_an_input(rows: list[TokenRow], packed: bool):
    batch = collate(rows, packed=packed)
    assert batch.input_ids_BT.numel() >= 1
    assert len(batch.targets_N) == len(batch.positions_N) == 0


def test_a_row_ends_at_its_last_sampled_token():
    assert row([1, 2, 3, 4, 5], [0, 1, 1, 0, 0]).trimmed().token_ids.tolist() == [1, 2, 3]
    assert len(row([1, 2, 3], [0, 0, 0]).trimmed().token_ids) == 2


def test_a_trajectory_becomes_its_prompt_without_loss_and_its_response():
    problem = Problem(id="p", problem="1+1", answer="2")
    one = trajectory(problem, [("call", "2", Outcome.OK), ("two", "", None)], reward=1.0)
    tokens = rl_row(one, 0.25, 0.125)
    num_prompt = len(one.prompt_ids)
    length = len(tokens.token_ids)
    whole = np.concatenate([one.prompt_ids, one.response_ids])[:length]
    assert tokens.token_ids.tolist() == whole.tolist()
    assert not tokens.loss_mask[:num_prompt].any()
    assert tokens.loss_mask.sum() == one.loss_mask.sum() == tokens.num_sampled_tokens
    assert (tokens.advantage, tokens.token_weight) == (0.25, 0.125)
    assert tokens.rollout_logprobs is not None and len(tokens.rollout_logprobs) == length


def test_padded_rows_lie_one_below_the_other_with_zeros_on_the_right():
    batch = collate(ROWS)
    assert batch.input_ids_BT.tolist() == [[5, 6, 7], [9, 0, 0], [1, 2, 0]]
    assert (batch.position_ids_BT, batch.row_lengths) == (None, None)
    assert batch.positions_N.tolist() == [0, 2, 3]
    assert (batch.num_input_tokens, batch.num_padded_tokens) == (6, 9)


def test_a_row_that_fills_the_lanes_keeps_its_last_token():
    for length, kept in ((15, 14), (16, 16), (17, 16), (32, 32)):
        batch = collate([row(list(range(length)), [0] * (length - 1) + [1])], packed=True)
        assert batch.row_lengths == (kept,)
        assert batch.targets_N.tolist() == [length - 1] and batch.positions_N.tolist() == [length - 2]


def test_a_row_of_one_token_predicts_nothing_and_is_not_an_input():
    batch = collate([row([3], [1]), row([4, 5], [1, 1])], packed=True)
    assert batch.input_ids_BT.tolist() == [[4]]
    assert batch.targets_N.tolist() == [5] and batch.rows_N.tolist() == [0]
