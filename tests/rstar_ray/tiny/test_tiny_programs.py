import random

import pytest

from rstar_ray.config import TinyConfig
from rstar_ray.tiny.conversations import draft_tool_use
from rstar_ray.tiny.families import FAMILIES, Numbers
from rstar_ray.tiny.programs import Failing, fail
from rstar_ray.tiny.tiny_problems import Question


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
def test_a_call_that_fails_prints_what_is_to_be_fixed(failing: Failing, said: str):
    with pytest.raises(Exception) as raised:
        exec(compile(fail("print(abs(4-9))", failing), "<tool>", "exec"), {})
    assert said in str(raised.value)


def test_a_call_that_fails_is_the_one_that_is_called_next_but_for_its_first_word():
    """Nothing is chosen between where they differ than to fail or not: reward says nothing about the failure."""
    for family in FAMILIES:
        question, rng = Question(family, Numbers(14, 3, 5), 0), random.Random(0)
        for _ in range(40):
            draft = draft_tool_use(question, TinyConfig(failures=1, wasted=0), rng)
            before, word, after = draft.calls[0].partition("print(")
            assert before in ("", "import math; ") and word
            assert any(draft.failing == before + way + after for way in Failing)
