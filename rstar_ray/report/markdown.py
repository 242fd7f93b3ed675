"""`report.md`: the findings and tables of a run, for reading where the code is read."""

import re
from collections.abc import Sequence

from rstar_ray.report.findings import (
    EVALUATION_HEAD,
    PHASE_NAMES,
    PLACEMENT_HEAD,
    before_after,
    evaluation_cells,
    facts,
    headline,
    other_sets,
    placement_notes,
    placement_rows,
    results_rows,
    sft_change,
    time_rows,
)
from rstar_ray.report.run_record import Row, RunRecord
from rstar_ray.report.stage_ends import STAGE_END_HEAD, STAGE_END_NOTE, stage_end_rows


def markdown_report(run: RunRecord) -> str:
    parts = [f"# {run.name}", headline(run)]
    if rows := before_after(run):
        parts += ["## Before and after", evaluation_table(rows)]
    for problem_set in other_sets(run):
        parts += [f"### {_escaped(problem_set)}", evaluation_table(before_after(run, problem_set))]
    head, by_results = results_rows(run)
    if by_results:
        parts += ["### Held-out pass@1 by difficulty", table(head, by_results)]
    if ended := stage_end_rows(run):
        parts += ["## Whether stages had more to teach", STAGE_END_NOTE, table(STAGE_END_HEAD, ended)]
    if run.steps:
        head = ["stage", "steps", "time", *PHASE_NAMES.values()]
        parts += ["## Where the time went", table(head, time_rows(run))]
    if placed := placement_rows(run):
        parts += ["## Where rollouts ran", table(PLACEMENT_HEAD, placed), *placement_notes(run)]
    if run.sft:
        parts += ["## Supervised fine-tuning", sft_change(run).title]
    if known := facts(run):
        parts += ["## What ran where", table(["", ""], known)]
    return _printable("\n\n".join(parts) + "\n")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """First column to the left, the others to the right where there are more than two."""
    rule = [":--", *["--:" if len(head) > 2 else ":--"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *map(_cells, rows)))


def _cells(row: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|").replace("<", "\\<").replace("\n", " ") for cell in row]


def evaluation_table(rows: Sequence[Row]) -> str:
    return table(EVALUATION_HEAD, [evaluation_cells(row) for row in rows])


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|~$!])", r"\\\1", text)


def _printable(text: str) -> str:
    """Control characters, which a terminal may obey, and halves of surrogate pairs as escapes."""
    controls = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(controls, lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))
