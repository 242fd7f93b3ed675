"""Distributions of rollouts by name, with which placement rules are tested.

Legend: G prompt groups, S siblings; lengths are tokens of a whole response. Every kind is a training step with a
previous step (`earlier`), from the same distribution or from one that has shifted since. `family` also draws the
distribution, by its number, so that a rule can be tested on distributions that were not used for tuning.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.traces.stage_traces import STAGES, StageShape, synthetic
from scheduler.traces.trace import TraceRollout, TraceTurn, cut

Floats = NDArray[np.float64]
Random = np.random.Generator

BUDGET_TOKENS = 11_800
SHORTEST_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One distribution of rollouts."""

    summary: str
    lengths_GS: Callable[[Random, tuple[int, int]], Floats]
    shift: float = 1.0  # lengths of this step over those of the previous one
    max_response_tokens: int = BUDGET_TOKENS
    max_turns: int = 10
    calls_mean: float = 2.75  # tool calls of a rollout of mean length
    prompt_tokens: tuple[float, float] = (100.0, 900.0)  # log-uniform between these
    tool_s: tuple[float, ...] = (0.3,)  # means of exponential times, ...
    tool_shares: tuple[float, ...] = (1.0,)  # ... and the probability of each
    tool_tokens_mean: float = 120.0


def log_normal(mean: float, group: float, sibling: float) -> Callable[[Random, tuple[int, int]], Floats]:
    """`mean` is the median of lengths; the others are standard deviations of its logarithm."""

    def lengths(rng: Random, shape: tuple[int, int]) -> Floats:
        return mean * np.exp(group * rng.normal(size=(shape[0], 1)) + sibling * rng.normal(size=shape))

    return lengths


def _bimodal(rng: Random, shape: tuple[int, int]) -> Floats:
    long = rng.random(shape) < 0.25
    return np.where(long, rng.uniform(8_000, 11_800, shape), rng.uniform(300, 1_500, shape))


def _heavy_tail(rng: Random, shape: tuple[int, int]) -> Floats:
    return 600.0 * (1.0 + rng.pareto(1.1, shape))


def _hard_last(rng: Random, shape: tuple[int, int]) -> Floats:
    groups = np.sort(rng.lognormal(7.8, 1.0, shape[0]))
    return groups[:, None] * rng.uniform(0.5, 1.6, shape)


def _mixed_tasks(rng: Random, shape: tuple[int, int]) -> Floats:
    """Half of the prompts need a short answer, half a long program."""
    answers, programs = log_normal(500.0, 0.4, 0.4)(rng, shape), log_normal(6_500.0, 0.35, 0.4)(rng, shape)
    return np.where(rng.random((shape[0], 1)) < 0.5, answers, programs)


KINDS: dict[str, Kind] = {
    "log_normal": Kind(summary="log-normal, siblings alike", lengths_GS=log_normal(4_700.0, 0.5, 0.5)),
    "bimodal": Kind(summary="3 of 4 rollouts short, 1 of 4 long, whatever the prompt", lengths_GS=_bimodal),
    "heavy_tail": Kind(summary="Pareto(1.1), cut by the budget", lengths_GS=_heavy_tail),
    "slow_tools": Kind(
        summary="a fifth of the tool calls takes 4 s",
        lengths_GS=log_normal(2_981.0, 0.5, 0.49),
        tool_s=(0.3, 4.0),
        tool_shares=(0.8, 0.2),
    ),
    "minutes_at_tools": Kind(
        summary="a tenth of the tool calls takes a minute",
        lengths_GS=log_normal(2_981.0, 0.5, 0.49),
        tool_s=(0.3, 60.0),
        tool_shares=(0.9, 0.1),
    ),
    "hard_last": Kind(summary="the longest groups are submitted last", lengths_GS=_hard_last),
    "longer": Kind(summary="twice as long as in the step before", lengths_GS=log_normal(4_700.0, 0.5, 0.5), shift=2.0),
    "briefer": Kind(summary="half as long as in the step before", lengths_GS=log_normal(2_700.0, 0.5, 0.5), shift=0.5),
    "mixed_tasks": Kind(summary="half the prompts want short answers, half long programs", lengths_GS=_mixed_tasks),
    "long_prompts": Kind(
        summary="prompts of 100 to 20,000 tokens",
        lengths_GS=log_normal(2_981.0, 0.5, 0.49),
        prompt_tokens=(100.0, 20_000.0),
    ),
}
NAMES = (*STAGES, *KINDS, "family")


