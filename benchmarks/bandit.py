"""What a rule of resampling does to learning, in seconds: a policy of a few coins under the product's own rules.

python -m benchmarks.bandit

Each family of problems has two coins: whether a rollout's answer is right, and whether its first tool call fails. They
are independent, so that reward alone says nothing about failed calls. Groups are drawn, resampled and given advantages
by the code that training uses; the coins move along the policy gradient. No engine and no model: what comes out says
how the rules differ, and not how well anything learns.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rstar_ray.algorithm.advantage import group_advantages, rewards_differ
from rstar_ray.algorithm.resample import Candidate, resample_on_correct
from rstar_ray.config import AlgorithmConfig
from rstar_ray.seeds import named_generator

FAMILIES = 15
PROMPTS = 32
"""Groups of a step."""
STEPS = 60
EARLY = 34
"""Steps of stage 1 in the tiny world."""
LATE = 10
"""The last steps, over which shares of groups are taken."""
RIGHT, FAILS = 0.4, 0.3
"""Where the coins start."""
RATE = 0.15
"""How far one step moves a coin's log-odds: stage 1 of the tiny world goes from 0.4 to above 0.9."""
FORMS = {
    "plain GRPO": AlgorithmConfig(rollouts_per_prompt=8, keep=4, resample="none"),
    "paper": AlgorithmConfig(rollouts_per_prompt=8, keep=4),
    "paper, least failures 1": AlgorithmConfig(rollouts_per_prompt=8, keep=4, least_failures=1),
    "paper, least failures 2": AlgorithmConfig(rollouts_per_prompt=8, keep=4, least_failures=2),
    "release": AlgorithmConfig(rollouts_per_prompt=8, keep=4, resample="release"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One run's ends; shares."""

    right_early: float  # after `EARLY` steps
    right: float  # after all
    fails: float  # of first calls in right rollouts, after all
    groups_trained: float  # over the last steps


def learn(algorithm: AlgorithmConfig, seed: int) -> Course:
    """`STEPS` steps from the same start."""
    rng = named_generator(seed, "bandit")
    logits = np.array([[_logit(RIGHT), _logit(FAILS)]] * FAMILIES)  # [family, coin]
    trained: list[float] = []
    right_early = RIGHT
    for step in range(1, STEPS + 1):
        gradient, telling = _gradient(_share(logits), algorithm, rng)
        logits = logits + RATE * gradient
        trained.append(telling / PROMPTS)
        if step == EARLY:
            right_early = float(_share(logits)[:, 0].mean())
    right, fails = _share(logits).mean(axis=0)
    return Course(
        right_early=right_early, right=float(right), fails=float(fails), groups_trained=sum(trained[-LATE:]) / LATE
    )


def _gradient(
    shares: NDArray[np.float64], algorithm: AlgorithmConfig, rng: np.random.Generator
) -> tuple[NDArray[np.float64], int]:
    """Mean over a step's rows of advantage times (coin - share), by family; and how many groups had a signal."""
    total, rows, telling = np.zeros_like(shares), 0, 0
    for family in rng.integers(len(shares), size=PROMPTS):
        coins = rng.random((algorithm.num_rollouts, 2)) < shares[family]  # [rollout, (right, first call fails)]
        kept = _kept(coins, algorithm, rng)
        rewards = [float(right) for right, _ in kept]
        if not rewards_differ(rewards):
            continue
        advantages = group_advantages(rewards, deviation=algorithm.advantage_std)
        total[family] += (advantages[:, None] * (kept - shares[family])).sum(axis=0)
        rows, telling = rows + len(kept), telling + 1
    return total * len(shares) / max(1, rows), telling


def _kept(coins: NDArray[np.bool_], algorithm: AlgorithmConfig, rng: np.random.Generator) -> NDArray[np.bool_]:
    """A rollout whose first call fails has a second one."""
    if algorithm.resample == "none":
        return coins
    candidates = [
        Candidate(reward=float(right), num_calls=1 + int(fails), num_failed=int(fails), num_answers=1, num_turns=2)
        for right, fails in coins
    ]
    return coins[resample_on_correct(candidates, algorithm, rng)]


def telling_share(right: float, algorithm: AlgorithmConfig, *, draws: int = 4_000, seed: int = 0) -> float:
    """Share of groups with a signal at this chance of a right answer."""
    rng = named_generator(seed, "bandit", "groups")
    told = 0
    for _ in range(draws):
        kept = _kept(rng.random((algorithm.num_rollouts, 2)) < (right, 0.0), algorithm, rng)
        told += rewards_differ([float(is_right) for is_right, _ in kept])
    return told / draws


def _share(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1.0 / (1.0 + np.exp(-logits))


def _logit(share: float) -> float:
    return math.log(share / (1.0 - share))


def _cell(values: Sequence[float]) -> str:
    """Mean and 95 % interval of the mean, in percent."""
    half = 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return f"{100 * float(np.mean(values)):.1f} ± {100 * half:.1f}"


def main(seeds: int = 20) -> None:
    """Print both tables."""
    head = (
        f"{seeds} seeds, %",
        f"right after {EARLY}",
        f"right after {STEPS}",
        "first calls that fail",
        "groups, late",
    )
    print(f"| {' | '.join(head)} |\n|---|---|---|---|---|")
    for name, algorithm in FORMS.items():
        courses = [learn(algorithm, seed) for seed in range(seeds)]
        columns = ("right_early", "right", "fails", "groups_trained")
        print(
            f"| {name} | {' | '.join(_cell([getattr(course, c) for course in courses]) for c in columns)} |", flush=True
        )
    chances = (0.5, 0.8, 0.9, 0.95, 0.99)
    print(f"\n| groups with a signal, % | {' | '.join(f'{100 * chance:.0f} % right' for chance in chances)} |")
    print("|---|---|---|---|---|---|")
    for name, algorithm in FORMS.items():
        print(f"| {name} | {' | '.join(f'{100 * telling_share(c, algorithm):.0f}' for c in chances)} |", flush=True)


if __name__ == "__main__":
    main()
