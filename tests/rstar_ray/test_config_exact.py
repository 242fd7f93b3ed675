"""Every default, and every limit of a setting on both sides, with what a person is told beyond it."""

from dataclasses import dataclass, field
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from rstar_ray.config import RunConfig, differences, leaves, may_change, with_values
from rstar_ray.config.checks import at_least, require, share
from rstar_ray.config.tree import MayChange
from rstar_ray.errors import ConfigError

DEFAULTS: dict[str, dict[str, Any]] = {
    "": {
        "stage": "stage1", "scale": "auto", "run_dir": "", "when_short": "refuse", "seed": 0, "model": "", "steps": 300,
        "until": "steps", "max_empty_steps": 10, "prompts_per_step": 512, "drop_solved": False, "own_folder": "",
        "reset_optimizer": False, "deterministic": False,
    },
    "rollout.": {
        "max_response_tokens": 8_192, "max_turns": 10, "temperature": 1.0, "top_p": 1.0, "instruct": True,
        "deadline_s": 1_800.0,
    },
    "chat.": {
        "template": "", "system": "", "before": "", "thinking": "auto", "parser": "auto", "stop": (),
        "tool_name": "python",
    },
    "algorithm.": {
        "rollouts_per_prompt": 32, "keep": 16, "resample": "paper", "least_failures": 0, "roc_error_ratio": True,
        "roc_answer_format": True, "min_zero_reward_trace_num": 2, "min_non_zero_reward_trace_num": 2,
        "reject_equal_reward": True, "advantage_std": "population", "clip_low": 0.2, "clip_high": 0.28,
        "dual_clip": 0.0, "normalisation": "token", "entropy_coefficient": 0.0, "kl_coefficient": 0.0,
        "reference_model": "", "correction": "none", "correction_cap": 2.0, "correction_low": 0.5,
    },
    "optimizer.": {
        "learning_rate": 1e-6, "warmup_steps": 20, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.0,
        "grad_clip": 1.0, "updates_per_step": 1, "max_bad_updates": 3, "save_bad_updates": "",
    },
    "engine.": {
        "replicas": 1, "gpus_per_replica": 0.0, "cpus_per_replica": 1.0, "tensor_parallel": 1, "dtype": "bfloat16",
        "max_context_tokens": 32_768, "kv_tokens": 0, "max_running": 256, "gpu_memory_share": 0.6, "compile": True,
        "block_size": 32, "num_threads": 1, "start_deadline_s": 900.0, "completion_deadline_s": 3_600.0,
        "answer_deadline_s": 120.0, "vllm_metrics": False,
    },
    "balancer.": {"rule": "expected_kv", "risk": 0, "preemption_steps": 0, "idle_share": 0},
    "learner.": {
        "ranks": 1, "gpus_per_rank": 0.0, "own_gpus": False, "cpus_per_rank": 1.0, "zero": 3, "offload": False,
        "lora_rank": 0, "lora_alpha": 32, "attention": "rows", "attention_kernel": "fused",
        "dtype": "bfloat16", "micro_batch_tokens": 32_768,
        "max_padding": 0.05,
        "pass_tokens": 1_024, "logprob_chunk_tokens": 4_096, "activation_checkpointing": True, "num_threads": 1,
        "bucket_mb": 256, "weights_by": "auto",
        "check_old_logprobs_every": 0, "start_deadline_s": 900.0, "step_deadline_s": 1_800.0,
    },
    "sandbox.": {
        "executors": 1, "slots": 0, "level": "namespaces", "time_limit_s": 4.0, "wall_limit_s": 0.0, "memory_mb": 384,
        "max_output_mb": 4, "max_output_chars": 1_000, "deadline_s": 120.0, "max_waiting": 65_536, "attempts": 2,
        "spare_cells": 1, "calls_per_cell": 2_000, "cells_per_server": 1_000,
        "warm": ("lean", "numpy", "sympy", "scipy"),
    },
    "reward.": {"name": "math", "place": "answer", "partial": False, "deadline_s": 10.0, "processes": 2},
    "tools.": {"use": ("python",), "environment": "", "max_calls_per_turn": 16, "hosts": 1},
    "data.": {
        "train": "", "heldout": "", "integer_answers": True, "num_train": 4_000, "num_heldout": 240, "num_filtered": 0,
    },
    "sft.": {
        "steps": 400, "batch_size": 128, "learning_rate": 5e-6, "schedule": "cosine", "warmup_share": 0.04,
        "stable_share": 0.6, "final_share": 0.0, "data": "", "max_left_out": 0.05, "num_conversations": 6_000,
    },
    "tiny.": {"drills": 0.3, "slips": 0.5, "failures": 0.4, "wasted": 0.05, "coupling": 0.0},
    "evaluate.": {
        "protocol": "own", "num_problems": 0, "samples": 16, "temperature": 0.6, "top_p": 1.0,
        "max_response_tokens": 30_720, "max_turns": 30, "every_steps": 0, "files": (),
    },
    "checkpoint.": {"every_steps": 10, "keep": 2, "grace_s": 120.0, "trajectories_every_steps": 10},
    "detector.": {
        "probe_every_s": 2.0, "silent_s": 60.0, "learner_silent_s": 600.0, "engine_step_s": 300.0, "still_s": 3_600.0,
        "node_away_s": 1_200.0,
    },
    "telemetry.": {"wandb": "", "traces": ""},
}  # fmt: skip


