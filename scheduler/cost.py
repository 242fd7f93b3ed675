"""The cost of an engine's steps, and the resulting risk of preemption that a placement should take.

    one step                            fixed + B per_sequence + K per_context        B sequences, K tokens of context
    prefill of n tokens after c others  per_request + n per_prefill + n (c + n / 2) per_prefill_context

A preempted rollout is computed again; an empty seat saves only a part of its share of a step. Both costs are in decode
steps of a full batch, so that a tiny model on a CPU and a large one on a GPU can be compared.

How much of the cache to leave free is the newsvendor problem (Arrow, Harris and Marschak, Econometrica 1951): the best
stock is where the probability of a shortage equals the cost of one unit too many over that of one unit too few.
"""

import json
from dataclasses import dataclass, fields
from math import inf, isfinite
from pathlib import Path

from scheduler.json_records import read_record


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCost:
    """Costs in seconds: measured on an engine, fitted to its runs, or computed from a GPU's data sheet
    (recipes/plan.py).
    """

    fixed_s: float
    per_sequence_s: float
    per_context_s: float
    per_prefill_s: float
    per_prefill_context_s: float = 0.0
    per_request_s: float = 0.0  # host time of receiving a turn and returning it

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0.0 <= value < inf:
                raise ValueError(f"{field.name!r} is {value}; give seconds, 0 or more")
        if self.fixed_s == 0.0:
            raise ValueError("'fixed_s' is 0; every decode step takes time: give that of a step with a single sequence")

    def step_s(self, sequences: float, context_tokens: float) -> float:
        return self.fixed_s + sequences * self.per_sequence_s + context_tokens * self.per_context_s

    def prefill_s(self, tokens: float, cached_tokens: float) -> float:
        of_tokens = tokens * (self.per_prefill_s + (cached_tokens + tokens / 2) * self.per_prefill_context_s)
        return self.per_request_s + of_tokens


def read_cost(path: Path) -> EngineCost:
    """Read a file of `make calibrate ARGS='--out FILE'`. Raises `ValueError` with file and field."""
    try:
        return read_record(EngineCost, json.loads(path.read_text("utf-8")))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}; `make calibrate ARGS='--out FILE'` writes such a file") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementCost:
    """The costs of the two placement mistakes on one engine: a preemption and an empty seat."""

    preemption_steps: float  # time to compute one rollout's context again, in decode steps of a full batch
    idle_share: float  # share of its part of a decode step that an empty seat does not save
    running: float = inf  # rollouts in a full cache; inf: so many that one more does not matter
    life_steps: float = 0.0  # decode steps for which a rollout keeps its seat

    def __post_init__(self) -> None:
        if not (isfinite(self.preemption_steps) and self.preemption_steps >= 0.0):
            raise ValueError(f"'preemption_steps' is {self.preemption_steps}; give decode steps, 0 or more")
        if not 0.0 <= self.idle_share <= 1.0:
            raise ValueError(f"'idle_share' is {self.idle_share}; give a share between 0 and 1")


def running_in(kv_tokens: int, max_running: int, context_tokens: float) -> float:
    """Number of rollouts of this final length (prompt and response) that fill an engine."""
    return max(1.0, min(float(max_running), kv_tokens / context_tokens))


def placement_cost(cost: EngineCost, *, kv_tokens: int, max_running: int, context_tokens: float) -> PlacementCost:
    """The costs on an engine whose cache is full of rollouts of this length."""
    running = running_in(kv_tokens, max_running, context_tokens)
    step_s = cost.step_s(running, running * context_tokens)
    return PlacementCost(
        preemption_steps=cost.prefill_s(context_tokens, 0) / step_s,
        idle_share=cost.fixed_s / step_s,
        running=running,
    )


LEAST_RISK = 0.01  # for preemptions of ten decode steps or more (at an idle share of 0.4), or unknown costs
USUAL_STEPS, USUAL_IDLE_SHARE = 10.0, 0.4
MOST_RISK = 0.9999
"""Half a deviation more than is expected to fit, if recomputing costs less than empty seats."""
LOOKS = 8  # independent moments of a rollout's life at which its replica may overflow
FEW = 16.0  # up to this many rollouts per cache, a preemption is over before the next one


def risk_of(cost: PlacementCost | None) -> float:
    """The share of rollouts that an engine may have to preempt, at any of `LOOKS` moments of their lives.

    The gain of filling more grows with the cost of an empty seat. If many rollouts share a cache, the loss grows with
    the square of a preemption's cost: with the cost of each, and with their number, because all others continue to grow
    into the same cache meanwhile. If few rollouts share it, the space left free for one is a large part of the cache;
    the share per moment is then the cost of an empty seat during a rollout's life over that of a preemption at every
    moment. In between it falls with the number of rollouts.
    """
    if cost is None:
        return LEAST_RISK
    if cost.preemption_steps == 0.0:
        return MOST_RISK
    of_many = LEAST_RISK * cost.idle_share / USUAL_IDLE_SHARE * (USUAL_STEPS / cost.preemption_steps) ** 2
    at_a_look = cost.idle_share * cost.life_steps / (cost.running * LOOKS * cost.preemption_steps)
    at_a_look *= min(1.0, FEW / cost.running)
    of_few = 1.0 - (1.0 - min(1.0, at_a_look)) ** LOOKS
    return min(MOST_RISK, max(LEAST_RISK, of_many, of_few))
