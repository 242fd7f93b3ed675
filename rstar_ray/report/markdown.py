"""`report.md`: the findings, the plots, the tables and a few trajectories, for reading where the code is read."""

import re
from collections.abc import Sequence
from pathlib import Path

from rstar_ray.report.examples import Example, Segment, examples, segments
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
    time_rows,
)
from rstar_ray.report.record import Row, RunRecord
from rstar_ray.report.stage_ends import STAGE_END_HEAD, STAGE_END_NOTE, stage_end_rows

ALT_TEXTS = {
    "overview": "Held-out pass@1, tool errors in correct answers, reward, length, truncation and solved problems",
    "time": "Seconds of every phase per step",
    "families": "Held-out pass@1 by family before RL and at the end",
    "sft": "SFT loss",
}


def markdown_report(run: RunRecord, plots: Sequence[Path]) -> str:
    """The whole report; plots are linked relative to the run directory."""
    pictures = {plot.stem: f"![{_alt_text(plot)}](plots/{plot.name})" for plot in plots}
    parts = [f"# {run.name}", headline(run), pictures.get("overview", "")]
    if rows := before_after(run):
        parts += ["## Before and after", evaluation_table(rows)]
    for problem_set in other_sets(run):
        parts += [f"### {_escaped(problem_set)}", evaluation_table(before_after(run, problem_set))]
    head, by_results = results_rows(run)
    if by_results:
        parts += ["### Held-out pass@1 by difficulty", table(head, by_results)]
    parts.append(pictures.get("families", ""))
    if ended := stage_end_rows(run):
        parts += ["## Whether stages had more to teach", STAGE_END_NOTE, table(STAGE_END_HEAD, ended)]
    if run.steps:
        head = ["stage", "steps", "time", *PHASE_NAMES.values()]
        parts += ["## Where the time went", table(head, time_rows(run)), pictures.get("time", "")]
        parts += [picture for name, picture in pictures.items() if name.startswith("step-")]
    if placed := placement_rows(run):
        parts += ["## Where rollouts ran", table(PLACEMENT_HEAD, placed), *placement_notes(run)]
    if run.sft:
        parts += ["## Supervised fine-tuning", pictures.get("sft", "")]
    if chosen := examples(run):
        parts += ["## Trajectories to read", *map(example_section, chosen)]
    if known := facts(run):
        parts += ["## What ran where", table(["", ""], known)]
    return _printable("\n\n".join(part for part in parts if part) + "\n")


def _alt_text(plot: Path) -> str:
    return ALT_TEXTS.get(plot.stem, "One step: a lane per replica, rollouts as bars, and the KV cache in use")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """First column to the left, the others to the right where there are more than two."""
    rule = [":--", *["--:" if len(head) > 2 else ":--"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *map(_cells, rows)))


def _cells(row: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|").replace("<", "\\<").replace("\n", " ") for cell in row]


def evaluation_table(rows: Sequence[Row]) -> str:
    return table(EVALUATION_HEAD, [evaluation_cells(row) for row in rows])


def example_section(example: Example) -> str:
    row = example.row
    verdict = "right" if row["reward"] >= 1 else "wrong"
    calls = f"{row['num_calls']} call{'' if row['num_calls'] == 1 else 's'}, {row['num_failed']} failed"
    parts = [
        f"### {example.title}: {verdict}",
        _quote(row["problem"]),
        f"Truth {_code_span(row['answer'])} · reward {row['reward']:g} · {calls} · {row['num_response_tokens']} tokens",
    ]
    for turn in row["turns"]:
        parts += [_segment(segment) for segment in segments(turn)]
    return "\n\n".join(parts)


def _segment(segment: Segment) -> str:
    match segment.kind:
        case "text":
            return _quote(segment.text)
        case "code":
            return fenced(segment.text, "python")
        case "stdin":
            return f"with input\n\n{fenced(segment.text)}"
        case "broken call":
            return f"a call that cannot be read\n\n{fenced(segment.text)}"
        case "response":
            verdict = f"tool: ✗ {segment.outcome.replace('_', ' ')}" if segment.failed else "tool: ✓"
            return f"{verdict}\n\n{fenced(segment.text)}"
        case "answer":
            return f"**Answer** {_code_span(segment.text)}"


def fenced(text: str, language: str = "") -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    fence = "`" * max(3, _longest_backticks(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _code_span(text: str) -> str:
    """Code within a line: no line break, which would end the paragraph, and quoted by more backticks than it has."""
    line = " ".join(text.split())
    quote = "`" * (_longest_backticks(line) + 1)
    return f"{quote} {line} {quote}" if "`" in line or not line else f"`{line}`"


def _longest_backticks(text: str) -> int:
    return max(map(len, re.findall(r"`+", text)), default=0)


def _quote(text: str) -> str:
    """The policy's own words: quoted, and with nothing in them that Markdown or HTML would act on."""
    return "\n".join(f"> {line}" for line in _escaped(text).splitlines())


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|~$!])", r"\\\1", text)


def _printable(text: str) -> str:
    """Control characters, which a terminal may obey, and halves of surrogate pairs as escapes."""
    controls = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(controls, lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))