def test_a_run_is_this_where_nothing_is_said():
    written = {prefix + name: value for prefix, group in DEFAULTS.items() for name, value in group.items()}
    assert leaves(RunConfig()) == written


# A setting, the least (or the most) that it may be, and what lies just beyond.
AT_LEAST: list[tuple[str, float, float]] = [
    ("steps", 0, -1), ("seed", 0, -1), ("prompts_per_step", 1, 0), ("max_empty_steps", 1, 0),
    ("rollout.max_response_tokens", 1, 0), ("rollout.max_turns", 1, 0), ("rollout.temperature", 0, -0.1),
    ("rollout.deadline_s", 1, 0.9),
    ("algorithm.keep", 2, 1), ("algorithm.least_failures", 0, -1), ("algorithm.min_zero_reward_trace_num", 0, -1),
    ("algorithm.min_non_zero_reward_trace_num", 0, -1), ("algorithm.clip_low", 0, -0.1),
    ("algorithm.clip_high", 0, -0.1), ("algorithm.kl_coefficient", 0, -0.1), ("algorithm.correction_low", 0, -0.1),
    ("optimizer.learning_rate", 0, -1e-9), ("optimizer.warmup_steps", 0, -1), ("optimizer.weight_decay", 0, -0.1),
    ("optimizer.grad_clip", 0, -0.1), ("optimizer.updates_per_step", 1, 0), ("optimizer.max_bad_updates", 1, 0),
    ("engine.replicas", 1, 0), ("engine.tensor_parallel", 1, 0), ("engine.gpus_per_replica", 0, -1),
    ("engine.kv_tokens", 0, -1), ("engine.cpus_per_replica", 0, -1), ("engine.max_running", 1, 0),
    ("engine.num_threads", 1, 0), ("engine.start_deadline_s", 1, 0.9),
    ("engine.completion_deadline_s", 1, 0.9), ("engine.answer_deadline_s", 1, 0.9),
    ("learner.ranks", 1, 0), ("learner.micro_batch_tokens", 1, 0), ("learner.gpus_per_rank", 0, -1),
    ("learner.cpus_per_rank", 0, -1), ("learner.num_threads", 1, 0), ("learner.step_deadline_s", 1, 0.9),
    ("learner.start_deadline_s", 1, 0.9), ("learner.bucket_mb", 1, 0), ("learner.logprob_chunk_tokens", 1, 0),
    ("learner.pass_tokens", 0, -1), ("learner.check_old_logprobs_every", 0, -1), ("learner.lora_rank", 0, -1),
    ("learner.lora_alpha", 1, 0),
    ("sandbox.executors", 1, 0), ("sandbox.max_output_mb", 1, 0), ("sandbox.slots", 0, -1),
    ("balancer.preemption_steps", 0, -1),
    ("sandbox.spare_cells", 0, -1), ("sandbox.max_waiting", 1, 0), ("sandbox.attempts", 1, 0),
    ("sandbox.calls_per_cell", 1, 0), ("sandbox.cells_per_server", 1, 0), ("sandbox.wall_limit_s", 0, -1),
    ("sandbox.memory_mb", 64, 63), ("sandbox.max_output_chars", 16, 15), ("sandbox.time_limit_s", 0.05, 0.04),
    ("reward.deadline_s", 0.01, 0.009), ("reward.processes", 1, 0), ("tools.max_calls_per_turn", 1, 0),
    ("tools.hosts", 1, 0), ("data.num_train", 1, 0), ("data.num_heldout", 1, 0), ("data.num_filtered", 0, -1),
    ("sft.steps", 1, 0), ("sft.batch_size", 1, 0), ("sft.num_conversations", 1, 0), ("sft.learning_rate", 0, -1e-9),
    ("evaluate.num_problems", 0, -1), ("evaluate.every_steps", 0, -1), ("evaluate.samples", 1, 0),
    ("evaluate.max_response_tokens", 1, 0), ("evaluate.max_turns", 1, 0), ("evaluate.temperature", 0, -0.1),
    ("checkpoint.every_steps", 1, 0), ("checkpoint.keep", 1, 0), ("checkpoint.grace_s", 0, -1),
    ("checkpoint.trajectories_every_steps", 0, -1), ("detector.probe_every_s", 0.1, 0.09),
    ("detector.node_away_s", 0, -1),
]  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {"algorithm.kl_coefficient": {"algorithm.reference_model": "/a"}}


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def refusal(values: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        with_values(RunConfig(), values)
    return refused.value


def said(values: dict[str, Any]) -> tuple[str, str, str]:
    error = refusal(values)
    return error.field, error.problem, error.mend


@pytest.mark.parametrize(("name", "least", "beyond"), AT_LEAST)
def test_the_least_of_a_setting_is_taken_and_what_is_below_is_refused(name: str, least: float, beyond: float):
    beside = BESIDE.get(name, {})
    assert leaves(with_values(RunConfig(), {name: least} | beside))[name] == least
    assert said({name: beyond} | beside) == (option(name), f"{beyond} is too small", f"give at least {least}")
    assert said({name: inf} | beside)[0] == option(name)


def test_the_context_of_an_engine_holds_a_response_and_a_prompt():
    def budgets(context: int, response: int, evaluated: int) -> dict[str, Any]:
        names = ("engine.max_context_tokens", "rollout.max_response_tokens", "evaluate.max_response_tokens")
        return dict(zip(names, (context, response, evaluated), strict=True))

    assert with_values(RunConfig(), budgets(2, 1, 1)).engine.max_context_tokens == 2
    assert said({"engine.max_context_tokens": 0})[2] == "give at least 1"
    mend = "lower it or raise --engine.max-context-tokens"
    for name, values in (("rollout", budgets(100, 100, 99)), ("evaluate", budgets(100, 99, 100))):
        problem = "a response of 100 tokens leaves no room for a prompt in a context of 100"
        assert said(values) == (f"--{name}.max-response-tokens", problem, mend)


TWO = {"learner.ranks": 2, "engine.replicas": 2}
# Values that are taken, and values that are refused with the field and a part of what is said.
EDGES: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]], str, str]] = [
    ("engine.kv_tokens", [{"": 32_768}], [{"": 1}, {"": 32_767}], "cannot hold one rollout of 32768 tokens",
     "give at least --engine.max-context-tokens, or 0 for what memory allows"),
    ("engine.gpu_memory_share", [{"": 0.01}, {"": 0.95}], [{"": 0}, {"": -1}, {"": 0.951}], "is no share",
     "give one in (0, 0.95]"),
    ("balancer.risk", [{"": 0}, {"": 0.001}, {"": 0.9999}], [{"": -0.01}, {"": 1}, {"": nan}],
     "is no share of rollouts that an engine may preempt",
     "give one up to 0.9999, or 0 to derive it from what a preemption costs"),
    ("balancer.idle_share", [{"": 0}, {"": 1}], [{"": -0.1}, {"": 1.1}, {"": nan}], "is no share",
     "give one up to 1, or 0 to have it measured"),
    ("learner.max_padding", [{"": 0}, {"": 0.99}], [{"": 1}, {"": -0.01}], "is no share", "give one in [0, 1)"),
    ("learner.zero", [{"": 1}, {"": 0, "learner.dtype": "float32"}], [{"": 0}],
     "bfloat16 without ZeRO has no float32 master weights", "give 1, 2 or 3, or --learner.dtype float32"),
    ("learner.offload", [{"": True}, {"": True, "learner.zero": 1}],
     [{"": True, "learner.zero": 0, "learner.dtype": "float32"}], "without ZeRO nothing is offloaded",
     "give --learner.zero 1, 2 or 3"),
    ("sandbox.warm", [{"": ("lean",)}], [{"": ("numpy", "scipy")}], "numpy scipy lacks lean", "add lean"),
    ("sandbox.warm", [], [{"": ()}], "none lacks lean", "add lean"),
    ("sandbox.wall_limit_s", [{"": 4.0}, {"": 5.0}], [{"": 3.9}],
     "3.9 would end programs that have CPU time left, 4.0 s", "raise it, or give 0"),
    ("sandbox.deadline_s", [{"": 7.71}], [{"": 7.6}],
     "7.6 leaves no room above the 7 s by the clock that a program may take",
     "give 8 or more, or lower --sandbox.wall-limit-s or --sandbox.time-limit-s"),
    ("sandbox.deadline_s", [{"": 120.0, "sandbox.time_limit_s": 40.0}, {"": 134.0, "sandbox.time_limit_s": 80.0}],
     [{"": 120.0, "sandbox.time_limit_s": 80.0}],
     "120.0 leaves no room above the 121 s by the clock that a program may take", "give 134 or more, or lower"),
    ("sandbox.deadline_s", [{"": 0.06, "sandbox.time_limit_s": 0.05, "sandbox.wall_limit_s": 0.05}], [{"": 0.04}],
     "0.04 is too small", "give at least 0.05"),
    ("algorithm.keep", [{"": 3, "algorithm.least_failures": 2}], [{"": 2, "algorithm.least_failures": 2}],
     "2 kept leave no place for a success beside 2 failures",
     "give 3 or more, or --algorithm.least-failures 1 or less"),
    ("algorithm.keep", [{"": 32}], [{"": 33}], "33 is above the 32 rollouts of a prompt",
     "lower it or raise --algorithm.rollouts-per-prompt"),
    ("algorithm.clip_low", [{"": 0.99}], [{"": 1}], "would clip no ratio: none is below 0", "give one below 1"),
    ("algorithm.dual_clip", [{"": 0}, {"": 1.01}], [{"": 1}, {"": 0.5}, {"": inf}],
     "would clip what the other clips leave alone", "give one above 1, or 0 for no dual clip"),
    ("algorithm.entropy_coefficient", [{"": -1}, {"": 1}], [{"": inf}, {"": nan}], "is not finite", "give a number"),
    ("algorithm.kl_coefficient", [{"": 0.1, "algorithm.reference_model": "/a"}], [{"": 0.1}],
     "a KL term has nothing to be taken to", "name a model folder with --algorithm.reference-model, or give 0"),
    ("algorithm.correction_cap", [{"": 0.5}], [{"": 0}, {"": -1}, {"": inf}], "is no weight", "give a number above 0"),
    ("algorithm.correction_low", [{"": 2.0}], [{"": 2.1}], "2.1 is above the upper end of the band, 2.0",
     "lower it or raise --algorithm.correction-cap"),
    ("optimizer.beta1", [{"": 0}, {"": 0.99}], [{"": 1}, {"": -0.1}], "is no decay", "give one in [0, 1)"),
    ("optimizer.beta2", [{"": 0.1}, {"": 0.9999}], [{"": 1}, {"": 0}], "is no decay", "give one in (0, 1)"),
    ("optimizer.epsilon", [{"": 1e-12}, {"": 1.5}], [{"": 0}, {"": inf}], "is no epsilon", "give one above 0"),
    ("rollout.top_p", [{"": 1}, {"": 0.1}], [{"": 0}, {"": 1.01}], "is no share", "give one in (0, 1]"),
    ("evaluate.top_p", [{"": 1}, {"": 0.1}], [{"": 0}, {"": 1.01}], "is no share", "give one in (0, 1]"),
    ("sft.max_left_out", [{"": 0}, {"": 1}], [{"": -0.01}, {"": 1.01}], "is no share", "give one in [0, 1]"),
    ("sft.final_share", [{"": 0}, {"": 1}], [{"": -0.01}, {"": 1.01}], "is no share", "give one in [0, 1]"),
    ("sft.stable_share", [{"": 0}, {"": 0.99}], [{"": -0.01}, {"": 1}], "is no share", "give one in [0, 1)"),
    ("sft.warmup_share", [{"": 0}, {"": 0.8, "sft.steps": 4}], [{"": 0.9, "sft.steps": 4}],
     "0.9 of 4 steps leaves none after the warm-up", "lower it or raise --sft.steps"),
    ("chat.tool_name", [{"": "x"}], [{"": ""}], "it is empty", "give a name"),
    ("reward.name", [{"": "choice"}, {"": "a.b:c"}], [{"": "maths"}, {"": ":f"}, {"": "a:b:c"}], "is no reward",
     "give math, exact, choice, code, instructions, calls, or module:function"),
    ("tools.use", [{"": ()}, {"": ("a:b", "python")}], [{"": ("python", "search")}], "'search' is no tool",
     "give python, or module:object"),
    ("tools.use", [{"": ("a:b", "a:c")}], [{"": ("a:b", "a:b")}], "a:b stands there twice", "name it once"),
    ("tools.environment", [{"": "a:b"}], [{"": "game"}], "'game' is no environment", "give module:object"),
    ("detector.silent_s", [{"": 6.0}], [{"": 5.9}], "5.9 s are not three probes, which come every 2 s",
     "raise it, or lower --detector.probe-every-s"),
    ("detector.learner_silent_s", [{"": 6.0}], [{"": 5.9}], "5.9 s are not three probes", "raise it, or lower"),
    ("detector.engine_step_s", [{"": 6.0}], [{"": 5.9}], "5.9 s are not three probes", "raise it, or lower"),
    ("detector.still_s", [{"": 6.0}], [{"": 5.9}], "5.9 s are not three probes", "raise it, or lower"),
    # shares of GPUs
    ("engine.tensor_parallel", [{"": 2}, {"": 2, "engine.gpus_per_replica": 2}], [{"": 2, "engine.gpus_per_replica": 1},
     {"": 2, "engine.gpus_per_replica": 4}], "a replica split over 2 GPUs cannot have",
     "give --engine.gpus-per-replica 2, or --engine.tensor-parallel 1"),
    ("engine.gpus_per_replica", [{"": 1}, {"": 0.5}], [{"": 2}, {"": 1.5}], "a replica that is not split uses one GPU",
     "give 1, or --engine.tensor-parallel"),
    ("learner.gpus_per_rank", [{"": 1}, {"": 0.5}], [{"": 1.5}, {"": 2}], "a rank uses one GPU of",
     "give 1 or a share of one, and more --learner.ranks"),
    ("learner.own_gpus", [{"": True}, {"": True, "learner.gpus_per_rank": 1}],
     [{"": True, "learner.gpus_per_rank": 0.5}], "a rank that reserves 0.5 of a GPU has none of its own",
     "give --learner.gpus-per-rank 1"),
    ("learner.ranks", [{"": 2, "learner.gpus_per_rank": 0.5, "engine.replicas": 2, "engine.gpus_per_replica": 0.5},
     {"": 2, "learner.gpus_per_rank": 1},
     {"": 2}], [{"": 2, "learner.gpus_per_rank": 0.5}], "2 ranks beside 1 replicas would have to share GPUs",
     "give at most --engine.replicas, or --learner.gpus-per-rank 1"),
    ("learner.gpus_per_rank", [{"": 0.5, "engine.gpus_per_replica": 0.5}, {"": 1, "engine.gpus_per_replica": 0.5},
     {"": 0.5, "engine.gpus_per_replica": 1}], [{"": 0.6, "engine.gpus_per_replica": 0.5}],
     "0.6 of a GPU for a rank and 0.5 for the replica beside it are more than one",
     "lower one of them, or give --learner.gpus-per-rank 1"),
    ("learner.gpus_per_rank", [{"": 0.5}, {"": 0.25, "engine.gpus_per_replica": 0.3, **TWO},
     {"": 1, "engine.gpus_per_replica": 1, **TWO}],
     [{"": 0.5, **TWO}, {"": 0.5, "engine.gpus_per_replica": 1, **TWO},
      {"": 0.2, "engine.gpus_per_replica": 0.3, **TWO},
      {"": 0.5, "engine.gpus_per_replica": 2, "engine.tensor_parallel": 2, **TWO}],
     "may come to lie on one GPU, which their collectives refuse",
     "give 1, or a share that with its replica's is more than half a GPU"),
    ("engine.block_size", [{"": 32}, {"": 96}, {"": 16, "engine.gpus_per_replica": 1}],
     [{"": 0}, {"": 33}, {"": 16}, {"": -32}, {"": 8, "engine.gpus_per_replica": 1}],
     "take no blocks of", "give a multiple of"),
    ("learner.attention", [{"": "sdpa"}, {"": "flash_attention_2", "learner.gpus_per_rank": 1}],
     [{"": "flash_attention_2"}], "flash_attention_2 is for GPUs, and a rank has none", "give rows or sdpa"),
    ("learner.attention_kernel", [{"": "eager"}, {"": "aiter", "learner.gpus_per_rank": 1}], [{"": "aiter"}],
     "aiter is for ROCm's GPUs, and a rank has none", "give fused"),
    ("sandbox.memory_mb", [{"": 2**22}], [{"": 2**22 + 1}], "4194305 is too much", "give at most 4194304"),
    ("sandbox.max_output_mb", [{"": 4_096}], [{"": 4_097}], "4097 is too much", "give at most 4096"),
    ("sandbox.max_output_chars", [{"": 2**24}], [{"": 2**24 + 1}], "is too much", "give at most 16777216"),
    ("sandbox.time_limit_s", [{"": 3_600.0, "sandbox.deadline_s": 9_999.0}],
     [{"": 3_601.0, "sandbox.deadline_s": 9_999.0}], "3601.0 is too much", "give at most 3600.0"),
    ("sandbox.wall_limit_s", [{"": 3_600.0, "sandbox.deadline_s": 9_999.0}], [{"": 3_601.0}], "3601.0 is too much",
     "give at most 3600.0"),
    ("seed", [{"": 2**32 - 1}], [{"": 2**32}], "4294967296 is too much", "give at most 4294967295"),
    ("telemetry.traces", [{"": ""}, {"": "traces/here"}, {"": "http://127.0.0.1:4318"}, {"": "https://[::1]:4318/v1"}],
     [{"": "http://"}, {"": "http://:4318"}, {"": "http://here:port"}], "names no host",
     "give one such as http://127.0.0.1:4318"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "taken", "refused", "problem", "mend"), EDGES)
