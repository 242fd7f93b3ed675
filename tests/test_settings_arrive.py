"""Every setting arrives: in the arguments of vLLM, DeepSpeed, Ray or the pool, or in a result that it changes.

`WAYS` says for each leaf of `RunConfig` where another value of it is seen; a leaf that nobody has put there fails.
"""

import ast
import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from actors.generation.settings import EngineSettings
from actors.learner.deepspeed_start import deepspeed_config, optimizer_arguments, parameter_groups
from actors.learner.settings import LearnerSettings, learner_settings
from actors.placement import fitted, plan_layout
from actors.tool_host import planned_hosts
from recipes.data import heldout_problems, problem_sets, sft_examples, training_problems
from recipes.session import run_path, tools_of
from rstar_ray.algorithm.batch_plan import BatchLimits, batch_limits, plan_ranks
from rstar_ray.algorithm.loss import SampledTokens, policy_loss
from rstar_ray.algorithm.loss_settings import LossSettings, loss_settings
from rstar_ray.algorithm.lr_schedule import sft_schedule
from rstar_ray.algorithm.normalisation import token_weights
from rstar_ray.algorithm.update import SftExample, UpdateResult
from rstar_ray.chat.model_folder import load_chat
from rstar_ray.config import RunConfig, conditions, idle, leaves, with_values
from rstar_ray.data.sft_plan import ChatSource
from rstar_ray.errors import ConfigError, RStarError
from rstar_ray.reward.judge import make_judge
from rstar_ray.reward.own import OwnReward
from rstar_ray.rollouts import DroppedRollout, FinishedRollout
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.stages import run_rl, run_sft
from rstar_ray.train_loop import TrainingRow, TrainingSystem, train_step
from rstar_ray.trajectory import Problem, RolloutRequest
from sandbox.limits import Limits, program_limits
from sandbox.pool import SandboxPool
from sandbox.pool_config import PoolConfig, pool_config
from scheduler.balancer import Balancer
from scheduler.cost import EngineCost
from scheduler.load import RolloutLoad
from tests.arrivals import (
    actors,
    anchored,
    buckets,
    deterministic,
    engine_waits,
    gang_calls,
    loaded,
    refused_updates,
    seconds_until_given_up,
    started_rank,
    stop_grace,
    vllm,
    watched,
)
from tests.fakes import InProcess, LocalRollouts, SkilledPolicy, SkillLearner, adding_problems, fake_crew
from tests.rstar_ray.chat.families import FAMILIES, generation_of, tokenizer_of

REPOSITORY = Path(__file__).parent.parent
SMALL: dict[str, Any] = {
    "scale": "tiny",
    "steps": 2,
    "prompts_per_step": 3,
    "algorithm.rollouts_per_prompt": 8,
    "algorithm.keep": 4,
    "rollout.max_response_tokens": 400,
    "evaluate.max_response_tokens": 400,
    "evaluate.samples": 1,
    "evaluate.max_turns": 4,
    "engine.max_context_tokens": 2_000,
    "engine.kv_tokens": 4_096,
    "learner.ranks": 2,
    "data.num_train": 20,
    "data.num_heldout": 6,
}
"""A run of milliseconds."""
Seam = Callable[[RunConfig, Path], Any]


# ---------------------------------------------------------------- where settings are seen


def deepspeed(config: RunConfig, folder: Path) -> Any:
    """What `deepspeed.initialize` and its optimizer are given."""
    settings = learner_settings(config, folder)
    decays = [group["weight_decay"] for group in parameter_groups(nn.Linear(2, 2), settings.weight_decay)]
    return deepspeed_config(settings), optimizer_arguments(settings), decays


def ray_resources(config: RunConfig, _: Path) -> Any:
    """What Ray reserves, and what of it where nothing fits twice."""
    return plan_layout(config), plan_layout(fitted(config, [{"CPU": 3.0, "GPU": 1.0}]))


def pool(config: RunConfig, _: Path) -> Any:
    """The pool that an executor holds, and the limits of a program."""
    return SandboxPool(pool_config(config.sandbox)).config, program_limits(config.sandbox)


