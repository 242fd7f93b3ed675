import random

from rstar_ray.config import TinyConfig
from rstar_ray.tiny.conversations import draft_tool_use
from rstar_ray.tiny.families import FAMILIES, Numbers
from rstar_ray.tiny.programs import Failing
from rstar_ray.tiny.tiny_problems import Question


def test_a_call_that_fails_is_the_one_that_is_called_next_but_for_its_first_word():
    """Nothing is chosen between where they differ than to fail or not: reward says nothing about the failure."""
    for family in FAMILIES:
        question, rng = Question(family, Numbers(14, 3, 5), 0), random.Random(0)
        for _ in range(40):
            draft = draft_tool_use(question, TinyConfig(failures=1, wasted=0), rng)
            before, word, after = draft.calls[0].partition("print(")
            assert before in ("", "import math; ") and word
            assert any(draft.failing == before + way + after for way in Failing)
