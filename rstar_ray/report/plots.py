"""The report's plots. One colour per figure everywhere; titles state the finding; nothing drawn that says nothing."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rstar_ray.report.findings import (
    PHASE_COLOURS,
    PHASE_NAMES,
    family_changes,
    heldout_change,
    length_change,
    percent,
    reward_change,
    reward_range,
    sft_change,
    solved_change,
    time_title,
    tool_error_change,
    truncation_change,
)
from rstar_ray.report.record import RunRecord, StageSpan, seconds_by_phase, smooth, stage_title
from rstar_ray.run_dir.decoration import decoration

INK, MUTED, GRID, BAND = "#1f2933", "#6b7785", "#e4e7eb", "#f4f6f8"
BLUE, GREEN, RED, PURPLE, AMBER, GREY = "#2b6cb0", "#2f855a", "#c8452d", "#6b4fa0", "#d99a2b", "#c3cad3"
SHADES = {"blue": BLUE, "green": GREEN, "red": RED, "purple": PURPLE, "amber": AMBER, "grey": GREY}
GROUP_COLOURS = (BLUE, RED, GREEN, PURPLE, AMBER, MUTED)
TITLE_SIZE = 9.5
WIDTH_IN = 8.8  # at 200 dpi twice the pixels of GitHub's column
STYLE: Any = {
    "font.family": ["DejaVu Sans"],
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}
Axes = Any  # matplotlib is only partly typed


def draw_plots(run: RunRecord, folder: Path, show: Callable[[str], None] = print) -> list[Path]:
    """Every plot the run has figures for, in reading order; one that fails is a shown line."""
    folder.mkdir(parents=True, exist_ok=True)
    plots: list[tuple[str, Callable[[Any, RunRecord], None], float]] = []
    if run.steps:
        plots += [("overview", _overview, 8.0), ("time", _alone(draw_time), 3.0)]
    if family_changes(run):
        plots.append(("families", _alone(draw_families), 0.9 + 0.24 * len(family_changes(run))))
    if run.sft:
        plots.append(("sft", _alone(draw_sft), 2.7))
    drawn: list[Path] = []
    for name, draw, height_in in plots:
        with decoration(f"{name}.png", show):
            drawn.append(save(draw, run, folder / f"{name}.png", height_in=height_in))
    drawn += sorted(folder.glob("step-*.png"))[-1:]  # of the last stage, drawn when it ended
    return drawn


def save(draw: Callable[[Any, Any], None], subject: Any, path: Path, *, height_in: float) -> Path:
    """Draw on a fresh figure and write a PNG; byte for byte the same for the same figures."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        draw(figure, subject)
        figure.savefig(path, dpi=200, metadata={"Software": None})
    return path


def _alone(draw: Callable[[Axes, RunRecord], None]) -> Callable[[Any, RunRecord], None]:
    return lambda figure, run: draw(figure.subplots(), run)


def _overview(figure: Any, run: RunRecord) -> None:
    (heldout, tool_errors), (reward, length), (truncated, solved) = figure.subplots(3, 2, sharex=True)
    draw_heldout(heldout, run)
    draw_tool_errors(tool_errors, run)
    draw_reward(reward, run)
    draw_length(length, run)
    draw_truncated(truncated, run)
    draw_solved(solved, run)
    for axes in (heldout, tool_errors, reward, length):
        axes.set_xlabel("")
    figure.get_layout_engine().set(hspace=0.06, wspace=0.05)


def draw_heldout(axes: Axes, run: RunRecord) -> None:
    """Points with their 95 % intervals; the first and the last are labelled."""
    _frame(axes, run, heldout_change(run).title)
    percent_axis(axes, 1.0)
    rows = run.heldout
    if not rows:
        axes.text(0.5, 0.5, "not evaluated", transform=axes.transAxes, color=MUTED, ha="center")
        return
    steps, scores = [row["rl_step"] for row in rows], [row["avg_at_k"] for row in rows]
    axes.vlines(
        steps, [row["ci_low"] for row in rows], [row["ci_high"] for row in rows], color=GREEN, alpha=0.35, linewidth=2.5
    )
    axes.plot(steps, scores, color=GREEN, linewidth=1.8, marker="o", markersize=4.5, clip_on=False, zorder=3)
    for position in {0, len(rows) - 1}:
        _label(axes, steps[position], scores[position], percent(scores[position], 0), GREEN, run)


def draw_reward(axes: Axes, run: RunRecord) -> None:
    _frame(axes, run, reward_change(run).title)
    values = run.column("reward_mean")
    _series(axes, run, values, BLUE)
    low, high = reward_range([value for value in values if not math.isnan(value)])
    axes.set_ylim(low, high + 0.04 * (high - low))


def draw_tool_errors(axes: Axes, run: RunRecord) -> None:
    _frame(axes, run, tool_error_change(run).title)
    values = run.column("tool_error_share_correct")
    _series(axes, run, values, RED)
    percent_axis(axes, max([0.05, *(1.15 * value for value in values if not math.isnan(value))]))


def draw_length(axes: Axes, run: RunRecord) -> None:
    _frame(axes, run, length_change(run).title)
    values = run.column("response_tokens_mean")
    _series(axes, run, values, PURPLE)
    axes.set_ylim(0, 1.2 * max(values))


def draw_truncated(axes: Axes, run: RunRecord) -> None:
    _frame(axes, run, truncation_change(run).title)
    values = run.column("share_truncated")
    _series(axes, run, values, AMBER)
    percent_axis(axes, max(0.05, 1.15 * max(values)))


