"""`report.html`: one file that needs no network, with charts and the trajectory browser."""

import html
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rstar_ray.algorithm.stage_end import WINDOW
from rstar_ray.report.findings import (
    EVALUATION_HEAD,
    PHASE_COLOURS,
    PHASE_NAMES,
    FigureChange,
    before_after,
    duration,
    evaluation_cells,
    facts,
    family_changes,
    headline,
    heldout_change,
    length_change,
    metric_rows,
    other_sets,
    phase_times,
    reward_change,
    reward_range,
    sft_change,
    time_title,
    tool_error_change,
    training_tool_error_change,
    truncation_change,
)
from rstar_ray.report.health_checks import health_checks, summary
from rstar_ray.report.run_record import (
    RunRecord,
    TrajectoryFile,
    read_ledger,
    seconds_by_phase,
    smoothed,
    stage_title,
    trajectory_files,
    unread_files,
)
from rstar_ray.report.slow import slow_data
from rstar_ray.report.trajectory_browser import Browser, ledger_data, ledger_ids, read_browser
from rstar_ray.report.trajectory_text import MOST_TEXT_BYTES, Body, block, blocks, chosen, json_bytes
from rstar_ray.run_dir.folder import flatten

WEB = Path(__file__).with_name("web")
GREEN, RED, PURPLE, BLUE, AMBER, INK = "green", "red", "purple", "blue", "amber", "ink"
"""Color names; the page has a shade of each for light and dark mode."""
SCRIPTS = ("dom", "charts", "store", "highlight", "browser", "watch", "page")
"""The order in the page."""


def html_report(run: RunRecord) -> str:
    """The page with the run's data. Model text is embedded as data, never as markup."""
    ledger = read_ledger(run)
    browser, bodies = read_browser(run, ledger)
    held, with_figures = chosen(bodies)
    ids = ledger_ids(ledger)
    data = page_data(run) | {
        "browser": browser_data(browser, held, with_figures),
        "ledger": ledger_data(run, ledger),
        "footer": "One file, made from the run directory; it needs no network.",
    }
    of_ledger = [block(f"ids/{name}", packed) for name, packed in ids.items()]
    return whole_page(run.name, as_script_data(data), "\n".join([blocks(held, with_figures), *of_ledger]))


def as_script_data(data: Mapping[str, Any]) -> str:
    """JSON that is safe inside a script element."""
    return json_bytes(data).decode().replace("<", "\\u003c")


def whole_page(title: str, data: str, below: str) -> str:
    """The page with its data; with empty data it fetches them from its server."""
    parts = {
        "TITLE": html.escape(title),
        "STYLE": (WEB / "page.css").read_text("utf-8"),
        "DATA": data,
        "SCRIPT": "\n".join((WEB / f"{name}.js").read_text("utf-8") for name in SCRIPTS),
        "BLOCKS": below,
    }
    template = (WEB / "page.html").read_text("utf-8")
    return re.sub(r"__(TITLE|STYLE|DATA|SCRIPT|BLOCKS)__", lambda found: parts[found[1]], template)


def page_data(run: RunRecord) -> dict[str, Any]:
    """Everything on the page except trajectories, as JSON values; non-finite numbers are null."""
    files = trajectory_files(run)
    metrics_head, metrics_rows = metric_rows(run)
    return {
        "name": run.name,
        "headline": headline(run),
        "tiles": _tiles(run),
        "spans": [
            {"name": span.name, "start": span.start, "end": span.end, "title": stage_title(span.name)}
            for span in run.spans
        ],
        "x": [row["rl_step"] for row in run.steps],
        "heldout_title": heldout_change(run).title,
        "heldout": [
            {"x": row["rl_step"], "y": row["avg_at_k"], "low": row["ci_low"], "high": row["ci_high"]}
            for row in run.heldout
        ],
        "lines": _lines(run) if run.steps else [],
        **_phases(run),
        "sft": _sft(run),
        "results": [
            {
                "title": "Held-out" if name == "held-out" else name,
                "head": list(EVALUATION_HEAD),
                "rows": [evaluation_cells(row) for row in rows],
            }
            for name in ["held-out", *other_sets(run)]
            if (rows := before_after(run, name))
        ],
        "families": [
            {"name": name.replace("_", " "), "before": before, "after": after}
            for name, before, after in family_changes(run)
        ],
        "metrics_head": metrics_head,
        "metrics_rows": metrics_rows,
        "facts": [list(fact) for fact in facts(run)],
        "stage_titles": stage_titles(run, files),
        "faults": [*run.faults, *unread_files(run, files)],
        "health": health_data(run),
        "slow": slow_data(run),
    }


