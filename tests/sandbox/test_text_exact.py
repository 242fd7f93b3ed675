"""Texts, codecs and queues of the sandbox, to the character."""

import json
import signal
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rstar_ray.outcome import Outcome
from sandbox.cage import wire
from sandbox.cage.cut import cut_text, head_and_tail, join_kept, mark
from sandbox.cage.display import show
from sandbox.case_check import Case, check_case, read_cases
from sandbox.errors import ComparisonFailed
from sandbox.fair_queue import FairQueue
from sandbox.http import code_judge
from sandbox.http.codec import request_from_data, request_to_data, result_from_data, result_to_data
from sandbox.limits import CEILINGS, MIB
from sandbox.outcomes import kept_bytes, read_result
from sandbox.request import MAX_CODE_CHARS, MAX_STDIN_CHARS, ExecutionRequest, ExecutionResult
from sandbox.tool_text import tool_text
from sandbox.verify import VERIFY_LIMITS, equal_expressions
from tests import derived

# -- cutting -----------------------------------------------------------------------------------------------------------


def test_a_cut_leaves_both_ends_and_says_what_is_missing():
    assert [head_and_tail(limit, 0.25) for limit in (0, 1, 7, 8)] == [(0, 0), (0, 1), (1, 6), (2, 6)]
    assert cut_text("0123456789", 4, 0.25) == ("0\n... [6 characters cut] ...\n789", 6)
    assert cut_text("0123456789", 4, 1.0) == ("0123\n... [6 characters cut] ...\n", 6)
    assert cut_text("abc", 0, 0.5) == ("\n... [3 characters cut] ...\n", 3)
    assert kept_bytes(9, 0.25) == (8, 28)


@pytest.mark.parametrize("letter", ["a", "é", "€", "😀"])
def test_of_a_long_stream_only_whole_characters_are_kept(letter: str):
    whole = (letter * 100).encode()
    size = len(letter.encode())
    for split in range(4 * 3 + 1):  # whatever part of a character the cut falls into
        text, missing = join_kept(whole[:split], whole[-split:] if split else b"", 100, 6, 0.5)
        kept = min(split // size, 3)
        assert text == letter * kept + mark(100 - 2 * kept) + letter * kept and missing == 100 - 2 * kept


def test_bytes_that_are_no_text_are_replaced_and_never_less_than_one_is_missing():
    assert join_kept(b"\xffa", b"\xfeb", 50, 4, 0.5) == ("\ufffda" + mark(46) + "\ufffdb", 46)
    assert join_kept(b"ab", b"cd", 3, 4, 0.5) == ("ab" + mark(1) + "cd", 1)
    assert join_kept(b"ab", b"cd", 9, 2, 1.0) == ("ab" + mark(7), 7)
    assert join_kept(b"\x80\x80\x80\x80\x80", b"", 9, 8, 1.0)[0].startswith("\ufffd" * 5)
    assert join_kept(b"x\xc3\xa9", b"", 9, 8, 1.0)[0].startswith("xé\n")


# -- values ------------------------------------------------------------------------------------------------------------


class Odd(list[int]):
    pass


def one(a: int, b: int = 2) -> None: ...


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([], "[]"), ((), "()"), (frozenset(), "frozenset()"), ([1, (2,)], "[1, (2,)]"), ((1, 2), "(1, 2)"),
        (Odd([1]), "[1]"), (Odd, f"{__name__}.Odd"), (ValueError, "ValueError"), (len, "<built-in function len>"),
        (one, f"<function {__name__}.one(a: int, b: int = 2) -> None>"), ({1: [2]}, "{1: [2]}"),
        (["x" * 36, "y" * 35], f"['{'x' * 36}', '{'y' * 35}']"),  # 79 columns
        (["x" * 36, "y" * 36], f"['{'x' * 36}',\n '{'y' * 36}']"),
        ({"k": ["x" * 36, "y" * 36]}, f"{{'k': ['{'x' * 36}',\n       '{'y' * 36}']}}"),
        (({1, "a"},), None),
    ],
)  # fmt: skip
def test_a_value_is_shown_as_ipython_does(value: Any, text: str | None):
    assert show(value) == text if text is not None else show(value) in ("({1, 'a'},)", "({'a', 1},)")