def test_what_is_refused_begins_where_it_should_and_names_the_mend(
    name: str, taken: list[dict[str, Any]], refused: list[dict[str, Any]], problem: str, mend: str
):
    def full(values: dict[str, Any]) -> dict[str, Any]:
        return {key or name: value for key, value in values.items()}

    for values in taken:
        assert leaves(with_values(RunConfig(), full(values)))[name] == values[""]
    for values in refused:
        told = said(full(values))
        assert told[0] == option(name) and problem in told[1] and mend in told[2], told


def test_the_rollouts_of_plain_grpo_are_those_that_are_kept():
    drawn = {rule: with_values(RunConfig(), {"algorithm.resample": rule}).algorithm.num_rollouts
             for rule in ("paper", "release", "none")}  # fmt: skip
    assert drawn == {"paper": 32, "release": 32, "none": 16}


PATHS = ("model", "algorithm.reference_model", "data.train", "data.heldout", "sft.data", "own_folder")


def test_what_is_named_must_be_there_and_a_model_must_have_a_config(tmp_path: Path):
    RunConfig().check_paths()
    here, away = str(tmp_path), str(tmp_path / "away")
    for name in (*PATHS, "evaluate.files"):
        values = {name: (here, away) if name == "evaluate.files" else away}
        with pytest.raises(ConfigError) as refused:
            with_values(RunConfig(), values).check_paths()
        assert str(refused.value) == f"{option(name)}: {away} does not exist; give an existing path"
    for name in ("model", "algorithm.reference_model"):
        with pytest.raises(ConfigError) as refused:
            with_values(RunConfig(), {name: here}).check_paths()
        wanted = f"{option(name)}: {here}/config.json does not exist; give a Hugging Face model folder"
        assert str(refused.value) == wanted
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"^--own-folder: .*config\.json is a file; give the folder that it is in$"):
        with_values(RunConfig(), {"own_folder": f"{here}/config.json"}).check_paths()
    with_values(RunConfig(), {**dict.fromkeys(PATHS, here), "evaluate.files": (here,)}).check_paths()


