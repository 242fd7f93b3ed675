import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar_ray.algorithm import resample
from rstar_ray.algorithm.resample import error_penalty, format_penalty, total_penalty
from rstar_ray.config import AlgorithmConfig
from rstar_ray.trajectory import TrajectorySummary
from tests.rstar_ray.fabricate import summary

RNG = np.random.default_rng


def resample_on_correct(candidates: Any, keep: int, rng: Any, mode: Any = "paper", **changes: Any) -> list[int]:
    values = {"keep": keep, "resample": mode, "rollouts_per_prompt": max(keep, 32), **changes}
    return resample.resample_on_correct(candidates, AlgorithmConfig(**values), rng)


def candidate(**fields: Any) -> TrajectorySummary:
    return replace(summary(), **fields)


def right(num_failed: int = 0, num_calls: int = 4, num_answers: int = 1) -> TrajectorySummary:
    return candidate(reward=1.0, num_calls=num_calls, num_failed=num_failed, num_answers=num_answers, num_turns=5)


WRONG = candidate(reward=0.0, num_calls=1, num_failed=0, num_answers=1, num_turns=2)


def test_penalties_follow_equations_4_and_5():
    assert error_penalty(0, 0) == 0.5
    assert error_penalty(4, 1) == 0.25
    assert format_penalty(0, 3) == 1.0
    assert format_penalty(1, 3) == 0.0
    assert format_penalty(2, 4) == 0.25
    assert format_penalty(9, 4) == 1.0
    assert total_penalty(right(num_calls=0), AlgorithmConfig()) == 0.5


@pytest.mark.parametrize(
    ("wrong", "correct", "keep", "wrong_kept"),
    [
        (5, 11, 8, 2),  # half of the failures, rounded down
        (8, 12, 16, 6),  # a group that lost rollouts: 8 of 20, and not floor(8 / 2)
        (4, 4, 7, 3),  # an odd target: the successes do not suffice, failures fill up
        (8, 0, 4, 4),  # no positives
        (0, 8, 4, 0),  # no negatives
        (15, 1, 8, 7),  # one success is kept whatever its flaws
        (1, 15, 8, 0),  # floor(1 / 2)
        (3, 4, 7, 3),  # nothing to choose
        (3, 2, 8, 3),  # fewer candidates than keep: all stay
        (20, 12, 4, 2),  # far below half: the failures' share
    ],
)
def test_every_odd_case_has_a_defined_answer(wrong: int, correct: int, keep: int, wrong_kept: int):
    candidates = [WRONG] * wrong + [right(num_failed=i % 3) for i in range(correct)]
    for mode in ("paper", "release"):
        kept = resample_on_correct(candidates, keep, RNG(1), mode)
        assert len(kept) == min(keep, len(candidates)) == len(set(kept))
        if mode == "paper":
            assert sum(candidates[i].reward == 0 for i in kept) == wrong_kept


@pytest.mark.parametrize(
    ("wrong", "correct", "least", "wrong_kept"),
    [
        (1, 7, 0, 0),  # as the paper has it: the group's one failure, and with it the signal, is gone
        (1, 7, 1, 1),
        (1, 7, 2, 1),  # the least of a side is what there is of it
        (3, 5, 1, 1),
        (3, 5, 2, 2),
        (6, 2, 2, 3),  # more than the least anyway
        (3, 5, 3, 3),  # a success keeps its place
        (0, 8, 2, 0),
    ],
)
def test_the_least_failures_of_a_group_are_kept_where_they_are(wrong: int, correct: int, least: int, wrong_kept: int):
    candidates = [WRONG] * wrong + [right()] * correct
    kept = resample_on_correct(candidates, 4, RNG(0), least_failures=least)
    assert len(kept) == 4 and sum(candidates[i].reward == 0 for i in kept) == wrong_kept


def test_successes_are_drawn_with_probability_inverse_to_their_penalty():
    # p = 0, which comes first, and 1/4, 1/2, 1
    candidates = [right(), right(num_failed=1), right(num_failed=2), right(num_failed=4)]
    rng = RNG(2)
    drawn = Counter(resample_on_correct(candidates, 2, rng)[1] for _ in range(8_000))
    for index, share in enumerate((4 / 7, 2 / 7, 1 / 7), start=1):
        assert drawn[index] / 8_000 == pytest.approx(share, abs=0.015)


def test_flawless_successes_come_first_and_uniformly():
    candidates = [right(), right(), right(), right(num_failed=1), right(num_failed=2)]
    rng = RNG(3)
    drawn = Counter(i for _ in range(6_000) for i in resample_on_correct(candidates, 2, rng))
    assert set(drawn) == {0, 1, 2}
    assert all(count == pytest.approx(4_000, rel=0.06) for count in drawn.values())


def test_failures_are_drawn_uniformly():
    candidates = [WRONG] * 6 + [right()] * 2
    rng = RNG(4)
    drawn = Counter(i for _ in range(6_000) for i in resample_on_correct(candidates, 4, rng) if i < 6)
    assert all(count == pytest.approx(3_000, rel=0.06) for count in drawn.values())


def test_the_release_sorts_and_cuts_and_keeps_two_a_side():
    candidates = [WRONG] * 3 + [right(num_failed=i) for i in (3, 0, 2, 1, 4)]
    kept = resample_on_correct(candidates, 4, RNG(5), "release")
    assert kept == [0, 1, 4, 6]
    one_side = resample_on_correct(
        candidates,
        4,
        RNG(5),
        "release",
        min_zero_reward_trace_num=0,
        min_non_zero_reward_trace_num=3,
    )
    assert one_side == [0, 4, 5, 6]


