"""Simulates whole training steps with a staleness: `python -m benchmarks.steps` (JSON rows, one per line).

Draws from one distribution, a learner that alternates with the engines and takes a share of a synchronous step, and
every rule with every staleness. Each row has the first step's time and the mean of later ones. `--without` disables
parts of `expected_kv`, one at a time, to measure the gain of each:

    python -m benchmarks.steps --replicas 64 --kv-tokens 650000
    python -m benchmarks.steps --kinds hard_last --demand 1.5 --rules expected_kv least_requests least_sessions
    python -m benchmarks.steps --replicas 4 --demand 1.5 --without all
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.scheduler import SEATS, demand_tokens
from benchmarks.trace_kinds import NAMES, draw, kind_named
from scheduler.balancer import RULES
from scheduler.expected_kv import caution, estimate, room
from scheduler.expected_kv import rule as expected_kv
from scheduler.simulator.engine_model import EngineShape
from scheduler.simulator.simulate import MI300X_14B, SimulatorSettings
from scheduler.simulator.steps import LearnerTime, SimulatedSteps, StepsSimulator
from scheduler.state import BLOCK_TOKENS
from scheduler.traces.trace import TraceRollout

KINDS = ["stage1", "stage2", "stage3", "minutes_at_tools"]
SIMPLE = ["least_requests", "least_sessions"]


PARTS: dict[str, list[tuple[object, str, Any]]] = {
    "similarity of siblings": [(estimate, "ALIKENESS", np.array([0.0])), (estimate, "FIRST_ALIKENESS", 0.0)],
    "ages of running rollouts": [(estimate.LengthEstimate, "survive", lambda self, rows, ages: None)],
    "probes": [(expected_kv, "PROBES", 0)],
    "longest group first": [(expected_kv.AdmissionOrder, "_expected", lambda self, group: 0.0)],
    "moves": [(expected_kv.Moves, "decide", lambda self: [])],
    "moves away from an overflow": [(expected_kv.Moves, "_relief", lambda self, rollout, source: None)],
    "waiting again": [(expected_kv.Moves, "_sent_to_wait", lambda self, source: [])],
    "risk by costs": [(caution.Caution, "weigh", lambda self, *given, **named: None)],
    "room by a cached prompt": [(room, "PROMPT_WORTH", 1)],
}
"""Parts of the rule, and the replacement that disables each."""


@contextmanager
def without(part: str) -> Generator[None]:
    """Disable a part of `expected_kv`; an empty name disables none."""
    changed = [patch.object(target, name, value) for target, name, value in PARTS.get(part, [])]
    for one in changed:
        one.start()
    try:
        yield
    finally:
        for one in reversed(changed):
            one.stop()


def setting(args: argparse.Namespace, name: str) -> tuple[SimulatorSettings, Callable[[int], Sequence[TraceRollout]]]:
    """The simulator's settings for this kind, and its draws by number."""
    base, _, number = name.partition(":")
    kind = kind_named(base, int(number or 0))

    def draw_of(step: int) -> Sequence[TraceRollout]:
        return draw(kind, groups=args.groups * args.replicas, siblings=args.siblings, seed=1_000 * args.seed + step)

    first = draw_of(1)
    kv_tokens = args.kv_tokens
    if args.demand:
        least = max(rollout.prompt_tokens for rollout in first) + 2 * kind.max_response_tokens
        kv_tokens = max(int(demand_tokens(first) / args.demand / args.replicas), least)
    settings = SimulatorSettings(
        replicas=args.replicas,
        shape=EngineShape(kv_tokens=kv_tokens // BLOCK_TOKENS * BLOCK_TOKENS, max_running=SEATS),
        cost=MI300X_14B,
        max_response_tokens=kind.max_response_tokens,
        max_turns=kind.max_turns,
    )
    return settings, draw_of


def simulate(args: argparse.Namespace, name: str) -> Iterator[dict[str, Any]]:
    """A row for every rule and staleness of this kind."""
    settings, draw_of = setting(args, name)

    def run(rule: str, staleness: int, learner: LearnerTime, steps: int) -> SimulatedSteps:
        return StepsSimulator(draw_of, rule, settings, steps=steps, staleness=staleness, learner=learner).run_steps()

    learn_s = -1.0  # a share of the first synchronous run's step
    for rule in args.rules:
        synchronous: SimulatedSteps | None = None
        for part in ("", *(args.without if rule == "expected_kv" else [])):
            for staleness in sorted({0, *args.staleness} if learn_s < 0.0 else args.staleness):
                began_s = time.process_time()
                with without(part):
                    if staleness:
                        learner = LearnerTime(learn_s=learn_s, engines_pause_s=learn_s, recompute=args.recompute)
                        found = run(rule, staleness, learner, args.steps + staleness)
                        step_s = found.step_s
                    else:  # no rollout runs while the learner learns
                        found = run(rule, 0, LearnerTime(), args.synchronous_steps)
                        if learn_s < 0.0:
                            learn_s = args.learner_share / (1.0 - args.learner_share) * found.step_s
                        step_s = found.step_s + learn_s
                        synchronous = synchronous or found
                yield {
                    "kind": name,
                    "rule": rule,
                    "without": part,
                    "staleness": staleness,
                    "kv_tokens": settings.shape.kv_tokens,
                    "learn_s": round(learn_s, 1),
                    "first_step_s": round(found.steps[0].drawn_s, 1),
                    "step_s": round(step_s, 1),
                    "gain": round(gain(synchronous, found, learn_s), 3) if synchronous else None,
                    "over_bound": round(found.over_bound, 3),
                    "recomputed_share": round(found.recomputed_share, 4),
                    "cpu_s": round(time.process_time() - began_s, 1),
                    "simulated": True,
                }


def gain(synchronous: SimulatedSteps, found: SimulatedSteps, learn_s: float) -> float:
    """The gain in a step's time, corrected for work: the runs count different draws, whose lengths vary."""
    bound_s = synchronous.step_s / synchronous.over_bound
    return (synchronous.step_s + learn_s) / (found.over_bound * bound_s + learn_s)


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """`expected_kv` compared with the best other rule, and with itself without each part, by kind."""
    said: list[str] = []
    for step in ("first_step_s", "step_s"):
        for staleness in sorted({row["staleness"] for row in rows}):
            if step == "first_step_s" and staleness:
                continue
            ratios: dict[str, float] = {}
            lost: dict[str, list[float]] = {}
            for kind in dict.fromkeys(row["kind"] for row in rows):
                found = [row for row in rows if row["kind"] == kind and row["staleness"] == staleness]
                ours = [row[step] for row in found if row["rule"] == "expected_kv" and not row["without"]]
                others = [row[step] for row in found if row["rule"] != "expected_kv"]
                if ours and others:
                    ratios[kind] = min(others) / ours[0]
                for row in found:
                    if row["without"]:
                        lost.setdefault(row["without"], []).append(row[step] / ours[0])
            head = f"staleness {staleness}, {'first step' if step == 'first_step_s' else 'later steps'}"
            if ratios:
                each = ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in ratios.items())
                middle, least = statistics.median(ratios.values()), min(ratios.values())
                said.append(f"{head}: best other rule's time over ours, {each}; median {middle:.2f}, least {least:.2f}")
            said += [
                f"{head}: without {part} {statistics.median(times):.3f} x the time in the median, "
                f"{min(times):.3f} to {max(times):.3f}"
                for part, times in lost.items()
            ]
    return said


