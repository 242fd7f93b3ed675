"""Comparisons by computer algebra, in the jail."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rstar_ray.reward.maths import Pair, same_mathematics
from sandbox.equality import VERIFY_LIMITS, equal_expressions
from sandbox.pool import SandboxPool
from tests.rstar_ray.reward.pairs import DIFFERENT, NOT_READ, SAME

pytestmark = pytest.mark.asyncio(loop_scope="session")
PATIENT = replace(VERIFY_LIMITS, cpu_s=60.0, wall_s=120.0)


@pytest.mark.real
async def test_three_hundred_pairs_are_judged_as_the_table_says(pool: SandboxPool):
    """All that the rules leave open goes into one comparison, so that the test takes its time once."""
    asked: dict[Pair, None] = {}

    async def note(pairs: Sequence[Pair]) -> Sequence[bool]:
        asked.update(dict.fromkeys(pairs))
        return [False] * len(pairs)

    for pair in [*SAME, *DIFFERENT]:
        await same_mathematics(*pair, note)
    assert asked
    known = dict(zip(asked, await equal_expressions(pool.run, list(asked), limits=PATIENT), strict=True))

    async def compare(pairs: Sequence[Pair]) -> Sequence[bool]:
        return [known[pair] for pair in pairs]

    assert [pair for pair in SAME if not await same_mathematics(*pair, compare)] == []
    assert [pair for pair in DIFFERENT if await same_mathematics(*pair, compare)] == []


@pytest.mark.real
async def test_an_answer_whose_comparison_uses_all_of_its_cpu_time_is_wrong(pool: SandboxPool):
    endless = "+".join(f"\\sqrt{{{n}+\\sqrt{{{n + 1}}}}}" for n in range(2, 40))
    limits = replace(VERIFY_LIMITS, cpu_s=0.5, wall_s=120.0)
    assert await equal_expressions(pool.run, [(endless, endless.replace("+", "-", 1))], limits=limits) == [False]


@pytest.mark.real
async def test_equal_answers_that_are_not_read_are_those_of_the_documentation(pool: SandboxPool):
    async def compare(pairs: Sequence[Pair]) -> Sequence[bool]:
        return await equal_expressions(pool.run, pairs, limits=PATIENT)

    assert [pair for pair in NOT_READ if await same_mathematics(*pair, compare)] == []
