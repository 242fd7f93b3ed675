"""Figures of the scheduler as one JSON line: `python -m scheduler.bench` (`--quick`: a small fleet, for a smoke test).

Decisions are timed on one core with 64 replicas and 16,384 rollouts waiting. Steps are simulated by the twin: three
stages, KV demand (the peak that all rollouts would need if all started at once) at several multiples of capacity; once
as a run's first step, once with the lengths of an earlier step known. Beside them stand the lower bound, and what a
plain schedule takes that knows every length in advance.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from scheduler.balancer import RULES, Balancer
from scheduler.load import RolloutLoad
from scheduler.traces.record import TraceRollout
from scheduler.traces.stages import STAGES, synthetic
from scheduler.twin.clairvoyant import clairvoyant_step
from scheduler.twin.engine_model import EngineShape
from scheduler.twin.simulate import MI300X_14B, Twin, TwinResult, TwinSettings

OTHERS = [name for name in RULES if name != "expected_kv"]


def decisions_per_s(rule: str, *, replicas: int = 64, groups: int = 512) -> float:
    """Admissions a second of CPU time, from a queue of `groups` x 32 until nothing more fits."""
    balancer = Balancer(rule)
    for index in range(replicas):
        balancer.add_replica(f"replica-{index}", 650_000, max_running=1_024, block_tokens=16)
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
    decisions = balancer.decide()
    return len(decisions.admissions) / (time.process_time() - started)


def demand_tokens(rollouts: Sequence[TraceRollout]) -> int:
    """The most KV that all rollouts would hold at once, all started together and growing in lock-step."""
    longest = max(rollout.response_tokens for rollout in rollouts)
    return max(
        sum(rollout.prompt_tokens + at for rollout in rollouts if rollout.response_tokens > at)
        for at in range(0, longest, max(1, longest // 96))
    )


def simulate(stage: str, demand: float, *, replicas: int, groups: int, rules: Sequence[str]) -> dict[str, Any]:
    """One step at this multiple of KV capacity under every rule; makespans, ratios and waste."""
    limits = STAGES[stage]
    rollouts = synthetic(limits, groups=groups, seed=0)
    history = synthetic(limits, groups=groups, seed=99)
    kv_tokens = max(int(demand_tokens(rollouts) / demand / replicas) // 16 * 16, 2 * limits.max_response_tokens)
    settings = TwinSettings(
        replicas=replicas,
        shape=EngineShape(kv_tokens=kv_tokens),
        cost=MI300X_14B,
        max_response_tokens=limits.max_response_tokens,
        max_turns=limits.max_turns,
    )

    def shown(name: str, result: TwinResult) -> TwinResult:
        line = f"{stage}, KV demand {demand:g} x capacity, {name}: {result.makespan_s:.1f} s simulated"
        print(line, file=sys.stderr, flush=True)
        return result

    started = time.process_time()
    first = shown("expected_kv, first step", Twin(rollouts, "expected_kv", settings).run())
    cpu_s = time.process_time() - started
    later = shown("expected_kv, later step", Twin(rollouts, "expected_kv", settings, history=history).run())
    clairvoyant = shown("clairvoyant", clairvoyant_step(rollouts, settings))
    others = {rule: shown(rule, Twin(rollouts, rule, settings).run()) for rule in rules}
    return {
        "stage": stage,
        "kv_demand": demand,
        "kv_tokens": kv_tokens,
        "lower_bound_s": round(later.lower_bound_s, 1),
        "clairvoyant_s": round(clairvoyant.makespan_s, 1),
        "first_step": _row(first, clairvoyant, others),
        "later_step": _row(later, clairvoyant, others),
        "others_makespan_s": {name: round(result.makespan_s, 1) for name, result in others.items()},
        "simulation_cpu_s": round(cpu_s, 1),
    }


def _row(ours: TwinResult, clairvoyant: TwinResult, others: dict[str, TwinResult]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "makespan_s": round(ours.makespan_s, 1),
        "over_bound": round(ours.makespan_s / ours.lower_bound_s, 3),
        "over_clairvoyant": round(ours.makespan_s / clairvoyant.makespan_s, 3),
        "recomputed_share": round(ours.recomputed_tokens / ours.generated_tokens, 4),
        "preemptions": ours.preemptions,
        "kv_utilisation": round(ours.kv_utilisation, 3),
    }
    if others:
        best = min(others.values(), key=lambda result: result.makespan_s)
        row |= {"best_other": best.rule, "faster_than_best_other": round(best.makespan_s / ours.makespan_s, 3)}
    if "static" in others:
        row["faster_than_static"] = round(others["static"].makespan_s / ours.makespan_s, 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scheduler.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--demands", nargs="+", type=float, default=[0.95, 1.5, 3.0])
    parser.add_argument("--rules", nargs="*", choices=OTHERS, default=OTHERS)
    args = parser.parse_args()
    replicas, groups = (4, 32) if args.quick else (64, 512)
    figures = {
        "replicas": replicas,
        "rollouts": groups * 32,
        "decisions_per_s": {
            rule: round(decisions_per_s(rule, replicas=replicas, groups=groups))
            for rule in ("expected_kv", *args.rules)
        },
        "simulated": [
            simulate(stage, demand, replicas=replicas, groups=groups, rules=args.rules)
            for stage in args.stages
            for demand in args.demands
        ],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