def asked(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; ends the process if it is invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", default=KINDS, help=f"of {', '.join(NAMES)}, and family:NUMBER")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=["expected_kv"])
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--groups", type=int, default=8, help="prompt groups a replica and step")
    parser.add_argument("--siblings", type=int, default=32)
    parser.add_argument("--kv-tokens", type=int, default=650_000, help="of a replica")
    parser.add_argument("--demand", type=float, default=0.0, help="KV demand over capacity, instead of --kv-tokens")
    parser.add_argument("--steps", type=int, default=7, help="of a run with a staleness, and it more")
    parser.add_argument("--synchronous-steps", type=int, default=4)
    parser.add_argument("--learner-share", type=float, default=0.25, help="of a synchronous step")
    parser.add_argument("--recompute", action="store_true", help="contexts are computed again after each publish")
    parser.add_argument("--without", nargs="+", default=[], choices=["all", *PARTS], metavar="PART", help=str([*PARTS]))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for option in ("replicas", "groups", "siblings", "kv_tokens"):
        if getattr(args, option) < 1:
            parser.error(f"--{option.replace('_', '-')}: {getattr(args, option)} is too small; give at least 1")
    if min(args.staleness) < 0 or args.synchronous_steps < 2 or args.steps < 4:
        parser.error("--staleness: at least 0, --synchronous-steps: at least 2, --steps: at least 4")
    if not 0.0 <= args.learner_share < 1.0:
        parser.error(f"--learner-share: {args.learner_share} is not in [0, 1)")
    for name in args.kinds:
        base, _, number = name.partition(":")
        if base not in NAMES or (number and (base != "family" or not number.isdecimal())):
            parser.error(f"--kinds: {name!r} is none of {', '.join(NAMES)}, or family:NUMBER")
    if "all" in args.without:
        args.without = [*PARTS]
    return args


def main() -> None:
    args = asked()
    rows: list[dict[str, Any]] = []
    for name in args.kinds:
        for row in simulate(args, name):
            print(json.dumps(row), flush=True)
            rows.append(row)
    print("\n".join(summary(rows)), file=sys.stderr)


if __name__ == "__main__":
    main()
