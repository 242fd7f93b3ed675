"""`python -m benchmarks.traces --kind bimodal --out bimodal.jsonl` writes 512 groups of 32 rollouts."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from benchmarks.trace_kinds import NAMES, draw, kind_named
from rstar_ray.config.checks import at_least, check_bounds
from rstar_ray.config.options import run_command
from rstar_ray.errors import ConfigError
from scheduler.traces.trace import stop_reason, write_trace


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    out: Path
    """file to write"""
    kind: str = "stage1"
    """the distribution; benchmarks/trace_kinds.py lists them"""
    number: Annotated[int, at_least(0)] = 0
    """which member of the family (--kind family)"""
    earlier: bool = False
    """the step before, for --history"""
    groups: Annotated[int, at_least(1)] = 512
    siblings: Annotated[int, at_least(1)] = 32
    seed: Annotated[int, at_least(0)] = 0

    def __post_init__(self) -> None:
        check_bounds("", self)
        if self.kind not in NAMES:
            raise ConfigError("--kind", f"no such kind (got {self.kind!r})", f"choose {', '.join(NAMES)}")
        if self.number and self.kind != "family":
            raise ConfigError("--number", f"--kind {self.kind} has no numbers (got {self.number})", "omit it")


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(TraceOptions, _write, argv, description=__doc__)


def _write(options: TraceOptions) -> None:
    kind = kind_named(options.kind, options.number)
    rollouts = draw(kind, groups=options.groups, siblings=options.siblings, seed=options.seed, earlier=options.earlier)
    try:
        write_trace(options.out, rollouts)
    except OSError as error:
        raise ConfigError("--out", f"cannot be written ({error})", "name another file") from error
    lengths = np.array([rollout.response_tokens for rollout in rollouts])
    reasons = (stop_reason(rollout, kind.max_response_tokens, kind.max_turns) for rollout in rollouts)
    truncated = sum(reason.truncated for reason in reasons) / len(rollouts)
    print(f"{options.out}: {len(rollouts)} rollouts, mean {lengths.mean():.0f} tokens, {truncated:.1%} truncated")


if __name__ == "__main__":
    sys.exit(main())
