"""Bounds of requests, their wire formats, and verdicts over expressions."""

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

from rstar_ray.errors import JudgeError
from rstar_ray.outcome import Outcome
from sandbox.equality import VERIFY_LIMITS, equal_expressions
from sandbox.http import code_judge
from sandbox.http.codec import request_from_data, request_to_data
from sandbox.jail.cut import mark
from sandbox.limits import MIB
from sandbox.pool import SandboxPool
from sandbox.request import ExecutionRequest, ExecutionResult
from tests import derived

# -- queue, limits, requests -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "low", "high", "below", "beyond"),
    [
        ("cpu_s", 0.01, 3600.0, 0.009, 3600.1), ("wall_s", 0.01, 3600.0, 0.009, 3600.1),
        ("memory_bytes", MIB, 1 << 42, MIB - 1, (1 << 42) + 1),
        ("stdout_chars", 0, 16 * MIB, -1, 16 * MIB + 1), ("stderr_chars", 0, 16 * MIB, -1, 16 * MIB + 1),
        ("output_bytes", 1_024, 1 << 32, 1_023, (1 << 32) + 1),
    ],
)  # fmt: skip
def test_a_limit_has_bounds_and_a_type(field: str, low: float, high: float, below: float, beyond: float):
    for value in (low, high):
        assert getattr(derived.program(**{field: value}), field) == value
    for value in (below, beyond, True, "1", float("nan")):
        with pytest.raises(ValueError, match=rf"limits\.{field}"):
            derived.program(**{field: value})
    if not field.endswith("_s"):
        with pytest.raises(ValueError, match="expected a number, got float"):
            derived.program(**{field: float(high)})


# -- over a wire -------------------------------------------------------------------------------------------------------


def test_a_request_over_the_wire_is_never_trusted_and_takes_the_servers_limits():
    request = ExecutionRequest(
        code="x", stdin="i", call_id="c", seed=3, trusted=True, limits=derived.program(cpu_s=2.0)
    )
    data = request_to_data(request)
    assert "trusted" not in data and request_from_data(data) == replace(request, trusted=False)
    assert request_from_data({"code": "x", "stdin": None}, derived.program(wall_s=9.0)).limits.wall_s == 9.0
    limited = request_from_data({"code": "x", "limits": {"cpu_s": 1.5}}, derived.program(wall_s=9.0)).limits
    assert (limited.cpu_s, limited.wall_s) == (1.5, 9.0)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ([], "a request is an object, not list"), ({}, "code: missing"),
        ({"code": "", "trusted": True}, "unknown fields: trusted"),
        ({"code": "", **{f"f{n}": 0 for n in range(9)}}, "unknown fields: f0, f1, f2, f3, f4$"),
        ({"code": "", "seed": True}, "seed: expected a whole number, got bool"),
        ({"code": "", "seed": 1.5}, "seed: expected a whole number, got float"),
        ({"code": "", "limits": []}, "limits: expected an object, got list"),
        ({"code": "", "limits": {"speed": 1}}, "limits: unknown fields speed"),
        ({"code": "", "n" * 50: 1}, f"unknown fields: {'n' * 40}$"),
        ({"code": "", "call_id": "i" * 1_001}, "call_id: 1001 characters, more than 1000"),
    ],
)  # fmt: skip
def test_an_invalid_request_is_refused_with_the_field(data: Any, problem: str):
    with pytest.raises(ValueError, match=problem):
        request_from_data(data)


def submission(**more: Any) -> dict[str, Any]:
    return {"type": "python", "solution": "print(1)", **more}


def test_a_submission_is_read_with_its_input_and_what_it_should_print():
    read = code_judge.read_submission(submission(input="i", sub_id=7), derived.program(stdout_chars=5))
    assert (read.sub_id, read.expected, read.request.stdin) == ("7", None, "i")
    assert read.request.limits.stdout_chars == 5
    compared = code_judge.read_submission(submission(expected_output="1", type="cpp"), derived.program(stdout_chars=5))
    assert (compared.request.limits.stdout_chars, compared.request.language) == (MIB, "cpp")
    assert len(compared.sub_id) == 36  # a separate id
    assert code_judge.read_submission(submission(sub_id="x" * 2_000), derived.program()).sub_id == "x" * 1_000
    assert len(code_judge.read_submission(submission(sub_id=""), derived.program()).sub_id) == 36


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (None, "a submission is an object, not nothing"), ([], "not a list"), (3, "not int"),
        ({"type": "ruby"}, r"type: 'ruby' is not 'python' or 'cpp'"),
        ({"type": "r" * 80}, r"type: 'r{56}\.\.\. is not"),
        ({"type": "r" * 57}, r"type: 'r{57}' is not"), ({"type": "r" * 58}, r"type: 'r{56}\.\.\. is not"),
        ({"type": "python"}, "solution: missing"), (submission(solution=1), "solution: expected a string, got int"),
        (submission(input={}), "input: expected a string, got an object"),
    ],
)  # fmt: skip
def test_an_invalid_submission_is_refused_with_the_field(data: Any, problem: str):
    with pytest.raises(code_judge.BadInput, match=problem):
        code_judge.read_submission(data, derived.program())


