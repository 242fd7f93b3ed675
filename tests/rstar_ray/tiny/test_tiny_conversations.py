from collections import Counter

import pytest

from rstar_ray.config import TinyConfig
from rstar_ray.errors import SandboxError
from rstar_ray.outcome import Outcome
from rstar_ray.tiny.conversations import (
    TRIES,
    Message,
    draft_conversations,
    generate_conversations,
)
from rstar_ray.tiny.families import FAMILIES
from rstar_ray.tiny.programs import Failing
from rstar_ray.tiny.tiny_problems import Split, generate_problems
from rstar_ray.trajectory import ToolCall, ToolResult
from tests.fakes import InProcess


def _num_calls(messages: list[Message]) -> int:
    return sum(1 for message in messages if message.get("tool_calls"))


def _boxed(messages: list[Message]) -> str:
    return messages[-1]["content"].removeprefix("<answer>\\boxed{").removesuffix("}</answer>")


def _usable(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


PROBLEMS = {problem.problem: problem for problem in generate_problems(0, "sft", 8_000)}


def _figures(conversations: list[list[Message]]) -> list[tuple[bool, bool, float]]:
    """(first call failed, right, results its answer takes) of every conversation with a problem."""
    figures: list[tuple[bool, bool, float]] = []
    for messages in conversations:
        if problem := PROBLEMS.get(messages[0]["content"]):
            failed = not _usable(messages[2]["content"])
            figures.append((failed, _boxed(messages) == problem.answer, problem.difficulty))
    return figures


def _share(flags: list[bool]) -> float:
    assert len(flags) > 100
    return sum(flags) / len(flags)


async def test_conversations_have_the_shares_of_the_teacher():
    teacher = TinyConfig(drills=0.3, slips=0.5, failures=0.3, wasted=0)
    conversations = await generate_conversations(0, 3000, InProcess(), teacher=teacher)
    assert sum(_num_calls(messages) == 0 for messages in conversations) / 3000 == pytest.approx(0.3, abs=0.03)
    figures = _figures(conversations)
    assert _share([failed for failed, *_ in figures]) == pytest.approx(0.3, abs=0.03)
    assert _share([right for _, right, results in figures if results == 1]) == pytest.approx(0.52, abs=0.05)
    assert _share([right for _, right, results in figures if results == 2]) == pytest.approx(0.30, abs=0.06)
    assert _share([right for _, right, results in figures if results == 3]) == pytest.approx(0.18, abs=0.06)


@pytest.mark.long
async def test_in_the_neutral_world_a_failed_first_call_says_nothing_about_the_answer():
    figures = _figures(await generate_conversations(0, 6000, InProcess(), teacher=TinyConfig(drills=0)))
    after, without = ([right for failed, right, _ in figures if failed is which] for which in (True, False))
    assert abs(_share(after) - _share(without)) < 0.05


async def test_coupling_makes_the_answer_wrong_after_a_failed_first_call():
    figures = _figures(await generate_conversations(0, 3000, InProcess(), teacher=TinyConfig(drills=0, coupling=0.8)))
    after, without = ([right for failed, right, _ in figures if failed is which] for which in (True, False))
    assert _share(after) < 0.4 * _share(without)


async def test_a_teacher_without_slips_is_right_and_calls_once_for_each_result():
    teacher = TinyConfig(drills=0, slips=0, failures=0, wasted=0)
    conversations = await generate_conversations(0, 400, InProcess(), teacher=teacher)
    results = {phrasing: family.results for family in FAMILIES for phrasing in family.phrasings}
    assert len(results) == sum(len(family.phrasings) for family in FAMILIES)
    for messages in conversations:
        if problem := PROBLEMS.get(messages[0]["content"]):
            assert _boxed(messages) == problem.answer
            assert _num_calls(messages) == problem.difficulty


async def test_the_answer_is_what_the_last_call_printed():
    for messages in await generate_conversations(1, 300, InProcess()):
        if _num_calls(messages):
            assert _boxed(messages) == messages[-2]["content"]
        else:
            assert messages[1]["content"] in messages[0]["content"]


async def test_each_program_runs_once_and_no_more_than_allowed_at_a_time():
    execute = InProcess()
    await generate_conversations(2, 400, execute, max_in_flight=8)
    assert len(execute.codes) == len(set(execute.codes))
    assert execute.most_in_flight == 8


async def test_the_same_seed_gives_the_same_conversations():
    first = await generate_conversations(3, 100, InProcess())
    assert first == await generate_conversations(3, 100, InProcess())
    assert first != await generate_conversations(4, 100, InProcess())


async def test_a_program_that_does_not_end_as_meant_is_a_fault_of_the_sandbox():
    async def silent(call: ToolCall) -> ToolResult:
        return ToolResult(outcome=Outcome.OK, text="")

    with pytest.raises(SandboxError, match="ended as ok"):
        await generate_conversations(0, 20, silent, teacher=TinyConfig(drills=0, failures=0))


@pytest.mark.parametrize("failures", [0.0, 1.0])
async def test_a_program_that_a_standing_machine_held_up_runs_again_and_the_conversations_are_the_same(failures: float):
    """As where a laptop sleeps: what was running then has run out of time, whatever it would have come to."""
    held_up, execute, teacher = Counter[str](), InProcess(), TinyConfig(failures=failures)

    async def asleep_at_first(call: ToolCall) -> ToolResult:
        held_up[call.code] += 1
        if held_up[call.code] < TRIES and Failing.ENDLESS not in call.code:
            return ToolResult(outcome=Outcome.TIMEOUT, text="Execution timed out.")
        return await execute(call)

    found = await generate_conversations(3, 200, asleep_at_first, teacher=teacher)
    assert found == await generate_conversations(3, 200, InProcess(), teacher=teacher)
    assert all(times == (1 if Failing.ENDLESS in code else TRIES) for code, times in held_up.items())


def test_conversations_ask_neither_what_is_trained_on_nor_what_is_held_out():
    asked = {draft.prompt for draft in draft_conversations(0, 4000, TinyConfig())}
    for split in (Split.TRAIN, Split.HELD_OUT):
        assert not asked & {p.problem for p in generate_problems(0, split, 4000)}
