"""The figures of a run as text and tables: titles of charts, headline, evaluations, metrics by stage, facts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from rstar_ray.report.run_record import Row, RunRecord, ends, identity_of, pooled, seconds_by_phase, stage_title
from rstar_ray.telemetry.registry import Metric, step_metric

PHASE_NAMES = {
    "generate_s": "generation",
    "tools_s": "tools",
    "verify_s": "verification",
    "learn_s": "learning",
    "publish_s": "publishing",
    "other_s": "other",
}
PHASE_COLOURS = {
    "generate_s": "blue",
    "tools_s": "amber",
    "verify_s": "purple",
    "learn_s": "green",
    "publish_s": "red",
    "other_s": "grey",
}
"""Color name by phase, for pictures and page; each defines the shades."""


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Seconds of one phase, over all RL steps of a stage or of the run."""

    phase: str
    seconds: float
    share: float


def percent(value: float | None, digits: int = 1) -> str:
    if value is None or math.isnan(value):
        return "–"
    return f"{100 * value:.{digits}f} %"


def number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:,.0f}"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5_400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3_600:.1f} h"


@dataclass(frozen=True, slots=True)
class FigureChange:
    """A metric at the start and at the end."""

    name: str
    before: float | None  # None if unknown
    after: float | None
    show: Callable[[float | None], str]
    unit: str = ""

    @property
    def title(self) -> str:
        """For a plot: "Response length: 84 → 75 tokens"."""
        unit = f" {self.unit}" if self.unit else ""
        if self.before is None or self.show(self.before) == self.show(self.after):
            return f"{self.name}: {self.show(self.after)}{unit}" if self.after is not None else self.name
        return f"{self.name}: {self.show(self.before)} → {self.show(self.after)}{unit}"

    @property
    def sentence(self) -> str:
        """For a reader: "Response length fell from 84 to 75 tokens."."""
        unit = f" {self.unit}" if self.unit else ""
        if self.after is None:
            return ""
        if self.before is None:
            return f"{self.name}: {self.show(self.after)}{unit}."
        if self.show(self.before) == self.show(self.after):
            return f"{self.name} stayed at {self.show(self.after)}{unit}."
        verb = "rose" if self.after > self.before else "fell"
        return f"{self.name} {verb} from {self.show(self.before)} to {self.show(self.after)}{unit}."


def heldout_change(run: RunRecord) -> FigureChange:
    scores = [row["avg_at_k"] for row in run.heldout]
    before, after = (scores[0] if len(scores) > 1 else None), (scores[-1] if scores else None)
    return FigureChange("Held-out pass@1", before, after, percent)


def reward_range(rewards: Sequence[float]) -> tuple[float, float]:
    """The range of an axis of rewards: 0 to 1, and whole numbers beyond where rewards are.

    >>> reward_range([0.2, 0.9]), reward_range([-0.4, 0.5])
    ((0.0, 1.0), (-1.0, 1.0))
    """
    return float(math.floor(min([0.0, *rewards]))), float(math.ceil(max([1.0, *rewards])))


def reward_change(run: RunRecord) -> FigureChange:
    return _change("Training reward", run.column("reward_mean"), lambda value: f"{value:.2f}")


def tool_error_change(run: RunRecord) -> FigureChange:
    """The change on held-out problems if they were evaluated at least twice; else over the training steps."""
    shares = [row["tool_error_rate_correct"] for row in run.heldout]
    if len(shares) > 1:
        return FigureChange("Tool errors in correct rollouts (held-out)", shares[0], shares[-1], percent)
    return training_tool_error_change(run)


def training_tool_error_change(run: RunRecord) -> FigureChange:
    return _change("Tool errors in correct training rollouts", run.column("tool_error_rate_correct"), percent)


def length_change(run: RunRecord) -> FigureChange:
    return _change("Response length", run.column("response_tokens_mean"), number, "tokens")


def truncation_change(run: RunRecord) -> FigureChange:
    return _change("Truncated training rollouts", run.column("frac_truncated"), percent)


def sft_change(run: RunRecord) -> FigureChange:
    losses = [math.nan if row["loss"] is None else row["loss"] for row in run.sft]
    return _change("SFT loss", losses, _loss, "nats per token")


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _change(name: str, values: Sequence[float], show: Callable[[float | None], str], unit: str = "") -> FigureChange:
    """The change between the means of the first and of the last few steps; of one value, that value."""
    before, after = ends(values) or (None, next((value for value in values if not math.isnan(value)), None))
    return FigureChange(name, before, after, show, unit)


def time_title(run: RunRecord) -> str:
    most = max(phase_times(run.steps), key=lambda phase: phase.seconds)
    return f"Seconds per step: {percent(most.share, 0)} go into {PHASE_NAMES[most.phase]}"


def phase_times(steps: Sequence[Row]) -> list[PhaseTime]:
    """Wall time of these steps by phase."""
    seconds = {phase: sum(layer) for phase, layer in seconds_by_phase(steps).items()}
    total = sum(seconds.values()) or 1.0
    return [PhaseTime(phase, spent, spent / total) for phase, spent in seconds.items()]


def headline(run: RunRecord) -> str:
    """The run in a few sentences."""
    changes = [heldout_change(run)]
    if run.steps:
        changes += [tool_error_change(run), length_change(run)]
    elif run.sft:
        changes.append(sft_change(run))
    sentences = [change.sentence for change in changes if change.sentence]
    if any(change.before is not None for change in changes[1:]):
        sentences.append("Training figures are means over the first and the last steps.")
    return " ".join(sentences)