def test_values_end_somewhere():
    assert show(list(range(1_000))).endswith("\n 999]") and show(list(range(1_001))).endswith("\n 999,\n ...]")
    deep: list[Any] = []
    for _ in range(60):
        deep = [deep]
    assert show(deep) == repr(deep)
    for width, gap in ((28, " "), (29, "\n" + " " * 9)):  # 79 columns, and two more
        inner = {"a" * width: 1, "b" * width: 2}
        assert show({"key": inner}) == f"{{'key': {{'{'a' * width}': 1,{gap}'{'b' * width}': 2}}}}"


# -- what a cell saw ---------------------------------------------------------------------------------------------------


def seen(status: int = 0, **more: Any) -> wire.Result:
    nothing = dict.fromkeys(wire.Result._fields, 0)
    return wire.Result(**(nothing | {"call_id": 7, "wait_status": status, "wall_s": 0.5, "cpu_s": 0.25} | more))


def result_of(out: bytes = b"", err: bytes = b"", value: bytes = b"", status: int = 0, **more: Any) -> ExecutionResult:
    given = {
        "ended_for": 0, "flags": 0, "value_cut": 0, "peak_memory_bytes": 9, "out_bytes": len(out), "out_chars": 0,
        "err_chars": 0, "out_head": len(out), "out_tail": 0, "err_head": len(err), "err_tail": 0,
        "value": len(value),
    } | more  # fmt: skip
    request = ExecutionRequest(code="", call_id="mine", limits=derived.program(stdout_chars=10, stderr_chars=8))
    return read_result(request, memoryview(seen(status, **given).pack() + out + err + value))


def test_a_result_is_read_part_by_part():
    result = result_of(b"out", b"error", status=3 << 8)
    assert asdict(result) == {
        "outcome": Outcome.ERROR, "stdout": "out", "stderr": "error", "value": "", "exit_status": 3, "signal": None,
        "reason": "", "wall_s": 0.5, "cpu_s": 0.25, "peak_memory_bytes": 9, "stdout_cut_chars": 0,
        "stderr_cut_chars": 0, "value_cut_chars": 0, "call_id": "mine",
    }  # fmt: skip
    ended = result_of(status=signal.SIGTERM)
    assert (ended.exit_status, ended.signal, ended.outcome) == (None, signal.SIGTERM, Outcome.KILLED)
    with pytest.raises(ValueError, match="claims"):
        result_of(b"out", out_head=2)


def test_a_value_is_shown_only_where_nothing_was_printed():
    assert result_of(value=b"42").value == "42"
    assert result_of(b"x", value=b"42").value == ""
    long = "v" * 30
    assert result_of(value=long.encode()).value == "vvvvv" + mark(20) + "vvvvv"
    told = "vvvvv" + mark(99) + "vvvvv"
    assert (
        result_of(value=told.encode(), value_cut=99).value,
        result_of(value=told.encode(), value_cut=99).value_cut_chars,
    ) == (told, 99)
    forged = "v" * 11 + mark(99)
    assert result_of(value=forged.encode(), value_cut=99).value != forged


def test_a_long_stream_is_put_together_from_its_ends():
    result = result_of(b"abcdeuvwxy", b"EEEEEEEEEE", out_head=5, out_tail=5, out_chars=1_000, out_bytes=1_000)
    assert (result.stdout, result.stdout_cut_chars) == ("abcde" + mark(990) + "uvwxy", 990)
    assert (result.stderr, result.stderr_cut_chars) == ("EE" + mark(2) + "EEEEEE", 2)


# -- queue, limits, requests -------------------------------------------------------------------------------------------


def test_a_queue_knows_its_first_and_forgets_who_has_nothing():
    queue: FairQueue[int] = FairQueue()
    assert not queue
    queue.push("a", 1)
    queue.push("b", 2)
    queue.push_front("b", 3)
    assert queue and queue.first() == 3
    assert [queue.pop() for _ in range(3)] == [3, 1, 2] and not queue
    queue.push("a", 4)
    assert queue.first() == 4 and queue.pop() == 4


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


