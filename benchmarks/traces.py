"""`python -m benchmarks.traces --kind bimodal --out bimodal.jsonl`: 512 groups of 32 rollouts of a distribution."""

import argparse
from pathlib import Path

import numpy as np

from benchmarks.trace_kinds import KINDS, NAMES, draw, kind_named
from scheduler.traces.trace import stop_reason, write_trace


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.traces",
        description="Write a synthetic trace.",
        epilog="; ".join(f"{name}: {kind.summary}" for name, kind in KINDS.items()),
    )
    parser.add_argument("--kind", choices=NAMES, default="stage1", help="the distribution")
    parser.add_argument("--number", type=int, default=0, help="which member of the family (--kind family)")
    parser.add_argument("--earlier", action="store_true", help="the step before, for --history")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--siblings", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, least in (("groups", 1), ("siblings", 1), ("seed", 0), ("number", 0)):
        if getattr(args, name) < least:
            parser.exit(2, f"benchmarks.traces: --{name} is {getattr(args, name)}, not at least {least}\n")
    if args.number and args.kind != "family":
        parser.exit(2, f"benchmarks.traces: --number is {args.number}, and --kind {args.kind} has no numbers\n")
    kind = kind_named(args.kind, args.number)
    rollouts = draw(kind, groups=args.groups, siblings=args.siblings, seed=args.seed, earlier=args.earlier)
    try:
        write_trace(args.out, rollouts)
    except OSError as error:
        parser.exit(2, f"benchmarks.traces: --out: {error}\n")
    lengths = np.array([rollout.response_tokens for rollout in rollouts])
    reasons = (stop_reason(rollout, kind.max_response_tokens, kind.max_turns) for rollout in rollouts)
    truncated = sum(reason.truncated for reason in reasons) / len(rollouts)
    print(f"{args.out}: {len(rollouts)} rollouts, mean response {lengths.mean():.0f} tokens, {truncated:.1%} truncated")


if __name__ == "__main__":
    main()
