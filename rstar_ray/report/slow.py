"""Why a step was slow: its parts beside the median of its stage, and what in its figures goes with them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rstar_ray.report.findings import PHASE_NAMES, duration, percent
from rstar_ray.report.run_record import PHASES, Row, RunRecord

NOTABLE = 1.15
"""Times its median from which on a step or a figure is spoken of."""
Medians = dict[str, float]
TOLD: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("tokens_generated", "tokens sampled", lambda value: f"{value:,.0f}"),
    ("response_tokens_mean", "tokens per rollout", lambda value: f"{value:,.0f}"),
    ("calls_mean", "calls per rollout", lambda value: f"{value:.2f}"),
    ("trained_trajectories", "trajectories trained on", lambda value: f"{value:,.0f}"),
)


@dataclass(frozen=True, slots=True)
class SlowStep:
    """One step's explanation."""

    rl_step: int
    seconds: float
    because: str
    covered: float  # share of the step's seconds that its parts add up to, `other` apart


def stage_medians(steps: Sequence[Row]) -> dict[str, Medians]:
    """Of every numeric figure, by stage."""
    medians: dict[str, Medians] = {}
    for stage in dict.fromkeys(row["stage"] for row in steps):
        rows = [row for row in steps if row["stage"] == stage]
        names = [name for name, value in rows[0].items() if isinstance(value, int | float)]
        medians[stage] = {
            name: median(known)
            for name in names
            if (known := [row[name] for row in rows if isinstance(row[name], int | float)])
        }
    return medians


def explained(row: Row, usual: Medians) -> SlowStep:
    """In a sentence or two; `usual` are the medians of its stage."""
    seconds = row["step_s"]
    parts = {phase: row[phase] for phase in PHASES}
    excess = sorted(((row[phase] - usual[phase], phase) for phase in PHASES), reverse=True)
    times = seconds / usual["step_s"] if usual["step_s"] else 1.0
    said = [f"{_seconds(seconds)}, {times:.1f} times the stage's median"]
    if times >= NOTABLE:
        more = [
            f"{PHASE_NAMES[phase]} +{_seconds(by)}" for by, phase in excess if by > 0.1 * (seconds - usual["step_s"])
        ]
        said.append("more than the median in " + ", ".join(more) if more else "in no part of its own")
    else:
        most = max(parts, key=lambda phase: parts[phase])
        share = parts[most] / seconds if seconds else 0
        said.append(f"{percent(share, 0)} of it {PHASE_NAMES[most]}")
    figures = [*_figures(row, usual), *_placement(row)]
    covered = min(1.0, sum(parts.values()) / seconds) if seconds else 1.0
    with_it = "; ".join(figures)
    sentence = ": ".join(said) + "." + (f" {with_it[0].upper()}{with_it[1:]}." if figures else "")
    return SlowStep(row["rl_step"], seconds, sentence, covered)


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 89.95 else duration(value)


def _figures(row: Row, usual: Medians) -> list[str]:
    """What there was more of than usual, and how fast it went."""
    told = [
        f"{show(row[name])} {title}, {row[name] / usual[name]:.1f} times the median"
        for name, title, show in TOLD
        if usual[name] and row[name] >= NOTABLE * usual[name]
    ]
    speed = usual["tokens_per_s"]
    if speed and row["tokens_per_s"] and row["tokens_per_s"] * NOTABLE <= speed:
        told.append(f"{row['tokens_per_s']:,.0f} tokens/s where the median is {speed:,.0f}")
    if longest := row["longest"]:
        alone = longest["generate_s"] + longest["tool_s"] + longest["verify_s"]
        size = f"{longest['tokens']:,} tokens in {longest['turns']} turns"
        told.append(f"its longest rollout took {_seconds(alone)} itself ({size})")
    if row["before_s"] > 0.1 * row["step_s"]:
        told.append(f"before it {_seconds(row['before_s'])} went into the last one's record, checkpoint or evaluation")
    for name, title in (("restarts", "rollouts begun again"), ("judge_retries", "answers judged again")):
        if row[name]:
            told.append(f"{row[name]:,} {title}")
    return told


def _placement(row: Row) -> list[str]:
    placed, step_s = row["balancer"], row["step_s"]
    if not placed:
        return []
    told = [f"KV cache at most {percent(placed['kv_used_share_most'], 0)} full"]
    if placed["waiting_most"]:
        told.append(
            f"at most {placed['waiting_most']:,} waited for a place, half of them {placed['wait_p50_s']:.1f} s and "
            f"more, the longest {placed['wait_p99_s']:.1f} s"
        )
    for held, seconds in placed["held_s"].items():
        if seconds > 0.02 * step_s:
            told.append(f"for {_seconds(seconds)} of it the queue stood still: {held}")
    if placed["preemptions"] or placed["moves"]:
        again = placed["recomputed_tokens"]
        told.append(
            f"{placed['preemptions']:,} preemptions and {placed['moves']:,} moves, {again:,} tokens computed again"
        )
    return told


def slow_data(run: RunRecord) -> dict[str, Any]:
    """For the page: every step's words, medians of the parts by stage, and the longest rollout where it is recorded."""
    usual = stage_medians(run.steps)
    steps = [explained(row, usual[row["stage"]]) for row in run.steps]
    covered = sum(step.covered * step.seconds for step in steps) / (sum(step.seconds for step in steps) or 1.0)
    return {
        "because": [step.because for step in steps],
        "covered": covered,
        "worst_covered": min((step.covered for step in steps), default=1.0),
        "slowest": [step.rl_step for step in sorted(steps, key=lambda step: -step.seconds)[:5]],
        "medians": {stage: {phase: of[phase] for phase in (*PHASES, "step_s")} for stage, of in usual.items()},
        "longest": [row["longest"] for row in run.steps],
    }