def micro_batches(config: RunConfig, _: Path) -> Any:
    """Which rows an update takes together."""
    limits = replace(batch_limits(config.learner), attention_tokens=8_000)
    return plan_ranks([17 * n % 700 + 40 for n in range(40)], 2, limits)


def loss(config: RunConfig, _: Path) -> Any:
    """The loss of five tokens in three rows and two groups."""
    settings = loss_settings(config)
    weights = token_weights(
        [2, 1, 2], ["a", "a", "b"], settings.normalisation, constant_tokens=settings.constant_tokens
    )
    old = torch.tensor([-1.0, -2.0, -1.5, -0.5, -3.0])
    tokens = SampledTokens(
        logprobs_N=old + torch.tensor([0.6, -0.6, 2.0, 0.26, -0.6]),
        entropy_N=torch.linspace(0.1, 0.9, 5),
        old_logprobs_N=old,
        rollout_logprobs_N=old - torch.tensor([1.2, -1.2, 0.3, 0.0, 0.1]),
        advantages_N=torch.tensor([1.0, 1.0, -1.0, 2.0, -2.0]),
        weights_N=torch.tensor(weights)[[0, 0, 1, 2, 2]],
        rows_N=torch.tensor([0, 0, 1, 2, 2]),
        ref_logprobs_N=old - 0.4,
    )
    return float(policy_loss(tokens, settings)[0])


def balancer(config: RunConfig, _: Path) -> Any:
    """The rule that places rollouts, and how careful it is."""
    settings = config.balancer
    made = Balancer(settings.rule, settings)
    cost = EngineCost(fixed_s=0.01, per_sequence_s=0.0, per_context_s=1e-7, per_prefill_s=5e-5)
    made.add_replica("r0", 64_000, max_running=64, block_tokens=16, cost=cost if settings.measured else None)
    load = RolloutLoad(rollout_id="a", group_id="a", prompt_tokens=100, max_response_tokens=4_000, max_turns=4)
    made.submit([load])
    made.decide()
    return made.rule, made.snapshot().risk


def problems(config: RunConfig, folder: Path) -> Any:
    """What is trained and evaluated on, or why nothing is."""
    path = folder / "set.jsonl"
    path.write_text('{"id": "a", "problem": "1 / 2?", "answer": "0.5"}\n')
    named = [name for name in ("data.train", "data.heldout") if leaves(config)[name] == "FILE"]
    config = with_values(config, dict.fromkeys(named, str(path)))
    try:
        return training_problems(config), heldout_problems(config), problem_sets(config)
    except (ConfigError, RStarError) as refused:
        return str(refused)


def taught(config: RunConfig, _: Path) -> Any:
    """What the tiny world's teacher leaves to train on."""
    config = with_values(config, {"sft.num_conversations": min(60, config.sft.num_conversations)})
    examples, _ = asyncio.run(sft_examples(config, None, ChatSource(None).load(), InProcess()))
    return sorted((example.name, example.token_ids.tolist()) for example in examples)


def sft_rates(config: RunConfig, _: Path) -> Any:
    return [sft_schedule(config.sft).at(step) for step in range(config.sft.steps)]


def place(config: RunConfig, _: Path) -> Any:
    return run_path(config)


def paths(config: RunConfig, _: Path) -> Any:
    """Which of the named files are looked for before anything starts."""
    try:
        return config.check_paths()
    except (ConfigError, RStarError) as refused:
        return str(refused)


