"""Simulate one step of rollouts: `python -m scheduler.simulator --trace FILE`; every figure printed is simulated."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rstar_ray.config import BalancerConfig, EngineConfig
from rstar_ray.config.options import options_of, spelled
from rstar_ray.errors import ConfigError
from scheduler.balancer import PLACEMENT, RULES
from scheduler.cost import read_cost
from scheduler.records import NeverFits
from scheduler.simulator.engine_model import EngineShape
from scheduler.simulator.simulate import (
    MI300X_14B,
    CannotHold,
    Simulator,
    SimulatorResult,
    SimulatorSettings,
    limits_of,
)
from scheduler.state import BLOCK_TOKENS
from scheduler.traces.stage_traces import STAGES
from scheduler.traces.trace import TraceRollout, read_trace


@dataclass(frozen=True, kw_only=True)
class SimulatorOptions:
    trace: Path
    """rollouts of one step, as benchmarks/traces.py writes them"""
    history: Path | None = None
    """trace of an earlier step, known to the balancer"""
    replicas: int = 64
    kv_tokens: int = 650_000
    """KV capacity of one replica [tokens]"""
    rule: str = "expected_kv"
    """a placement rule, or all"""
    stage: Literal["", "stage1", "stage2", "stage3"] = ""
    """take the budgets from this stage, not from the trace"""
    max_running: int = EngineConfig().max_running
    block_tokens: int = BLOCK_TOKENS
    risk: float = PLACEMENT.risk
    preemption_steps: float = PLACEMENT.preemption_steps
    idle_share: float = PLACEMENT.idle_share
    cost: Path | None = None
    """a fitted engine model (JSON), instead of the computed MI300X"""
    json: bool = False

    def __post_init__(self) -> None:
        if self.rule not in (*RULES, "all"):
            raise ConfigError("--rule", f"not a choice (got {self.rule!r})", f"choose {', '.join((*RULES, 'all'))}")
        for name in ("risk", "preemption_steps", "idle_share"):
            if self.rule not in ("expected_kv", "all") and getattr(self, name) != getattr(PLACEMENT, name):
                raise ConfigError(spelled(name), f"has no effect with --rule {self.rule}", "leave it out")


def main() -> None:
    results: list[SimulatorResult | CannotHold] = []
    try:
        args = options_of(SimulatorOptions, None, description=__doc__)
        rules = list(RULES) if args.rule == "all" else [args.rule]
        rollouts = read_trace(args.trace)
        history = [] if args.history is None else read_trace(args.history)
        settings = _settings(args, rollouts)
        for rule in rules:
            try:
                results.append(Simulator(rollouts, rule, settings, history=history, clock=time.perf_counter).run())
            except NeverFits as error:
                if len(rules) == 1:
                    raise
                results.append(CannotHold(rule, str(error)))
    except (ConfigError, ValueError, OSError, TypeError) as error:
        sys.exit(f"scheduler.simulator: {error}")
    if not args.json:
        print(table(results))
    else:
        rows = [result.as_json() for result in results]
        print(json.dumps(rows if args.rule == "all" else rows[0]))


def _settings(args: SimulatorOptions, rollouts: Sequence[TraceRollout]) -> SimulatorSettings:
    budget, turns = limits_of(rollouts)
    if args.stage:
        budget, turns = STAGES[args.stage].max_response_tokens, STAGES[args.stage].max_turns
    return SimulatorSettings(
        replicas=args.replicas,
        shape=EngineShape(kv_tokens=args.kv_tokens, block_tokens=args.block_tokens, max_running=args.max_running),
        cost=MI300X_14B if args.cost is None else read_cost(args.cost),
        max_response_tokens=budget,
        max_turns=turns,
        placement=BalancerConfig(risk=args.risk, preemption_steps=args.preemption_steps, idle_share=args.idle_share),
    )


def table(results: Sequence[SimulatorResult | CannotHold]) -> str:
    """All rules side by side."""
    held = [result for result in results if isinstance(result, SimulatorResult)]
    lines = [
        f"simulated; lower bound {held[0].lower_bound_s:.1f} s, {held[0].generated_tokens} tokens generated",
        f"{'rule':<16}{'makespan_s':>11}{'x bound':>9}{'preempted':>10}{'recomputed':>11}{'KV use':>8}"
        f"{'wait p50':>10}{'wait p99':>10}{'decisions/s':>13}",
    ]
    lines += [
        f"{r.rule:<16}{r.makespan_s:>11.1f}{r.makespan_s / r.lower_bound_s:>9.3f}{r.preemptions:>10}"
        f"{r.recomputed_tokens / r.generated_tokens:>11.2%}{r.kv_utilisation:>8.1%}{r.wait_s_p50:>10.1f}"
        f"{r.wait_s_p99:>10.1f}{r.decisions_per_s:>13.0f}"
        if isinstance(r, SimulatorResult)
        else f"{r.rule:<16}cannot hold it: {r.reason}"
        for r in results
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