def family(number: int) -> Kind:
    """The distribution with this number, which seeds components, tail, order, prompts, tools and shift."""
    rng = np.random.default_rng([number, 0xFA])
    components = int(rng.integers(1, 4))
    medians = np.exp(rng.uniform(np.log(300), np.log(8_000), components))
    spreads = rng.uniform([0.0, 0.1], [0.9, 0.9], (components, 2))
    weights = rng.dirichlet(np.ones(components))
    by_group, heavy = bool(rng.random() < 0.5), bool(rng.random() < 0.25)
    alpha, order = float(rng.uniform(1.1, 2.5)), str(rng.choice(["drawn", "drawn", "hard_last", "hard_first"]))

    def lengths(draw: Random, shape: tuple[int, int]) -> Floats:
        chosen = draw.choice(components, size=(shape[0], 1) if by_group else shape, p=weights)
        own = spreads[chosen, 0] * draw.normal(size=(shape[0], 1)) + spreads[chosen, 1] * draw.normal(size=shape)
        lengths_GS = medians[chosen] * np.exp(own) * (1.0 + draw.pareto(alpha, shape) if heavy else 1.0)
        if order == "drawn":
            return lengths_GS
        ranked = lengths_GS.mean(axis=1).argsort()
        return lengths_GS[ranked if order == "hard_last" else ranked[::-1]]

    slow_share = float(rng.uniform(0.0, 0.3))
    least_prompt = float(rng.uniform(100, 500))
    return Kind(
        summary=f"number {number} of a family: {components} components, {'groups' if by_group else 'rollouts'} differ, "
        f"{'heavy tail, ' if heavy else ''}{order}",
        lengths_GS=lengths,
        shift=float(np.exp(rng.normal(0.0, 0.25))),
        max_response_tokens=int(rng.choice([4_096, 8_192, 11_800, 16_384])),
        calls_mean=float(rng.uniform(0.0, 5.0)),
        prompt_tokens=(least_prompt, min(20_000.0, least_prompt * float(np.exp(rng.uniform(0.0, np.log(40.0)))))),
        tool_s=(0.3, float(np.exp(rng.uniform(0.0, np.log(30.0))))),
        tool_shares=(1.0 - slow_share, slow_share),
    )


def kind_named(name: str, number: int = 0) -> Kind | StageShape:
    """The kind with this name in `NAMES`; `number` selects a member of the family."""
    if name == "family":
        return family(number)
    return STAGES[name] if name in STAGES else KINDS[name]


def draw(
    kind: Kind | StageShape, *, groups: int = 512, siblings: int = 32, seed: int = 0, earlier: bool = False
) -> list[TraceRollout]:
    """`groups` x `siblings` rollouts of a kind (or stage), or of its previous step; deterministic in its arguments.

    Raises `ValueError` for no group or sibling, or a negative seed.
    """
    if groups < 1 or siblings < 1 or seed < 0:
        raise ValueError(f"groups {groups} and siblings {siblings} must be at least 1, and seed {seed} at least 0")
    if isinstance(kind, StageShape):
        return synthetic(kind, groups=groups, siblings=siblings, seed=seed + 1_000_003 * earlier)
    rng = np.random.default_rng([seed, int(earlier)])
    lengths_GS = kind.lengths_GS(rng, (groups, siblings)) / (kind.shift if earlier else 1.0)
    least, most = np.log(kind.prompt_tokens)
    prompts_G = np.exp(rng.uniform(least, most, groups)).astype(int)
    mean = float(np.minimum(lengths_GS, kind.max_response_tokens).mean())
    return [
        cut(
            TraceRollout(
                f"g{group}", int(prompts_G[group]), _turns(kind, max(SHORTEST_TOKENS, int(length)), mean, rng)
            ),
            kind.max_response_tokens,
            kind.max_turns,
        )
        for group in range(groups)
        for length in np.minimum(lengths_GS[group], 2 * kind.max_response_tokens)
    ]


def _turns(kind: Kind, length: int, mean: float, rng: Random) -> tuple[TraceTurn, ...]:
    """Split a response of `length` tokens into turns; longer responses have more calls."""
    calls = min(int(rng.poisson(kind.calls_mean * min(2.0, length / mean))), kind.max_turns - 1, length // 32)
    answers = np.clip(rng.lognormal(np.log(kind.tool_tokens_mean) - 0.32, 0.8, calls), 8, 512).astype(int)
    waits = 0.05 + rng.exponential(np.array(kind.tool_s)[rng.choice(len(kind.tool_s), calls, p=kind.tool_shares)])
    sampled = max(calls + 1, length - int(answers.sum()))
    tokens = np.maximum(1, np.round(rng.dirichlet(np.full(calls + 1, 2.0)) * sampled)).astype(int)
    middle = [TraceTurn(int(tokens[n]), int(answers[n]), round(float(waits[n]), 3)) for n in range(calls)]
    return (*middle, TraceTurn(int(tokens[calls])))
