"""`report.md`: the short report, for terminals and code hosts."""

import re
from collections.abc import Iterable, Sequence

from rstar_ray.report.findings import EVALUATION_HEAD, before_after, evaluation_cells, facts, headline, other_sets
from rstar_ray.report.health_checks import health_checks, summary
from rstar_ray.report.run_record import RunRecord


def markdown_report(run: RunRecord) -> str:
    """Headline, health checks, evaluations and facts; report.html has everything else."""
    parts = [f"# {run.name}", headline(run)]
    if checks := health_checks(run):
        rows = [[one.state, one.signal, one.current, one.threshold, one.source] for one in checks]
        head = ["", "signal", "current", "threshold", "source"]
        parts += ["## Health checks", f"{summary(checks)}.", table(head, rows)]
    for problem_set in ["held-out", *other_sets(run)]:
        if rows := before_after(run, problem_set):
            parts += [f"## Evaluation: {_escaped(problem_set)}", table(EVALUATION_HEAD, map(evaluation_cells, rows))]
    if known := facts(run):
        parts += ["## Facts", table(["", ""], known)]
    return _printable("\n\n".join(parts) + "\n")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """First column left-aligned; the others right-aligned if there are more than two."""
    rule = [":--", *["--:" if len(head) > 2 else ":--"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *map(_cells, rows)))


def _cells(row: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|").replace("<", "\\<").replace("\n", " ") for cell in row]


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|~$!])", r"\\\1", text)


def _printable(text: str) -> str:
    """Escape control characters, which a terminal would interpret, and unpaired surrogates."""
    controls = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(controls, lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))
