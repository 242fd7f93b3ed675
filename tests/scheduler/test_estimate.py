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


def test_a_gap_in_which_nobody_ends_is_learned_as_a_gap():
    rng = np.random.default_rng(4)
    lengths = np.where(rng.random(800) < 0.25, rng.uniform(5_500, 8_000, 800), rng.uniform(300, 1_000, 800))
    estimate = filled([[float(length)] for length in lengths])
    fresh = np.array([estimate.add_group("fresh")])
    assert estimate.survival(fresh, np.array([1_100.0]), np.array([4_300.0]))[0, 0] > 0.95


def test_an_earlier_step_is_believed_as_far_as_this_one_bears_it_out():
    estimate = LengthEstimate(8_000)
    estimate.remember([(f"old{n}", 1_000.0 + n % 400, False) for n in range(600)])
    fresh = np.array([estimate.add_group("fresh")])
    before = estimate.survival(fresh, np.zeros(1), np.array([2_000.0]))[0, 0]
    for _ in range(100):
        estimate.grow(estimate.start(int(fresh[0]), 0.0), 1_800.0)
    estimate.refresh()
    other = np.array([estimate.add_group("other")])
    assert before < 0.05 < 0.8 < estimate.survival(other, np.zeros(1), np.array([1_600.0]))[0, 0]


def test_a_rush_of_ends_is_not_believed_to_go_on_where_nobody_has_been():
    estimate = LengthEstimate(8_000)
    rng = np.random.default_rng(5)
    for number in range(200):
        row = estimate.start(estimate.add_group(f"g{number}"), 0.0)
        if number < 100:
            estimate.end(row, float(rng.uniform(300, 900)), truncated=False)
        else:
            estimate.grow(row, 900.0)
    estimate.refresh()
    fresh = np.array([estimate.add_group("fresh")])
    assert estimate.survival(fresh, np.array([900.0]), np.array([6_000.0]))[0, 0] > 0.15


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


def test_what_is_still_to_come_is_told_without_bias_and_with_the_right_spread():
    """Running groups at one age, told by a thousand earlier rollouts: the sum alive later, against what happens."""
    rng = np.random.default_rng(3)

    def lengths(groups: int) -> list[list[float]]:
        return [list(np.minimum(rng.lognormal(7.8 + z, 0.5, 16), 8_000.0)) for z in rng.normal(0, 0.5, groups)]

    estimate = filled(lengths(300))
    age, later, errors = 1_500.0, np.array([1_500.0]), []
    for number, group in enumerate(lengths(200)):
        index = estimate.add_group(f"new{number}")
        for length in group:
            slot = estimate.start(index, min(age, length))
            if length <= age:
                estimate.end(slot, length, truncated=False)
    estimate.refresh()
    rng = np.random.default_rng(3)
    lengths(300)
    for number, group in enumerate(lengths(200)):
        running = [length for length in group if length > age]
        if not running:
            continue
        index = np.array([300 + number])
        alive, shared = (float(table[0, 0]) for table in estimate.survivals(index, np.array([age]), later))
        count = len(running)
        spread = np.sqrt(count * alive * (1 - alive) + count * (count - 1) * shared)
        errors.append((sum(length > age + later[0] for length in running) - count * alive) / max(spread, 0.3))
    assert abs(np.mean(errors)) < 0.15 and 0.8 < np.std(errors) < 1.2


def test_nothing_outlives_its_budget():
    estimate = filled([[8_000.0] * 4] * 20)
    group = np.array([estimate.add_group("fresh")])
    assert estimate.survival(group, np.array([7_900.0]), np.array([50.0, 100.0])).tolist()[0][1] == 0.0
    assert estimate.mean_remaining(group, np.zeros(1))[0] > 7_000


def test_dropped_rollouts_are_no_evidence():
    estimate = LengthEstimate(8_000)
    group = np.array([estimate.add_group("g")])
    before = estimate.mean_remaining(group, np.zeros(1))
    slot = estimate.start(0, 4_000.0)
    estimate.drop(slot)
    estimate.refresh()
    assert estimate.mean_remaining(group, np.zeros(1)) == before and estimate.start(0, 0.0) == slot


def test_memory_stays_flat_over_many_steps():
    estimate = LengthEstimate(8_000)
    for step in range(50):
        for number in range(40):
            slot = estimate.start(estimate.add_group(f"{step}/{number // 4}"), 0.0)
            estimate.end(slot, 1_000.0, truncated=False)
        estimate.forget_finished()
    assert estimate.num_groups == 0
    assert len(estimate._age_R) <= 64
