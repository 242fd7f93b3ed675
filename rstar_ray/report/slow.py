"""Why a step was slow: its phases compared with the medians of its stage, and metrics that explain them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rstar_ray.report.findings import PHASE_NAMES, duration, percent
from rstar_ray.report.run_record import PHASES, Row, RunRecord

NOTABLE = 1.15
"""Factor on the median; steps and metrics below it are not mentioned."""
WAITED = 0.25
"""Share of a step above which the longest rollout is reported."""
Medians = dict[str, float]
COMPARED: tuple[tuple[str, str, Callable[[float], str]], ...] = (
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
    """Medians of every metric over the steps that have it, by stage."""
    known: dict[str, dict[str, list[float]]] = {}
    for row in steps:
        of_stage = known.setdefault(row["stage"], {})
        for name, value in row.items():
            if isinstance(value, int | float):
                of_stage.setdefault(name, []).append(value)
    return {stage: {name: median(values) for name, values in of.items()} for stage, of in known.items()}


def explained(row: Row, usual: Medians) -> SlowStep:
    """One or two sentences; `usual` has the medians of the step's stage."""
    seconds = row["step_s"]
    parts = {phase: row[phase] for phase in PHASES}
    excess = sorted(((row[phase] - usual[phase], phase) for phase in PHASES), reverse=True)
    times = seconds / usual["step_s"] if usual["step_s"] else 1.0
    if times >= NOTABLE:
        more = [
            f"{PHASE_NAMES[phase]} +{_seconds(by)}" for by, phase in excess if by > 0.1 * (seconds - usual["step_s"])
        ]
        where = "above the median in " + ", ".join(more) if more else "no phase is above its median"
    else:
        most = max(parts, key=lambda phase: parts[phase])
        where = f"{percent(parts[most] / seconds if seconds else 0, 0)} of it {PHASE_NAMES[most]}"
    details = "; ".join([*_figures(row, usual), *_placement(row)])
    covered = min(1.0, sum(parts.values()) / seconds) if seconds else 1.0
    sentence = f"{_seconds(seconds)}, {times:.1f} times the stage's median: {where}."
    if details:
        sentence += f" {details[0].upper()}{details[1:]}."
    return SlowStep(row["rl_step"], seconds, sentence, covered)


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 89.95 else duration(value)


def _figures(row: Row, usual: Medians) -> list[str]:
    """Metrics well above their medians, and a throughput below its median."""
    found = [
        f"{show(row[name])} {title}, {row[name] / usual[name]:.1f} times the median"
        for name, title, show in COMPARED
        if usual[name] and row[name] >= NOTABLE * usual[name]
    ]
    speed = usual.get("tokens_per_s")
    if speed and row["tokens_per_s"] and row["tokens_per_s"] * NOTABLE <= speed:
        found.append(f"{row['tokens_per_s']:,.0f} tokens/s, median {speed:,.0f}")
    if longest := row["longest"]:
        alone = longest["generate_s"] + longest["tool_s"] + longest["verify_s"]
        size = f"{longest['tokens']:,} tokens in {longest['turns']} turns"
        found.append(f"its longest rollout took {_seconds(alone)} without waiting ({size})")
    if row.get("last_ended") and row["rollout_s"] > WAITED * row["step_s"]:
        _, draw, rollout = row["last_ended"].split("/", 2)
        found.append(f"it waited {_seconds(row['rollout_s'])} for its rollouts (draw {draw}); {rollout} ended last")
    if (row["inter_step_s"] or 0.0) > 0.1 * row["step_s"]:
        found.append(f"{_seconds(row['inter_step_s'])} before it for the last step's record, checkpoint or evaluation")
    for name, title in (("restarts", "rollouts restarted"), ("judge_retries", "rewards computed again")):
        if row[name]:
            found.append(f"{row[name]:,} {title}")
    return found


def _placement(row: Row) -> list[str]:
    placed, step_s = row["balancer"], row["step_s"]
    if not placed:
        return []
    found = [f"KV cache at most {percent(row['balancer/kv_util_max'], 0)} full"]
    if waiting := row["balancer/queue_len_max"]:
        found.append(
            f"at most {waiting:,} rollouts waited for a replica, median {row['balancer/wait_p50_s']:.1f} s, "
            f"99th percentile {row['balancer/wait_p99_s']:.1f} s"
        )
    for reason, seconds in placed["held_s"].items():
        if seconds > 0.02 * step_s:
            found.append(f"the queue stood still for {_seconds(seconds)}: {reason}")
    preempted, moved = row["balancer/num_preemptions"], row["balancer/num_moves"]
    if preempted or moved:
        again = row["balancer/num_recomputed_tokens"]
        found.append(f"{preempted:,} preemptions and {moved:,} moves, {again:,} tokens recomputed")
    return found


def slow_data(run: RunRecord) -> dict[str, Any]:
    """Data for the page: every step's text, medians of the parts by stage, and the longest rollout if recorded."""
    usual = stage_medians(run.steps)
    for stage, medians in usual.items():
        if any(
            row.get("staleness") for row in run.steps if row["stage"] == stage
        ):  # earlier steps sampled a part: it says nothing about this step
            medians.pop("tokens_per_s", None)
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
