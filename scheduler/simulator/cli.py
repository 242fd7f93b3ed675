"""The command line: `python -m scheduler.simulator` simulates one step; every figure printed is simulated."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rstar_ray.config import BalancerConfig, EngineConfig
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


def main() -> None:
    args = _arguments()
    rules = list(RULES) if args.rule == "all" else [args.rule]
    results: list[SimulatorResult | CannotHold] = []
    try:
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


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scheduler.simulator", description="Simulate one step; every figure printed is simulated."
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--history", type=Path, help="trace of an earlier step, known to the balancer; default: none")
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--kv-tokens", type=int, default=650_000, help="KV capacity of one replica")
    parser.add_argument("--rule", choices=[*RULES, "all"], default="expected_kv")
    parser.add_argument("--stage", choices=STAGES, help="take the budgets from this stage, not from the trace")
    parser.add_argument("--max-running", type=int, default=EngineConfig().max_running)
    parser.add_argument("--block-tokens", type=int, default=BLOCK_TOKENS)
    parser.add_argument("--risk", type=float, default=PLACEMENT.risk)
    parser.add_argument("--preemption-steps", type=float, default=PLACEMENT.preemption_steps)
    parser.add_argument("--idle-share", type=float, default=PLACEMENT.idle_share)
    parser.add_argument("--cost", type=Path, help="a fitted engine model (JSON), instead of the computed MI300X")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cautious = (args.risk, args.preemption_steps, args.idle_share)
    careless = (PLACEMENT.risk, PLACEMENT.preemption_steps, PLACEMENT.idle_share)
    if args.rule not in ("expected_kv", "all") and cautious != careless:
        parser.error(f"--risk, --preemption-steps and --idle-share mean nothing to --rule {args.rule}")
    return args


def _settings(args: argparse.Namespace, rollouts: Sequence[TraceRollout]) -> SimulatorSettings:
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
