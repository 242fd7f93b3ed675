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

from actors.generation.settings import EngineSettings, engine_settings
from actors.generation.vllm_start import engine_arguments, engine_environment
from actors.learner.deepspeed_start import deepspeed_config, optimizer_arguments, parameter_groups
from actors.learner.settings import LearnerSettings, learner_settings
from actors.placement import fitted, plan_layout
from actors.system import traces_of
from actors.tool_host import planned_hosts
from actors.watch import Watch
from recipes.data import heldout_problems, problem_sets, sft_examples, training_problems
from recipes.session import run_path, tools_of
from rstar_ray.algorithm.batch_plan import BatchLimits, batch_limits, plan_ranks
from rstar_ray.algorithm.loss import SampledTokens, policy_loss
from rstar_ray.algorithm.loss_settings import LossSettings, loss_settings
from rstar_ray.algorithm.lr_schedule import sft_schedule
from rstar_ray.algorithm.normalisation import token_weights
from rstar_ray.algorithm.update import SftExample, UpdateResult
from rstar_ray.chat.model_folder import load_chat
from rstar_ray.config import RunConfig, leaves, with_values
from rstar_ray.data.sft_plan import ChatSource
from rstar_ray.errors import ConfigError, RStarError
from rstar_ray.reward.judge import make_judge
from rstar_ray.reward.own import OwnReward
from rstar_ray.rollouts import DroppedRollout, FinishedRollout
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.stages import run_rl, run_sft
from rstar_ray.train_loop import TrainingRow
from rstar_ray.trajectory import Problem, RolloutRequest
from sandbox.limits import Limits, program_limits
from sandbox.pool import SandboxPool
from sandbox.pool_config import PoolConfig, pool_config
from scheduler.balancer import Balancer
from scheduler.cost import EngineCost
from scheduler.load import RolloutLoad
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


def vllm(config: RunConfig, folder: Path) -> Any:
    """What vLLM's arguments and its environment are made of."""
    (folder / "config.json").write_text(
        json.dumps({"num_attention_heads": 2, "head_dim": 8, "num_hidden_layers": 1, "hidden_size": 16})
    )
    settings = engine_settings(config, folder)
    return engine_arguments(settings), engine_environment(settings)


def engine(config: RunConfig, folder: Path) -> Any:
    """What an engine waits by; that each field is read is a test of its own."""
    return engine_settings(config, folder)


def deepspeed(config: RunConfig, folder: Path) -> Any:
    """What `deepspeed.initialize` and its optimizer are given."""
    settings = learner_settings(config, folder)
    decays = [group["weight_decay"] for group in parameter_groups(nn.Linear(2, 2), settings.weight_decay)]
    return deepspeed_config(settings), optimizer_arguments(settings), decays


def rank(config: RunConfig, folder: Path) -> Any:
    """What a learner rank is built from; that each field is read is a test of its own."""
    return learner_settings(config, folder)


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
    if config.data.train:
        path = folder / "set.jsonl"
        path.write_text('{"id": "a", "problem": "1 / 2?", "answer": "0.5"}\n')
        config = with_values(config, {"data.train": str(path)})
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
    written = {str(path.relative_to(folder)) for path in (folder / "run").rglob("*") if path.is_file()}
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


def traces(config: RunConfig, _: Path) -> Any:
    """Where workers are told to write their traces; that they do is a test of their own."""
    return traces_of(config)