@dataclass
class SeenRollouts(LocalRollouts):
    """Writes down what is asked."""

    def __post_init__(self) -> None:
        self.asked: list[RolloutRequest] = []

    async def run(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[FinishedRollout | DroppedRollout]:
        self.asked += requests
        async for done in super().run(requests):
            yield done


@dataclass
class SeenLearner(SkillLearner):
    """Writes down what it is told."""

    def __post_init__(self) -> None:
        self.told: list[Any] = []

    async def train_rl(self, rows: Sequence[TrainingRow], lr: float) -> UpdateResult:
        self.told.append((lr, [(row.rollout_id, row.advantage) for row in rows]))
        return await super().train_rl(rows, lr)

    async def train_sft(self, examples: Sequence[SftExample], lr: float) -> UpdateResult:
        self.told.append((lr, len(examples)))
        return await super().train_sft(examples, lr)

    async def reset_optimizer(self) -> None:
        self.told.append("reset")


def run(config: RunConfig, folder: Path) -> Any:
    """A whole stage over fakes: what was asked, what the learner was told, what was written, why it ended."""
    policy = SkilledPolicy(skill=0.6)
    rollouts, learner = SeenRollouts(policy), SeenLearner(policy)
    crew = replace(fake_crew(policy), rollouts=rollouts, learner=learner)
    ended = ""
    with RunDir.open(folder / "run", config.stage, asdict(config)) as run_dir:
        try:
            asyncio.run(run_rl(config, adding_problems(12), crew, run_dir, heldout=adding_problems(4, seed=1)))
        except (ConfigError, RStarError) as refused:
            ended = str(refused)
    files = (
        path for path in (folder / "run").rglob("*") if path.is_file() and path.parent.parent.name != "tensorboard"
    )
    written = {re.sub(r"-[0-9a-f]{12}(?=\.jsonl$)", "", str(path.relative_to(folder))) for path in files}  # no digests
    return rollouts.asked, learner.told, written, ended


def sft(config: RunConfig, folder: Path) -> Any:
    """How many conversations each supervised step takes."""
    learner = SeenLearner(SkilledPolicy())
    examples = [SftExample(np.arange(9, dtype=np.int32), np.ones(9, dtype=bool)) for _ in range(20)]
    config = replace(config, stage="sft")
    with RunDir.open(folder / "run", "sft", asdict(config)) as run_dir:
        asyncio.run(run_sft(config, examples, [], replace(fake_crew(learner.policy), learner=learner), run_dir))
    return learner.told


def own(config: RunConfig, folder: Path) -> Any:
    """Processes for a function of one's own."""
    return OwnReward(config.reward, str(folder))._free.qsize()


def called(config: RunConfig, folder: Path) -> Any:
    """Which tools there are, and in which actors."""
    (folder / "mine.py").write_text(
        "from rstar_ray.tools.tool import Tool\n"
        "async def f() -> str: return ''\n"
        "mine = Tool(name='mine', description='?', parameters={'type': 'object'}, function=f)\n"
    )
    specs = tools_of(replace(config, own_folder=str(folder)))
    return specs, planned_hosts(config.tools, specs)


def judged(config: RunConfig, _: Path) -> Any:
    """What a completion is worth whose answer stands in a box alone."""
    one = Problem(id="p", problem="?", answer="a")
    return asyncio.run(make_judge(config.reward, None)("so it is \\boxed{ A }", one))  # type: ignore[arg-type]


def prompt(config: RunConfig, folder: Path) -> Any:
    """What a model is asked."""
    tokenizer_of(FAMILIES["qwen3-base"]).save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 400}))
    (folder / "generation_config.json").write_text(json.dumps(generation_of(FAMILIES["qwen3-base"])))
    chat = load_chat(folder, config.chat, instruct=config.rollout.instruct)
    return chat.decode(chat.prompt_ids(Problem(id="p", problem="q", answer="")))


