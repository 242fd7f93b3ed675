"""The estimate of lengths against a slow reading of the same definitions, one rollout and one bin at a time."""

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
import pytest

from scheduler.expected_kv.estimate import FIRST_MEAN, SPARSE_MEAN, LengthEstimate

MOST = 6_000
NORMAL = NormalDist()
EDGES = [MOST * (bin_ / 48) ** 1.5 for bin_ in range(49)]
FACTORS = [-2.8 + 0.35 * k for k in range(17)]


@dataclass
class Life:
    group: str
    age: float
    died: bool = False  # by the policy's own choice


@dataclass
class Plain:
    """Kaplan and Meier's hazard with a prior, and a one-factor Gaussian copula, in Python floats."""

    lives: list[Life]
    past_deaths: list[float] = field(default_factory=lambda: [0.0] * 48)
    past_tokens: list[float] = field(default_factory=lambda: [0.0] * 48)
    alikeness: float = 0.35
    _given: dict[tuple[float, int], list[list[float]]] = field(default_factory=dict)

    def deaths(self, bin_: int) -> float:
        last = bin_ == 47
        inside = [life for life in self.lives if EDGES[bin_] <= life.age and (last or life.age < EDGES[bin_ + 1])]
        return float(sum(life.died for life in inside))

    def at_risk(self, bin_: int) -> float:
        low, high = EDGES[bin_], EDGES[bin_ + 1]
        return sum(min(max(life.age - low, 0.0), high - low) for life in self.lives)

    def population(self) -> list[float]:
        """Survival at every edge."""
        mean = SPARSE_MEAN if any(self.past_deaths) else FIRST_MEAN
        assumed = rates(self.past_deaths, self.past_tokens, [1.0 / (mean * MOST)] * 48)
        now = [self.deaths(b) for b in range(48)], [self.at_risk(b) for b in range(48)]
        hazard, survival = 0.0, [1.0]
        for bin_, rate in enumerate(rates(*now, assumed)):
            hazard += rate * (EDGES[bin_ + 1] - EDGES[bin_])
            survival.append(math.exp(-hazard))
        return survival

    def given(self, alikeness: float) -> list[list[float]]:
        """For every factor of a group: log survival at every edge of its rollouts."""
        key = (alikeness, len(self.lives))
        if key not in self._given:
            scores = [NORMAL.inv_cdf(1.0 - alive) for alive in self.population()[1:]]
            own = [[(s - math.sqrt(alikeness) * u) / math.sqrt(1.0 - alikeness) for s in scores] for u in FACTORS]
            self._given[key] = [[0.0] + [max(math.log(max(NORMAL.cdf(-x), 1e-300)), -60.0) for x in row] for row in own]
        return self._given[key]

    def posterior(self, group: str, alikeness: float) -> tuple[list[float], float]:
        """Of the group's factor on the grid, and the log evidence."""
        weights = [math.exp(-0.5 * u * u) for u in FACTORS]
        chances = [weight / sum(weights) for weight in weights]
        for k, logs in enumerate(self.given(alikeness)):
            for life in self.lives:
                if life.group == group and life.died:
                    b = bin_of(life.age)
                    chances[k] *= math.exp(logs[b]) - math.exp(logs[b + 1])
                elif life.group == group:
                    chances[k] *= math.exp(log_at(logs, life.age))
        return [chance / sum(chances) for chance in chances], math.log(sum(chances))

    def alive(self, group: str, age: float, horizon: float) -> tuple[float, float]:
        """The chance to come so much further, and two siblings' covariance of it."""
        if age + horizon >= MOST:
            return 0.0, 0.0
        factors, _ = self.posterior(group, self.alikeness)
        further = []
        for logs in self.given(self.alikeness):
            further.append(math.exp(log_at(logs, age + horizon) - log_at(logs, age)))
        mean = sum(f * s for f, s in zip(factors, further, strict=True))
        return mean, sum(f * s * s for f, s in zip(factors, further, strict=True)) - mean * mean

    def remaining(self, group: str, age: float) -> float:
        alive = [self.alive(group, age, edge)[0] for edge in EDGES]
        return sum((EDGES[b + 1] - EDGES[b]) * (alive[b] + alive[b + 1]) / 2 for b in range(48))

    def forget(self, keep: float, groups: set[str]) -> "Plain":
        """These groups' lives become part of a past that counts less."""
        old = Plain([life for life in self.lives if life.group in groups], self.past_deaths, self.past_tokens)
        rest = [life for life in self.lives if life.group not in groups]
        deaths = [keep * (self.past_deaths[b] + old.deaths(b)) for b in range(48)]
        tokens = [keep * (self.past_tokens[b] + old.at_risk(b)) for b in range(48)]
        return Plain(rest, deaths, tokens, self.alikeness)


