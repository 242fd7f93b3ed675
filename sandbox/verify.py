"""Is an answer equivalent to the truth? Decided by math-verify, in the pool, as trusted code."""

import json
import logging
from typing import Protocol

from rstar_ray.outcome import Outcome
from sandbox.cage.verify_program import CODE
from sandbox.limits import MIB, Limits
from sandbox.request import ExecutionRequest, ExecutionResult

VERIFY_LIMITS = Limits(cpu_s=5.0, wall_s=10.0, memory_bytes=512 * MIB)
MAX_ANSWER_CHARS = 2_000
_log = logging.getLogger(__name__)


class Runs(Protocol):
    """What is needed of a pool, or of anything that stands for one."""

    async def run(self, request: ExecutionRequest, caller: str = "") -> ExecutionResult: ...


async def verify_answer(pool: Runs, answer: str, truth: str, *, limits: Limits = VERIFY_LIMITS) -> bool:
    """True where `answer` (the inside of a \\boxed{}) is equivalent to `truth` (arXiv:2508.20722, section 2.2).

    Identical and plainly integer answers are decided at once, the rest by math-verify within
    `limits`; what it cannot read or decide in time is not equivalent. Raises SandboxError.
    """
    answer, truth = answer.strip(), truth.strip()
    if answer == truth:
        return bool(truth)
    if len(answer) > MAX_ANSWER_CHARS or not answer or not truth:
        return False
    if _is_integer(answer) and _is_integer(truth):
        return int(answer) == int(truth)
    request = ExecutionRequest(code=CODE, stdin=json.dumps([answer, truth]), limits=limits, trusted=True)
    result = await pool.run(request, "verify")
    if result.outcome is not Outcome.OK:
        _log.debug("%r against %r: %s %s", answer, truth, result.outcome, result.stderr[-200:])
    return result.outcome is Outcome.OK and result.stdout == "equal\n"


def _is_integer(text: str) -> bool:
    digits = text[1:] if text[:1] in "+-" else text
    return digits.isascii() and digits.isdigit() and len(digits) < 100