def _phases(run: RunRecord) -> dict[str, Any]:
    """Seconds of every part of every step."""
    layers = seconds_by_phase(run.steps)
    shares = {phase.phase: phase.share for phase in phase_times(run.steps)}
    heights = [sum(layer[i] for layer in layers.values()) for i in range(len(run.steps))]
    return {
        "time_title": time_title(run) if run.steps else "",
        "time_top": 1.1 * _quantile(heights, 0.99) if run.steps else 1,
        "phases": [
            {
                "phase": phase,
                "name": PHASE_NAMES[phase],
                "colour": PHASE_COLOURS[phase],
                "values": seconds,
                "share": shares[phase],
            }
            for phase, seconds in layers.items()
        ],
    }


def _tiles(run: RunRecord) -> list[dict[str, str]]:
    """Headline values, each with its budget, since evaluations and training rollouts have different budgets."""
    evaluated = _budget(run.heldout[-1]) if run.heldout else ""
    tiles = [_tile(heldout_change(run), GREEN, evaluated)] if run.heldout else []
    if not run.steps and run.sft:
        tiles.append(_tile(sft_change(run), BLUE))
    if run.steps:
        newest = flatten(run.config.get(run.spans[-1].name, {}))
        trained = _budget({name.removeprefix("rollout."): value for name, value in newest.items()})
        errors = evaluated if len(run.heldout) > 1 else trained
        tiles += [
            _tile(reward_change(run), BLUE, trained),
            _tile(tool_error_change(run), RED, errors),
            _tile(replace(length_change(run), name="Training response length"), PURPLE, trained),
            _time_tile(run),
        ]
    return tiles


def _time_tile(run: RunRecord) -> dict[str, str]:
    rl_s, sft_s = (sum(row["step_s"] for row in rows) for rows in (run.steps, run.sft))
    rollouts = f"{len(run.steps)} RL steps, {sum(row['rollouts'] for row in run.steps):,} rollouts"
    beside = f"; without {duration(sft_s)} of SFT and evaluations" if run.sft else "; without evaluations"
    return {"name": "Time in RL steps", "value": duration(rl_s), "note": rollouts + beside, "colour": INK}


def _budget(asked: Mapping[str, Any]) -> str:
    """Budget from an evaluation's row, or from the settings of rollouts; empty where it is not recorded.

    >>> _budget({"max_response_tokens": 512, "max_turns": 8})
    '512 tokens, 8 turns'
    """
    tokens, turns = asked.get("max_response_tokens"), asked.get("max_turns")
    return f"{tokens:,} tokens, {turns} turns" if tokens and turns else ""


def _tile(change: FigureChange, colour: str, budget: str = "") -> dict[str, str]:
    unit = f" {change.unit}" if change.unit else ""
    before = "" if change.before is None else f"from {change.show(change.before)}{unit}"
    note = "; ".join(filter(None, [before, budget and f"at most {budget}"]))
    return {"name": change.name, "value": f"{change.show(change.after)}{unit}", "note": note, "colour": colour}