def before_after(run: RunRecord, problem_set: str = "held-out") -> list[Row]:
    """The last evaluation of each stage, in the order they were trained; each model and each protocol has its own."""
    # rows lie in order of their RL step
    last = {(row["stage"], *identity_of(row)): row for row in run.evaluations if row["set"] == problem_set}
    return list(last.values())


def other_sets(run: RunRecord) -> list[str]:
    return sorted({row["set"] for row in run.evaluations} - {"held-out"})


def family_changes(run: RunRecord) -> list[tuple[str, float, float]]:
    """(family, pass@1 at the first held-out evaluation, at the last), hardest at first on top."""
    if len(run.heldout) < 2:
        return []
    first, last = run.heldout[0]["by_family"], run.heldout[-1]["by_family"]
    changes = [(name, first[name]["avg_at_k"], last[name]["avg_at_k"]) for name in first if name in last]
    return sorted(changes, key=lambda change: change[1])


EVALUATION_HEAD = (
    "policy",
    "settings",
    "pass@1",
    "95 % interval",
    "pass@k",
    "maj@k",
    "calls per rollout",
    "tool errors in correct rollouts",
    "tokens",
    "truncated",
)


def evaluation_cells(row: Row) -> list[str]:
    return [
        row["model"] or stage_title(row["stage"]),
        _asked(row),
        percent(row["avg_at_k"]),
        f"{100 * row['ci_low']:.1f} to {100 * row['ci_high']:.1f}",
        percent(row["pass_at_k"]),
        percent(row["maj_at_k"]),
        f"{row['calls_mean']:.1f}",
        percent(row["tool_error_rate_correct"]),
        number(row["response_tokens_mean"]),
        percent(row["frac_truncated"]),
    ]


def _asked(row: Row) -> str:
    """ "k 4, T 1, top-p 1, 512 tokens, 6 turns"."""
    return (
        f"k {row['k']}, T {row['temperature']:g}, top-p {row['top_p']:g}, "
        f"{number(row['max_response_tokens'])} tokens, {row['max_turns']} turns"
    )


def metric_rows(run: RunRecord) -> tuple[list[str], list[list[str]]]:
    """(head, rows): every step metric that has a value, per stage over all its steps by the registry's reduction."""
    stages = {span.name: pooled([row for row in run.steps if row["stage"] == span.name]) for span in run.spans}
    rows: list[list[str]] = []
    for name in dict.fromkeys(name for values in stages.values() for name in values):
        metric = step_metric(name)[0]
        cells = [_value(values[name], metric) if name in values else "–" for values in stages.values()]
        rows.append([name, *cells, metric.unit, metric.reduction, metric.help])
    return ["metric", *map(stage_title, stages), "unit", "over the steps", "meaning"], rows


def _value(value: float, metric: Metric) -> str:
    if metric.unit == "fraction":
        return percent(value)
    if metric.unit == "bytes":
        return f"{value / 2**20:,.0f} MiB"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1_000 else f"{value:.4g}"


def facts(run: RunRecord) -> list[tuple[str, str]]:
    """Settings, sizes and versions of the run as (name, value)."""
    found: list[tuple[str, str]] = []
    for label, values in (
        ("Scale", run.setting("scale")),
        ("Model", run.setting("model")),
        ("Seed", run.setting("seed")),
        ("Prompts per step", run.setting("prompts_per_step")),
        ("Rollouts per prompt", run.rollouts_drawn()),
        ("Kept per prompt", run.setting("algorithm.keep")),
        ("Generation replicas", run.setting("engine.replicas")),
        ("Learner ranks", run.setting("learner.ranks")),
        ("Sandbox executors", run.setting("sandbox.executors")),
    ):
        if values:
            found.append((label, ", ".join(map(str, values))))
    if run.steps:
        found.append(("Algorithm", run.algorithm))
        stages = ", ".join(f"{stage_title(span.name)}: {span.end - span.start}" for span in run.spans)
        found.append(("RL steps", stages))
        rollouts, tokens = (sum(row[name] for row in run.steps) for name in ("rollouts", "tokens_generated"))
        found.append(("Rollouts", f"{rollouts:,}, {tokens:,} tokens sampled"))
    if run.sft:
        found.append(("SFT steps", str(run.sft[-1]["step"])))
    if run.heldout:
        last = run.heldout[-1]
        found.append(("Held-out", f"{last['num_problems']} problems, {last['k']} rollouts of each"))
    if run.launches:
        found += _launch_facts(run)
    return found


def _launch_facts(run: RunRecord) -> list[tuple[str, str]]:
    """Each start of a stage has a row; a stage with several rows was resumed."""
    first, last = run.launches[0], run.launches[-1]
    times_resumed = len(run.launches) - len({launch["stage"] for launch in run.launches})
    resumed = f", resumed {'once' if times_resumed == 1 else f'{times_resumed} times'}" if times_resumed else ""
    versions = ", ".join(f"{package} {version}" for package, version in last["versions"].items())
    usual = ("format", "started_at", "command", "host", "platform", "cpus", "versions", "stage", "scale")
    others = {name: value for name, value in last.items() if value and name not in usual}
    more = [(name.replace("_", " ").capitalize(), str(value)) for name, value in others.items()]
    found = [("Started", f"{first['started_at']}{resumed}")]
    if run.finished:
        ended = run.finished[-1]
        taken_s = (
            datetime.fromisoformat(ended["finished_at"]) - datetime.fromisoformat(first["started_at"])
        ).total_seconds()
        found.append(("Finished", f"{stage_title(ended['stage'])} after {duration(taken_s)}"))
    return [
        *found,
        ("Machine", f"{last['platform']}, {last['cpus']} CPU cores"),
        *more,
        ("Versions", versions),
    ]
