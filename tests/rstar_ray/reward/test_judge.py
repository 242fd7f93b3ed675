"""Who judges, what happens when judging fails, and what is refused before anything starts."""

import asyncio
import json
import pickle
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rstar_ray.config import RewardConfig
from rstar_ray.errors import ConfigError, JudgeError
from rstar_ray.outcome import Outcome
from rstar_ray.reward.judge import MAX_TRIES, JudgeFn, Judgement, Retrying, make_judge, refuse_truths
from rstar_ray.reward.own_function import check_own_reward
from rstar_ray.trajectory import Problem, StopReason, ToolCall, ToolResult, Transcript, TranscriptTurn
from tests.fakes import answer
from tests.processes import wait_for_end

Own = Callable[..., Retrying]
"""Makes the judge of a reward by its settings."""


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

    async def run_program(self, code: str, stdin: str) -> tuple[Outcome, str]:
        self.asked.append(stdin)
        if "while" in code:
            return Outcome.TIMEOUT, ""
        return Outcome.OK, f"{int(stdin) + 1}  \n"


def problem(truth: str) -> Problem:
    return Problem(id="p", problem="?", answer=truth)


def judge(tools: Tools | None = None, **settings: object) -> JudgeFn:
    tools = tools or Tools()
    return make_judge(RewardConfig(**settings), tools.compare, tools.run_program)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("name", "truth", "complaint"),
    [
        ("choice", "12", "is not a letter. Hint: write the letter"),
        ("code", "print(1)", "is not JSON"),
        ("code", "[]", "holds no case"),
        ("code", '[{"input": 1, "output": "2"}]', 'case 1 has no "input" and "output" in text'),
        ("code", '{"inputs": ["1"], "outputs": []}', "has 1 inputs and 0 outputs"),
    ],
)
def test_a_truth_that_cannot_be_judged_by_is_refused_by_its_problem(name: str, truth: str, complaint: str):
    with pytest.raises(ConfigError, match=r"--data.train set.jsonl, problem 'p'") as refused:
        refuse_truths([problem(truth)], RewardConfig(name=name), "--data.train set.jsonl")
    assert complaint in str(refused.value)


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
    if completion == "nan": return float("nan")
    if completion == "far": return -12.5
    print("noise")
    return 0.25 if completion == problem.answer else 0
async def slowly(completion, problem): return 1
def four(completion, problem, rollout, more): return 1
def one(completion): return 1
def weighted(completion, problem, weight=0.5): return weight
def wrapped(*args): return weighted(*args)
def length(completion, problem, rollout):
    first, last = rollout.turns
    assert (first.completion, first.calls[0].code, str(first.results[0].outcome)) == ("a", "1", "error")
    assert (last.completion, last.calls, last.results) == ("b", (), ())
    return problem.metadata["weight"] * (rollout.num_response_tokens - rollout.max_response_tokens)
value = 7
"""
ROLLOUT = Transcript(
    rollout_id="r",
    group_id="g",
    stop_reason=StopReason.TRUNCATED,
    turns=(
        TranscriptTurn(
            completion="a",
            num_tokens=1,
            calls=(ToolCall(code="1"),),
            results=(ToolResult(outcome=Outcome.ERROR, text="no"),),
        ),
        TranscriptTurn(completion="b", num_tokens=1),
    ),
    num_prompt_tokens=3,
    num_response_tokens=8,
    num_sampled_tokens=2,
    max_response_tokens=10,
    max_turns=4,
)


@pytest.fixture
async def own(tmp_path: Path) -> AsyncIterator[Callable[..., Retrying]]:
    """Judges by functions of modules that are written to `tmp_path`; closed at the end."""
    made: list[Retrying] = []

    def make(name: str = "math", **settings: Any) -> Retrying:
        tools, config = Tools(), RewardConfig(name=name, **settings)
        made.append(make_judge(config, tools.compare, tools.run_program, own_folder=str(tmp_path)))
        return made[-1]

    yield make
    for judge in made:
        await judge.close()


async def test_a_module_of_the_current_folder_does_not_stand_for_that_of_the_own_folder(
    tmp_path: Path, own: Own, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "mine.py").write_text("def fixed(completion, problem):\n    return 1.0\n")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.py").write_text("def fixed(completion, problem):\n    return 0.0\n")
    monkeypatch.chdir(tmp_path / "here")
    assert await own("mine:fixed")("x", problem("7")) == Judgement(1.0)


@pytest.mark.long
async def test_an_own_function_is_asked_in_a_separate_process_and_killed_with_all_it_started(tmp_path: Path, own: Own):
    (tmp_path / "mine.py").write_text(OWN)
    started = tmp_path / "pid"
    one = Problem(id="p", problem=str(started), answer="yes")
    ask = own("mine:reward", processes=1)
    assert await ask("yes", one) == Judgement(0.25)
    assert await ask("no", one) == Judgement(0.0)
    assert await ask("far", one) == Judgement(-12.5)
    for said, complaint in [
        ("raise", "--reward.name mine:reward: ValueError: no such thing really"),
        ("die", "ended without an answer"),
        ("none", "gave None, not a finite number"),
        ("text", "gave 'much', not a finite number"),
        ("nan", "gave nan, not a finite number"),
    ]:
        with pytest.raises(JudgeError, match=complaint):
            await ask(said, one)
    hurried = own("mine:reward", deadline_s=2.0)
    with pytest.raises(JudgeError, match=r"no answer within 2 s"):
        await hurried("hang", one)
    await asyncio.to_thread(wait_for_end, int(started.read_text()))
    coroutine = own("mine:slowly")
    assert await coroutine("yes", one) == Judgement(1.0)


async def test_a_program_that_a_function_starts_reads_nothing_of_ours(tmp_path: Path, own: Own):
    code = """