def _lines(run: RunRecord) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for name, change, colour, unit in (
        ("tool_error_rate_correct", training_tool_error_change(run), RED, "percent"),
        ("reward_mean", reward_change(run), BLUE, "plain"),
        ("response_tokens_mean", length_change(run), PURPLE, "tokens"),
        ("frac_truncated", truncation_change(run), AMBER, "percent"),
    ):
        values = run.column(name)
        known = [value for value in values if not math.isnan(value)]
        highest = max(known, default=0.0)
        low, high = reward_range(known) if name == "reward_mean" else (0.0, max(1.15 * highest, 0.05))
        lines.append(
            {
                "title": change.title,
                "colour": colour,
                "unit": unit,
                "bottom": low,
                "top": high,
                "values": _nullable(values),
                "smooth": _nullable(smoothed(values)),
            }
        )
    return lines + _named_lines(run)


def _named_lines(run: RunRecord) -> list[dict[str, Any]]:
    """A chart for each component of the reward, and for each tool where there are several."""
    names = dict.fromkeys(name for row in run.steps for name in row)
    tools = [name for name in names if name.startswith("tool_calls/")]
    components = [name for name in names if name.startswith("reward_component/")]
    lines: list[dict[str, Any]] = []
    for name in [*components, *(tools if len(tools) > 1 else [])]:
        values = [math.nan if row.get(name) is None else float(row[name]) for row in run.steps]
        known = [value for value in values if not math.isnan(value)]
        kind, _, label = name.partition("/")
        low, high = reward_range(known)
        lines.append(
            {
                "title": f"Reward component: {label}"
                if kind == "reward_component"
                else f"Calls of {label} per rollout",
                "colour": PURPLE if kind == "reward_component" else AMBER,
                "unit": "plain",
                "bottom": low,
                "top": high,
                "values": _nullable(values),
                "smooth": _nullable(smoothed(values)),
            }
        )
    return lines


def _sft(run: RunRecord) -> dict[str, Any] | None:
    if not run.sft:
        return None
    validated = [(row["step"], row["val_loss"]) for row in run.sft if row["val_loss"] is not None]
    return {
        "title": sft_change(run).title,
        "training": [(row["step"], row["loss"]) for row in run.sft if row["loss"] is not None],
        "validation": validated,
        "training_colour": BLUE,
        "validation_colour": RED,
    }


def health_data(run: RunRecord) -> dict[str, Any]:
    """A row per health check, and a summary."""
    found = health_checks(run)
    return {"summary": summary(found) if found else "", "rows": [asdict(one) for one in found], "window": WINDOW}


def stage_titles(run: RunRecord, files: Sequence[TrajectoryFile]) -> dict[str, str]:
    """Display names of all stages that a row or a file may name."""
    stages = {file.stage for file in files} | {row["stage"] for row in [*run.sft, *run.steps]}
    return {stage: stage_title(stage) for stage in sorted(stages)}


def browser_data(browser: Browser, held: Sequence[Body], with_figures: Collection[int]) -> dict[str, Any]:
    """The browser's rows, and the texts that the page contains."""
    bodies = {body.group for body in held}
    data = browser.as_json()
    rows = data["columns"]["group"]
    note = sampling_note(len(rows), sum(group in bodies for group in rows), len(with_figures), len(bodies))
    return data | {"bodies": sorted(bodies), "figures": sorted(with_figures), "note": note}


def sampling_note(rows: int, with_text: int, with_figures: int, groups: int) -> str:
    """The part of the recorded trajectories that the page contains."""
    if with_text == rows:
        texts = f"{rows:,} recorded trajectories, each with its text"
    else:
        texts = (
            f"{rows:,} recorded trajectories, {with_text:,} with their texts: whole groups of siblings, the first of "
            f"every file, then the second, and so on up to {MOST_TEXT_BYTES // 2**20} MB"
        )
    tokens = "" if with_figures in (0, groups) else f"; tokens can be coloured in {with_figures:,} of {groups:,} groups"
    return f"{texts}{tokens}."


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] or 1.0


def _nullable(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(value) else round(value, 6) for value in values]