def unfinished(config: RunConfig, _: Path) -> float:
    """How long a step waits for rollouts of which none ends [s]."""

    class Endless(LocalRollouts):
        async def run(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[FinishedRollout | DroppedRollout]:
            await asyncio.Event().wait()
            yield DroppedRollout(requests[0].rollout_id, "never")

    crew = fake_crew(SkilledPolicy())
    system = TrainingSystem(rollouts=Endless(SkilledPolicy()), learner=crew.learner, publish=crew.publish)
    step = train_step(adding_problems(1), system, config, step=1, policy_version=0)
    return seconds_until_given_up(lambda: step)


# ---------------------------------------------------------------- which setting is seen where


@dataclass(frozen=True)
class Way:
    """Another value, where it is seen, and what else has to be set for it to matter."""

    value: Any
    seam: Seam
    beside: dict[str, Any] | None = None


@dataclass(frozen=True)
class Elsewhere:
    """A test elsewhere that gives the setting other values and sees what they do."""

    name: str  # path::function
    words: str  # in its file


GPUS = {"engine.gpus_per_replica": 0.5, "engine.replicas": 2, "learner.gpus_per_rank": 0.5}
KL = {"algorithm.kl_coefficient": 0.1, "algorithm.reference_model": "reference"}
CHAT = "tests/rstar_ray/chat/test_chat_folder.py"
TEMPLATES = "tests/rstar_ray/chat/test_families.py"
JUDGE = "tests/rstar_ray/reward/test_judge.py"
WAYS: dict[str, Way | Elsewhere] = {
    "stage": Way("stage2", run),
    "scale": Way("gpu", problems),
    "run_dir": Way("elsewhere", place),
    "seed": Way(7, run),
    "deterministic": Way(True, deterministic, GPUS),
    "model": Way("/no/such/folder", paths),
    "steps": Way(3, run),
    "until": Elsewhere("tests/rstar_ray/test_stages.py::test_a_stage_ends_when_it_has_taught_what_it_can", "until="),
    "max_empty_steps": Elsewhere(
        "tests/rstar_ray/test_stages.py::test_a_run_whose_batches_stay_empty_ends_with_the_reason_and_the_mend",
        "max_empty_steps",
    ),
    "prompts_per_step": Way(4, run),
    "drop_solved": Way(True, run),
    "when_short": Way("smaller", ray_resources, {"engine.replicas": 4}),
    "own_folder": Elsewhere(f"{JUDGE}::test_an_own_function_that_cannot_be_asked_is_refused_in_one_line", "own_folder"),
    "reset_optimizer": Way(True, run),
    "rollout.max_response_tokens": Way(300, run),
    "rollout.max_turns": Way(3, run),
    "rollout.temperature": Way(0.7, run),
    "rollout.top_p": Way(0.9, run),
    "rollout.instruct": Way(False, prompt),
    "rollout.deadline_s": Way(9.0, unfinished),
    "chat.template": Elsewhere(f"{CHAT}::test_what_is_exported_names_every_stop_token", "template="),
    "chat.system": Way("Be kind.", prompt),
    "chat.before": Way("Think well.", prompt),
    "chat.thinking": Elsewhere(f"{TEMPLATES}::test_thinking_is_switched_where_the_template_has_a_switch", "thinking="),
    "chat.parser": Elsewhere(f"{TEMPLATES}::test_what_does_not_fit_is_refused_with_the_mend", "parser="),
    "chat.stop": Elsewhere(f"{TEMPLATES}::test_a_template_without_an_end_of_its_own_takes", "stop="),
    "chat.tool_name": Way("other", prompt),
    "algorithm.rollouts_per_prompt": Way(10, run),
    "algorithm.keep": Way(5, run),
    "algorithm.resample": Way("none", run),
    "algorithm.least_failures": Way(3, run),
    "algorithm.roc_error_ratio": Way(False, run),
    "algorithm.roc_answer_format": Elsewhere(
        "tests/rstar_ray/test_resample.py::test_each_part_of_the_penalty_can_be_switched_off", "roc_answer_format"
    ),
    "algorithm.min_zero_reward_trace_num": Way(3, run, {"algorithm.resample": "release"}),
    "algorithm.min_non_zero_reward_trace_num": Way(
        4, run, {"algorithm.resample": "release", "algorithm.min_zero_reward_trace_num": 0}
    ),
    "algorithm.reject_equal_reward": Way(False, run, {"algorithm.keep": 2}),
    "algorithm.advantage_std": Way("none", run),
    "algorithm.clip_low": Way(0.5, loss),
    "algorithm.clip_high": Way(0.5, loss),
    "algorithm.dual_clip": Way(1.5, loss),
    "algorithm.normalisation": Way("group", loss),
    "algorithm.entropy_coefficient": Way(0.1, loss),
    "algorithm.kl_coefficient": Way(0.2, loss, KL),
    "algorithm.reference_model": Way("another", started_rank, KL),
    "algorithm.correction": Way("token", loss),
    "algorithm.correction_cap": Way(1.1, loss, {"algorithm.correction": "token"}),
    "algorithm.correction_low": Way(0.1, loss, {"algorithm.correction": "icepop"}),
    "optimizer.learning_rate": Way(1e-3, run),
    "optimizer.warmup_steps": Way(2, run, {"reset_optimizer": True}),
    "optimizer.beta1": Way(0.8, deepspeed),
    "optimizer.beta2": Way(0.9, deepspeed),
    "optimizer.epsilon": Way(1e-6, deepspeed),
    "optimizer.weight_decay": Way(0.1, deepspeed),
    "optimizer.grad_clip": Way(0.5, deepspeed),
    "optimizer.updates_per_step": Way(2, gang_calls),
    "optimizer.max_bad_updates": Way(1, refused_updates),
    "optimizer.save_bad_updates": Way("bad", refused_updates),
    "engine.replicas": Way(3, ray_resources),
    "engine.gpus_per_replica": Way(0.4, ray_resources, GPUS),
    "engine.cpus_per_replica": Way(2.0, ray_resources),
    "engine.tensor_parallel": Way(2, vllm),
    "engine.dtype": Way("float32", vllm),
    "engine.max_context_tokens": Way(3_000, vllm),
    "engine.kv_tokens": Way(8_192, vllm),
    "engine.max_running": Way(7, vllm),
    "engine.gpu_memory_share": Way(0.3, vllm),
    "engine.compile": Way(False, vllm, GPUS),
    "engine.block_size": Way(64, vllm),
    "engine.num_threads": Way(2, vllm),
    "engine.vllm_metrics": Way(True, vllm),
    "engine.start_deadline_s": Way(9.0, engine_waits),
    "engine.completion_deadline_s": Way(9.0, engine_waits),
    "engine.answer_deadline_s": Way(9.0, engine_waits),
    "balancer.rule": Way("static", balancer),
    "balancer.risk": Way(0.2, balancer),
    "balancer.preemption_steps": Way(4.0, balancer),
    "balancer.idle_share": Way(0.9, balancer),
    "learner.ranks": Way(1, ray_resources),
    "learner.gpus_per_rank": Way(0.4, ray_resources, GPUS),
    "learner.cpus_per_rank": Way(2.0, ray_resources),
    "learner.own_gpus": Way(True, ray_resources),
    "learner.zero": Way(1, deepspeed),
    "learner.offload": Way(True, deepspeed),
    "learner.lora_rank": Way(4, started_rank),
    "learner.lora_alpha": Way(8, started_rank, {"learner.lora_rank": 4}),
    "learner.attention_kernel": Way("eager", started_rank),
    "learner.attention": Way("sdpa", loaded),
    "learner.dtype": Way("float32", deepspeed),
    "learner.micro_batch_tokens": Way(900, micro_batches),
    "learner.max_padding": Way(0.5, micro_batches, {"learner.attention": "sdpa"}),
    "learner.pass_tokens": Way(0, micro_batches, {"learner.attention": "sdpa", "learner.max_padding": 0.9}),
    "learner.logprob_chunk_tokens": Way(7, started_rank),
    "learner.activation_checkpointing": Way(False, started_rank),
    "learner.num_threads": Way(2, started_rank),
    "learner.bucket_mb": Way(1, buckets),
    "learner.weights_by": Way("object_store", gang_calls, GPUS),
    "learner.check_old_logprobs_every": Way(5, anchored),
    "learner.start_deadline_s": Way(9.0, gang_calls),
    "learner.step_deadline_s": Way(9.0, gang_calls),
    "sandbox.executors": Way(2, ray_resources),
    "sandbox.slots": Way(3, pool),
    "sandbox.level": Way("process", pool),
    "sandbox.time_limit_s": Way(1.0, pool),
    "sandbox.wall_limit_s": Way(9.0, pool),
    "sandbox.memory_mb": Way(100, pool),
    "sandbox.max_output_mb": Way(1, pool),
    "sandbox.max_output_chars": Way(50, pool),
    "sandbox.deadline_s": Way(50.0, pool),
    "sandbox.max_waiting": Way(50, pool),
    "sandbox.attempts": Way(3, pool),
    "sandbox.spare_cells": Way(3, pool),
    "sandbox.calls_per_cell": Way(3, pool),
    "sandbox.cells_per_server": Way(3, pool),
    "sandbox.warm": Way(("lean",), pool),
    "reward.name": Way("exact", judged, {"reward.name": "choice", "reward.place": "boxed"}),
    "reward.place": Way("boxed", judged, {"reward.name": "choice"}),
    "reward.partial": Elsewhere(
        f"{JUDGE}::test_a_program_passes_all_cases_or_by_a_setting_its_share_of_them", "partial="
    ),
    "reward.deadline_s": Elsewhere(f"{JUDGE}::test_an_own_function_is_asked_in_a_process", "deadline_s="),
    "reward.processes": Way(3, own),
    "tools.use": Way(("python", "mine:mine"), called),
    "tools.environment": Way("mine:Game", called),
    "tools.hosts": Way(2, called, {"tools.use": ("mine:mine",)}),
    "tools.max_calls_per_turn": Way(2, run),
    "data.train": Way("FILE", problems),
    "data.heldout": Way("FILE", problems),
    "data.integer_answers": Way(False, problems, {"data.train": "FILE"}),
    "data.num_train": Way(21, problems),
    "data.num_heldout": Way(5, problems),
    "data.num_filtered": Way(5, run, {"drop_solved": True}),
    "sft.steps": Way(9, sft_rates, {"sft.steps": 10}),
    "sft.batch_size": Way(3, sft, {"sft.steps": 2}),
    "sft.learning_rate": Way(1e-3, sft_rates),
    "sft.schedule": Way("wsd", sft_rates),
    "sft.warmup_share": Way(0.5, sft_rates),
    "sft.stable_share": Way(0.2, sft_rates, {"sft.schedule": "wsd"}),
    "sft.max_left_out": Elsewhere(
        "tests/rstar_ray/test_sft.py::test_more_than_a_share_left_out_is_refused", "max_left_out=0.7"
    ),
    "sft.final_share": Way(0.5, sft_rates),
    "sft.data": Way("/no/such/file", paths),
    "sft.num_conversations": Way(30, taught),
    "tiny.drills": Way(0.9, taught),
    "tiny.slips": Way(0.1, taught),
    "tiny.failures": Way(0.9, taught),
    "tiny.wasted": Way(0.9, taught),
    "tiny.coupling": Way(0.9, taught),
    "evaluate.protocol": Elsewhere(
        "tests/recipes/test_recipe_options.py::test_a_protocol_sets_what_was_published", "evaluate.protocol"
    ),
    "evaluate.num_problems": Way(2, problems),
    "evaluate.samples": Way(2, run),
    "evaluate.temperature": Way(0.3, run),
    "evaluate.top_p": Way(0.9, run),
    "evaluate.max_response_tokens": Way(300, run),
    "evaluate.max_turns": Way(2, run),
    "evaluate.every_steps": Way(1, run),
    "evaluate.files": Way(("/no/such/file",), paths),
    "checkpoint.every_steps": Way(1, run),
    "checkpoint.keep": Way(1, run, {"checkpoint.every_steps": 1, "steps": 3}),
    "checkpoint.grace_s": Way(9.0, stop_grace),
    "checkpoint.trajectories_every_steps": Way(0, run),
    "telemetry.traces": Way("traces", actors),
    "telemetry.wandb": Elsewhere(
        "tests/rstar_ray/test_sinks.py::test_a_stage_hands_its_numbers_on_with_its_settings", "telemetry.wandb"
    ),
    "detector.probe_every_s": Way(1.0, watched),
    "detector.silent_s": Way(9.0, actors),
    "detector.learner_silent_s": Way(9.0, actors),
    "detector.engine_step_s": Way(9.0, engine_waits),
    "detector.node_away_s": Way(9.0, actors),
    "detector.still_s": Way(90.0, watched),
}
IDLE_IN: dict[str, dict[str, Any]] = {
    "algorithm.rollouts_per_prompt": {"algorithm.resample": "none"},
    "algorithm.least_failures": {"algorithm.resample": "release"},
    "algorithm.roc_error_ratio": {"algorithm.resample": "random"},
    "algorithm.min_zero_reward_trace_num": {},
    "algorithm.min_non_zero_reward_trace_num": {},
    "algorithm.reference_model": {},
    "algorithm.correction_cap": {},
    "algorithm.correction_low": {"algorithm.correction": "token"},
    "optimizer.warmup_steps": {},
    "engine.compile": {},
    "engine.num_threads": GPUS,
    "balancer.risk": {"balancer.rule": "static"},
    "balancer.preemption_steps": {"balancer.risk": 0.1},
    "balancer.idle_share": {"balancer.risk": 0.1},
    "learner.lora_alpha": {},
    "learner.max_padding": {},
    "learner.pass_tokens": {},
    "learner.check_old_logprobs_every": {"optimizer.updates_per_step": 2},
    "tools.hosts": {},
    "data.heldout": {"evaluate.files": ("/no/such/file",)},
    "data.integer_answers": {"data.train": "FILE", "reward.name": "exact"},
    "data.num_train": {"data.train": "FILE"},
    "data.num_heldout": {"scale": "gpu", "data.train": "FILE"},
    "data.num_filtered": {},
    "sft.stable_share": {},
}
"""Of what means something in some mode alone: another mode."""
WHERE_ITS_WAY_BEGINS = {
    "reward.processes": "the processes are asked for by a reward of one's own",
    "sft.num_conversations": "conversations are generated where no file is named",
    "learner.attention_kernel": "torch's own switch, which flash_attention_2 does not look at",
    **dict.fromkeys(("tiny.drills", "tiny.slips", "tiny.failures", "tiny.wasted", "tiny.coupling"), "the same"),
}
"""Of the others: the mode decides before what their way shows."""
SHOWN_THE_BETTER = {
    "deterministic": "what a GPU's libraries find in their environment",
    "algorithm.reject_equal_reward": "groups of two are often equal",
    "algorithm.kl_coefficient": "a policy to take it to",
    "engine.gpus_per_replica": "a share with a rank", "learner.gpus_per_rank": "a share with a replica",
    "when_short": "more replicas than there is room for", "learner.weights_by": "placements that have several ways",
    "checkpoint.keep": "checkpoints to choose from", "sft.steps": "few steps", "sft.batch_size": "few steps",
    "reward.name": "another rule for the same answer", "reward.place": "the same",
}  # fmt: skip
"""Settings that act without what stands beside them as well."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all, so that no two are told apart by where they wrote."""
    return tmp_path_factory.mktemp("arrive")


@pytest.fixture(scope="module")
def base() -> RunConfig:
    return with_values(RunConfig(), SMALL)


def test_every_setting_has_a_way():
    assert WAYS.keys() == leaves(RunConfig()).keys()


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if isinstance(way, Way)])
def test_another_value_is_seen_where_it_acts(name: str, base: RunConfig, folders: Path):
    way = WAYS[name]
    assert isinstance(way, Way)
    plain = with_values(base, way.beside or {})
    other = with_values(plain, {name: way.value})
    assert _seen(way.seam, plain, folders) != _seen(way.seam, other, folders)