def test_a_huge_limit_is_not_spelled_out():
    with pytest.raises(ValueError, match=r"memory_bytes: a huge number is outside 1048576 to"):
        derived.program(memory_bytes=1 << 64)
    with pytest.raises(ValueError, match=rf"memory_bytes: {(1 << 64) - 1} is outside"):
        derived.program(memory_bytes=(1 << 64) - 1)


def test_the_first_limit_above_a_ceiling_is_named():
    assert derived.program().above(CEILINGS) == "" and CEILINGS.above(CEILINGS) == ""
    assert replace(CEILINGS, wall_s=121.0, output_bytes=65 * MIB).above(CEILINGS) == "wall_s"
    sizes = (CEILINGS.memory_bytes, CEILINGS.stdout_chars, CEILINGS.stderr_chars, CEILINGS.output_bytes)
    assert [value / MIB for value in sizes] == [1_536, 1, 1, 64]
    assert (CEILINGS.cpu_s, CEILINGS.wall_s) == (60.0, 120.0)
    assert derived.program(cpu_s=5.0, wall_s=10.0, memory_bytes=640 * MIB) == VERIFY_LIMITS


def test_a_request_refuses_what_is_beyond_all_bounds():
    assert (MAX_CODE_CHARS, MAX_STDIN_CHARS) == (1 << 20, 64 << 20)
    assert ExecutionRequest(code="", seed=0) and ExecutionRequest(code="", seed=(1 << 32) - 1)
    wrong: list[dict[str, Any]] = [
        {"code": b""}, {"stdin": 1}, {"limits": {}}, {"call_id": 1}, {"language": "c"}, {"seed": -1}, {"seed": 1 << 32},
    ]  # fmt: skip
    for fields in wrong:
        with pytest.raises(ValueError, match=rf"^{next(iter(fields))}: "):
            ExecutionRequest(**({"code": ""} | fields))
    untold = ExecutionRequest(code="")
    assert (untold.seed, untold.trusted, untold.language, untold.stdin) == (None, False, "python", "")
    assert ExecutionResult(outcome=Outcome.OK) == ExecutionResult(
        outcome=Outcome.OK, exit_status=None, signal=None, wall_s=0.0, cpu_s=0.0, peak_memory_bytes=0,
        stdout_cut_chars=0, stderr_cut_chars=0, value_cut_chars=0,
    )  # fmt: skip


def test_a_huge_input_is_refused():
    class Long(str):
        def __len__(self) -> int:
            return (64 << 20) + self.count("+")

    assert ExecutionRequest(code="", stdin=Long("")).stdin == ""
    with pytest.raises(ValueError, match="stdin: 67108865 characters, more than 67108864"):
        ExecutionRequest(code="", stdin=Long("+"))


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
    ],
)  # fmt: skip
def test_a_request_that_is_none_is_refused_with_the_field(data: Any, problem: str):
    with pytest.raises(ValueError, match=problem):
        request_from_data(data)


def test_a_result_over_the_wire_is_the_same():
    result = result_of(b"out", b"err", status=1 << 8)
    assert result_from_data(json.loads(json.dumps(result_to_data(result)))) == result
    for wrong in ([], {"outcome": "ok", "more": 1}, {"outcome": "fine"}):
        with pytest.raises(ValueError):
            result_from_data(wrong)


def submission(**more: Any) -> dict[str, Any]:
    return {"type": "python", "solution": "print(1)", **more}


def test_a_submission_is_read_with_its_input_and_what_it_should_print():
    read = code_judge.read_submission(submission(input="i", sub_id=7), derived.program(stdout_chars=5))
    assert (read.sub_id, read.expected_output, read.request.stdin) == ("7", None, "i")
    assert read.request.limits.stdout_chars == 5
    compared = code_judge.read_submission(submission(expected_output="1", type="cpp"), derived.program(stdout_chars=5))
    assert (compared.request.limits.stdout_chars, compared.request.language) == (MIB, "cpp")
    assert len(compared.sub_id) == 36  # an id of its own
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
def test_a_submission_that_is_none_is_refused_with_the_field(data: Any, problem: str):
    with pytest.raises(code_judge.BadInput, match=problem):
        code_judge.read_submission(data, derived.program())


