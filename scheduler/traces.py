"""Traces: what rollouts turned out to be, one a line, and synthetic ones of the paper's three stages.

`python -m scheduler.traces --stage stage1 --out stage1.jsonl` writes 512 groups of 32. Lengths are log-normal with a
part shared by the siblings of a prompt (`--tail heavy`: Pareto), cut at the stage's budget as the agent loop cuts them.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

LONGEST_TOOL_S = 1e9  # times and sums of what a trace holds stay finite
MOST_TOKENS = 10**9


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One completion, and the tool's answer to it; both zero tokens and seconds where no tool was called."""

    completion_tokens: int
    tool_tokens: int = 0
    tool_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TraceRollout:
    """A rollout's whole life; only the twin's engines may read it, never a rule."""

    group: str
    prompt_tokens: int
    turns: tuple[TraceTurn, ...]

    @property
    def generated_tokens(self) -> int:
        return sum(turn.completion_tokens for turn in self.turns)

    @property
    def response_tokens(self) -> int:
        """Everything after the prompt: the last turn's tool text is never appended."""
        return self.generated_tokens + sum(turn.tool_tokens for turn in self.turns[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The shape of a stage's rollouts (arXiv:2508.20722, Table 2 and section 3.1)."""

    max_response_tokens: int
    max_turns: int
    mean_response_tokens: float  # before the cut
    calls_mean: float = 2.75  # 45K tool calls per step over 16,384 rollouts
    tool_seconds_mean: float = 0.3
    tool_tokens_mean: float = 120.0
    prompt_tokens_mean: float = 300.0
    spread_group: float = 0.5  # standard deviation of log length between groups
    spread_sibling: float = 0.5  # and within one


STAGES = {
    "stage1": Stage(max_response_tokens=8_192, max_turns=10, mean_response_tokens=4_000),
    "stage2": Stage(max_response_tokens=12_288, max_turns=10, mean_response_tokens=6_000),
    "stage3": Stage(max_response_tokens=12_288, max_turns=15, mean_response_tokens=7_500),
}


def cut(rollout: TraceRollout, max_response_tokens: int, max_turns: int) -> TraceRollout:
    """The rollout as the agent loop's limits leave it: tool text that would overflow is not appended."""
    used = 0
    turns: list[TraceTurn] = []
    for turn in rollout.turns[:max_turns]:
        room = max_response_tokens - used
        if turn.completion_tokens >= room:
            turns.append(TraceTurn(room))
            break
        turns.append(turn)
        used += turn.completion_tokens + turn.tool_tokens
        if used >= max_response_tokens:
            break
    return replace(rollout, turns=tuple(turns))


def synthetic(
    stage: Stage, *, groups: int = 512, siblings: int = 32, seed: int = 0, tail: str = "lognormal"
) -> list[TraceRollout]:
    """`groups` x `siblings` rollouts of a stage; the same arguments give the same trace.

    Raises `ValueError` for a tail that is neither `lognormal` nor `heavy`, no group or sibling, or a negative seed.
    """
    if groups < 1 or siblings < 1 or seed < 0:
        raise ValueError(f"groups {groups} and siblings {siblings} must be at least 1, and seed {seed} at least 0")
    if tail not in ("lognormal", "heavy"):
        raise ValueError(f"tail {tail!r} is neither 'lognormal' nor 'heavy'")
    rng = np.random.default_rng(seed)
    spread = stage.spread_group**2 + stage.spread_sibling**2
    rollouts: list[TraceRollout] = []
    for group in range(groups):
        prompt = int(np.clip(rng.lognormal(np.log(stage.prompt_tokens_mean), 0.4), 64, 2_048))
        shared = rng.normal(0.0, stage.spread_group)
        for _ in range(siblings):
            if tail == "lognormal":
                own = rng.normal(0.0, stage.spread_sibling)
                length = stage.mean_response_tokens * float(np.exp(shared + own - spread / 2))
            else:
                scale = float(np.exp(shared - stage.spread_group**2 / 2))
                length = stage.mean_response_tokens * scale * (0.4 + 0.36 * float(rng.pareto(1.6)))
            rollout = _rollout(f"g{group}", prompt, max(16, int(length)), stage, rng)
            rollouts.append(cut(rollout, stage.max_response_tokens, stage.max_turns))
    return rollouts


def _rollout(group: str, prompt: int, length: int, stage: Stage, rng: np.random.Generator) -> TraceRollout:
    """Split a response of `length` tokens into turns: more calls in longer ones."""
    rate = stage.calls_mean * min(2.0, length / stage.mean_response_tokens)
    calls = min(int(rng.poisson(rate)), stage.max_turns - 1, length // 32)
    tool_tokens = np.clip(rng.lognormal(np.log(stage.tool_tokens_mean) - 0.32, 0.8, calls), 8, 512).astype(int)
    tool_seconds = 0.05 + rng.exponential(stage.tool_seconds_mean - 0.05, calls)
    sampled = max(calls + 1, length - int(tool_tokens.sum()))
    shares = rng.dirichlet(np.full(calls + 1, 2.0))
    tokens = np.maximum(1, np.round(shares * sampled)).astype(int)
    turns = [
        TraceTurn(int(tokens[turn]), int(tool_tokens[turn]), round(float(tool_seconds[turn]), 3))
        for turn in range(calls)
    ]
    return TraceRollout(group, prompt, (*turns, TraceTurn(int(tokens[calls]))))


# -- files ----------------------------------------------------------------------------------------------------------
def write_trace(path: Path, rollouts: Iterable[TraceRollout]) -> None:
    """One JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        for rollout in rollouts:
            file.write(json.dumps(trace_row(rollout), separators=(",", ":")) + "\n")


def trace_row(rollout: TraceRollout) -> dict[str, Any]:
    return {
        "group": rollout.group,
        "prompt_tokens": rollout.prompt_tokens,
        "turns": [
            {
                "completion_tokens": turn.completion_tokens,
                "tool_tokens": turn.tool_tokens,
                "tool_seconds": turn.tool_seconds,
            }
            for turn in rollout.turns
        ],
    }


def read_trace(path: Path) -> list[TraceRollout]:
    """Raises `ValueError` naming file, line and field for anything missing, negative or of another type."""
    rollouts: list[TraceRollout] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                rollouts.append(_parse(json.loads(line)))
            except (ValueError, TypeError, RecursionError) as error:  # no UTF-8, no JSON, or nested beyond reason
                raise ValueError(f"{path}:{number}: {error}") from error
    if not rollouts:
        raise ValueError(f"{path}: the trace is empty")
    return rollouts


def _parse(row: Any) -> TraceRollout:
    row = _object(row, "a rollout")
    group = row.get("group")
    if not isinstance(group, str) or not group:
        raise ValueError("'group' is missing or not a non-empty string")
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns:
        raise ValueError("'turns' is missing or not a non-empty list")
    return TraceRollout(
        group, _count(row, "prompt_tokens", 1), tuple(_parse_turn(turn) for turn in cast(Sequence[Any], turns))
    )


def _parse_turn(turn: Any) -> TraceTurn:
    turn = _object(turn, "a turn")
    seconds = turn.get("tool_seconds")
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds <= LONGEST_TOOL_S:
        raise ValueError(f"'tool_seconds' is {seconds!r:.40}, not a number between 0 and {LONGEST_TOOL_S:g}")
    return TraceTurn(_count(turn, "completion_tokens", 1), _count(turn, "tool_tokens", 0), float(seconds))


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a JSON object")
    return cast(dict[str, Any], value)


def _count(row: dict[str, Any], name: str, least: int) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST_TOKENS:
        raise ValueError(f"{name!r} is {value!r:.40}, not a whole number between {least} and {MOST_TOKENS}")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scheduler.traces", description="Write a synthetic trace.")
    parser.add_argument("--stage", choices=STAGES, default="stage1")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--siblings", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tail", choices=("lognormal", "heavy"), default="lognormal")
    args = parser.parse_args()
    for name, least in (("groups", 1), ("siblings", 1), ("seed", 0)):
        if getattr(args, name) < least:
            parser.exit(2, f"scheduler.traces: --{name} is {getattr(args, name)}, not at least {least}\n")
    rollouts = synthetic(STAGES[args.stage], groups=args.groups, siblings=args.siblings, seed=args.seed, tail=args.tail)
    try:
        write_trace(args.out, rollouts)
    except OSError as error:
        parser.exit(2, f"scheduler.traces: --out: {error}\n")
    lengths = np.array([rollout.response_tokens for rollout in rollouts])
    truncated = float((lengths >= STAGES[args.stage].max_response_tokens).mean())
    print(f"{args.out}: {len(rollouts)} rollouts, mean response {lengths.mean():.0f} tokens, {truncated:.1%} truncated")


if __name__ == "__main__":
    main()
