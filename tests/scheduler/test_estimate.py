"""What is learned of lengths."""

import numpy as np

from scheduler.estimate import LengthEstimate


def filled(lengths: list[list[float]], most: int = 8_000) -> LengthEstimate:
    estimate = LengthEstimate(most)
    for number, group in enumerate(lengths):
        index = estimate.add_group(f"g{number}")
        for length in group:
            estimate.end(estimate.start(index, 0.0), length, truncated=length >= most)
    estimate.refresh()
    return estimate


def test_survival_is_that_of_the_lengths_seen():
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(7.5, 0.7, 2_000), 8_000)
    estimate = filled([[float(length)] for length in lengths])
    fresh = estimate.add_group("fresh")
    at = np.array([500.0, 1_000.0, 2_000.0, 4_000.0])
    alive = estimate.survival(np.array([fresh]), np.zeros(1), at)[0]
    assert np.allclose(alive, [(lengths > a).mean() for a in at], atol=0.03)


def test_running_rollouts_count_as_survived_so_early_ends_do_not_mislead():
    estimate = LengthEstimate(8_000)
    for number in range(100):
        slot = estimate.start(estimate.add_group(f"g{number}"), 0.0)
        if number < 10:
            estimate.end(slot, 200.0, truncated=False)
        else:
            estimate.grow(slot, 1_000.0)
    estimate.refresh()
    fresh = np.array([estimate.add_group("fresh")])
    assert estimate.survival(fresh, np.zeros(1), np.array([1_000.0]))[0, 0] > 0.85


def test_siblings_tell_of_each_other():
    rng = np.random.default_rng(1)
    lengths = [list(np.minimum(rng.lognormal(7.5 + z, 0.4, 8), 7_999.0)) for z in rng.normal(0, 0.6, 100)]
    estimate = filled([*lengths, [100.0] * 8, [6_000.0] * 8])
    means = estimate.mean_remaining(np.array([100, 101]), np.zeros(2))
    assert means[1] > 2 * means[0]


def test_nothing_outlives_its_budget():
    estimate = filled([[8_000.0] * 4] * 20)
    group = np.array([estimate.add_group("fresh")])
    assert estimate.survival(group, np.array([7_900.0]), np.array([50.0, 100.0])).tolist()[0][1] == 0.0
    assert estimate.mean_remaining(group, np.zeros(1))[0] > 7_000


def test_dropped_rollouts_are_no_evidence():
    estimate = LengthEstimate(8_000)
    slot = estimate.start(estimate.add_group("g"), 0.0)
    estimate.drop(slot)
    estimate.refresh()
    assert estimate.deaths_G.sum() == 0 and estimate.start(0, 0.0) == slot


def test_memory_stays_flat_over_many_steps():
    estimate = LengthEstimate(8_000)
    for step in range(50):
        for number in range(40):
            slot = estimate.start(estimate.add_group(f"{step}/{number // 4}"), 0.0)
            estimate.end(slot, 1_000.0, truncated=False)
        estimate.forget_finished()
    assert estimate.num_groups == 0
    assert len(estimate._age_R) <= 64
