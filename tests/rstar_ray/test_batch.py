"""Plans: every row once, padding small, ranks balanced. Micro batches: the tokens where they belong."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar_ray.algorithm.batch import TokenRow, collate, rl_row, sft_row
from rstar_ray.algorithm.batch_plan import (
    BatchLimits,
    balance,
    cheapest_cut,
    cut,
    fill,
    padding_waste,
    plan_ranks,
    row_work,
)
from rstar_ray.algorithm.update import SftExample
from rstar_ray.outcome import Outcome
from rstar_ray.trajectory import Problem
from tests import derived
from tests.rstar_ray.fabricate import trajectory

LIMITS = derived.limits(micro_batch_tokens=2_048)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 3_000), max_size=60),
    world_size=st.integers(1, 7),
    tokens=st.integers(1, 5_000),
)
def test_every_row_is_planned_once_and_all_ranks_get_as_many_micro_batches(
    lengths: list[int], world_size: int, tokens: int
):
    plan = plan_ranks(lengths, world_size, derived.limits(micro_batch_tokens=tokens))
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


def test_fewer_passes_are_made_where_padding_allows():
    lengths = [100, 99, 98, 50, 49]
    few = cut(lengths, range(5), derived.limits(micro_batch_tokens=1_000, max_padding=0.5))
    many = cut(lengths, range(5), derived.limits(micro_batch_tokens=1_000, max_padding=0.02))
    assert (few, many) == ([[0, 1, 2, 3, 4]], [[0, 1, 2], [3, 4]])


@given(st.lists(st.integers(1, 90), max_size=40), st.integers(20, 200))
def test_packed_micro_batches_hold_every_row_once_within_the_budget(lengths: list[int], budget: int):
    limits = derived.limits(micro_batch_tokens=budget, packed=True)
    batches = cut(lengths, range(len(lengths)), limits)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[i] for i in batch) <= budget for batch in batches)
    assert batches == cut(lengths, range(len(lengths)), limits)


def test_packed_micro_batches_are_few_and_even():
    lengths = tiny_lengths(64)
    batches = cut(lengths, range(64), derived.limits(micro_batch_tokens=2_048, packed=True))
    sizes = [sum(lengths[i] for i in batch) for batch in batches]
    assert len(batches) == -(-sum(lengths) // 2_048)
    assert max(sizes) - min(sizes) < 100


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
        (long_lengths(8_192), 64, derived.limits(micro_batch_tokens=32_768, attention_tokens=64_000)),
        (long_lengths(512), 8, derived.limits(micro_batch_tokens=32_768, attention_tokens=64_000)),
    ],
)
def test_padding_is_at_most_five_per_cent(lengths: list[int], world_size: int, limits: BatchLimits):
    assert padding_waste(lengths, plan_ranks(lengths, world_size, limits)) <= 0.05


def test_ranks_are_balanced_by_work_attention_included():
    lengths = long_lengths(8_192)
    plan = plan_ranks(lengths, 64, derived.limits(micro_batch_tokens=32_768, attention_tokens=8_000))
    work = [sum(row_work(lengths[i], 8_000) for batch in batches for i in batch) for batches in plan]
    assert max(work) / min(work) < 1.01


def test_the_plan_is_the_same_every_time():
    lengths = long_lengths(300)
    assert plan_ranks(lengths, 3, LIMITS) == plan_ranks(list(lengths), 3, LIMITS)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_without_a_token_are_planned_too(packed: bool):
    plan = plan_ranks([0, 0, 0, 0], 2, derived.limits(packed=packed))
    assert sorted(i for batches in plan for batch in batches for i in batch) == [0, 1, 2, 3]
    assert plan_ranks([], 2, derived.limits(packed=packed)) == [[], []]


@pytest.mark.parametrize("tokens", [0, -1])
def test_a_micro_batch_holds_at_least_one_token(tokens: int):
    with pytest.raises(ValueError, match="micro_batch_tokens must be at least 1"):
        derived.limits(micro_batch_tokens=tokens)


def test_with_fewer_rows_than_ranks_the_others_get_empty_micro_batches():
    plan = plan_ranks([10, 20], 4, LIMITS)
    assert sorted(len(batches[0]) for batches in plan) == [0, 0, 1, 1]
    assert plan_ranks([], 3, LIMITS) == [[], [], []]


# ---------------------------------------------------------------- plans, number by number


def test_the_works_of_a_row_are_its_length_and_its_attention():
    assert row_work(10, 40.0) == 12.5
    assert row_work(10, float("inf")) == 10.0


def test_the_longest_row_goes_to_the_part_with_least_work_and_equals_go_in_order():
    assert balance([5, 9, 5, 1], range(4), 2, float("inf")) == [[1, 3], [0, 2]]
    assert balance([4, 4, 4], range(3), 2, float("inf")) == [[0, 2], [1]]
    assert balance([9, 3, 3, 3], [3, 1], 2, float("inf")) == [[1], [3]]
    # Attention makes one row of 8 heavier than two of 5 (8 + 16 against 5 + 6.25 each).
    assert balance([8, 5, 5, 1], range(4), 2, 4.0) == [[0], [1, 2, 3]]
    assert balance([8, 5, 5, 1], range(4), 2, float("inf")) == [[0, 3], [1, 2]]


def test_a_rank_with_fewer_micro_batches_cuts_its_largest_in_two():
    ten, hundred = (derived.limits(micro_batch_tokens=tokens, packed=True) for tokens in (10, 100))
    assert plan_ranks([10, 10, 10, 3, 3, 3], 2, ten) == [[[0], [2]], [[1], [3, 4, 5]]]
    assert plan_ranks([90, 34, 33, 33, 20], 2, hundred) == [[[0], [4]], [[1], [2, 3]]]
    assert plan_ranks([90, 50, 50, 20], 2, hundred) == [[[0], [3]], [[1], [2]]]
    assert plan_ranks([12, 1, 1, 1, 1, 1, 7], 2, ten) == [[[0], []], [[6], [1, 2, 3, 4, 5]]]


def test_filling_takes_as_few_micro_batches_as_hold_the_rows():
    assert fill([5, 5], range(2), 10) == [[0, 1]]
    assert fill([6, 5], range(2), 10) == [[0], [1]]
    assert fill([20, 5, 6], range(3), 10) == [[0], [2], [1]]
    assert fill([6, 6, 6, 2], range(4), 10) == [[0, 3], [1], [2]]
    assert fill([], [], 10) == []


def test_the_cheapest_cut_weighs_padding_against_a_pass():
    assert cheapest_cut([10, 6], 100, 3) == [range(0, 1), range(1, 2)]  # 10 + 6 + 6 against 20 + 3
    assert cheapest_cut([10, 7], 100, 4) == [range(0, 2)]  # 10 + 7 + 8 against 20 + 4
    assert cheapest_cut([10, 10], 20, 1) == [range(0, 2)]
    assert cheapest_cut([10, 10], 19, 1) == [range(0, 1), range(1, 2)]
    assert cheapest_cut([50], 19, 7) == [range(0, 1)]
    assert cheapest_cut([], 19, 7) == []


def test_padding_is_counted_over_all_ranks_and_micro_batches():
    assert padding_waste([4, 2, 3], [[[0, 1]], [[2], []]]) == pytest.approx(1 - 9 / 11)
    assert padding_waste([4, 4], [[[0, 1]]]) == 0.0
    assert padding_waste([], [[[]]]) == 0.0


def test_the_overhead_is_halved_until_padding_is_within_its_limit():
    lengths = [100, 90, 80, 70]

    def passes(max_padding: float) -> int:
        limits = derived.limits(micro_batch_tokens=1_000, max_padding=max_padding, overhead_tokens=1_024)
        return len(cut(lengths, range(4), limits))

    assert [passes(share) for share in (0.2, 0.149, 0.056, 0.055, 0.0)] == [1, 2, 2, 4, 4]
    assert passes(1 - 340 / 400) == 1  # exactly at the limit


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


def test_a_conversation_becomes_a_row_that_counts_its_tokens_with_a_loss():
    example = SftExample(np.arange(6, dtype=np.int32), np.array([0, 0, 1, 1, 0, 0], np.bool_), "file:3")
    tokens = sft_row(example, 0.5)
    assert (tokens.name, tokens.num_sampled_tokens, len(tokens.token_ids), tokens.token_weight) == ("file:3", 2, 4, 0.5)


def test_a_micro_batch_moves_whole_to_a_device():
    moved = collate(ROWS, packed=True).to(torch.device("meta"))
    assert {moved.input_ids_BT.device.type, moved.weights_N.device.type, moved.rows_N.device.type} == {"meta"}


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


def test_a_row_of_one_token_predicts_nothing_and_is_no_input():
    batch = collate([row([3], [1]), row([4, 5], [1, 1])], packed=True)
    assert batch.input_ids_BT.tolist() == [[4]]
    assert batch.targets_N.tolist() == [5] and batch.rows_N.tolist() == [0]


def test_rows_without_log_probs_of_an_engine_have_zeros_there():
    batch = collate([TokenRow("sft", np.array([1, 2, 3], np.int32), np.ones(3, np.bool_))])
    assert batch.rollout_logprobs_N.tolist() == [0.0, 0.0]
    assert batch.advantages_N.tolist() == batch.weights_N.tolist() == [1.0, 1.0]


def test_a_trimmed_row_keeps_everything_else():
    whole = row([1, 2, 3, 4], [1, 1, 0, 0], advantage=0.5, weight=0.25)
    cut_row = whole.trimmed()
    assert (cut_row.name, cut_row.advantage, cut_row.token_weight) == ("r", 0.5, 0.25)
    assert cut_row.rollout_logprobs is not None and cut_row.rollout_logprobs.tolist() == [0.0, -1.0]
    assert whole.num_sampled_tokens == cut_row.num_sampled_tokens == 1  # the first token never counts
    full = row([1, 2], [0, 1])
    assert full.trimmed() is full
