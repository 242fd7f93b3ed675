"""Who judges, what happens when judging fails, and what is refused before anything starts."""

import asyncio
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rstar_ray.config import RewardConfig
from rstar_ray.errors import ConfigError, JudgeError
from rstar_ray.outcome import Outcome
from rstar_ray.reward.judge import MAX_TRIES, JudgeFn, Judgement, make_judge, refuse_truths
from rstar_ray.reward.own import OwnReward, check_own_reward
from rstar_ray.reward.programs import ProgramRun
from rstar_ray.trajectory import Problem
from tests.fakes import answer


class Tools:
    """Compares by text; fails the first `failing` times; its programs add one, or loop where they say so."""

    def __init__(self, failing: int = 0) -> None:
        self.failing = failing
        self.asked: list[object] = []

    async def compare(self, pairs: Sequence[tuple[str, str]]) -> Sequence[bool]:
        self.asked.append(pairs)
        if len(self.asked) <= self.failing:
            raise JudgeError("it hung")
        return [pair == ("\\sqrt{12}", "2\\sqrt{3}") for pair in pairs]

    async def run_program(self, code: str, stdin: str) -> ProgramRun:
        self.asked.append(stdin)
        if "while" in code:
            return ProgramRun(outcome=Outcome.TIMEOUT, stdout="")
        return ProgramRun(outcome=Outcome.OK, stdout=f"{int(stdin) + 1}  \n")


def problem(truth: str) -> Problem:
    return Problem(id="p", problem="?", answer=truth)


def judge(tools: Tools | None = None, **settings: object) -> JudgeFn:
    return make_judge(RewardConfig(**settings), tools or Tools())  # type: ignore[arg-type]


async def test_integers_need_no_checker_and_the_rest_does():
    tools = Tools()
    ask = judge(tools)
    assert await ask(answer("204"), problem("204")) == Judgement(1.0)
    assert await ask(answer("205"), problem("204")) == Judgement(0.0)
    assert await ask("204", problem("204")) == Judgement(0.0)
    assert not tools.asked
    assert await ask(answer("\\sqrt{12}"), problem("2\\sqrt{3}")) == Judgement(1.0)
    assert len(tools.asked) == 1


async def test_a_comparison_that_hangs_is_tried_again_and_counted_and_never_a_silent_zero():
    assert await judge(Tools(failing=2))(answer("\\sqrt{12}"), problem("2\\sqrt{3}")) == Judgement(1.0, retries=2)
    tools = Tools(failing=10**9)
    with pytest.raises(JudgeError, match="it hung"):
        await judge(tools)(answer("\\sqrt{12}"), problem("2\\sqrt{3}"))
    assert len(tools.asked) == MAX_TRIES


async def test_exact_and_choice():
    assert (await judge(name="exact")(answer("Rio  de Janeiro"), problem("Rio de Janeiro"))).reward == 1.0
    assert (await judge(name="exact")(answer("rio"), problem("Rio"))).reward == 0.0
    assert (await judge(name="exact")(answer("rio"), problem("Rio"))).answer == "rio"
    choice = judge(name="choice", place="anywhere")
    assert (await choice("The answer is (C).", problem("C"))).reward == 1.0
    assert (await choice("The answer is (C).", problem("B"))).reward == 0.0
    assert (await choice("The answer is 12.", problem("B"))).reward == 0.0


CASES = '[{"input": "1", "output": "2"}, {"input": "2", "output": "3"}, {"input": "3", "output": "5"}]'


async def test_a_program_passes_all_cases_or_by_a_setting_its_share_of_them():
    said = "```python\nprint(int(input()) + 1)\n```"
    assert (await judge(name="code")(said, problem(CASES))).reward == 0.0
    assert (await judge(name="code", partial=True)(said, problem(CASES))).reward == pytest.approx(2 / 3)
    two = '{"inputs": ["1", "2"], "outputs": ["2\\n", "3"]}'
    assert (await judge(name="code")(said, problem(two))).reward == 1.0
    assert (await judge(name="code", partial=True)("```\nwhile True: pass\n```", problem(two))).reward == 0.0
    assert (await judge(name="code")("no program", problem(two))).reward == 0.0


async def test_what_follows_a_failed_batch_of_cases_does_not_run():
    many = json.dumps({"inputs": ["1"] * 40, "outputs": ["9"] * 40})
    tools = Tools()
    await judge(tools, name="code")("```\nprint(2)\n```", problem(many))
    assert len(tools.asked) == 8


@pytest.mark.parametrize(
    ("name", "truth", "complaint"),
    [
        ("choice", "12", "is no letter; write the letter"),
        ("code", "print(1)", "is no JSON"),
        ("code", "[]", "holds no case"),
        ("code", '[{"input": 1, "output": "2"}]', 'case 1 has no "input" and "output" in text'),
        ("code", '{"inputs": ["1"], "outputs": []}', "has 1 inputs and 0 outputs"),
    ],
)
def test_a_truth_that_cannot_be_judged_by_is_refused_by_its_problem(name: str, truth: str, complaint: str):
    with pytest.raises(ConfigError, match=r"--data.train set.jsonl, problem 'p'") as refused:
        refuse_truths([problem(truth)], RewardConfig(name=name), "--data.train set.jsonl")
    assert complaint in str(refused.value)


