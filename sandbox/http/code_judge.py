"""Code Judge's interface (0xWJ/code-judge): reading its requests, writing its answers.

Pure functions on decoded JSON or msgpack; any input becomes a request or a `BadInput` with a message.
"""

import hashlib
import reprlib
import uuid
from dataclasses import dataclass, replace
from typing import Any, cast

from rstar_ray.outcome import Outcome
from sandbox.jail.cut import STDOUT_HEAD_SHARE, cut_text
from sandbox.limits import MIB, Limits
from sandbox.pool_metrics import PoolStats
from sandbox.request import MAX_ID_CHARS, ExecutionRequest, ExecutionResult

MAX_BATCH = 50_000
COMPARED_CHARS = MIB  # of stdout, against an expected output
SHOWN_CHARS = 1000  # of stdout and stderr in an answer
TIMED_OUT = "Suicide from timeout.\n"  # Code Judge appends this to stdout; clients look for it

INVALID_INPUT, QUEUE_TIMEOUT, WORKER_TIMEOUT, INTERNAL_ERROR = (
    "invalid_input",
    "queue_timeout",
    "worker_timeout",
    "internal_error",
)


class BadInput(ValueError):
    """An invalid request; `str()` is the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One program of a client, and the digest of the expected output if there is one."""

    sub_id: str
    request: ExecutionRequest
    expected: bytes | None = None  # a digest: a waiting call must not hold a long text


def read_submission(data: object, limits: Limits) -> Submission:
    """Read one submission. Raises BadInput."""
    if not isinstance(data, dict):
        raise BadInput(f"a submission is an object, not {_kind(data)}")
    fields = cast(dict[object, object], data)
    language = fields.get("type")
    if language not in ("python", "cpp"):
        raise BadInput(f"type: {_short(language)} is not 'python' or 'cpp'")
    solution = _text(fields, "solution")
    if solution is None:
        raise BadInput("solution: missing")
    expected = _text(fields, "expected_output")
    if expected is not None:
        limits = replace(limits, stdout_chars=COMPARED_CHARS)
    try:
        request = ExecutionRequest(
            code=solution,
            stdin=_text(fields, "input") or "",
            limits=limits,
            language=language,
        )
    except ValueError as error:
        raise BadInput(str(error)) from error
    return Submission(sub_id=_sub_id(fields), request=request, expected=None if expected is None else _digest(expected))


def read_batch(data: object, limits: Limits) -> tuple[str, list[Submission | dict[str, Any]]]:
    """Read a batch: its id, and for each entry a submission or the response to an invalid one. Raises BadInput."""
    if not isinstance(data, dict):
        raise BadInput(f"a batch is an object, not {_kind(data)}")
    fields = cast(dict[object, object], data)
    entries = fields.get("submissions")
    if not isinstance(entries, list):
        raise BadInput(f"submissions: expected a list, got {_kind(entries)}")
    listed = cast(list[object], entries)
    if not 1 <= len(listed) <= MAX_BATCH:
        raise BadInput(f"submissions: {len(listed)} entries; a batch has 1 to {MAX_BATCH}")
    batch: list[Submission | dict[str, Any]] = []
    for entry in listed:
        try:
            batch.append(read_submission(entry, limits))
        except BadInput as error:
            batch.append(bad_answer(_sub_id(entry), str(error)))
    return _sub_id(fields), batch


def write_answer(submission: Submission, result: ExecutionResult) -> dict[str, Any]:
    """The answer to a program that ran (or was refused)."""
    run_success = result.outcome is Outcome.OK
    success = run_success
    if submission.expected is not None:
        success = run_success and _digest(result.stdout) == submission.expected
    reason, stdout = "", result.stdout
    if submission.expected is not None:  # more was retained for the comparison
        stdout = cut_text(stdout, SHOWN_CHARS, STDOUT_HEAD_SHARE)[0]
    if result.outcome is Outcome.TIMEOUT:
        reason = WORKER_TIMEOUT
        stdout += TIMED_OUT
    elif result.outcome is Outcome.INVALID:
        reason = INVALID_INPUT
    return _answer(
        submission.sub_id,
        success=success,
        run_success=run_success,
        cost=result.wall_s,
        stdout=stdout,
        stderr=result.stderr or _note(result),
        reason=reason,
    )


def write_status(stats: PoolStats) -> dict[str, int]:
    """The server's load. No further fields: Code Judge's own client accepts none."""
    return {"queue": stats.waiting, "num_workers": stats.slots}


def bad_answer(sub_id: str, text: str) -> dict[str, Any]:
    """The answer to a submission that cannot be read."""
    return _answer(sub_id, stderr=text, reason=INVALID_INPUT)


def failed_answer(sub_id: str, reason: str, text: str) -> dict[str, Any]:
    """The answer to a program that the pool could not run."""
    return _answer(sub_id, stderr=text, reason=reason)


def as_verdict(answer: dict[str, Any]) -> dict[str, Any]:
    """The response without the program's output, as the judge routes return it."""
    return {key: answer[key] for key in ("sub_id", "success", "run_success", "cost", "reason")}


def _answer(
    sub_id: str,
    *,
    success: bool = False,
    run_success: bool = False,
    cost: float = 0.0,
    stdout: str = "",
    stderr: str = "",
    reason: str = "",
) -> dict[str, Any]:
    return {
        "sub_id": sub_id,
        "success": success,
        "run_success": run_success,
        "cost": cost,
        "stdout": stdout,
        "stderr": stderr,
        "reason": reason,
    }


def _note(result: ExecutionResult) -> str:
    return "" if result.outcome is Outcome.OK else result.reason


def _sub_id(data: object) -> str:
    if isinstance(data, dict):
        given = cast(dict[object, object], data).get("sub_id")
        if isinstance(given, (str, int)) and str(given):
            return str(given)[:MAX_ID_CHARS]
    return str(uuid.uuid4())


def _digest(output: str) -> bytes:
    """Digest of an output without the space around it, which does not count."""
    return hashlib.sha256(output.strip().encode("utf-8", "surrogatepass")).digest()


def _text(fields: dict[object, object], name: str) -> str | None:
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value
    raise BadInput(f"{name}: expected a string, got {_kind(value)}")


def _kind(value: object) -> str:
    return {"NoneType": "nothing", "dict": "an object", "list": "a list"}.get(
        type(value).__name__, type(value).__name__
    )


def _short(value: object) -> str:
    text = repr(value[:60]) if isinstance(value, str) else reprlib.repr(value)  # bounded, whatever its size
    return text if len(text) < 60 else text[:57] + "..."