def test_a_batch_has_one_entry_to_fifty_thousand():
    assert code_judge.MAX_BATCH == 50_000
    batch_id, entries = code_judge.read_batch({"sub_id": "b", "submissions": [submission(), 5]}, derived.program())
    assert batch_id == "b" and isinstance(entries[0], code_judge.Submission)
    assert isinstance(entries[1], dict) and entries[1]["reason"] == "invalid_input"
    refused: list[tuple[Any, str]] = [
        ({"submissions": []}, "0 entries"), ({"submissions": [0] * 50_001}, "50001 entries"),
        ({"submissions": None}, "got nothing"), ([], "a batch is an object, not a list"),
    ]  # fmt: skip
    for wrong, problem in refused:
        with pytest.raises(code_judge.BadInput, match=problem):
            code_judge.read_batch(wrong, derived.program())
    assert len(code_judge.read_batch({"submissions": [0] * 50_000}, derived.program())[1]) == 50_000


def test_an_answer_compares_what_was_printed_and_shows_a_part():
    expecting = code_judge.read_submission(submission(expected_output=" 1\n"), derived.program())
    plain = code_judge.read_submission(submission(), derived.program())

    def answer(given: code_judge.Submission, stdout: str, outcome: Outcome = Outcome.OK, **more: Any):
        return code_judge.write_answer(given, ExecutionResult(outcome=outcome, stdout=stdout, **more))

    assert [answer(expecting, text)["success"] for text in ("1", "1 \n", "2")] == [True, True, False]
    assert not answer(expecting, "1", Outcome.ERROR)["success"] and answer(expecting, "2")["run_success"]
    assert answer(plain, "2")["success"] and not answer(plain, "1", Outcome.KILLED)["success"]
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


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"outcome": Outcome.OK, "stdout": "1\n\n", "value": "2", "stderr": "warned"}, "1"),
        ({"outcome": Outcome.KILLED, "reason": "ended by SIGSEGV"}, "The program was ended by SIGSEGV."),
        ({"outcome": Outcome.KILLED}, "The program was ended by a signal."),
        ({"outcome": Outcome.ERROR, "exit_status": 3, "stderr": "E\n"}, "E"),
        ({"outcome": Outcome.OUT_OF_MEMORY, "stderr": "\nE\n", "value": "7"}, "7\nE\nOut of memory."),
        ({"outcome": Outcome.OUTPUT_LIMIT, "stdout": "x"}, "x\nThe program printed too much and was ended."),
        ({"outcome": Outcome.INVALID}, "The program could not be run."), ({"outcome": Outcome.OK}, ""),
    ],
)  # fmt: skip
def test_a_model_reads_what_was_printed_and_what_went_wrong(result: dict[str, Any], text: str):
    assert tool_text(ExecutionResult(**result)) == text


class Answers:
    """A pool that gives these results, in turn."""

    def __init__(self, *results: ExecutionResult) -> None:
        self.results, self.asked = list(results), list[ExecutionRequest]()

    async def run(self, request: ExecutionRequest, caller: str = "") -> ExecutionResult:
        self.asked.append(request)
        return self.results.pop(0)


def said(stdout: str = "", outcome: Outcome = Outcome.OK, **more: Any) -> ExecutionResult:
    return ExecutionResult(outcome=outcome, stdout=stdout, **more)


async def test_expressions_are_equal_where_the_program_says_so():
    pool = Answers(said("=/=\n"))
    pairs = [("1", "1"), ("1", "2"), ("x", "x")]
    assert await equal_expressions(pool, pairs) == [True, False, True]
    (asked,) = pool.asked
    assert asked.trusted and asked.limits == VERIFY_LIMITS and json.loads(str(asked.stdin)) == [list(p) for p in pairs]


