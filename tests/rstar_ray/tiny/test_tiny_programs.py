import random

import pytest

from rstar_ray.config import TinyConfig
from rstar_ray.tiny.broken_tool import python
from rstar_ray.tiny.conversations import draft_tool_use
from rstar_ray.tiny.families import FAMILIES, Numbers
from rstar_ray.tiny.problems import Question
from rstar_ray.tiny.programs import EVERYWHERE, PROGRAMS, Failing, fail
from rstar_ray.tools.tool import ToolFailed


@pytest.mark.parametrize("failing", Failing)
def test_a_call_that_fails_prints_what_is_to_be_mended(failing: Failing):
    said = {
        Failing.UNCLOSED: "'(' was never closed",
        Failing.UNMATCHED: "unmatched ')'",
        Failing.UNNAMED: "name 'a' is not defined",
        Failing.NOTHING: "unsupported operand type(s) for +: 'int' and 'NoneType'",
        Failing.NO_INDEX: "'int' object is not subscriptable",
        Failing.ZERO: "integer division or modulo by zero",
    }
    call = fail("print(abs(4-9))", failing)
    assert call.startswith("print(abs(4-9)")
    if failing in said:
        with pytest.raises(Exception) as raised:
            exec(compile(call, "<tool>", "exec"), {})
        assert said[failing] in str(raised.value)
    assert {Failing.SHAPE: ",0)", Failing.ENDLESS: "iter(int,1)))"}.get(failing, "") in call


def test_every_program_fails_in_ways_of_its_own_beside_those_of_all():
    for program in PROGRAMS.values():
        assert program.failing and not set(program.failing) & set(EVERYWHERE)
    assert {way for program in PROGRAMS.values() for way in program.failing} | set(EVERYWHERE) == set(Failing)


def test_a_call_that_fails_begins_as_the_one_that_is_called_next():
    """Whether the answer will be right is settled before it: reward says nothing about the failure."""
    for family in FAMILIES:
        question, rng = Question(family, Numbers(14, 3, 5), 0), random.Random(0)
        for _ in range(40):
            draft = draft_tool_use(question, TinyConfig(failures=1, wasted=0), rng)
            assert draft.failing.startswith(draft.calls[0].removesuffix(")")) and draft.failing != draft.calls[0]


async def test_the_broken_tool_never_answers():
    assert python.function is not None and python.name == "python"
    with pytest.raises(ToolFailed, match="out of order"):
        await python.function(code="print(1)")