def draw_solved(axes: Axes, run: RunRecord) -> None:
    """What there is to learn from lies between the two: problems all of whose rollouts are right, and all wrong."""
    _frame(axes, run, f"{solved_change(run).title}, and all wrong")
    _series(axes, run, run.column("share_all_right"), GREEN)
    _series(axes, run, run.column("share_all_wrong"), MUTED)
    percent_axis(axes, 1.0)


def draw_time(axes: Axes, run: RunRecord) -> None:
    _frame(axes, run, time_title(run), bands=False)
    steps = run.column("rl_step")
    edges = [steps[0] - 1, *steps]
    bottom = [0.0] * len(steps)
    for phase, seconds in seconds_by_phase(run.steps).items():
        top = [below + more for below, more in zip(bottom, seconds, strict=True)]
        if sum(seconds) > 0.002 * sum(run.column("step_s")):
            colour, label = SHADES[PHASE_COLOURS[phase]], PHASE_NAMES[phase]
            axes.stairs(top, edges, baseline=bottom, fill=True, color=colour, label=label, linewidth=0)
        bottom = top
    axes.set_ylim(0, 1.15 * quantile(bottom, 0.99))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False,
        handlelength=0.9, handleheight=0.9, labelcolor=INK,
    )  # fmt: skip
    _stage_names(axes, run.spans)


def draw_families(axes: Axes, run: RunRecord) -> None:
    """Before and after, one line per family, hardest at first on top."""
    changes = family_changes(run)[::-1]
    set_title(axes, "Held-out pass@1 by family, before RL and at the end")
    rows = range(len(changes))
    before, after = [change[1] for change in changes], [change[2] for change in changes]
    axes.hlines(rows, before, after, color=GREY, linewidth=2.2)
    axes.plot(before, rows, "o", color="white", markeredgecolor=MUTED, markersize=6, label="before RL", clip_on=False)
    axes.plot(after, rows, "o", color=GREEN, markersize=6.5, label="at the end", clip_on=False)
    axes.set_yticks(list(rows), [change[0].replace("_", " ") for change in changes], color=INK)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.6, len(changes) - 0.4)
    axes.xaxis.set_major_formatter(_as_percent)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, handletextpad=0.2)


def draw_sft(axes: Axes, run: RunRecord) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    steps = [row["step"] for row in run.sft]
    losses = [math.nan if row["loss"] is None else row["loss"] for row in run.sft]
    set_title(axes, sft_change(run).title)
    axes.plot(steps, losses, color=BLUE, linewidth=1.4, label="training")
    if measured := [(row["step"], row["val_loss"]) for row in run.sft if row["val_loss"] is not None]:
        axes.plot(
            *zip(*measured, strict=True), color=RED, marker="o", markersize=3.5, linewidth=1.2, label="validation",
            clip_on=False,
        )  # fmt: skip
        axes.legend(frameon=False, loc="upper right")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(_plainly)
    axes.set_xlabel("SFT step")
    axes.set_xlim(0, steps[-1])


def _frame(axes: Axes, run: RunRecord, title: str, *, bands: bool = True) -> None:
    """Title, stages and axis shared by every plot over RL steps."""
    set_title(axes, title, pad=17)
    axes.set_xlabel("RL step, all stages")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlim(0, max([1, *(span.end for span in run.spans)]))
    if bands:
        for position, span in enumerate(run.spans):
            if position % 2 == 0:
                axes.axvspan(span.start, span.end, color=BAND, linewidth=0, zorder=0)
        _stage_names(axes, run.spans)


def _stage_names(axes: Axes, spans: Sequence[StageSpan]) -> None:
    for span in spans:
        across = axes.get_xaxis_transform()
        axes.text((span.start + span.end) / 2, 1.02, stage_title(span.name), transform=across, color=MUTED,
                  fontsize=7.5, ha="center", va="bottom")  # fmt: skip
        if span.start:
            axes.axvline(span.start, color=GREY, linewidth=0.8, zorder=1)


def _series(axes: Axes, run: RunRecord, values: list[float], colour: str) -> None:
    """Every step pale, the smoothed course bold, its ends labelled by the title."""
    steps = run.column("rl_step")
    axes.plot(steps, values, color=colour, alpha=0.28, linewidth=0.9)
    axes.plot(steps, smoothed(values), color=colour, linewidth=2.0)


def set_title(axes: Axes, title: str, pad: float = 6) -> None:
    axes.set_title(title, loc="left", fontsize=TITLE_SIZE, fontweight="bold", pad=pad)


def _as_percent(value: float, _: int) -> str:
    return f"{100 * value:.0f} %"


def _plainly(value: float, _: int) -> str:
    return f"{value:g}"


def percent_axis(axes: Axes, top: float) -> None:
    axes.set_ylim(0, top)
    axes.yaxis.set_major_formatter(_as_percent)


def _label(axes: Axes, x: float, y: float, text: str, colour: str, run: RunRecord) -> None:
    """Beside the point, where a rising line leaves room: right below its start, left above its end."""
    from matplotlib.patheffects import withStroke

    at_end = x > 0.5 * max([1, *(span.end for span in run.spans)])
    offset = (-3, -15 if y > 0.9 else 7) if at_end else (9, -4 if y > 0.08 else 3)
    axes.annotate(
        text, (x, y), xytext=offset, textcoords="offset points", ha="right" if at_end else "left", color=colour,
        fontweight="bold", path_effects=[withStroke(linewidth=3, foreground="white")],
    )  # fmt: skip


def smoothed(values: Sequence[float]) -> list[float]:
    """The course of a figure, at the same smoothness wherever it is drawn."""
    return smooth(values, max(3, len(values) // 12))


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] or 1.0