IN_SOME_MODE = {
    name for name, needed in conditions(RunConfig()).items() if any(one.setting != "stage" for one in needed)
}


def test_what_means_something_in_some_mode_alone_has_another_here():
    elsewhere = {name for name in IN_SOME_MODE if isinstance(WAYS[name], Elsewhere)}
    assert IDLE_IN.keys() | WHERE_ITS_WAY_BEGINS.keys() | elsewhere == IN_SOME_MODE


@pytest.mark.parametrize("name", IDLE_IN)
def test_in_a_mode_that_has_no_use_for_a_setting_it_changes_nothing(name: str, base: RunConfig, folders: Path):
    way = WAYS[name]
    assert isinstance(way, Way)
    plain = with_values(base, IDLE_IN[name])
    assert name in idle(plain)
    assert _seen(way.seam, plain, folders) == _seen(way.seam, with_values(plain, {name: way.value}), folders)


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if isinstance(way, Way) and way.beside])
def test_a_setting_that_needs_another_beside_it_says_so(name: str, base: RunConfig):
    assert name in SHOWN_THE_BETTER or name in idle(base)


_seen_before: dict[tuple[Seam, RunConfig], Any] = {}


def _seen(seam: Seam, config: RunConfig, folder: Path) -> Any:
    """In a folder of the same name each time; once for each configuration."""
    if (seam, config) not in _seen_before:
        place = folder / "folder"
        place.mkdir()
        try:
            _seen_before[seam, config] = seam(config, place)
        finally:
            place.rename(folder / str(len(list(folder.iterdir()))))
    return _seen_before[seam, config]


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if isinstance(way, Elsewhere)])
def test_what_another_test_shows_is_shown_there(name: str):
    way = WAYS[name]
    assert isinstance(way, Elsewhere)
    path, _, function = way.name.partition("::")
    text = (REPOSITORY / path).read_text("utf-8")
    assert way.words in text
    assert f"def {function}" in text