def rates(deaths: list[float], tokens: list[float], assumed: list[float]) -> list[float]:
    """Ends per token of every bin, to which two ends at the assumed rate are added."""
    return [(died + 2.0) / (risk + 2.0 / rate) for died, risk, rate in zip(deaths, tokens, assumed, strict=True)]


def bin_of(age: float) -> int:
    return min(bisect_right(EDGES, age) - 1, 47)


def log_at(logs: list[float], age: float) -> float:
    b = bin_of(age)
    share = min((age - EDGES[b]) / (EDGES[b + 1] - EDGES[b]), 1.0)
    return logs[b] + share * (logs[b + 1] - logs[b])


def feed(estimate: LengthEstimate, lives: list[Life]) -> dict[str, int]:
    """Every life, at its age; returns each group's index."""
    groups = {life.group: estimate.add_group(life.group) for life in lives}
    for number, life in enumerate(lives):
        row = estimate.start(groups[life.group], 0.0)
        if life.died or number % 2:  # a rollout that a budget cut has survived, as one that still runs
            estimate.end(row, life.age, truncated=not life.died)
        else:
            estimate.grow(row, life.age)
    estimate.refresh()
    return groups


def lives(groups: int, siblings: int, seed: int, *, alike: float = 0.6) -> list[Life]:
    rng = np.random.default_rng(seed)
    ages = 1_500 * np.exp(rng.normal(0, alike, (groups, 1)) + rng.normal(0, 0.5, (groups, siblings)))
    return [
        Life(f"g{group}", min(round(age, 1), float(MOST)), age < MOST and rng.random() < 0.6)
        for group, row in enumerate(ages.tolist())
        for age in row
    ]


def agrees(estimate: LengthEstimate, plain: Plain, groups: dict[str, int]) -> None:
    ages, horizons = [0.0, 700.0, 2_345.6, 5_990.0], [0.0, 10.0, 333.0, 1_700.0, 5_999.0]
    for group, index in [*list(groups.items())[:2], list(groups.items())[-1]]:
        alive_NH, shared_NH = estimate.survivals(np.full(4, index), np.array(ages), np.array(horizons))
        for row, age in enumerate(ages):
            expected = [plain.alive(group, age, horizon) for horizon in horizons]
            assert alive_NH[row] == pytest.approx([mean for mean, _ in expected], abs=1e-9)
            assert shared_NH[row] == pytest.approx([covariance for _, covariance in expected], abs=1e-9)
    group, index = next(iter(groups.items()))
    remaining = estimate.mean_remaining(np.array([index]), np.array([700.0]))[0]
    assert remaining == pytest.approx(plain.remaining(group, 700.0), rel=1e-9)


def test_before_anything_is_seen_the_mean_is_what_the_prior_says():
    estimate = LengthEstimate(MOST)
    agrees(estimate, Plain([]), {"new": estimate.add_group("new")})


def test_survival_covariance_and_what_remains_are_those_of_the_definitions():
    seen = lives(groups=5, siblings=6, seed=0)
    estimate = LengthEstimate(MOST)
    agrees(estimate, Plain(seen), feed(estimate, seen) | {"fresh": estimate.add_group("fresh")})