import subprocess, sys
def words(completion, problem):
    read = subprocess.run(["cat"], capture_output=True, timeout=60).stdout + sys.stdin.buffer.read()
    return float(len(read))
async def words_later(completion, problem):
    return words(completion, problem)
"""
    (tmp_path / "mine.py").write_text(code)
    for name in ("mine:words", "mine:words_later"):
        judge = own(name, processes=1)
        assert await asyncio.gather(*(judge(said, problem("1")) for said in "abc")) == [Judgement(0.0)] * 3


async def test_a_function_may_return_the_components_of_its_reward(tmp_path: Path, own: Own):
    code = """
def parts(completion, problem):
    return {"reward": 1, "format": 0.5, "length": -float(completion)}
def no_reward(completion, problem):
    return {"format": 0.5}
"""
    (tmp_path / "mine.py").write_text(code)
    judge = own("mine:parts", processes=1)
    judgement = await judge("2", problem("1"))
    assert judgement == Judgement(1.0, components={"format": 0.5, "length": -2.0})
    assert pickle.loads(pickle.dumps(judgement)) == judgement  # it goes to other processes
    with pytest.raises(JudgeError, match="gave nan as component 'length', not a finite number"):
        await judge("nan", problem("1"))
    with pytest.raises(JudgeError, match="gave None, not a finite number"):
        await own("mine:no_reward", processes=1)("2", problem("1"))


async def test_the_function_in_the_documentation_works(tmp_path: Path, own: Own):
    page = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        name = re.match(r"# (\w+\.py)", code)
        assert name is not None, "an example says which file it is"
        (tmp_path / name[1]).write_text(code)
    close = own("mine:close")
    assert [(await close(answer(said), problem("21"))).reward for said in ("21", "29", "19")] == [1.0, 0.5, 0.0]

    overlong = own("overlong:dapo")
    assert await overlong.reads_rollouts(problem("21"))

    async def reward(said: str, tokens: int) -> float:
        stop = StopReason.TRUNCATED if tokens == 20_480 else StopReason.ANSWERED
        rollout = replace(ROLLOUT, stop_reason=stop, num_response_tokens=tokens, max_response_tokens=20_480)
        return (await overlong.judge_rollout(said, problem("21"), rollout)).reward

    # DAPO (arXiv:2503.14476, Eq. 13): L_max 20,480 and L_cache 4,096
    lengths = (16_384, 18_432, 20_480)
    assert [await reward(answer("21"), tokens) for tokens in lengths] == [1.0, 0.5, -2.0]
    assert [await reward(answer("20"), tokens) for tokens in lengths] == [-1.0, -1.5, -2.0]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("absent:reward", "No module named 'absent'. Hint: give module:function, and its folder as --own-folder"),
        ("mine:absent", "no attribute 'absent'. Hint: name a function of "),
        ("mine:value", "value is not a function. Hint: name a function of "),
        ("mine:four", "missing a required argument: 'more'). Hint: write it as (completion, problem) or "),
        ("mine:one", "too many positional arguments). Hint: write it as (completion, problem) or "),
        ("needs:reward", "No module named 'not_installed'. Hint: install it, or fix needs"),
        ("raises:reward", "importing raises: RuntimeError: no key. Hint: fix the module raises"),
    ],
)
def test_an_own_function_that_cannot_be_asked_is_refused_in_one_line(name: str, complaint: str, tmp_path: Path):
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "needs.py").write_text("import not_installed")
    (tmp_path / "raises.py").write_text("raise RuntimeError('no key')")
    with pytest.raises(ConfigError, match=f"^--reward.name {name}: ") as refused:
        check_own_reward(name, str(tmp_path))
    assert complaint in str(refused.value) and "\n" not in str(refused.value)


async def test_a_function_with_a_third_argument_gets_the_whole_rollout_and_the_metadata_of_its_problem(
    tmp_path: Path, own: Own
):
    (tmp_path / "mine.py").write_text(OWN)
    judge = own("mine:length")
    weighed = replace(problem("7"), metadata={"weight": 0.5})
    assert await judge.reads_rollouts(weighed)
    assert await judge.judge_rollout("b", weighed, ROLLOUT) == Judgement(-1.0)


ASYNC = """
import asyncio, os, time
running = most = 0
async def waits(completion, problem):
    global running, most
    if completion == "block": time.sleep(60)
    if completion == "late": await asyncio.sleep(60)
    if completion == "die": os._exit(3)
    if completion == "most": return most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.25)
    running -= 1
    return float(completion)