@pytest.mark.parametrize("mode", ["paper", "release"])
def test_each_part_of_the_penalty_can_be_switched_off(mode: str):
    flawed, unclean = right(num_failed=4), right(num_answers=6)
    group = [flawed, unclean, right(), WRONG, WRONG]
    for part, chosen in (("roc_error_ratio", 0), ("roc_answer_format", 1)):
        kept = resample_on_correct(group, 3, RNG(0), mode, **{part: False}, min_zero_reward_trace_num=0)
        assert {2, chosen} <= set(kept) and 1 - chosen not in kept


@pytest.mark.parametrize(
    ("candidates", "keep", "wrong", "wrong_kept"),
    [
        (32, 16, 7, 4),
        (32, 16, 9, 4),
        (32, 16, 11, 6),
        (32, 16, 15, 8),
        (32, 16, 19, 10),
        (32, 16, 23, 12),
        (32, 16, 27, 14),
        (16, 8, 7, 4),
        (16, 8, 11, 6),
        (32, 16, 1, 1),  # the least of a side is what there is of it
        (32, 16, 3, 2),
        (32, 16, 31, 15),
        (32, 8, 14, 4),  # 3.5
        (8, 7, 4, 4),  # 3.5 on both sides, where the release fails on the sum
    ],
)
def test_the_release_rounds_a_sides_share_halves_to_even(candidates: int, keep: int, wrong: int, wrong_kept: int):
    group = [WRONG] * wrong + [right()] * (candidates - wrong)
    kept = resample_on_correct(group, keep, RNG(0), "release")
    assert len(kept) == keep and sum(index < wrong for index in kept) == wrong_kept


def test_at_random_every_candidate_is_as_likely_whatever_its_reward_and_penalty():
    group = [replace(WRONG, reward=1.0), replace(WRONG, reward=1.0, num_failed=1), WRONG, WRONG]
    counts = np.zeros(4)
    for seed in range(2_000):
        kept = resample_on_correct(group, 2, RNG(seed), "random")
        assert len(set(kept)) == 2 and kept == sorted(kept)
        counts[kept] += 1
    assert counts / 2_000 == pytest.approx(0.5, abs=0.04)
    assert resample_on_correct(group, 4, RNG(0), "random") == [0, 1, 2, 3]


@pytest.mark.parametrize("mode", ["paper", "release"])
def test_a_half_right_rollout_does_not_replace_a_fully_right_one_because_its_calls_are_clean(mode: str):
    full, half = right(num_failed=1), replace(right(), reward=0.5)
    group = [full] * 12 + [half] * 16 + [WRONG] * 4
    kept = Counter(group[i].reward for i in resample_on_correct(group, 16, RNG(0), mode))
    assert kept == {1.0: 6, 0.5: 8, 0.0: 2}
    without_failures = Counter(group[i].reward for i in resample_on_correct(group[:28], 14, RNG(0), mode))
    assert without_failures == {1.0: 6, 0.5: 8}


@pytest.mark.parametrize("mode", ["paper", "release"])
def test_penalties_decide_between_rollouts_of_equal_reward(mode: str):
    clean, flawed = right(), right(num_failed=2)
    group = [flawed] * 4 + [clean] * 4 + [replace(flawed, reward=0.3)] * 4 + [replace(clean, reward=0.1 + 0.2)] * 4
    assert resample_on_correct(group, 8, RNG(0), mode) == [4, 5, 6, 7, 12, 13, 14, 15]


@pytest.mark.parametrize("mode", ["paper", "release"])
def test_a_rare_reward_is_kept_as_often_as_its_share_says(mode: str):
    group = [right(num_failed=4)] + [replace(right(), reward=0.5)] * 10
    draws = [resample_on_correct(group, 5, RNG(seed), mode) for seed in range(4_000)]
    assert all(len(set(kept)) == 5 for kept in draws)
    assert sum(0 in kept for kept in draws) / len(draws) == pytest.approx(5 / 11, abs=0.03)


@pytest.mark.parametrize("mode", ["paper", "release"])
def test_where_all_rewards_differ_each_success_is_as_likely_whatever_its_penalty(mode: str):
    group = [replace(right(num_failed=i % 5), reward=1 + i / 7) for i in range(9)]
    rng = RNG(8)
    drawn = Counter(i for _ in range(4_000) for i in resample_on_correct(group, 4, rng, mode))
    assert all(drawn[i] / 4_000 == pytest.approx(4 / 9, abs=0.03) for i in range(9))


def test_what_cannot_be_is_refused_by_name():
    for num_calls, num_failed, named in ((2, 5, "num_failed"), (0, 1, "num_failed"), (3, -1, "num_failed")):
        with pytest.raises(ValueError, match=named):
            error_penalty(num_calls, num_failed)
    with pytest.raises(ValueError, match="num_calls"):
        error_penalty(-1, 0)
    for reward in (math.nan, math.inf):
        unknown = replace(WRONG, reward=reward)
        for group in ([unknown], [unknown] * 4):
            with pytest.raises(ValueError, match="reward"):
                resample_on_correct(group, 2, RNG(0))


@given(
    st.lists(
        st.builds(
            candidate,
            reward=st.sampled_from([0.0, 1.0]) | st.floats(-5, 5),
            num_calls=st.just(5),
            num_failed=st.integers(0, 5),
            num_answers=st.integers(0, 4),
            num_turns=st.integers(1, 6),
        ),
        max_size=40,
    ),
    st.integers(2, 40),
    st.sampled_from(["paper", "release"]),
)
def test_whatever_the_group_exactly_keep_distinct_ones_stay(candidates: list[TrajectorySummary], keep: int, mode: str):
    kept = resample_on_correct(candidates, keep, RNG(0), mode)  # type: ignore[arg-type]
    assert kept == sorted(set(kept))
    assert len(kept) == min(keep, len(candidates))
    assert all(0 <= index < len(candidates) for index in kept)
