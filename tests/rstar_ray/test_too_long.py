"""Prompts beyond the context are found before anything starts, and hardly one is tokenized for that."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rstar_ray.agent.rollout import RolloutState
from rstar_ray.chat.template import TokenizerChat, chat_of
from rstar_ray.config import RunConfig, with_values
from rstar_ray.data.too_long import too_long
from rstar_ray.evaluation.run import run_evaluation
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.tiny.tokenizer import make_tokenizer
from rstar_ray.trajectory import Problem, StopReason
from tests.fakes import LIMITS, CharChat, SkilledPolicy, adding_problems, fake_crew, request


def of_length(*lengths: int) -> list[Problem]:
    return [Problem(id=f"p{number}", problem="7" * length, answer="1") for number, length in enumerate(lengths)]


class Counting(CharChat):
    asked = 0

    def prompt_ids(self, problem: Problem) -> list[int]:
        self.asked += 1
        return super().prompt_ids(problem)


def test_those_are_too_long_that_a_rollout_would_be_refused_for():
    limits = replace(LIMITS, max_context_tokens=100)
    problems = of_length(*range(60, 110))
    refused = {
        problem.id
        for problem in problems
        if RolloutState.start(request(problem, limits=limits), CharChat().prompt_ids(problem)).stop_reason
        is StopReason.REFUSED
    }
    found = too_long(problems, CharChat(), 100)
    assert found is not None and found.num_tokens.keys() == refused and 0 < len(refused) < 50
    assert found.num_tokens["p35"] == 100  # 95 characters and five around them


def test_what_is_found_is_counted_with_the_first():
    found = too_long(of_length(3, 200, 300), CharChat(), 100)
    assert str(found) == (
        "2 of 3 prompts do not fit into a context of 100 tokens, such as that of problem 'p1' with 205"
    )
    assert too_long(of_length(3, 94), CharChat(), 100) is None and too_long([], CharChat(), 100) is None


def test_only_what_has_bytes_for_it_is_tokenized():
    chat = Counting()
    assert too_long(of_length(*[100] * 500), chat, 1_000) is None and chat.asked == 1
    found = too_long([*of_length(*[100] * 500), Problem(id="long", problem="é" * 600, answer="1")], chat, 1_000)
    assert found is None and chat.asked == 3  # it has 1,200 bytes, and here a token is a character


@pytest.mark.parametrize("instruct", [False, True])
def test_a_real_tokenizers_prompts_are_counted_whole(instruct: bool):
    chat: TokenizerChat = chat_of(make_tokenizer(), instruct=instruct)
    problems = [Problem(id=str(size), problem="What is 17 + 5? é→😀 " * size, answer="1") for size in (1, 5, 20, 60)]
    counts = {problem.id: len(chat.prompt_ids(problem)) for problem in problems}
    for context in sorted(counts.values()):
        found = too_long(problems, chat, context)
        assert found is not None
        assert found.num_tokens == {name: count for name, count in counts.items() if count >= context}
    assert too_long(problems, chat, max(counts.values()) + 1) is None


@pytest.mark.usefixtures("without_fsync")
async def test_an_evaluation_says_how_many_it_could_not_ask(tmp_path: Path):
    values = {"evaluate.samples": 2, "evaluate.max_response_tokens": 400, "rollout.max_response_tokens": 400}
    config, shown = with_values(RunConfig(), {**values, "engine.max_context_tokens": 900}), list[str]()
    problems = [*adding_problems(3), Problem(id="long", problem="1" * 1_000, answer="1")]
    with RunDir.open(tmp_path, "stage1", asdict(config)) as run_dir:
        crew = fake_crew(SkilledPolicy(), shown)
        (result,) = await run_evaluation(config, {"exam": problems}, crew, run_dir, step=1)
        assert shown[-2] == (
            "stage1 exam: 1 of 4 prompts do not fit into a context of 900 tokens (--engine.max-context-tokens); they "
            "count as wrong"
        )
        assert result.num_problems == 4
        await run_evaluation(config, {"short": problems[:3]}, crew, run_dir, step=1)
    assert sum("do not fit" in line for line in shown) == 1
