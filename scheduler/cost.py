"""What an engine's steps cost, and what follows for a placement: how much risk of a preemption is worth taking.

    one step                            fixed + B per_sequence + K per_context        B sequences, K tokens of context
    prefill of n tokens after c others  per_request + n per_prefill + n (c + n / 2) per_prefill_context

A rollout that is preempted is computed again; a seat that stays empty saves only a part of its share of a step. Both
are told in decode steps of a full batch, so that a tiny model on a CPU and a large one on a GPU can be compared.
"""

import json
from dataclasses import MISSING, dataclass, fields
from math import inf, isfinite
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCost:
    """Seconds; measured on an engine, fitted to runs of one, or computed from a GPU's figures (recipes/plan.py)."""

    fixed_s: float
    per_sequence_s: float
    per_context_s: float
    per_prefill_s: float
    per_prefill_context_s: float = 0.0
    per_request_s: float = 0.0  # host time of taking a turn in and giving it back

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0.0 <= value < inf:
                raise ValueError(f"{field.name!r} is {value!r:.40}; give seconds, 0 or more")
        if self.fixed_s == 0.0:
            raise ValueError("'fixed_s' is 0; no decode step takes no time: give what one takes with a single sequence")

    def step_s(self, sequences: float, context_tokens: float) -> float:
        return self.fixed_s + sequences * self.per_sequence_s + context_tokens * self.per_context_s

    def prefill_s(self, tokens: float, cached_tokens: float) -> float:
        of_tokens = tokens * (self.per_prefill_s + (cached_tokens + tokens / 2) * self.per_prefill_context_s)
        return self.per_request_s + of_tokens


def read_cost(path: Path) -> EngineCost:
    """Of a JSON file. Raises `ValueError` naming file, field and mend for costs that are missing or none."""
    try:
        given: Any = json.loads(path.read_text("utf-8"))
        if not isinstance(given, dict):
            raise ValueError("it holds no JSON object")
        costs = cast(dict[str, Any], given)
        known = {field.name: field.default for field in fields(EngineCost)}
        for name in costs:
            if name not in known:
                raise ValueError(f"{name!r} is no cost; remove it (there are {', '.join(known)})")
        for name, default in known.items():
            if name not in costs and default is MISSING:
                raise ValueError(
                    f"{name!r} is missing; give seconds, as `make calibrate ARGS='--out FILE'` writes them"
                )
        return EngineCost(**costs)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementCost:
    """What the two mistakes of a placement cost on one engine."""

    preemption_steps: float  # decode steps of a full batch in which one rollout's context is computed again
    idle_share: float  # of its part of a decode step, what an empty seat does not save: 1 all of it, 0 nothing

    def __post_init__(self) -> None:
        if not (isfinite(self.preemption_steps) and self.preemption_steps >= 0.0):
            raise ValueError(f"'preemption_steps' is {self.preemption_steps}; give decode steps, 0 or more")
        if not 0.0 <= self.idle_share <= 1.0:
            raise ValueError(f"'idle_share' is {self.idle_share}; give a share between 0 and 1")


def placement_cost(cost: EngineCost, *, kv_tokens: int, max_running: int, context_tokens: float) -> PlacementCost:
    """On an engine whose cache is full of rollouts of this length (prompt and response, at their end)."""
    running = max(1.0, min(float(max_running), kv_tokens / context_tokens))
    step_s = cost.step_s(running, running * context_tokens)
    return PlacementCost(
        preemption_steps=cost.prefill_s(context_tokens, 0) / step_s,
        idle_share=cost.fixed_s / step_s,
    )


LEAST_RISK = 0.01  # where a preemption costs ten decode steps (at an idle share of 0.4) or more, or nobody knows
USUAL_STEPS, USUAL_IDLE_SHARE = 10.0, 0.4
MOST_RISK = 0.98
"""A third of a deviation is left free: below a decode step or two, recomputing costs less than empty seats."""


def risk_of(cost: PlacementCost | None) -> float:
    """The share of rollouts that an engine may have to preempt.

    What is gained by filling more grows with what an empty seat loses. What is lost grows with the square of what a
    preemption costs: with what each costs, and with how many there are, since all others go on growing into the same
    cache while one is computed again.
    """
    if cost is None:
        return LEAST_RISK
    if cost.preemption_steps == 0.0:
        return MOST_RISK
    wanted = LEAST_RISK * cost.idle_share / USUAL_IDLE_SHARE * (USUAL_STEPS / cost.preemption_steps) ** 2
    return min(MOST_RISK, max(LEAST_RISK, wanted))