def test_an_answer_compares_what_was_printed_and_shows_a_part():
    expecting = code_judge.read_submission(submission(expected_output=" 1\n"), derived.program())
    plain = code_judge.read_submission(submission(), derived.program())

    def answer(given: code_judge.Submission, stdout: str, outcome: Outcome = Outcome.OK, **more: Any):
        return code_judge.write_answer(given, ExecutionResult(outcome=outcome, stdout=stdout, **more))

    assert [answer(expecting, text)["success"] for text in ("1", "1 \n", "2")] == [True, True, False]
    assert not answer(expecting, "1", Outcome.ERROR)["success"] and answer(expecting, "2")["run_success"]
    assert answer(plain, "2")["success"] and not answer(plain, "1", Outcome.KILLED)["success"]
    huge = code_judge.read_submission(submission(expected_output=" \ud800" * 10_000_000), derived.program())
    assert len(pickle.dumps(huge)) < 10_000  # calls that wait hold no long text
    long = "0123456789" * 150
    assert answer(expecting, long)["stdout"] == long[:500] + mark(500) + long[-500:]
    assert answer(plain, long)["stdout"] == long
    assert answer(plain, "", Outcome.ERROR, stderr="e", reason="r")["stderr"] == "e"
    assert answer(plain, "", Outcome.OK, reason="r")["stderr"] == ""
    assert answer(plain, "", wall_s=1.5)["cost"] == 1.5
    assert code_judge.bad_answer("s", "t") == code_judge.failed_answer("s", "invalid_input", "t") == {
        "sub_id": "s", "success": False, "run_success": False, "cost": 0.0, "stdout": "", "stderr": "t",
        "reason": "invalid_input",
    }  # fmt: skip


# -- what a model reads, what a check sees -----------------------------------------------------------------------------


class Answers(SandboxPool):
    """A pool that gives these results, in turn."""

    def __init__(self, *results: ExecutionResult) -> None:
        self.results, self.asked = list(results), list[ExecutionRequest]()

    async def run(
        self, request: ExecutionRequest, caller: str = "", *, deadline_s: float | None = None
    ) -> ExecutionResult:
        self.asked.append(request)
        return self.results.pop(0)


def said(stdout: str = "", outcome: Outcome = Outcome.OK, **more: Any) -> ExecutionResult:
    return ExecutionResult(outcome=outcome, stdout=stdout, **more)


async def test_expressions_are_equal_where_the_program_says_so():
    pool = Answers(said("=/=\n"))
    pairs = [("1", "1"), ("1", "2"), ("x", "x")]
    assert await equal_expressions(pool.run, pairs) == [True, False, True]
    (asked,) = pool.asked
    assert asked.trusted and asked.limits == VERIFY_LIMITS and json.loads(str(asked.stdin)) == [list(p) for p in pairs]


@pytest.mark.parametrize(
    "answer",
    [said("="), said("=/x"), said("=/=="), said("==/", Outcome.TIMEOUT, reason="ran for too long"),
     said("", stderr="first\nlast")],
)  # fmt: skip
async def test_a_comparison_that_failed_is_not_a_verdict(answer: ExecutionResult):
    with pytest.raises(JudgeError, match=r"comparing 'a+' with 'b'") as failed:
        await equal_expressions(Answers(answer).run, [("a" * 90, "b"), ("1", "1"), ("2", "2")])
    assert "a" * 80 in str(failed.value) and "a" * 81 not in str(failed.value)
    assert answer.stderr == "" or str(failed.value).endswith("last")
    assert answer.reason in str(failed.value)
