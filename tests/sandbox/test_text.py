"""What a reader sees: cut output, shown values, tool text, and whose turn it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar_ray.outcome import Outcome
from sandbox.cage import flavors
from sandbox.cage.cut import CONTINUATION, cut_text, join_kept
from sandbox.cage.display import show
from sandbox.fair_queue import FairQueue
from sandbox.request import ExecutionResult
from sandbox.tool_text import tool_text


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
