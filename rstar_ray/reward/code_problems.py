"""Programs judged by their output: each case is a standard input and the expected output."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rstar_ray.outcome import Outcome

CASES_AT_ONCE = 8
"""The first cases; the others need not run where one of these fails."""


RunProgramFn = Callable[[str, str], Awaitable[tuple[Outcome, str]]]
"""Runs a program with this standard input in the sandbox; its outcome and what it printed.

Raises `SandboxError` for our own failures only.
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One input and its output."""

    stdin: str
    stdout: str


def read_cases(truth: str) -> list[Case]:
    """Cases of a ground truth: `[{"input", "output"}, ...]` or `{"inputs": [...], "outputs": [...]}` as JSON.

    Raises ValueError with the reason.
    """
    try:
        written: Any = json.loads(truth)
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from None
    if isinstance(written, dict):
        columns = cast(dict[str, Any], written)
        inputs, outputs = columns.get("inputs"), columns.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list):
            raise ValueError('has no "inputs" and "outputs"')
        ins, outs = cast(list[Any], inputs), cast(list[Any], outputs)
        if len(ins) != len(outs):
            raise ValueError(f"has {len(ins)} inputs and {len(outs)} outputs")
        rows = [{"input": given, "output": wanted} for given, wanted in zip(ins, outs, strict=True)]
    else:
        rows = cast(list[Any], written) if isinstance(written, list) else []
    if not rows:
        raise ValueError("holds no case")
    return [_case(row, number) for number, row in enumerate(rows, 1)]


def _case(row: Any, number: int) -> Case:
    fields = cast(dict[str, Any], row) if isinstance(row, dict) else {}
    given, wanted = fields.get("input"), fields.get("output")
    if not isinstance(given, str) or not isinstance(wanted, str):
        raise ValueError(f'case {number} has no "input" and "output" in text')
    return Case(given, wanted)


async def share_passed(code: str, cases: Sequence[Case], run: RunProgramFn, *, all_of_them: bool) -> float:
    """The share of cases that pass; with `all_of_them` 1 or 0, and cases after a failure do not run."""
    passed = 0
    for first in range(0, len(cases), CASES_AT_ONCE):
        batch = cases[first : first + CASES_AT_ONCE]
        passed += sum(await asyncio.gather(*(_passes(code, case, run) for case in batch)))
        if all_of_them and passed < first + len(batch):
            return 0.0
    return passed / len(cases)


async def _passes(code: str, case: Case, run: RunProgramFn) -> bool:
    outcome, stdout = await run(code, case.stdin)
    return outcome is Outcome.OK and _lines(stdout) == _lines(case.stdout)


def _lines(text: str) -> list[str]:
    """Whitespace at the end of lines and of the text does not count."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