@pytest.mark.parametrize(
    "answer",
    [said("="), said("=/x"), said("=/=="), said("==/", Outcome.TIMEOUT, reason="ran for too long"),
     said("", stderr="first\nlast")],
)  # fmt: skip
async def test_a_comparison_that_failed_is_no_verdict(answer: ExecutionResult):
    with pytest.raises(ComparisonFailed, match=r"comparing 'a+' with 'b'") as failed:
        await equal_expressions(Answers(answer), [("a" * 90, "b"), ("1", "1"), ("2", "2")])
    assert "a" * 80 in str(failed.value) and "a" * 81 not in str(failed.value)
    assert answer.stderr == "" or str(failed.value).endswith("last")
    assert answer.reason in str(failed.value)


def case(**more: Any) -> Case:
    given: dict[str, Any] = {
        "name": "n", "request": ExecutionRequest(code="c"), "status": ("ok", "oom"), "contains": ("yes",),
        "must_not_contain": ("secret",), "max_seconds": 5.0, "then_code": "then", "then_stdout": "45\n",
    }  # fmt: skip
    return Case(**(given | more))


async def test_a_case_is_judged_by_its_end_its_texts_and_the_next_program():
    async def wrong(first: ExecutionResult, after: str = "45\n", **more: Any) -> list[str]:
        pool: Any = Answers(first, said(after))
        result, trouble = await check_case(pool, case(**more))
        assert result is first and pool.asked[0].call_id == "n" and pool.asked[1].code == "then"
        return trouble

    assert await wrong(said("yes")) == await wrong(said(stderr="yes")) == await wrong(said(value="yes")) == []
    assert await wrong(said("yes", Outcome.OUT_OF_MEMORY)) == []
    (ended,) = await wrong(said("yes", Outcome.TIMEOUT, stderr="E"))
    assert ended == "ended as timeout, not ok or oom: 'E'"
    assert await wrong(said("no")) == ["'yes' is missing in 'no'"]
    assert await wrong(said("yes, a secret")) == ["'secret' got out"]
    assert await wrong(said("yes"), "46\n") == ["the next program printed '46\\n' ''"]
    assert [text[:4] for text in await wrong(said("yes"), max_seconds=-1.0)] == ["took"]


async def test_a_case_may_take_its_time_and_the_next_program_two_seconds(monkeypatch: pytest.MonkeyPatch):
    async def trouble(first_s: float, after_s: float, patience: float) -> list[str]:
        clock = iter([0.0, first_s, 100.0, 100.0 + after_s, 100.0 + after_s])
        monkeypatch.setattr("sandbox.case_check.time", SimpleNamespace(monotonic=lambda: next(clock)))
        pool: Any = Answers(said("yes"), said("45\n"))
        return (await check_case(pool, case(), patience=patience))[1]

    assert await trouble(5.0, 2.0, 1.0) == [] and await trouble(10.0, 4.0, 2.0) == []
    assert await trouble(5.1, 2.0, 1.0) == ["took 5.1 s, more than 5.0 s"]
    assert await trouble(5.0, 2.1, 1.0) == ["the next program took 2.1 s"]
    assert await trouble(10.2, 4.1, 2.0) == ["took 5.1 s, more than 5.0 s", "the next program took 4.1 s"]


def test_cases_are_read_from_their_file(tmp_path: Path):
    entry = {"name": "a", "code": "c", "stdin": None, "expect": {"status": ["ok"], "max_seconds": 3}}
    made = {"name": "b", "code_gen": "'x' * 3", "stdin_gen": "str(1 + 1)", "then": {"code": "t", "stdout": "o"},
            "expect": {"status": ["error"], "max_seconds": 4, "stdout_or_stderr_contains": ["p"],
                       "must_not_contain": ["q"]}}  # fmt: skip
    (tmp_path / "cases.json").write_text(json.dumps([entry, made]))
    plain, generated = read_cases(tmp_path / "cases.json")
    assert plain == case(name="a", request=ExecutionRequest(code="c", limits=derived.program(wall_s=2.0)),
                         status=("ok",), contains=(), must_not_contain=(), max_seconds=3,
                         then_code="print(sum(range(10)))")  # fmt: skip
    assert generated == case(name="b", status=("error",),
                             request=ExecutionRequest(code="xxx", stdin="2", limits=derived.program(wall_s=3.0)),
                             contains=("p",), must_not_contain=("q",), max_seconds=4, then_stdout="o",
                             then_code="t")  # fmt: skip
