"""Compares expressions with math-verify, which runs in the sandbox as trusted code."""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from rstar_ray.errors import JudgeError
from rstar_ray.outcome import Outcome
from sandbox.jail.verify_program import CODE
from sandbox.limits import MIB, Limits, standard_limits
from sandbox.outcomes import CPU_REASON
from sandbox.request import ExecutionRequest, ExecutionResult

VERIFY_LIMITS = replace(standard_limits(), cpu_s=5.0, wall_s=10.0, memory_bytes=640 * MIB)


async def equal_expressions(
    run: Callable[[ExecutionRequest], Awaitable[ExecutionResult]],
    pairs: Sequence[tuple[str, str]],
    *,
    limits: Limits = VERIFY_LIMITS,
) -> list[bool]:
    """Whether answer and truth of each pair are equal; False if one cannot be parsed. `run` runs a program.

    A single pair whose comparison uses all of its CPU time is not equal: an answer that cannot be simplified in time
    counts as wrong. Raises `JudgeError` if a comparison crashes or exceeds its wall time, and errors of `run`.
    """
    request = ExecutionRequest(code=CODE, stdin=json.dumps(list(pairs)), limits=limits, trusted=True)
    result = await run(request)
    if result.outcome is Outcome.TIMEOUT and result.reason == CPU_REASON and len(pairs) == 1:
        return [False]
    verdicts = result.stdout.strip()
    if result.outcome is not Outcome.OK or len(verdicts) != len(pairs) or set(verdicts) - {"=", "/"}:
        said = result.stderr.strip().splitlines()[-1:] or [result.reason]
        raise JudgeError(f"comparing {pairs[0][0][:80]!r} with {pairs[0][1][:80]!r}: {result.outcome}: {said[0]}")
    return [verdict == "=" for verdict in verdicts]
