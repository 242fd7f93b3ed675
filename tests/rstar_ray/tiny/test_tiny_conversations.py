import asyncio
import contextlib
import io
import traceback
from collections import Counter

import pytest

from rstar_ray.errors import SandboxError
from rstar_ray.outcome import Outcome
from rstar_ray.tiny.conversations import (
    ConversationMix,
    Message,
    draft_conversations,
    draft_tool_use,
    generate_conversations,
)
from rstar_ray.tiny.problems import Split, draw_questions, generate_problems
from rstar_ray.tiny.tokenizer import make_tokenizer
from rstar_ray.trajectory import ToolCall, ToolResult


class InProcess:
    """Runs our own templates here; stands for the sandbox."""

    def __init__(self) -> None:
        self.codes: list[str] = []
        self.in_flight = self.most_in_flight = 0

    async def __call__(self, call: ToolCall) -> ToolResult:
        self.codes.append(call.code)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                exec(compile(call.code, "<tool>", "exec"), {})
        except Exception as error:
            lines = traceback.format_exception_only(error)
            return ToolResult(outcome=Outcome.ERROR, text="".join(lines).strip())
        return ToolResult(outcome=Outcome.OK, text=out.getvalue().strip())


def _num_calls(messages: list[Message]) -> int:
    return sum(1 for message in messages if message.get("tool_calls"))


async def test_conversations_have_the_shares_of_the_mix():
    mix = ConversationMix(drills=0.3, mistakes=0.5, failures=0.3)
    conversations = await generate_conversations(0, 3000, InProcess(), mix=mix)
    calls = Counter(map(_num_calls, conversations))
    assert calls.keys() == {0, 1, 2}
    assert calls[0] / 3000 == pytest.approx(0.3, abs=0.03)
    assert calls[2] / (calls[1] + calls[2]) == pytest.approx(0.3, abs=0.03)
    answers = {p.problem: p.answer for p in generate_problems(0, "train", 6000)}
    solved = [answers[m[0]["content"]] == _boxed(m) for m in conversations if m[0]["content"] in answers]
    assert len(solved) > 1000
    assert sum(solved) / len(solved) == pytest.approx(0.5, abs=0.04)


def _boxed(messages: list[Message]) -> str:
    return messages[-1]["content"].removeprefix("<answer>\\boxed{").removesuffix("}</answer>")


async def test_the_answer_is_what_the_last_call_printed():
    for messages in await generate_conversations(1, 300, InProcess()):
        if _num_calls(messages):
            assert _boxed(messages) == messages[-2]["content"]
        else:
            assert messages[1]["content"] in messages[0]["content"]


async def test_a_failed_call_shows_its_error_and_is_repaired():
    conversations = await generate_conversations(1, 300, InProcess(), mix=ConversationMix(drills=0, failures=1))
    shown = [messages[2]["content"] for messages in conversations]
    assert all("NameError" in text or "SyntaxError" in text for text in shown)
    assert {text.split(":")[0] == "NameError" for text in shown} == {True, False}
    assert all(messages[4]["content"].lstrip("-").isdecimal() for messages in conversations)


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
        await generate_conversations(0, 20, silent, mix=ConversationMix(drills=0))


def test_slips_are_drawn_apart_from_the_numbers():
    import random

    question = next(draw_questions(0, Split.TRAIN))
    rng = random.Random(0)
    codes = {draft_tool_use(question, ConversationMix(), rng).codes[-1] for _ in range(50)}
    assert len(codes) >= 2


def test_conversations_ask_the_train_split_only():
    held_out = {p.problem for p in generate_problems(0, "held_out", 600)}
    assert not held_out & {draft.prompt for draft in draft_conversations(0, 4000, ConversationMix())}


def test_a_share_outside_zero_to_one_is_refused():
    with pytest.raises(ValueError, match="mistakes"):
        ConversationMix(mistakes=1.5)


async def test_a_conversation_takes_about_seventy_tokens():
    tokenizer = make_tokenizer()
    conversations = await generate_conversations(0, 300, InProcess())
    lengths = [len(tokenizer.encode(tokenizer.apply_chat_template(m, tokenize=False))) for m in conversations]
    assert 50 < sum(lengths) / len(lengths) < 80