def test_a_name_that_is_no_reward_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"--reward.name: 'maths' is no reward; give math, exact, choice, code, instructions, calls, or",
    ):
        RewardConfig(name="maths")


OWN = """
import os, sys, time
print("hello from the module")
def reward(completion, problem):
    if completion == "hang":
        os.system("sleep 300 & echo $! > " + problem.problem)
        while True: pass
    if completion == "raise": raise ValueError("no such thing\\nreally")
    if completion == "die": os._exit(3)
    if completion == "text": return "much"
    if completion == "none": return None
    print("noise")
    return 0.25 if completion == problem.answer else 0
async def slowly(completion, problem): return 1
def three(completion, problem, more): return 1
value = 7
"""


@pytest.mark.long
async def test_an_own_function_is_asked_in_a_process_of_its_own_and_killed_with_all_it_started(tmp_path: Path):
    (tmp_path / "mine.py").write_text(OWN)
    started = tmp_path / "pid"
    one = Problem(id="p", problem=str(started), answer="yes")
    ask = make_judge(RewardConfig(name="mine:reward", processes=1), Tools(), own_folder=str(tmp_path))
    assert await ask("yes", one) == Judgement(0.25)
    assert await ask("no", one) == Judgement(0.0)
    for said, complaint in [
        ("raise", "--reward.name mine:reward: ValueError: really"),
        ("die", "ended without an answer"),
        ("none", "gave None, no number from 0 to 1"),
        ("text", "ValueError"),
    ]:
        with pytest.raises(JudgeError, match=complaint):
            await ask(said, one)
    hurried = make_judge(RewardConfig(name="mine:reward", deadline_s=0.3), Tools(), own_folder=str(tmp_path))
    with pytest.raises(JudgeError, match=r"no answer within 0.3 s"):
        await hurried("hang", one)
    await _gone(int(started.read_text()))
    coroutine = make_judge(RewardConfig(name="mine:slowly"), Tools(), own_folder=str(tmp_path))
    assert await coroutine("yes", one) == Judgement(1.0)


async def test_the_function_in_the_documentation_works(tmp_path: Path):
    page = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    close = OwnReward(RewardConfig(name="mine:close"), str(tmp_path))
    rewards = [await close(answer(said), problem("21")) for said in ("21", "29", "19")]
    assert rewards == [1.0, 0.5, 0.0]


async def _gone(pid: int) -> None:
    deadline_s = time.monotonic() + 5
    while time.monotonic() < deadline_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        await asyncio.sleep(0.01)
    os.kill(pid, 9)
    raise AssertionError("what the function started lives on")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("absent:reward", "No module named 'absent'"),
        ("mine:absent", "no attribute 'absent'"),
        ("mine:value", "value is no function"),
        ("mine:three", "missing a required argument: 'more'"),
    ],
)
def test_an_own_function_that_cannot_be_asked_is_refused_in_one_line(name: str, complaint: str, tmp_path: Path):
    (tmp_path / "mine.py").write_text(OWN)
    with pytest.raises(ConfigError, match=r"^--reward.name mine|absent") as refused:
        check_own_reward(name, str(tmp_path))
    assert complaint in str(refused.value) and "--own-folder" in str(refused.value)
    assert "\n" not in str(refused.value)


async def test_a_problem_that_names_its_rule_is_judged_by_it_whatever_the_others_are():
    ask = judge()
    letter = Problem(id="g", problem="?", answer="C", reward="choice")
    assert (await ask(answer("C) 12"), letter)).reward == 1.0 and (await ask(answer("B"), letter)).reward == 0.0
    told = [{"name": "punctuation:no_comma", "asked": {}}, {"name": "startend:quotation", "asked": {}}]
    instructions = Problem(id="i", problem="?", answer=json.dumps(told), reward="instructions")
    assert (await ask('<think>a, b</think>"No."', instructions)).reward == 1.0
    assert (await ask("No.", instructions)).reward == 0.0
    assert (await judge(partial=True)("No.", instructions)).reward == 0.5
    loosely = await ask('Sure, gladly:\n"No."', instructions)
    assert (loosely.reward, loosely.loose) == (0.0, 1.0) and (await ask("B", letter)).loose is None
    calls = Problem(id="c", problem="?", answer='[{"name": "f", "arguments": {"a": [1]}}]', reward="calls")
    assert (await ask("[f(a=1)]", calls)).reward == 1.0 and (await ask("[f(a=2)]", calls)).reward == 0.0


@pytest.mark.parametrize(("rule", "message"), [("instructions", "holds no list"), ("calls", "names no values for a")])
def test_a_truth_is_refused_by_the_rule_that_its_problem_names(rule: str, message: str):
    wrong = {"instructions": "[]", "calls": '[{"name": "f", "arguments": {"a": 1}}]'}[rule]
    one = Problem(id="p", problem="?", answer=wrong, reward=rule)
    with pytest.raises(ConfigError, match=f"problem 'p': answer .*{message}"):
        refuse_truths([one], RewardConfig(), "--evaluate.files set.jsonl")
