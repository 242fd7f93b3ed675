"""Figures of the scheduler: `python -m benchmarks.scheduler` (`--quick`: a small fleet, for a smoke test).

Decisions are timed on one core with 64 replicas and 16,384 waiting rollouts. Steps are simulated: named kinds of traces
and members of a family (`family:NUMBER`) that were not used for tuning; KV demand (the peak if all rollouts started at
once) at several multiples of capacity; as a run's first step, and with a known previous step. They are compared with
the best other rule, the lower bound, and the best known schedule with all lengths known. A table goes to stderr, with
every exceeded limit; one JSON line to stdout.
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from benchmarks.oracle import oracle_step
from benchmarks.trace_kinds import NAMES, draw, kind_named
from rstar_ray.config.checks import at_least, check_bounds
from rstar_ray.config.options import run_command
from rstar_ray.errors import ConfigError
from scheduler.balancer import RULES, Balancer
from scheduler.cost import placement_cost
from scheduler.records import Registration, RolloutLoad
from scheduler.simulator.engine_model import EngineShape
from scheduler.simulator.simulate import MI300X_14B, Simulator, SimulatorResult, SimulatorSettings
from scheduler.state import BLOCK_TOKENS
from scheduler.traces.trace import TraceRollout

OTHERS = tuple(name for name in RULES if name != "expected_kv")
KINDS = ("bimodal", "heavy_tail", "slow_tools", "hard_last", *(f"family:{number}" for number in range(101, 105)))
SIBLINGS = 32
SEATS = 1_024  # more than KV allows, so that KV is the limit
LIMITS = {"first": (1.10, 0.02), "later": (1.02, 0.01)}
"""For a run's first step and a later one: largest time over the best other rule's, and largest recomputed share."""
COSTLY_STEPS = 10.0
"""The recomputed share is limited only if a preemption costs more decode steps; otherwise only time is limited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One step with `expected_kv`, and the figures that it is compared with; simulated seconds."""

    kind: str
    kv_demand: float
    kv_tokens: int  # of one replica
    step: str  # "first" or "later"
    makespan_s: float
    best_other_s: float
    best_other: str
    oracle_s: float
    lower_bound_s: float
    recomputed_share: float
    preemption_steps: float  # cost of recomputing a context of mean length, in decode steps of a full batch
    preemptions: int
    kv_utilisation: float
    cpu_s: float

    def missed(self) -> list[str]:
        """Texts for the limits that this row exceeds."""
        slowest, most = LIMITS[self.step]
        found: list[str] = []
        if self.makespan_s > slowest * self.best_other_s:
            found.append(f"{self.makespan_s / self.best_other_s:.2f} x the time of {self.best_other}, of {slowest:.2f}")
        if self.recomputed_share > most and self.preemption_steps > COSTLY_STEPS:
            found.append(f"{self.recomputed_share:.1%} recomputed, of {most:.0%}")
        return [f"{self.kind} at {self.kv_demand:g}, {self.step} step: {text}" for text in found]

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {
            "faster_than_best_other": round(self.best_other_s / self.makespan_s, 3),
            "over_oracle": round(self.makespan_s / self.oracle_s, 3),
            "over_bound": round(self.makespan_s / self.lower_bound_s, 3),
        }


def decisions_per_s(rule: str, *, replicas: int = 64, groups: int = 512) -> float:
    """Admissions per second of CPU time, from a queue of `groups` x 32 until no more fit."""
    balancer = Balancer(rule)
    for index in range(replicas):
        balancer.register(
            Registration(
                replica_id=f"replica-{index}", kv_capacity_tokens=650_000, max_running=SEATS, block_tokens=BLOCK_TOKENS
            )
        )
    balancer.submit(
        [
            RolloutLoad(
                rollout_id=f"{group}/{sibling}",
                group_id=f"{group}",
                prompt_tokens=300,
                max_response_tokens=8_192,
                max_turns=10,
            )
            for group in range(groups)
            for sibling in range(32)
        ]
    )
    started = time.process_time()
    admissions, _ = balancer.decide()
    return len(admissions) / (time.process_time() - started)


def demand_tokens(rollouts: Sequence[TraceRollout]) -> int:
    """The peak KV of all rollouts if they started together and grew at the same rate."""
    longest = max(rollout.response_tokens for rollout in rollouts)
    return max(
        sum(rollout.prompt_tokens + at for rollout in rollouts if rollout.response_tokens > at)
        for at in range(0, longest, max(1, longest // 96))
    )


def traces(name: str, *, groups: int) -> tuple[SimulatorSettings, list[TraceRollout], list[TraceRollout]]:
    """Settings of this kind, its step and the previous step; one replica, whose size is set later by demand."""
    base, _, number = name.partition(":")
    kind = kind_named(base, int(number or 0))
    now, before = (draw(kind, groups=groups, siblings=SIBLINGS, earlier=earlier) for earlier in (False, True))
    settings = SimulatorSettings(
        replicas=1,
        shape=EngineShape(kv_tokens=1, max_running=SEATS),
        cost=MI300X_14B,
        max_response_tokens=kind.max_response_tokens,
        max_turns=kind.max_turns,
    )
    return settings, now, before


def simulate(name: str, demand: float, *, replicas: int, groups: int, rules: Sequence[str]) -> list[Row]:
    """Simulate a first and a later step at this multiple of KV capacity."""
    limits, rollouts, before = traces(name, groups=groups)
    least = max(r.prompt_tokens for r in rollouts) + 2 * limits.max_response_tokens
    kv_tokens = max(int(demand_tokens(rollouts) / demand / replicas), least) // BLOCK_TOKENS * BLOCK_TOKENS
    settings = replace(limits, replicas=replicas, shape=EngineShape(kv_tokens=kv_tokens, max_running=SEATS))

    def timed(rule: str, history: Sequence[TraceRollout] = ()) -> tuple[SimulatorResult, float]:
        started = time.process_time()
        result = Simulator(rollouts, rule, settings, history=history).run()
        return result, time.process_time() - started

    mean_tokens = statistics.mean(rollout.prompt_tokens + rollout.response_tokens for rollout in rollouts)
    cost = placement_cost(settings.cost, kv_tokens=kv_tokens, max_running=SEATS, context_tokens=mean_tokens)
    others = [timed(rule)[0] for rule in rules]
    ours = {"first": timed("expected_kv"), "later": timed("expected_kv", before)}
    oracle = oracle_step(rollouts, settings)
    best = min(others, key=lambda result: result.makespan_s)
    # A schedule that knows every length can also copy any rule's.
    oracle_s = min(result.makespan_s for result in (oracle, *others, *(one for one, _ in ours.values())))
    return [
        Row(
            kind=name,
            kv_demand=demand,
            kv_tokens=kv_tokens,
            step=step,
            makespan_s=round(result.makespan_s, 1),
            best_other_s=round(best.makespan_s, 1),
            best_other=best.rule,
            oracle_s=round(oracle_s, 1),
            lower_bound_s=round(oracle.lower_bound_s, 1),
            recomputed_share=round(result.recomputed_tokens / result.generated_tokens, 4),
            preemption_steps=round(cost.preemption_steps, 1),
            preemptions=result.preemptions,
            kv_utilisation=round(result.kv_utilisation, 3),
            cpu_s=round(cpu_s, 1),
        )
        for step, (result, cpu_s) in ours.items()
    ]


HEAD = "kind               demand   step    ours  best other  faster  x oracle  x bound   again  steps each"


def line(row: Row) -> str:
    """A row of the printed table."""
    return (
        f"{row.kind:<18}{row.kv_demand:>7g}{row.step:>7}{row.makespan_s:>8.1f}{row.best_other_s:>12.1f}"
        f"{row.best_other_s / row.makespan_s:>8.2f}{row.makespan_s / row.oracle_s:>10.2f}"
        f"{row.makespan_s / row.lower_bound_s:>9.2f}{row.recomputed_share:>8.1%}{row.preemption_steps:>12.1f}"
    )


def summary(rows: Sequence[Row]) -> list[str]:
    """Medians, and every exceeded limit."""
    scarce = [row.best_other_s / row.makespan_s for row in rows if row.kv_demand > 1.0] or [0.0]
    over = [row.makespan_s / row.oracle_s for row in rows]
    median, most = statistics.median(over), max(over)
    return [
        f"where KV is scarce {statistics.median(scarce):.2f} x as fast as the best other rule in the median",
        f"{median:.2f} x the best schedule that knows every length in the median, {most:.2f} at most",
        *(text for row in rows for text in row.missed()),
    ]


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    quick: bool = False
    """4 replicas instead of 64"""
    replicas: Annotated[int, at_least(0)] = 0
    """0: as --quick says"""
    kinds: tuple[str, ...] = KINDS
    """named kinds of traces, and family:NUMBER"""
    demands: tuple[float, ...] = (0.95, 1.5, 3.0)
    """KV that all rollouts need over what there is"""
    rules: tuple[str, ...] = OTHERS
    """what `expected_kv` is compared with"""

    def __post_init__(self) -> None:
        check_bounds("", self)
        for name in self.kinds:
            base, _, number = name.partition(":")
            if base not in NAMES or (number and (base != "family" or not number.isdecimal())):
                raise ConfigError("--kinds", f"no such kind (got {name!r})", f"of {', '.join(NAMES)}, or family:NUMBER")
        if unknown := [rule for rule in self.rules if rule not in OTHERS]:
            raise ConfigError("--rules", f"no such rule (got {unknown[0]!r})", f"of {', '.join(OTHERS)}")


def main(args: BenchSettings) -> None:
    replicas = args.replicas or (4 if args.quick else 64)
    rows: list[Row] = []
    print(f"simulated, {replicas} replicas, {8 * SIBLINGS * replicas} rollouts\n{HEAD}", file=sys.stderr, flush=True)
    for name in args.kinds:
        for demand in args.demands:
            found = simulate(name, demand, replicas=replicas, groups=8 * replicas, rules=args.rules)
            print("\n".join(line(row) for row in found), file=sys.stderr, flush=True)
            rows += found
    print("\n".join(summary(rows)), file=sys.stderr, flush=True)
    figures = {
        "replicas": replicas,
        "rollouts": 8 * SIBLINGS * replicas,
        "decisions_per_s": {rule: round(decisions_per_s(rule)) for rule in ("expected_kv", *args.rules)},
        "simulated": [row.as_json() for row in rows],
        "missed": [text for row in rows for text in row.missed()],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    sys.exit(run_command(BenchSettings, main, None, description=__doc__))