"""


async def test_an_async_function_judges_many_rollouts_at_once_and_each_gets_its_own_reward(tmp_path: Path, own: Own):
    (tmp_path / "mine.py").write_text(ASYNC)
    judge = own("mine:waits", processes=1, concurrency=40)
    found = await asyncio.gather(*(judge(str(number), problem("")) for number in range(160)))
    assert [one.reward for one in found] == [float(number) for number in range(160)]
    assert (await judge("most", problem(""))).reward == 40


@pytest.mark.long
@pytest.mark.parametrize(("said", "complaint"), [("late", "within 2 s"), ("block", "within 2 s"), ("die", "ended")])
async def test_one_that_hangs_or_ends_the_process_costs_no_other_its_reward(
    said: str, complaint: str, tmp_path: Path, own: Own, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rstar_ray.reward.own_function.GRACE_S", 0.5)
    (tmp_path / "mine.py").write_text(ASYNC)
    judge = own("mine:waits", processes=1, deadline_s=2.0)
    late = asyncio.ensure_future(judge(said, problem("")))
    found = await asyncio.gather(*(judge(str(number), problem("")) for number in range(4)))
    assert [(one.reward, one.retries) for one in found] == [(0.0, 0), (1.0, 0), (2.0, 0), (3.0, 0)]
    with pytest.raises(JudgeError, match=complaint):
        await late


async def test_a_row_names_a_function_that_the_settings_name_too(tmp_path: Path, own: Own):
    (tmp_path / "mine.py").write_text(OWN)
    config = RewardConfig(functions=("mine:weighted", "mine:slowly", "mine:wrapped"))
    judge = own(functions=config.functions)
    names = ("", "mine:weighted", "mine:wrapped", "mine:slowly", "exact")
    rows = [replace(problem("7"), reward=reward) for reward in names]
    assert [(await judge(answer("7"), row)).reward for row in rows] == [1.0, 0.5, 0.5, 1.0, 1.0]
    refuse_truths(rows, config, "--data.train set.jsonl")
    with pytest.raises(
        ConfigError, match=r"set.jsonl, problem 'p': its reward 'mine:reward' is not among --reward.fun"
    ):
        refuse_truths([replace(problem("7"), reward="mine:reward")], config, "--data.train set.jsonl")


async def test_a_problem_that_names_its_rule_is_judged_by_it_whatever_the_others_are():
    ask = judge()
    letter = Problem(id="g", problem="?", answer="C", reward="choice")
    assert (await ask(answer("C) 12"), letter)).reward == 1.0 and (await ask(answer("B"), letter)).reward == 0.0
    checks = [{"name": "punctuation:no_comma", "kwargs": {}}, {"name": "startend:quotation", "kwargs": {}}]
    instructions = Problem(id="i", problem="?", answer=json.dumps(checks), reward="instructions")
    assert (await ask('<think>a, b</think>"No."', instructions)).reward == 1.0
    assert (await ask("No.", instructions)).reward == 0.0
    assert (await judge(partial=True)("No.", instructions)).reward == 0.5
    loosely = await ask('Sure, gladly:\n"No."', instructions)
    assert (loosely.reward, loosely.loose) == (0.0, 1.0) and (await ask("B", letter)).loose is None
    calls = Problem(id="c", problem="?", answer='[{"name": "f", "arguments": {"a": [1]}}]', reward="calls")
    assert (await ask("[f(a=1)]", calls)).reward == 1.0 and (await ask("[f(a=2)]", calls)).reward == 0.0
