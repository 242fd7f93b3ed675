"""Findings as one table: a row for each check and each different message of it."""

import textwrap
from collections.abc import Sequence

from actors.preflight.facts import Finding, Verdict

WIDTH = 118
WORST_FIRST = (Verdict.WRONG, Verdict.WARNING, Verdict.OK, Verdict.NOT_HERE)


def table(findings: Sequence[Finding]) -> str:
    """Checks in their order, of one check the worst first; the hint below its finding."""
    nodes = list(dict.fromkeys(finding.node for finding in findings))
    lines = [f"{'check':<15}{'':<9}{'nodes':<16}what"]
    for check in dict.fromkeys(finding.check for finding in findings):
        of_check = [finding for finding in findings if finding.check == check]
        kinds = dict.fromkeys((finding.verdict, finding.message, finding.hint) for finding in of_check)
        for verdict, message, hint in sorted(kinds, key=lambda kind: WORST_FIRST.index(kind[0])):
            where = [f.node for f in of_check if (f.verdict, f.message, f.hint) == (verdict, message, hint)]
            lines += _wrapped(f"{check:<15}{verdict:<9}{_named(where, nodes):<16}", message)
            lines += _wrapped(" " * 40 + "-> ", hint) if hint else []
    return "\n".join([*lines, "", _summary(findings, len(nodes))])


def _named(where: Sequence[str], nodes: Sequence[str]) -> str:
    if len(where) == len(nodes):
        return "all" if len(nodes) > 1 else where[0][:15]
    return where[0][:15] if len(where) == 1 else f"{where[0][:9]} +{len(where) - 1}"


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * 43, break_long_words=False)


def _summary(findings: Sequence[Finding], nodes: int) -> str:
    wrong = sum(finding.verdict is Verdict.WRONG for finding in findings)
    warnings = sum(finding.verdict is Verdict.WARNING for finding in findings)
    looked = f"{nodes} node{'s' if nodes != 1 else ''}"
    if not wrong:
        return f"{looked}: nothing is wrong" + (f", {warnings} warnings" if warnings else "")
    return f"{looked}: {wrong} things are wrong" if wrong > 1 else f"{looked}: 1 thing is wrong"
