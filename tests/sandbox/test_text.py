"""What a reader sees: cut output, shown values, tool text, and whose turn it is."""

import asyncio
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar_ray.config import SandboxConfig
from rstar_ray.outcome import Outcome
from sandbox import supervision
from sandbox.cage import flavors, wire
from sandbox.cage.cut import CONTINUATION, cut_text, join_kept
from sandbox.cage.display import show
from sandbox.call import message_for, refusal
from sandbox.crews import Crew, Crews
from sandbox.fair_queue import FairQueue
from sandbox.http.code_judge import Submission, write_answer
from sandbox.isolation import IsolationLevel
from sandbox.limits import MIB, Limits, program_limits
from sandbox.outcomes import judge
from sandbox.request import MAX_CODE_CHARS, ExecutionRequest, ExecutionResult
from sandbox.supervision import CELL_START_S, PING_AFTER_S, SILENCE_S, START_S, STARVING_S, SUSPECT_S, Verdict
from sandbox.tool_text import tool_text
from tests import derived


@given(st.text(min_size=200, max_size=600), st.integers(1, 60))
def test_a_cut_through_bytes_never_breaks_a_character(text: str, limit: int):
    data = text.encode("utf-8", "ignore")
    whole = data.decode()
    head, tail = data[: 4 * (limit // 2)], data[-4 * (limit - limit // 2) :]
    chars = len(data.translate(None, CONTINUATION))
    cut, missing = join_kept(head, tail, chars, limit, 0.5)
    assert "�" not in cut or "�" in whole
    assert missing >= len(whole) - limit


def test_short_text_is_left_alone():
    assert cut_text("abc", 3, 0.5) == ("abc", 0)
    assert cut_text("abcdef", 2, 0.5) == ("a\n... [4 characters cut] ...\nf", 4)


@pytest.mark.parametrize(
    "value, text",
    [
        (1, "1"),
        ("a", "'a'"),
        ((1,), "(1,)"),
        ({3, 1}, "{1, 3}"),
        (frozenset({2, 1}), "frozenset({1, 2})"),
        ({}, "{}"),
        (set(), "set()"),
        (int, "int"),
        ([["x" * 50], ["y" * 50]], f"[['{'x' * 50}'],\n ['{'y' * 50}']]"),
        ({"k" * 40: "v" * 40, "b": 1}, f"{{'{'k' * 40}': '{'v' * 40}',\n 'b': 1}}"),
    ],
)
def test_values_look_as_in_ipython(value: object, text: str):
    assert show(value) == text


def test_very_long_containers_end_in_dots():
    assert show(list(range(5000))).endswith("999,\n ...]")


def test_tool_text_has_all_four_kinds_of_answer():
    assert tool_text(ExecutionResult(outcome=Outcome.OK, stdout="a\n")) == "a"
    assert tool_text(ExecutionResult(outcome=Outcome.OK, value="5")) == "5"
    assert tool_text(ExecutionResult(outcome=Outcome.ERROR, stdout="a\n", stderr="E: x\n")) == "a\nE: x"
    assert tool_text(ExecutionResult(outcome=Outcome.TIMEOUT, stdout="a\n")) == "a\nExecution timed out."
    assert tool_text(ExecutionResult(outcome=Outcome.ERROR, exit_status=3)) == "The program exited with status 3."


@pytest.mark.parametrize(
    "code, flavor",
    [("print(1)", "lean"), ("import numpy as np", "numpy"), ("from sympy import *", "sympy"), ("x.scipyish", "lean")],
)
def test_a_program_gets_the_leanest_server_that_fits(code: str, flavor: str):
    assert flavors.choose(code) == flavor


def test_callers_are_served_in_turn_and_what_comes_back_goes_first():
    queue: FairQueue[int] = FairQueue()
    for number in range(3):
        queue.push("a", number)
    queue.push("b", 10)
    assert [queue.pop(), queue.pop()] == [0, 10]
    queue.push_front("c", 99)
    assert [queue.pop(), queue.pop(), queue.pop(), bool(queue)] == [99, 1, 2, False]


@pytest.mark.parametrize(
    "silent_s, ready, busy, pinged, verdict",
    [
        (0.0, True, False, False, Verdict.WELL),
        (PING_AFTER_S, True, False, False, Verdict.WELL),
        (PING_AFTER_S + 0.01, True, False, False, Verdict.PING),
        (SUSPECT_S, True, True, False, Verdict.WELL),
        (SUSPECT_S + 0.01, True, True, False, Verdict.SUSPECT),
        (SILENCE_S, True, True, False, Verdict.SUSPECT),
        (SILENCE_S + 0.01, True, True, False, Verdict.LOOK),
        (SILENCE_S + 0.01, True, False, True, Verdict.LOOK),
        (STARVING_S, True, True, False, Verdict.LOOK),
        (STARVING_S + 0.01, True, False, True, Verdict.LOST),
        (CELL_START_S, False, False, False, Verdict.WELL),
        (CELL_START_S + 0.01, False, False, False, Verdict.LOST),
    ],
)
def test_silence_is_judged_by_what_a_cell_owes(
    silent_s: float, ready: bool, busy: bool, pinged: bool, verdict: Verdict
):
    assert supervision.on_cell(silent_s, ready=ready, busy=busy, pinged=pinged) is verdict


@pytest.mark.parametrize(
    "silent_s, ready, pinged, verdict",
    [
        (START_S, False, False, Verdict.WELL),
        (START_S + 0.01, False, False, Verdict.LOST),
        (PING_AFTER_S, True, False, Verdict.WELL),
        (PING_AFTER_S + 0.01, True, False, Verdict.PING),
        (SUSPECT_S, True, True, Verdict.WELL),
        (SILENCE_S, True, True, Verdict.SUSPECT),
        (SILENCE_S + 0.01, True, True, Verdict.LOOK),
        (STARVING_S + 0.01, True, True, Verdict.LOST),
    ],
)
def test_a_server_may_import_for_a_minute_but_then_it_answers(
    silent_s: float, ready: bool, pinged: bool, verdict: Verdict
):
    assert supervision.on_server(silent_s, ready=ready, pinged=pinged) is verdict


class Seen:
    """A process as it looks from outside."""

    def __init__(self, *, waits: bool, spoke: bool, ran: bool) -> None:
        self.waits, self.spoke, self.ran = waits, spoke, ran

    def wants_to_run(self) -> bool:
        return self.waits

    def has_run(self) -> bool:
        return self.ran

    def has_spoken(self) -> bool:
        return self.spoke


@pytest.mark.parametrize(
    ("verdict", "waits", "ran", "spoke", "lost"),
    [
        (Verdict.WELL, False, False, False, False),
        (Verdict.PING, False, False, False, False),
        (Verdict.SUSPECT, False, False, False, False),
        (Verdict.LOOK, False, False, False, True),
        (Verdict.LOOK, True, False, False, False),
        (Verdict.LOOK, False, True, False, False),
        (Verdict.LOOK, False, False, True, False),
        (Verdict.LOST, True, True, False, True),
        (Verdict.LOST, False, False, True, False),
    ],
)
def test_who_waits_for_a_core_has_run_or_has_spoken_unheard_is_not_lost(
    verdict: Verdict, waits: bool, ran: bool, spoke: bool, lost: bool
):
    assert supervision.is_lost(verdict, Seen(waits=waits, ran=ran, spoke=spoke)) is lost


async def test_a_supervisor_that_meets_a_fault_of_ours_says_so_and_goes_on(caplog: pytest.LogCaptureFixture):
    crews, looks = Crews(derived.pool(), 1, IsolationLevel.PROCESS, None), asyncio.Queue[None]()  # type: ignore[arg-type]

    def look() -> list[Crew]:
        looks.put_nowait(None)
        raise KeyError("a bug")

    crews.everyone = look  # type: ignore[method-assign]
    supervising = asyncio.create_task(crews.supervise())
    async with asyncio.timeout(60):
        for _ in range(2):
            await looks.get()
    supervising.cancel()
    assert "a fault of ours" in caplog.text and "a bug" in caplog.text


def test_a_supervisor_that_slept_itself_blames_nobody():
    assert not supervision.overslept(4 * supervision.TICK_S)
    assert supervision.overslept(4 * supervision.TICK_S + 0.01)


def result_of(status: int, ended_for: int = 0, flags: int = 0, cpu_s: float = 0.0) -> wire.Result:
    return wire.Result(1, status, ended_for, flags, 0, 0.1, cpu_s, 0, 0, 0, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    "seen, outcome, reason",
    [
        (result_of(0), Outcome.OK, ""),
        (result_of(1 << 8), Outcome.ERROR, ""),
        (result_of(1 << 8, flags=wire.MEMORY_ERROR), Outcome.OUT_OF_MEMORY, "more memory than it may have"),
        (result_of(0, flags=wire.MEMORY_ERROR), Outcome.OK, ""),
        (result_of(9, wire.CPU_TIME), Outcome.TIMEOUT, "all of its CPU time"),
        (result_of(9, wire.WALL_TIME), Outcome.TIMEOUT, "too long"),
        (result_of(9, wire.OUTPUT), Outcome.OUTPUT_LIMIT, "printed too much"),
        (result_of(9, wire.STORAGE), Outcome.OUT_OF_MEMORY, "files"),
        (result_of(9), Outcome.KILLED, "ended by SIGKILL"),
        (result_of(11, wire.CPU_TIME), Outcome.KILLED, "ended by SIGSEGV"),
        (result_of(24, cpu_s=3.6), Outcome.TIMEOUT, "all of its CPU time"),
        (result_of(24, cpu_s=3.5), Outcome.KILLED, "ended by SIGXCPU"),
        (result_of(63), Outcome.KILLED, "ended by signal 63"),
    ],
)
def test_the_outcome_is_the_wait_status_and_the_bound_that_was_crossed(
    seen: wire.Result, outcome: Outcome, reason: str
):
    judged, why = judge(seen, 4.0)
    assert judged is outcome and reason in why and bool(reason) == bool(why)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_an_answer_in_code_judges_form_says_what_a_client_of_it_looks_for(outcome: Outcome):
    submission = Submission(sub_id="7", request=ExecutionRequest(code=""))
    answer = write_answer(submission, ExecutionResult(outcome=outcome, stdout="so far", reason="why", wall_s=0.5))
    assert (answer["sub_id"], answer["cost"], answer["run_success"]) == ("7", 0.5, outcome is Outcome.OK)
    assert answer["stdout"] == ("so farSuicide from timeout.\n" if outcome is Outcome.TIMEOUT else "so far")
    assert answer["reason"] == {Outcome.TIMEOUT: "worker_timeout", Outcome.INVALID: "invalid_input"}.get(outcome, "")
    assert answer["stderr"] == ("" if outcome is Outcome.OK else "why")


def test_refusals_say_what_is_missing():
    cpp = ExecutionRequest(code="int main(){}", language="cpp")
    assert "processes" in refusal(cpp, IsolationLevel.LANDLOCK)
    assert refusal(ExecutionRequest(code="x" * MAX_CODE_CHARS), IsolationLevel.LANDLOCK) == ""
    assert "characters" in refusal(ExecutionRequest(code="x" * (MAX_CODE_CHARS + 1)), IsolationLevel.PROCESS)


def test_a_cell_is_told_the_limits_of_its_call():
    limits = derived.program(cpu_s=2.0, wall_s=3.0, stdout_chars=10, stderr_chars=8, output_bytes=2048)
    header, code, stdin = message_for(ExecutionRequest(code="é", stdin=b"\xff", limits=limits, seed=9), 5)
    assert (code, stdin) == ("é".encode(), b"\xff")
    assert (header.call_id, header.cpu_s, header.wall_s, header.output_bytes, header.seed) == (5, 2.0, 3.0, 2048, 9)
    assert header.memory_bytes == limits.memory_bytes
    assert (header.code_bytes, header.stdin_bytes) == (2, 1)
    assert (header.out_head, header.out_tail, header.err_head, header.err_tail) == (20, 20, 8, 24)
    assert message_for(ExecutionRequest(code=""), 1)[0].seed == -1


def test_the_documented_limits_are_those_of_the_code():
    """docs/sandbox.md gives each number once, with the option that sets it."""
    text = (Path(__file__).parents[2] / "docs" / "sandbox.md").read_text("utf-8")
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `")]
    shown = {row[0].strip(" `"): row[1].strip() for row in rows if len(row) == 3}
    for name in (entry.name for entry in fields(Limits)):
        assert shown[name] == _shown(name, getattr(program_limits(SandboxConfig()), name)), name


def _shown(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return f"{value / MIB:g} MiB"
    return f"{value:g} s" if name.endswith("_s") else f"{value:,}"
