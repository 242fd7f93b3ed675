"""Runs a file of hostile and unusual programs through a pool and checks how each ended.

A case is a JSON object: `name`, `code` (or `code_gen`, a Python expression), `stdin` (or
`stdin_gen`), `expect` with `status` (allowed outcomes), texts that must or must not appear and `max_seconds` (the wall
limit is one second less); `then`, optionally, is a harmless program that runs afterwards, with its exact stdout.
"""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sandbox.limits import Limits, standard_limits
from sandbox.pool import SandboxPool
from sandbox.request import ExecutionRequest, ExecutionResult

# Names of outcomes in the file that differ from ours.
WORDS = {"out_of_memory": "oom"}
HONEST = {"code": "print(sum(range(10)))", "stdout": "45\n"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileCase:
    """One program, and the allowed results."""

    name: str
    request: ExecutionRequest
    status: tuple[str, ...]
    contains: tuple[str, ...]
    must_not_contain: tuple[str, ...]
    max_seconds: float
    then_code: str
    then_stdout: str


def read_cases(path: Path) -> list[HostileCase]:
    """Read a case file. Its `_gen` fields are evaluated, so read only trusted files."""
    return [_case(entry) for entry in json.loads(path.read_text("utf-8"))]


def _case(entry: dict[str, Any]) -> HostileCase:
    code = eval(entry["code_gen"], {}) if "code_gen" in entry else entry["code"]
    stdin = eval(entry["stdin_gen"], {}) if "stdin_gen" in entry else entry["stdin"] or ""
    expect, then = entry["expect"], entry.get("then", HONEST)
    return HostileCase(
        name=entry["name"],
        request=ExecutionRequest(code=code, stdin=stdin, limits=_limits(expect["max_seconds"])),
        status=tuple(expect["status"]),
        contains=tuple(expect.get("stdout_or_stderr_contains", ())),
        must_not_contain=tuple(expect.get("must_not_contain", ())),
        max_seconds=expect["max_seconds"],
        then_code=then["code"],
        then_stdout=then["stdout"],
    )


def _limits(max_seconds: float) -> Limits:
    """The standard limits, with the wall time below `max_seconds`."""
    limits = standard_limits()
    return replace(limits, wall_s=min(limits.wall_s, max(max_seconds - 1.0, 1.0)))


async def check_case(
    pool: SandboxPool, case: HostileCase, caller: str = "check", *, patience: float = 1.0
) -> tuple[ExecutionResult, list[str]]:
    """Run one case and the program after it; returns the result and its errors, empty if it was contained.

    `patience`: factor on the allowed seconds, for busy machines.
    """
    started = time.monotonic()
    result = await pool.run(replace(case.request, call_id=case.name), caller)
    wrong = _wrong(case, result, (time.monotonic() - started) / patience)
    started = time.monotonic()
    after = await pool.run(ExecutionRequest(code=case.then_code), caller)
    if after.stdout != case.then_stdout:
        wrong.append(f"the next program printed {after.stdout[:80]!r} {after.stderr[-200:]!r}")
    if time.monotonic() - started > 2 * patience:
        wrong.append(f"the next program took {time.monotonic() - started:.1f} s")
    return result, wrong


def _wrong(case: HostileCase, result: ExecutionResult, seconds: float) -> list[str]:
    wrong: list[str] = []
    word = WORDS.get(result.outcome, str(result.outcome))
    text = result.stdout + result.stderr + result.value
    if word not in case.status:
        wrong.append(f"ended as {word}, not {' or '.join(case.status)}: {result.stderr[-200:]!r}")
    wrong += [f"{needle!r} is missing in {text[-200:]!r}" for needle in case.contains if needle not in text]
    wrong += [f"{needle!r} got out" for needle in case.must_not_contain if needle in text]
    if seconds > case.max_seconds:
        wrong.append(f"took {seconds:.1f} s, more than {case.max_seconds} s")
    return wrong
