"""`report.html`: one file without a network, with charts to point at and trajectories to walk through."""

import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rstar_ray.report.examples import recovered, segments, viewer_rows
from rstar_ray.report.findings import (
    EVALUATION_HEAD,
    PHASE_NAMES,
    PLACEMENT_HEAD,
    Change,
    before_after,
    duration,
    evaluation_cells,
    facts,
    family_changes,
    headline,
    heldout_change,
    length_change,
    other_sets,
    phase_times,
    placement_notes,
    placement_rows,
    results_rows,
    reward_change,
    sft_change,
    time_rows,
    time_title,
    tool_error_change,
    truncation_change,
)
from rstar_ray.report.plots import AMBER, BLUE, GREEN, INK, PHASE_COLOURS, PURPLE, RED, quantile, smoothed
from rstar_ray.report.record import Row, RunRecord, TrajectoryFile, seconds_by_phase, stage_title
from rstar_ray.report.stage_ends import STAGE_END_HEAD, STAGE_END_NOTE, stage_end_rows

TEMPLATE = Path(__file__).with_name("page.html")


def html_report(run: RunRecord) -> str:
    """The page with the run's figures in it. What a model wrote is data there, never markup."""
    data = json.dumps(page_data(run), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    title, body = html.escape(run.name), TEMPLATE.read_text(encoding="utf-8")
    return body.replace("__TITLE__", title, 1).replace("__DATA__", data, 1)


def page_data(run: RunRecord) -> dict[str, Any]:
    """All the page shows, as JSON values; numbers that are not finite are null."""
    layers = seconds_by_phase(run.steps)
    shares = {phase.phase: phase.share for phase in phase_times(run.steps)}
    heights = [sum(layer[i] for layer in layers.values()) for i in range(len(run.steps))]
    return {
        "name": run.name,
        "headline": headline(run),
        "tiles": _tiles(run),
        "spans": [{"start": span.start, "end": span.end, "title": stage_title(span.name)} for span in run.spans],
        "x": [row["rl_step"] for row in run.steps],
        "heldout_title": heldout_change(run).title,
        "heldout": [
            {"x": row["rl_step"], "y": row["avg_at_k"], "low": row["ci_low"], "high": row["ci_high"]}
            for row in run.heldout
        ],
        "lines": _lines(run) if run.steps else [],
        "time_title": time_title(run) if run.steps else "",
        "time_top": 1.1 * quantile(heights, 0.99) if run.steps else 1,
        "phases": [
            {"name": PHASE_NAMES[phase], "colour": PHASE_COLOURS[phase], "values": seconds, "share": shares[phase]}
            for phase, seconds in layers.items()
        ],
        "sft": _sft(run),
        "results": [
            {
                "title": "Before and after" if name == "held-out" else name,
                "head": list(EVALUATION_HEAD),
                "rows": [evaluation_cells(row) for row in rows],
            }
            for name in ["held-out", *other_sets(run)]
            if (rows := before_after(run, name))
        ]
        + _by_difficulty(run),
        "families": [
            {"name": name.replace("_", " "), "before": before, "after": after}
            for name, before, after in family_changes(run)
        ],
        "ends_note": STAGE_END_NOTE.replace("*", ""),
        "ends_head": list(STAGE_END_HEAD),
        "ends_rows": stage_end_rows(run),
        "time_head": ["stage", "steps", "time", *PHASE_NAMES.values()],
        "time_rows": time_rows(run),
        "placement_head": list(PLACEMENT_HEAD),
        "placement_rows": placement_rows(run),
        "placement_notes": placement_notes(run),
        "facts": [list(fact) for fact in facts(run)],
        "trajectories": [_trajectory(file, row) for file, rows in viewer_rows(run) for row in rows],
    }


def _tiles(run: RunRecord) -> list[dict[str, str]]:
    tiles = [_tile(heldout_change(run), GREEN)] if run.heldout else []
    if not run.steps and run.sft:
        tiles.append(_tile(sft_change(run), BLUE))
    if run.steps:
        tiles += [_tile(tool_error_change(run), RED), _tile(length_change(run), PURPLE)]
        wall_s = sum(row["step_s"] for row in [*run.sft, *run.steps])
        rollouts = f"{len(run.steps)} RL steps, {sum(row['rollouts'] for row in run.steps):,} rollouts"
        tiles.append({"name": "Time in steps", "value": duration(wall_s), "note": rollouts, "colour": INK})
    return tiles


def _tile(change: Change, colour: str) -> dict[str, str]:
    unit = f" {change.unit}" if change.unit else ""
    before = "" if change.before is None else f"from {change.show(change.before)}{unit}"
    return {"name": change.what, "value": f"{change.show(change.after)}{unit}", "note": before, "colour": colour}


def _by_difficulty(run: RunRecord) -> list[dict[str, Any]]:
    head, rows = results_rows(run)
    return [{"title": "Held-out pass@1 by difficulty", "head": head, "rows": rows}] if rows else []


def _lines(run: RunRecord) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for name, change, colour, unit in (
        ("tool_error_share_correct", tool_error_change(run), RED, "percent"),
        ("reward_mean", reward_change(run), BLUE, "plain"),
        ("response_tokens_mean", length_change(run), PURPLE, "tokens"),
        ("share_truncated", truncation_change(run), AMBER, "percent"),
    ):
        values = run.column(name)
        highest = max([value for value in values if not math.isnan(value)], default=0.0)
        lines.append(
            {
                "title": change.title,
                "colour": colour,
                "unit": unit,
                "top": 1.0 if name == "reward_mean" else max(1.15 * highest, 0.05),
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


def _trajectory(file: TrajectoryFile, row: Row) -> dict[str, Any]:
    return {
        "place": file.path.stem,
        "place_title": file.title,
        "id": row["rollout_id"],
        "problem": row["problem"],
        "answer": row["answer"],
        "reward": f"{row['reward']:g}",
        "right": row["reward"] >= 1,
        "recovered": recovered(row),
        "stop": row["stop_reason"].replace("_", " "),
        "calls": row["num_calls"],
        "failed": row["num_failed"],
        "tokens": row["num_response_tokens"],
        "turns": [
            {
                "tokens": turn["num_tokens"],
                "seconds": f"{turn['generate_s']:.2f} s generating, {turn['tool_s']:.2f} s in the tool",
                "segments": [
                    {"kind": piece.kind, "text": piece.text, "outcome": piece.outcome, "failed": piece.failed}
                    for piece in segments(turn)
                ],
            }
            for turn in row["turns"]
        ],
    }


def _nullable(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(value) else round(value, 6) for value in values]
