"""`compare.html`: several runs on one page, as one file: how they end, their courses over each other, what differs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rstar_ray.report.findings import PHASE_NAMES, percent, phase_times
from rstar_ray.report.page import as_script_data, whole_page
from rstar_ray.report.plots import smoothed
from rstar_ray.report.record import RunRecord, stage_title
from rstar_ray.report.verdicts import verdicts
from rstar_ray.run_dir.folder import flatten

SCRIPTS = ("dom", "charts", "compare")
COLOURS = ("blue", "red", "green", "purple", "amber")
"""Of groups, in their order."""
COURSES = (
    ("reward_mean", "Mean reward", "plain"),
    ("tool_error_share_correct", "Tool errors in correct answers", "percent"),
    ("response_tokens_mean", "Tokens per response", "tokens"),
    ("share_truncated", "Cut off by the budget", "percent"),
    ("share_all_right", "Prompts all right", "percent"),
    ("entropy", "Entropy, nats per token", "plain"),
    ("logprob_diff_mean", "Engine against learner, nats per token", "tiny"),
    ("grad_norm", "Gradient norm", "plain"),
    ("step_s", "Seconds of a step", "seconds"),
)
"""Field of a step's row, what it is, and how its numbers are written."""
Groups = Mapping[str, Sequence[RunRecord]]
Course = list[tuple[float, float]]
"""RL step and value; steps without one are left out."""


def comparison_page(groups: Groups, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """`head` and `rows` are the table of how the groups ended."""
    title = " against ".join(groups)
    data = {"title": title, "head": list(head), "rows": [list(row) for row in rows], **comparison_data(groups)}
    return whole_page(title, as_script_data(data), "", SCRIPTS)


def comparison_data(groups: Groups) -> dict[str, Any]:
    """All that the page shows but its first table, as JSON values."""
    runs = [run for members in groups.values() for run in members]
    names = short_names(runs)
    longest = max(runs, key=lambda run: len(run.steps))
    alike = len({run.spans for run in runs}) == 1
    return {
        "groups": [
            {"name": name, "colour": COLOURS[number % len(COLOURS)], "runs": [names[id(run)] for run in members]}
            for number, (name, members) in enumerate(groups.items())
        ],
        "spans": [
            {"title": stage_title(span.name), "start": span.start, "end": span.end}
            for span in (longest.spans if alike else ())
        ]
        or [{"title": "RL steps, all stages", "start": 0, "end": len(longest.steps)}],
        "charts": [chart for chart in _charts(groups) if any(one["runs"] for one in chart["groups"])],
        "runs": [{"name": names[id(run)], "path": str(run.path)} for run in runs],
        "verdicts": _verdicts(runs),
        "phases": _phases(runs),
        "settings": differing_settings(runs),
    }


def short_names(runs: Sequence[RunRecord]) -> dict[int, str]:
    """By identity: the directory's name, with its parent's where two are the same."""
    names = [run.name for run in runs]
    return {id(run): run.name if names.count(run.name) == 1 else f"{run.path.parent.name}/{run.name}" for run in runs}


def _charts(groups: Groups) -> list[dict[str, Any]]:
    heldout = _chart("Held-out pass@1", "percent", groups, _heldout, top=1.0)
    return [
        heldout,
        *(_chart(title, unit, groups, lambda run, name=name: _course(run, name)) for name, title, unit in COURSES),
    ]


def _chart(
    title: str,
    unit: str,
    groups: Groups,
    course_of: Callable[[RunRecord], Course],
    top: float | None = None,
) -> dict[str, Any]:
    drawn: list[dict[str, Any]] = []
    lowest = highest = 0.0
    for members in groups.values():
        courses = [course for run in members if (course := course_of(run))]
        values = [value for course in courses for _, value in course]
        lowest, highest = min([lowest, *values]), max([highest, *values])
        drawn.append({"runs": courses, "mean": mean_course(courses)})
    span = {"bottom": 1.1 * lowest, "top": top or 1.1 * highest or 1.0}
    return {"title": title, "unit": unit, **span, "groups": drawn}


def mean_course(courses: Sequence[Course]) -> Course:
    """Mean over runs at every step that all of them have."""
    by_step: dict[float, list[float]] = {}
    for course in courses:
        for step, value in course:
            by_step.setdefault(step, []).append(value)
    return [
        (step, sum(values) / len(values)) for step, values in sorted(by_step.items()) if len(values) == len(courses)
    ]


def _heldout(run: RunRecord) -> Course:
    return [(row["rl_step"], row["avg_at_k"]) for row in run.heldout]


def _course(run: RunRecord, name: str) -> Course:
    """Smoothed, without the steps in which it has no value."""
    pairs = zip(run.column("rl_step"), smoothed(run.column(name)), strict=True)
    return [(step, float(f"{value:.4g}")) for step, value in pairs if value == value]


def _verdicts(runs: Sequence[RunRecord]) -> list[list[Any]]:
    """A row a signal: its name, and each run's state and where it stands."""
    found = [{one.signal: one for one in verdicts(run)} for run in runs]
    signals = dict.fromkeys(signal for of_run in found for signal in of_run)
    return [
        [signal, *([str(of_run[signal].state), of_run[signal].value] if signal in of_run else None for of_run in found)]
        for signal in signals
    ]


def _phases(runs: Sequence[RunRecord]) -> list[list[str]]:
    """A row a part of the steps: each run's share, and its seconds a step."""
    of_runs = [{time.phase: time for time in phase_times(run.steps)} if run.steps else {} for run in runs]
    return [
        [
            name,
            *(
                f"{percent(of_run[phase].share, 0)}, {of_run[phase].seconds / len(run.steps):.2f} s"
                if phase in of_run
                else "–"
                for run, of_run in zip(runs, of_runs, strict=True)
            ),
        ]
        for phase, name in PHASE_NAMES.items()
    ]


def differing_settings(runs: Sequence[RunRecord]) -> list[list[str]]:
    """A row for each setting of a stage that is not the same in all runs: `stage1: algorithm.resample`, its values."""
    stages = dict.fromkeys(stage for run in runs for stage in run.config)
    rows: list[list[str]] = []
    for stage in stages:
        flat = [flatten(run.config.get(stage, {})) for run in runs]
        for name in dict.fromkeys(name for of_run in flat for name in of_run):
            values = [str(of_run.get(name, "–")) for of_run in flat]
            if len(set(values)) > 1:
                rows.append([f"{stage}: {name}", *values])
    return rows
