"""What a reader sees: cut output, shown values, tool text, and whose turn it is."""

from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar_ray.config import SandboxConfig
from rstar_ray.outcome import Outcome
from sandbox import supervision
from sandbox.call import FairQueue, refusal
from sandbox.isolation import IsolationLevel
from sandbox.jail import preload, wire
from sandbox.jail.cut import CONTINUATION, cut_text, join_kept
from sandbox.jail.display import show
from sandbox.limits import MIB, Limits, program_limits
from sandbox.outcomes import judge, tool_text
from sandbox.processes import Channel
from sandbox.request import MAX_CODE_CHARS, ExecutionRequest, ExecutionResult
from sandbox.supervision import ProcessHealth


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
    "code, preload_set",
    [("print(1)", "lean"), ("import numpy as np", "numpy"), ("from sympy import *", "sympy"), ("x.scipyish", "lean")],
)
def test_a_program_gets_the_leanest_server_that_fits(code: str, preload_set: str):
    assert preload.choose(code) == preload_set


def test_callers_are_served_in_turn_and_what_comes_back_goes_first():
    queue: FairQueue[int] = FairQueue()
    for number in range(3):
        queue.push("a", number)
    queue.push("b", 10)
    assert [queue.pop(), queue.pop()] == [0, 10]
    queue.push_front("c", 99)
    assert [queue.pop(), queue.pop(), queue.pop(), bool(queue)] == [99, 1, 2, False]


class Seen(Channel):
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
        (ProcessHealth.HEALTHY, False, False, False, False),
        (ProcessHealth.PING, False, False, False, False),
        (ProcessHealth.SUSPECT, False, False, False, False),
        (ProcessHealth.LOOK, False, False, False, True),
        (ProcessHealth.LOOK, True, False, False, False),
        (ProcessHealth.LOOK, False, True, False, False),
        (ProcessHealth.LOOK, False, False, True, False),
        (ProcessHealth.LOST, True, True, False, True),
        (ProcessHealth.LOST, False, False, True, False),
    ],
)
def test_who_waits_for_a_core_has_run_or_has_spoken_unheard_is_not_lost(
    verdict: ProcessHealth, waits: bool, ran: bool, spoke: bool, lost: bool
):
    assert supervision.is_lost(verdict, Seen(waits=waits, ran=ran, spoke=spoke)) is lost


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


def test_refusals_say_what_is_missing():
    cpp = ExecutionRequest(code="int main(){}", language="cpp")
    assert "processes" in refusal(cpp, IsolationLevel.LANDLOCK)
    assert refusal(ExecutionRequest(code="x" * MAX_CODE_CHARS), IsolationLevel.LANDLOCK) == ""
    assert "characters" in refusal(ExecutionRequest(code="x" * (MAX_CODE_CHARS + 1)), IsolationLevel.PROCESS)


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