@pytest.mark.parametrize("alike", [0.05, 0.4, 1.2])
def test_how_alike_siblings_are_is_the_likeliest_of_a_few_values(alike: float):
    seen = lives(groups=20, siblings=6, seed=1, alike=alike)
    estimate, plain = LengthEstimate(MOST), Plain(seen)
    feed(estimate, seen)
    tried = [0.0, 0.05, 0.2, 0.35, 0.5, 0.65, 0.8]
    evidence = {r2: sum(plain.posterior(f"g{group}", r2)[1] for group in range(20)) for r2 in tried}
    assert estimate.alikeness == max(tried, key=evidence.__getitem__)


def test_what_is_forgotten_counts_half_and_leaves_the_living_as_they_are():
    seen = lives(groups=6, siblings=14, seed=2)
    for life in seen:
        life.died = life.died or life.group in ("g1", "g4")  # these groups have ended
    estimate, plain = LengthEstimate(MOST), Plain(seen)
    feed(estimate, seen)
    plain.alikeness = estimate.alikeness
    done = {"g1", "g4"}
    estimate.forget_finished()
    groups = {f"g{n}": estimate.add_group(f"g{n}") for n in (0, 2, 3, 5)}
    assert sorted(groups.values()) == [0, 1, 2, 3] and estimate.num_groups == 4
    plain = plain.forget(0.5, done)
    plain.alikeness = estimate.alikeness
    agrees(estimate, plain, groups)
    more = lives(groups=3, siblings=40, seed=3)
    for life in more:
        life.group += "new"
    groups |= feed(estimate, more)
    plain.lives += more
    plain.alikeness = estimate.alikeness
    agrees(estimate, plain, groups)


def test_history_counts_whole_and_leaves_no_group():
    estimate = LengthEstimate(MOST)
    past = [Life("a", 800.0, True), Life("a", 900.0, True), Life("b", float(MOST)), Life("c", 2_000.0, True)]
    estimate.add_history([(life.group, life.age, not life.died) for life in past])
    assert estimate.num_groups == 0
    agrees(estimate, Plain(past).forget(1.0, {"a", "b", "c"}), {"new": estimate.add_group("new")})


def test_what_has_survived_is_known_without_a_report():
    estimate = LengthEstimate(MOST)
    group = estimate.add_group("g")
    rows = [estimate.start(group, 0.0) for _ in range(70)]
    estimate.survive(np.array(rows[1::2]), np.full(35, 1_234.0))
    estimate.refresh()
    seen = [Life("g", 1_234.0 if row % 2 else 0.0) for row in range(70)]
    agrees(estimate, Plain(seen), {"g": group})
    assert rows == list(range(70))


def test_a_dropped_rows_place_is_used_again_with_nothing_of_before():
    estimate = LengthEstimate(MOST)
    a, b = estimate.add_group("a"), estimate.add_group("b")
    row = estimate.start(a, 10.0)
    estimate.end(row, 20.0, truncated=False)
    dropped = estimate.start(a, 500.0)
    estimate.drop(dropped)
    assert estimate.start(b, 30.0) == dropped
    assert estimate.start(b, 40.0) == dropped + 1
    estimate.refresh()
    agrees(estimate, Plain([Life("a", 20.0, True), Life("b", 30.0), Life("b", 40.0)]), {"a": a, "b": b})
    estimate.forget_finished(keep=1.0)
    assert estimate.num_groups == 1 and estimate.add_group("b") == 0


def test_what_was_dropped_is_not_evidence_when_its_group_is_forgotten():
    estimate = LengthEstimate(MOST)
    group = estimate.add_group("last")
    estimate.end(estimate.start(group, 0.0), 900.0, truncated=False)
    estimate.drop(estimate.start(group, 4_000.0))
    estimate.forget_finished(keep=1.0)
    assert estimate.num_groups == 0
    past = Plain([Life("last", 900.0, True)]).forget(1.0, {"last"})
    agrees(estimate, past, {"new": estimate.add_group("new")})