@pytest.mark.parametrize("record", [EngineSettings, LearnerSettings, LossSettings, BatchLimits, PoolConfig, Limits])
def test_no_field_is_derived_and_then_read_by_nobody(record: type):
    """And none of these records has a default of its own."""
    read = _attributes_read()
    for field in fields(record):
        assert field.name in read, f"{record.__name__}.{field.name}"
        assert not re.search(rf"^    {field.name}: [^#\n]* = ", _source(record), re.M), field.name


OWN_MEANING = {
    "recipes/roc_vs_grpo.py": "an experiment says what differs, as a recipe does",
    "recipes/plan.py": "the stage that is planned for",
    "rstar_ray/run_dir/metrics.py": "the only stage that has such rows",
    "rstar_ray/chat/call_syntax.py": "the name of a way of writing calls",
    "rstar_ray/tools/host.py": "of a tool's own start",
    "sandbox/http/": "of a network between hosts, which no run has",
    "scheduler/estimate.py": "a share of what is remembered",
    "scheduler/traces/": "of the steps that schedulers are tried on",
    "scheduler/bench.py": "likewise",
}
"""Files in which something of a setting's name means something else."""


@pytest.mark.long
def test_no_setting_has_a_second_default_below_the_settings():
    """A field or parameter of a setting's name takes its value from `RunConfig`, or is told it."""
    names = {name.rpartition(".")[2] for name in leaves(RunConfig())}
    found: list[str] = []
    for room in ("rstar_ray", "sandbox", "scheduler", "actors", "recipes"):
        for path in sorted((REPOSITORY / room).rglob("*.py")):
            where = str(path.relative_to(REPOSITORY))
            if "bench" not in path.parts and "config" not in path.parts and not where.startswith(tuple(OWN_MEANING)):
                found += [f"{where}: {name}" for name in _stated(ast.parse(path.read_text("utf-8"))) if name in names]
    assert found == []


def _stated(tree: ast.Module) -> list[str]:
    """Fields and parameters with a number or a word of their own; nothing, no and 0 say that there is none."""
    pairs: list[tuple[str, ast.expr | None]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            given = [*node.args.posonlyargs, *node.args.args]
            pairs += [(one.arg, value) for one, value in zip(reversed(given), reversed(node.args.defaults))]  # noqa: B905
            pairs += [(one.arg, value) for one, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
        elif isinstance(node, ast.ClassDef):
            fields_ = [
                one for one in node.body if isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.unparse(one)
            ]
            pairs += [(one.target.id, one.value) for one in fields_ if isinstance(one.target, ast.Name)]
    return [name for name, value in pairs if isinstance(value, ast.Constant) and value.value]


def _source(record: type) -> str:
    return (REPOSITORY / (record.__module__.replace(".", "/") + ".py")).read_text("utf-8")


@cache
def _attributes_read() -> set[str]:
    found: set[str] = set()
    for room in ("rstar_ray", "actors", "sandbox"):
        for path in (REPOSITORY / room).rglob("*.py"):
            if path.name != "settings.py" and path.parent.name != "config":
                tree = ast.parse(path.read_text("utf-8"))
                found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return found
