import random

import pytest

from rstar_ray.config import TinyConfig
from rstar_ray.tiny.broken_tool import python
from rstar_ray.tiny.conversations import draft_tool_use
from rstar_ray.tiny.families import FAMILIES, Numbers
from rstar_ray.tiny.programs import EVERYWHERE, PROGRAMS, Failing, fail
from rstar_ray.tiny.tiny_problems import Question
from rstar_ray.tools.tool import ToolFailed


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        (Failing.UNNAMED, "name 'prin' is not defined"),
        (Failing.BRACKET, "closing parenthesis ')' does not match opening parenthesis '['"),
        (Failing.MODULE, "name 'math' is not defined"),
        (Failing.SUM, "'int' object is not iterable"),
        (Failing.LENGTH, "object of type 'int' has no len()"),
        (Failing.ZERO, "integer division or modulo by zero"),
    ],
)
def test_a_call_that_fails_prints_what_is_to_be_mended(failing: Failing, said: str):
    with pytest.raises(Exception) as raised:
        exec(compile(fail("print(abs(4-9))", failing), "<tool>", "exec"), {})
    assert said in str(raised.value)


def test_where_the_module_is_there_it_is_asked_for_what_it_has_not():
    with pytest.raises(AttributeError, match="module 'math' has no attribute 'print'"):
        exec(fail("import math; print(math.gcd(4,6))", Failing.MODULE), {})


def test_a_call_of_the_wrong_shape_prints_nothing(capsys: pytest.CaptureFixture[str]):
    exec(fail("print(4*6)", Failing.SHAPE), {})
    assert capsys.readouterr().out == ""
    assert fail("print(4*6)", Failing.ENDLESS) == "while 1:abs(4*6)"


def test_every_program_fails_in_ways_of_its_own_beside_those_of_all():
    for program in PROGRAMS.values():
        assert program.failing and not set(program.failing) & set(EVERYWHERE)
    assert {way for program in PROGRAMS.values() for way in program.failing} | set(EVERYWHERE) == set(Failing)


def test_a_call_that_fails_is_the_one_that_is_called_next_but_for_its_first_word():
    """Nothing is chosen between where they differ than to fail or not: reward says nothing about the failure."""
    for family in FAMILIES:
        question, rng = Question(family, Numbers(14, 3, 5), 0), random.Random(0)
        for _ in range(40):
            draft = draft_tool_use(question, TinyConfig(failures=1, wasted=0), rng)
            before, word, after = draft.calls[0].partition("print(")
            assert before in ("", "import math; ") and word
            assert any(draft.failing == before + way + after for way in Failing)


async def test_the_broken_tool_never_answers():
    assert python.function is not None and python.name == "python"
    with pytest.raises(ToolFailed, match="out of order"):
        await python.function(code="print(1)")