def watch(config: RunConfig, _: Path) -> Any:
    """How often the detector probes."""
    return Watch(config.detector, show=print)._detector.tick_s


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
    "deterministic": Way(True, engine),
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
    "rollout.deadline_s": Elsewhere(
        "tests/rstar_ray/test_stages.py::test_a_wait_for_rollouts_that_never_finish_ends_with_their_names", "deadline_s"
    ),
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
    "algorithm.min_non_zero_reward_trace_num": Way(4, run, {"algorithm.resample": "release"}),
    "algorithm.reject_equal_reward": Way(False, run, {"algorithm.keep": 2}),
    "algorithm.advantage_std": Way("none", run),
    "algorithm.clip_low": Way(0.5, loss),
    "algorithm.clip_high": Way(0.5, loss),
    "algorithm.dual_clip": Way(1.5, loss),
    "algorithm.normalisation": Way("group", loss),
    "algorithm.entropy_coefficient": Way(0.1, loss),
    "algorithm.kl_coefficient": Way(0.2, loss, KL),
    "algorithm.reference_model": Way("another", rank, KL),
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
    "optimizer.updates_per_step": Way(2, rank),
    "optimizer.max_bad_updates": Way(1, rank),
    "optimizer.save_bad_updates": Way("bad", rank),
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
    "engine.vllm_metrics": Way(True, engine),
    "engine.start_deadline_s": Way(9.0, engine),
    "engine.completion_deadline_s": Way(9.0, engine),
    "engine.answer_deadline_s": Way(9.0, engine),
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
    "learner.lora_rank": Way(4, rank),
    "learner.lora_alpha": Way(8, rank),
    "learner.attention_kernel": Way("eager", rank),
    "learner.attention": Way("sdpa", micro_batches),
    "learner.dtype": Way("float32", deepspeed),
    "learner.micro_batch_tokens": Way(900, micro_batches),
    "learner.max_padding": Way(0.5, micro_batches, {"learner.attention": "sdpa"}),
    "learner.pass_tokens": Way(0, micro_batches, {"learner.attention": "sdpa", "learner.max_padding": 0.9}),
    "learner.logprob_chunk_tokens": Way(7, rank),
    "learner.activation_checkpointing": Way(False, rank),
    "learner.num_threads": Way(2, rank),
    "learner.bucket_mb": Way(1, rank),
    "learner.weights_by": Way("object_store", rank, GPUS),
    "learner.check_old_logprobs_every": Way(5, rank),
    "learner.start_deadline_s": Way(9.0, rank),
    "learner.step_deadline_s": Way(9.0, rank),
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
    "data.train": Way("/no/such/file", paths),
    "data.heldout": Way("/no/such/file", paths),
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
    "checkpoint.grace_s": Elsewhere(
        "tests/recipes/test_stop.py::test_when_grace_runs_out_it_ends_in_the_middle_of_a_step", "StopSignals(0.05"
    ),
    "checkpoint.trajectories_every_steps": Way(0, run),
    "telemetry.traces": Way("traces", traces),
    "telemetry.wandb": Elsewhere(
        "tests/rstar_ray/test_sinks.py::test_a_stage_hands_its_numbers_on_with_its_settings", "telemetry.wandb"
    ),
    "detector.probe_every_s": Way(1.0, watch),
    "detector.silent_s": Elsewhere(
        "tests/actors/test_watch.py::test_a_silent_actor_is_ended_by_its_process", "silent_s="
    ),
    "detector.learner_silent_s": Elsewhere(
        "tests/actors/test_learner.py::test_a_rank_that_dies_or_stops_is_noticed_while_nobody_asks_it_and_new_ones_go_on_from_a_checkpoint",
        "silent_s",
    ),
    "detector.engine_step_s": Way(9.0, engine),
    "detector.node_away_s": Elsewhere(
        "tests/actors/test_replicas.py::test_replicas_of_which_none_has_a_node_end_the_run_through_its_rollouts",
        "node_away_s=",
    ),
    "detector.still_s": Elsewhere("tests/actors/test_watch.py::test_a_run_in_which_nothing_gets_on", "still_s"),
}


@pytest.fixture(scope="module")
def base() -> RunConfig:
    return with_values(RunConfig(), SMALL)


def test_every_setting_has_a_way():
    assert WAYS.keys() == leaves(RunConfig()).keys()


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if isinstance(way, Way)])
def test_another_value_is_seen_where_it_acts(name: str, base: RunConfig, tmp_path: Path):
    way = WAYS[name]
    assert isinstance(way, Way)
    plain = with_values(base, way.beside or {})
    other = with_values(plain, {name: way.value})
    assert _seen(way.seam, plain, tmp_path) != _seen(way.seam, other, tmp_path)


_seen_before: dict[tuple[Seam, RunConfig], Any] = {}


def _seen(seam: Seam, config: RunConfig, folder: Path) -> Any:
    """In a folder of the same name each time; once for each configuration."""
    if (seam, config) not in _seen_before:
        place = folder / "folder"
        place.mkdir()
        _seen_before[seam, config] = seam(config, place)
        place.rename(folder / str(len(_seen_before)))
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


def _source(record: type) -> str:
    return (REPOSITORY / (record.__module__.replace(".", "/") + ".py")).read_text("utf-8")


@cache
def _attributes_read() -> set[str]:
    found: set[str] = set()
    for room in ("rstar_ray", "actors", "sandbox"):
        for path in (REPOSITORY / room).rglob("*.py"):
            if path.name not in ("settings.py",) and path.parent.name != "config":
                tree = ast.parse(path.read_text("utf-8"))
                found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return found
