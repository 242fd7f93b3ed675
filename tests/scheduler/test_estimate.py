"""What is learned of lengths."""

import numpy as np
import pytest

from scheduler.expected_kv.estimate import LengthEstimate


def filled(lengths: list[list[float]], most: int = 8_000) -> LengthEstimate:
    estimate = LengthEstimate(most)
    for number, group in enumerate(lengths):
        index = estimate.add_group(f"g{number}")
        for length in group:
            estimate.end(estimate.start(index, 0.0), length, truncated=length >= most)
    estimate.refresh()
    return estimate


def test_a_gap_in_which_nobody_ends_is_learned_as_a_gap():
    rng = np.random.default_rng(4)
    lengths = np.where(rng.random(16_384) < 0.25, rng.uniform(5_500, 8_000, 16_384), rng.uniform(300, 1_000, 16_384))
    estimate = filled([[float(length)] for length in lengths])
    fresh = np.array([estimate.add_group("fresh")])
    assert estimate.survival(fresh, np.array([1_100.0]), np.array([4_300.0]))[0, 0] > 0.95


def test_what_is_still_to_come_is_estimated_without_bias_and_with_the_right_spread():
    """Running groups at one age, by a thousand earlier rollouts: the sum alive later, against what happens."""
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


@pytest.mark.parametrize(("first", "later", "learned"), [(1.2, 0.0, (0.0, 0.35)), (0.0, 1.2, (0.65, 0.8))])
def test_the_similarity_of_siblings_is_learned_in_every_step(first: float, later: float, learned: tuple[float, float]):
    """Of steps with the same number of rollouts; how far groups differ changes after the first."""
    rng, estimate = np.random.default_rng(5), LengthEstimate(8_000)
    found: list[float] = []
    for step in range(8):
        for number, z in enumerate(rng.normal(0, 1, 20) * (later if step else first)):
            index = estimate.add_group(f"{step}-{number}")
            for length in np.minimum(rng.lognormal(6.5 + z, 0.5, 8), 7_999.0):
                estimate.end(estimate.start(index, 0.0), float(length), truncated=False)
        estimate.refresh()
        found.append(estimate.alikeness)
        estimate.forget_finished()
    assert all(learned[0] <= one <= learned[1] for one in found[5:])
