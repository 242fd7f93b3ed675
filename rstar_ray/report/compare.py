"""Several runs side by side: each seed a thin line, each group's mean bold."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rstar_ray.errors import ConfigError
from rstar_ray.report.compare_page import Course, Groups, comparison_page, mean_course, short_names
from rstar_ray.report.findings import Change, heldout_change, length_change, number, percent, tool_error_change
from rstar_ray.report.markdown import table
from rstar_ray.report.plots import GROUP_COLOURS, percent_axis, save, set_title, smoothed
from rstar_ray.report.record import RunRecord, read_run
from rstar_ray.run_dir.durable import write_json, write_text


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure at the end of the runs of a group."""

    figure: str
    group: str
    ends: tuple[float, ...]  # one per run that has it

    @property
    def mean(self) -> float:
        return sum(self.ends) / len(self.ends) if self.ends else math.nan


def compare_runs(paths: Mapping[str, Sequence[Path | str]], out: Path, show: Callable[[str], None] = print) -> Path:
    """Write compare.html, compare.md, compare.json and compare.png below `out`; returns the page's path.

    Runs under the empty name are grouped as `group_runs` does. What cannot be read is a shown line.
    """
    read = {name: [read_run(path) for path in members] for name, members in paths.items()}
    for run in (run for members in read.values() for run in members):
        for fault in run.faults:
            show(f"{run.path}: {fault}")
    groups = group_runs(read)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        raise ConfigError("--out", f"{out}: {refused.strerror}", "name a folder that can be written") from refused
    save(_draw, groups, out / "compare.png", height_in=3.1)
    found = comparisons(groups)
    write_json(
        out / "compare.json", [{"figure": c.figure, "group": c.group, "ends": c.ends, "mean": c.mean} for c in found]
    )
    write_text(out / "compare.md", markdown_comparison(groups, found))
    head, rows = end_rows(groups, found)
    write_text(out / "compare.html", comparison_page(groups, head, rows))
    return out / "compare.html"


def group_runs(named: Groups) -> dict[str, list[RunRecord]]:
    """Runs without a name by their algorithm; where that is the same for all, each by itself."""
    runs = [run for members in named.values() for run in members]
    if set(named) == {""} and len({run.algorithm for run in runs}) == 1:
        named = {name: [run] for run, name in zip(runs, short_names(runs).values(), strict=True)}
    groups: dict[str, list[RunRecord]] = {}
    for name, runs in named.items():
        for run in runs:
            groups.setdefault(name or run.algorithm, []).append(run)
    if sum(map(len, groups.values())) < 2:
        raise ConfigError("run_dir", "there is only one run to compare", "name two or more")
    return groups


def comparisons(groups: Groups) -> list[Comparison]:
    """How the runs of every group ended."""
    figures = {
        "held-out pass@1": heldout_change,
        "tool errors when correct": tool_error_change,
        "tokens": length_change,
    }
    return [
        Comparison(figure, name, tuple(end for run in runs if (end := change(run).after) is not None))
        for figure, change in figures.items()
        for name, runs in groups.items()
    ]


def end_rows(groups: Groups, found: Sequence[Comparison]) -> tuple[list[str], list[list[str]]]:
    """A table's head, and a row a group."""
    by_group = {name: [c for c in found if c.group == name] for name in groups}
    figures = [c.figure for c in next(iter(by_group.values()))]
    rows = [
        [name, str(len(groups[name])), str(_trained(groups[name])), *(_spread(c) for c in by_group[name])]
        for name in groups
    ]
    return ["", "runs", "trajectories trained on, per run", *figures], rows


def markdown_comparison(groups: Groups, found: Sequence[Comparison]) -> str:
    head, rows = end_rows(groups, found)
    runs = [
        [name, run.name, str(seed_of(run)), heldout_change(run).title] for name, runs in groups.items() for run in runs
    ]
    return "\n\n".join(
        [
            f"# {' against '.join(groups)}",
            f"![{' against '.join(groups)}](compare.png)",
            table(head, rows),
            "Figures at the end of the runs: mean, and the lowest and highest run in brackets.",
            "## Runs",
            table(["", "run", "seed", "held-out"], runs),
        ]
    ) + "\n"  # fmt: skip


def seed_of(run: RunRecord) -> Any:
    return next(iter(run.setting("seed")), "–")


def _trained(runs: Sequence[RunRecord]) -> str:
    counts = [sum(row["trained_trajectories"] for row in run.steps) for run in runs]
    return f"{sum(counts) / len(counts):,.0f}"


def _spread(comparison: Comparison) -> str:
    show = number if comparison.figure == "tokens" else percent
    low, high = min(comparison.ends, default=math.nan), max(comparison.ends, default=math.nan)
    several = f" ({show(low)} to {show(high)})" if len(comparison.ends) > 1 else ""
    return f"{show(comparison.mean)}{several}"


def _heldout_course(run: RunRecord) -> Course:
    return [(row["rl_step"], row["avg_at_k"]) for row in run.heldout]


def _error_course(run: RunRecord) -> Course:
    values = smoothed(run.column("tool_error_share_correct"))
    pairs = zip(run.column("rl_step"), values, strict=True)
    return [(step, value) for step, value in pairs if not math.isnan(value)]


def _draw(figure: Any, groups: Groups) -> None:
    panels = figure.subplots(1, 2)
    for axes, title, course_of, change in (
        (panels[0], "Held-out pass@1", _heldout_course, heldout_change),
        (panels[1], "Tool errors in correct answers", _error_course, tool_error_change),
    ):
        highest = 0.0
        for (name, runs), colour in zip(groups.items(), GROUP_COLOURS * len(groups), strict=False):
            courses = [course for run in runs if (course := course_of(run))]
            for course in courses:
                axes.plot(*zip(*course, strict=True), color=colour, linewidth=0.9, alpha=0.4)
                highest = max(highest, *(value for _, value in course))
            if mean := mean_course(courses):
                axes.plot(*zip(*mean, strict=True), color=colour, linewidth=2.4, label=name)
        percent_axis(axes, 1.0 if axes is panels[0] else max(0.05, 1.15 * highest))
        set_title(axes, f"{title}: {_ends(groups, change)}")
        axes.set_xlabel("RL step, all stages")
        axes.set_xlim(0, None)
        axes.legend(frameon=False, loc="lower right" if axes is panels[0] else "upper right")


def _ends(groups: Groups, change: Any) -> str:
    """ "92.1 % against 84.0 %", in the order of the groups."""
    shown: list[str] = []
    for runs in groups.values():
        found: list[Change] = [change(run) for run in runs]
        known = [end.after for end in found if end.after is not None]
        shown.append(percent(sum(known) / len(known)) if known else "–")
    return " against ".join(shown)
