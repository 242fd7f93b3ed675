"""The examples of own code, loaded as a run loads them and played; then a training step with each at scale tiny."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from actors.launch.command_line import parse
from recipes import plan
from recipes.stage1 import STAGE_1
from rstar_ray.config import RewardConfig
from rstar_ray.outcome import Outcome
from rstar_ray.reward.own_function import OwnReward, check_own_reward
from rstar_ray.run_dir.durable import read_rows
from rstar_ray.tools.host import HostCall, ToolHost
from rstar_ray.tools.loader import check_environment, load_environment, load_tools, tool_specs
from rstar_ray.trajectory import Problem, StopReason, ToolMemory, ToolResult, Transcript, TranscriptTurn

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
FOLDER = str(EXAMPLES)
PROBLEM = Problem(id="p", problem="?", answer="1234")


async def test_the_tool_answers_queries_and_only_reads(monkeypatch: pytest.MonkeyPatch):
    assert [spec.name for spec in tool_specs(["python", "own_tool:sql"], FOLDER)] == ["python", "sql"]
    monkeypatch.syspath_prepend(FOLDER)
    (tool,) = load_tools("own_tool:sql")
    host = ToolHost(tool)
    answers = [
        await host.call(HostCall(arguments={"statement": statement}))
        for statement in (
            "SELECT name FROM countries WHERE millions > 50 ORDER BY millions",
            "DROP TABLE countries",
            "SELECT count(*) FROM countries",
        )
    ]
    assert [answer.outcome for answer in answers] == [Outcome.OK, Outcome.ERROR, Outcome.OK]
    assert [answers[0].text, answers[2].text] == ["Kenya\nFrance", "3"] and "readonly" in answers[1].text


def rollout(tokens: int, *, outcome: Outcome = Outcome.OK, stop: StopReason = StopReason.ANSWERED) -> Transcript:
    turn = TranscriptTurn(completion="", num_tokens=tokens, results=(ToolResult(outcome=outcome, text=""),))
    return Transcript(
        rollout_id="r",
        group_id="g",
        stop_reason=stop,
        turns=(turn,),
        num_prompt_tokens=5,
        num_response_tokens=tokens,
        num_sampled_tokens=tokens,
        max_response_tokens=100,
        max_turns=3,
    )


def test_the_reward_is_one_that_a_run_takes():
    check_own_reward("own_reward:brief", FOLDER, option="--reward.name")


async def test_the_reward_prefers_brief_right_answers():
    judge = OwnReward(RewardConfig(processes=1), "own_reward:brief", FOLDER)
    right, wrong = r"<answer>\boxed{1234}</answer>", r"<answer>\boxed{4321}</answer>"
    try:
        rewards = [
            await judge(completion, PROBLEM, played)
            for completion, played in (
                (right, rollout(10)),
                (right, rollout(90)),
                (right, rollout(10, outcome=Outcome.ERROR)),
                (wrong, rollout(10)),
                (right, rollout(100, stop=StopReason.TRUNCATED)),
            )
        ]
    finally:
        await judge.close()
    assert rewards == pytest.approx([0.98, 0.82, 0.88, 0.0, 0.0])


async def test_the_environment_leads_to_the_number_and_survives_the_loss_of_its_host(monkeypatch: pytest.MonkeyPatch):
    check_environment("own_environment:Mastermind", FOLDER)
    monkeypatch.syspath_prepend(FOLDER)
    kind = load_environment("own_environment:Mastermind")
    memory: ToolMemory | None = None
    texts: list[str] = []
    for said in ("I do not know.", "Is it 99?", "I say 1243"):
        host = ToolHost(environment=kind)  # a new process each time: the state comes from the snapshot
        answer = await host.call(
            HostCall(arguments={"said": said}, rollout_id="r", holder="w", problem=PROBLEM, memory=memory)
        )
        memory = answer.memory
        texts.append(answer.text)
    assert texts == ["Write a number.", "Write 4 digits.", "2 in place, 2 in the number but elsewhere."]
    host = ToolHost(environment=kind)
    ended = HostCall(
        arguments={}, rollout_id="r", holder="w", problem=PROBLEM, memory=memory, ended=StopReason.MAX_TURNS
    )
    assert (await host.call(ended)).reward == 0.25
    solved = HostCall(arguments={"said": "1234"}, rollout_id="r2", holder="w", problem=PROBLEM)
    assert (await ToolHost(environment=kind).call(solved)).reward == 1.0


def test_the_lora_settings_are_understood_and_fit_on_the_gpu_they_are_for(tmp_path: Path):
    file = str(EXAMPLES / "lora_one_gpu.toml")
    (config,) = parse([STAGE_1], ["--scale", "gpu", "--config", file, "--model", "/m", "--data.train", "/t"])
    assert (config.learner.lora_rank, config.engine.gpu_memory_share, config.evaluate.every_steps) == (32, 0.31, 20)
    options = "--gpus 1 --gpu-memory-gb 80 --model Qwen3-8B --prompts 32 --lora-rank 32 --gpu-memory-share 0.31"
    planned = plan.parsed(options.split())
    assert (planned.lora_rank, planned.gpu_memory_share) == (config.learner.lora_rank, config.engine.gpu_memory_share)


STEP = """
    --scale tiny --sft.steps 2 --sft.num-conversations 40 --sft.batch-size 4 --steps 1 --prompts-per-step 2
    --algorithm.rollouts-per-prompt 4 --algorithm.keep 2 --algorithm.least-failures 1 --data.num-heldout 4
    --evaluate.samples 1 --evaluate.max-response-tokens 32 --rollout.max-response-tokens 32 --learner.ranks 1
    --own-folder examples
"""


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "--rollout.instruct --tools.use python own_tool:sql --reward.name own_reward:brief",
        "--tools.environment own_environment:Mastermind --tools.max-environment-turns 3",
        "--data.train {rows} --data.mix sum=1 game=1 --tools.environments own_environment:Mastermind",
        f"--config {EXAMPLES / 'lora_one_gpu.toml'}",
        f"--own-folder examples/command_agent --agent.command '{sys.executable} agent.py'",
    ],
    ids=["tool-and-reward", "environment", "mix", "lora", "command"],
)
def test_a_training_step_runs_at_scale_tiny(options: str, tmp_path: Path):
    game = {"environment": "own_environment:Mastermind", "family": "game"}
    rows = [{"id": f"a{i}", "problem": f"{i} + 1 = ?", "answer": str(i + 1), "family": "sum"} for i in range(4)]
    rows += [{"id": f"b{i}", "problem": "Guess a number of 2 digits", "answer": f"1{i}", **game} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = options.replace("{rows}", str(tmp_path / "rows.jsonl"))
    command = [
        sys.executable,
        "recipes/stage1.py",
        *STEP.split(),
        *shlex.split(options),
        "--run-dir",
        str(tmp_path / "run"),
    ]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout[-2_000:] + ran.stderr[-2_000:]
    (row,) = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["stage"] == "stage1"]
    assert row["rollouts"] == 8
