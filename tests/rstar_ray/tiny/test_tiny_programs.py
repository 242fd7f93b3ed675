import random

import pytest

from rstar_ray.config import TinyConfig
from rstar_ray.tiny.broken_tool import python
from rstar_ray.tiny.conversations import draft_tool_use
from rstar_ray.tiny.families import FAMILIES, Numbers
from rstar_ray.tiny.problems import Question
from rstar_ray.tiny.programs import EVERYWHERE, PROGRAMS, Failing, fail
from rstar_ray.tools.tool import ToolFailed


@pytest.mark.parametrize(
    ("failing", "call", "failed"),
    [
        (Failing.UNCLOSED, "print(4+5)", "print(4+5"),
        (Failing.UNNAMED, "print(4+5)", "print(a+b)"),
        (Failing.MISSPELLED, "print(4+5)", "prnt(4+5)"),
        (Failing.NO_IMPORT, "import math; print(math.gcd(4,5))", "print(math.gcd(4,5))"),
        (Failing.NO_LIST, "print(4+5)", "print(sum(4+5))"),
        (Failing.SHAPE, "print((4+5)//2)", "print(((4+5)//2,))"),
        (Failing.ENDLESS, "print((4+5)//2)", "while (4+5)//2: pass"),
    ],
)
def test_a_call_fails_in_this_way(failing: Failing, call: str, failed: str):
    assert fail(call, "print(a+b)", failing) == failed


def test_what_a_call_needs_to_fail_is_in_every_program_that_may_fail_so():
    for program in PROGRAMS.values():
        templates = (program.steps[0].right, *program.steps[0].slips)
        assert program.failing and not set(program.failing) & set(EVERYWHERE)
        for template in templates:
            call = template.format(a=14, b=3, c=5)
            unnamed = template.format(a="a", b="b", c="c")
            broken = {fail(call, unnamed, failing) for failing in (*program.failing, *EVERYWHERE)}
            assert call not in broken and len(broken) == len(program.failing) + len(EVERYWHERE)


def test_a_call_that_fails_is_one_of_the_program_that_is_called_next():
    """Whether the answer will be right is settled with it: reward says nothing about the failure."""
    for family in FAMILIES:
        question, rng = Question(family, Numbers(14, 3, 5), 0), random.Random(0)
        steps = PROGRAMS[family.name].steps
        templates = {t.format(a=14, b=3, c=5): t for t in (steps[0].right, *steps[0].slips)}
        ways = (*PROGRAMS[family.name].failing, *EVERYWHERE)
        for _ in range(40):
            draft = draft_tool_use(question, TinyConfig(failures=1, wasted=0), rng)
            unnamed = templates[draft.calls[0]].format(a="a", b="b", c="c")
            assert draft.failing in [fail(draft.calls[0], unnamed, way) for way in ways]


async def test_the_broken_tool_never_answers():
    assert python.function is not None and python.name == "python"
    with pytest.raises(ToolFailed, match="out of order"):
        await python.function(code="print(1)")