# -- the tree ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = 3
    place: MayChange[str] = "here"


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: MayChange[str] = "a"
    count: int = 1
    inner: Inner = field(default_factory=Inner)


def test_a_tree_is_known_by_its_leaves():
    assert leaves(Outer()) == {"name": "a", "count": 1, "inner.size": 3, "inner.place": "here"}
    assert may_change(Outer()) == {"name", "inner.place"}
    other = with_values(Outer(), {"count": 2, "inner.size": 4})
    assert other == Outer(count=2, inner=Inner(size=4))
    assert differences(other, Outer()) == {"count": 2, "inner.size": 4}
    assert differences(other, other) == {}


def test_a_check_names_the_option_as_it_is_typed():
    at_least(2, a__b_c=2, d=3)
    share(a=0.0, b=0.999)
    require(True, "--x", "never", "said")
    for wrong, line in (
        (lambda: at_least(2, a__b_c=2, d_e=1.9), "--d-e: 1.9 is too small; give at least 2"),
        (lambda: at_least(2, a__b_c=inf), "--a.b-c: inf is not finite; give a finite number"),
        (lambda: share(a__b=1.0), "--a.b: 1.0 is no share; give one in [0, 1)"),
        (lambda: require(False, "--x", "it is", "mend it"), "--x: it is; mend it"),
    ):
        with pytest.raises(ConfigError) as refused:
            wrong()
        assert str(refused.value) == line
