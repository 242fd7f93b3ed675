"""Compute what fits on given GPUs, and how long a step takes. It needs no GPU and a few seconds.

python recipes/plan.py --gpus 64 --gpu-memory-gb 192 --stage stage1
python recipes/plan.py --gpus 1 --gpu-memory-gb 24 --model Qwen/Qwen3-0.6B --prompts 32 --offload \\
    --micro-batch-tokens 8192
python recipes/plan.py --gpus 8 --trace runs/mine/trajectories/stage1-step-000011.jsonl
python recipes/plan.py --scale mi300x-64 --dry-run

The last command places stand-ins on a cluster of fake nodes, and shows where each actor runs. Options have no prefix:
`--offload` is a run's `--learner.offload`, and `--prompts` its `--prompts-per-step`. Exit status: 0 it fits, or the
placement is right; 1 it does not fit, or is wrong; 2 refused.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from actors.launch.checks import Start, check_files
from actors.launch.command_line import chosen, config_in
from recipes.sft import SFT
from recipes.stage1 import STAGE_1
from rstar_ray.algorithm.state_bytes import gradient_bytes, state_bytes
from rstar_ray.chat.hub import local_folder
from rstar_ray.config import RunConfig, leaves, with_values
from rstar_ray.config.gpus import shares_gpus
from rstar_ray.config.machines import Dtype, ZeroStage
from rstar_ray.config.options import given, options_of, spelled, with_config_file
from rstar_ray.config.run import OnInsufficientResources, Scale
from rstar_ray.config.scales import MACHINES, SCALES, at_scale
from rstar_ray.errors import ConfigError
from rstar_ray.exit_status import exit_status_of
from scheduler.planner.capacity import (
    ENGINE_OWN_GB,
    GROUP_ROLLOUTS,
    RUN,
    SAMPLE_GROUPS,
    Memory,
    PoolPlan,
    adapter_parameters,
    best_separated,
    longest_tokens,
    plan_pools,
    pools_of,
    recommended,
    stale_steps,
)
from scheduler.planner.checkpoint_cost import CheckpointPlan, plan_checkpoint
from scheduler.planner.gpus import EXPECTED, GPUS, GPUS_PER_NODE, Gpu, nearest_gpu
from scheduler.planner.model_shape import GB, QWEN3_14B, ModelShape, read_model
from scheduler.planner.rule_choice import RuleTimes, of_size, recommended_rule, rule_times
from scheduler.planner.step_time import engine_cost
from scheduler.simulator.engine_model import EngineShape
from scheduler.simulator.simulate import limits_of
from scheduler.traces.stage_traces import STAGES, StageShape
from scheduler.traces.trace import read_trace

SETTINGS = {
    "tensor_parallel": "engine.tensor_parallel",
    "gpu_memory_share": "engine.gpu_memory_share",
    "max_running": "engine.max_running",
    "max_context_tokens": "engine.max_context_tokens",
    "sleep": "engine.sleep",
    "micro_batch_tokens": "learner.micro_batch_tokens",
    "offload": "learner.offload",
    "lora_rank": "learner.lora_rank",
    "zero": "learner.zero",
    "hpz_ranks": "learner.hpz_ranks",
    "reduce_dtype": "learner.reduce_dtype",
    "liger": "learner.liger",
    "prompts": "prompts_per_step",
}
"""Options that are settings of a run, by their names here."""
OF_THE_DRY_RUN = {"--nodes", "--on-insufficient-resources"}


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Nothing is measured: arithmetic, with its assumptions. With --dry-run Ray places stand-ins on fake nodes."""

    scale: Literal["", Scale] = ""
    """Take GPUs, their memory and the learner's settings from this scale; other options override it."""
    dry_run: bool = False
    """Start a cluster of fake nodes here, and show where each actor of --scale runs."""
    nodes: int = 0
    """Nodes of the dry run; 0 uses the scale's, fewer show a cluster with missing nodes."""
    on_insufficient_resources: OnInsufficientResources = RUN.on_insufficient_resources
    """As in a run: refuse a cluster that is too small, or scale the plan down."""
    gpus: int = 64
    gpu: Literal["", "mi300x", "mi325x", "b200", "h200", "h100", "a100", "l40s", "rtx4090"] = ""
    """GPU whose peak rates are used; by default the one whose memory is nearest to --gpu-memory-gb"""
    gpu_memory_gb: float = 0.0
    """nominal memory of one GPU; by default that of --gpu, or of an MI300X"""
    stage: Literal["stage1", "stage2", "stage3"] = "stage1"
    trace: str = ""
    """Plan with the rollouts of this file instead of a stage's: a step that a run recorded
    (RUN/trajectories/*.jsonl), or a trace (docs/scheduler.md). Its longest response and most turns are taken as the
    limits. Also simulates placement rules on them."""
    model: str = ""
    """a folder, its config.json, or a hub id; default Qwen3-14B, or the model of --run-config"""
    tensor_parallel: int = RUN.engine.tensor_parallel
    """--engine.tensor-parallel of the run"""
    gpu_memory_share: float = 0.0
    """--engine.gpu-memory-share of the run; 0 gives an engine the rest, and prints the share"""
    max_running: int = RUN.engine.max_running
    """--engine.max-running of the run"""
    max_context_tokens: int = RUN.engine.max_context_tokens
    """--engine.max-context-tokens of the run, which an engine's KV cache must hold"""
    sleep: bool = RUN.engine.sleep
    """--engine.sleep of the run"""
    micro_batch_tokens: int = RUN.learner.micro_batch_tokens
    """--learner.micro-batch-tokens of the run"""
    offload: bool = RUN.learner.offload
    """--learner.offload of the run"""
    lora_rank: int = RUN.learner.lora_rank
    """--learner.lora-rank of the run"""
    zero: ZeroStage = RUN.learner.zero
    """--learner.zero of the run"""
    hpz_ranks: int = RUN.learner.hpz_ranks
    """--learner.hpz-ranks of the run"""
    reduce_dtype: Dtype = RUN.learner.reduce_dtype
    """--learner.reduce-dtype of the run"""
    liger: bool = RUN.learner.liger
    """--learner.liger of the run"""
    prompts: int = RUN.prompts_per_step
    """--prompts-per-step of the run"""
    json: bool = False
    run_config: str = ""
    """A run's settings as TOML, such as RUN/stage1.toml: check them as its start does, and plan with them. Other
    options override them. Settings without an option here, such as the rollouts of a prompt, come from this file;
    without a file, the defaults of a run are used. Its own placement is ignored; several on its GPUs are compared."""

    def __post_init__(self) -> None:
        if self.dry_run and not self.scale:
            raise ConfigError("--dry-run", "needs a scale, whose actors it places", "give --scale too")
        if self.nodes < 0:
            raise ConfigError("--nodes", f"must be at least 0 (got {self.nodes})", "0 uses the scale's nodes")
        for option, number in (("--gpus", self.gpus), ("--gpu-memory-gb", self.gpu_memory_gb or 1)):
            if not 0 < number < math.inf:
                raise ConfigError(option, f"must be above 0 and finite (got {number:g})", "give a positive number")
        self.run()
        if self.gpus % self.tensor_parallel:
            problem = f"not a multiple of --tensor-parallel {self.tensor_parallel} (got {self.gpus})"
            raise ConfigError("--gpus", problem, "give a multiple of it, or lower --tensor-parallel")

    def run(self) -> RunConfig:
        """The settings of the planned run. Raises `ConfigError` by the option's name here."""
        run = run_in(self.run_config)
        values = {setting: getattr(self, name) for name, setting in SETTINGS.items()}
        values |= {"learner.ranks": self.gpus, "evaluate.max_response_tokens": 1}  # no evaluation is planned
        # The planner compares placements and stalenesses; these values allow all of them.
        values |= {"engine.gpus_per_replica": self.tensor_parallel, "learner.gpus_per_rank": 1, "staleness": 0}
        values["learner.weights_by"] = "object_store" if run.learner.weights_by == "object_store" else "auto"
        if not self.gpu_memory_share:
            del values["engine.gpu_memory_share"]
        try:
            return with_values(run, values)
        except ConfigError as refused:
            here = {spelled(setting): spelled(name) for name, setting in SETTINGS.items()}
            raise ConfigError(here.get(refused.field, refused.field), refused.problem, refused.hint) from None

    def planned_gpu(self) -> Gpu:
        """Peaks by name, or by memory."""
        if not self.gpu:
            return nearest_gpu(self.gpu_memory_gb or GPUS["mi300x"].memory_gb)
        named = GPUS[self.gpu]
        return replace(named, memory_gb=self.gpu_memory_gb or named.memory_gb)

    def shape(self) -> StageShape:
        """Lengths and limits of the planned rollouts. Raises `ConfigError` for a trace that cannot be read."""
        if self.trace:
            return shape_of_trace(self.trace)
        run = run_in(self.run_config)
        if not self.run_config or run.stage != self.stage:
            return STAGES[self.stage]
        limits = run.rollout
        return replace(STAGES[self.stage], max_response_tokens=limits.max_response_tokens, max_turns=limits.max_turns)

    def folder(self) -> str:
        """The model's folder or its config.json; by default the folder from which the run of `run_config` starts."""
        if self.model or not self.run_config:
            return self.model
        start = Start(asked=[run_in(self.run_config)], weights=False)
        return str(start.start_folder(start.configs[0]))


def parsed(argv: Sequence[str]) -> PlanConfig:
    """The given options, and the scale's for the rest. Raises `ConfigError` for options without effect."""
    argv = with_config_file(argv)
    asked = given(argv)
    dry_run, scale = "--dry-run" in asked, chosen("--scale", argv, ("", *SCALES), "")
    default = of_scale(scale) if scale and not dry_run else PlanConfig()
    if file := _run_config_of(argv):
        if scale:
            raise ConfigError("--scale", "has no effect with --run-config, whose file names one", "leave one out")
        for _, refused in check_files(run_in(file)):
            if refused is not None:
                raise refused
        default = of_run(run_in(file), file)
    if "--gpu" in asked and "--gpu-memory-gb" not in asked:
        default = replace(default, gpu_memory_gb=0.0)  # the memory of that GPU
    config = options_of(PlanConfig, argv, default=default, description=__doc__)
    if config.trace and "--stage" in asked:
        raise ConfigError("--stage", "has no effect with --trace, whose lengths are planned", "leave one out")
    known = {f"--{item.name.replace('_', '-')}" for item in dataclasses.fields(PlanConfig)}
    known |= {f"--no-{name[2:]}" for name in known}
    if dry_run:
        idle = known - OF_THE_DRY_RUN - {"--scale", "--dry-run"}
        why, hint = f"the dry run places what scale {scale} has", "leave it out"
    else:
        idle, why, hint = OF_THE_DRY_RUN, "it is for the dry run", "give --dry-run too"
    for option in sorted(asked & idle):
        raise ConfigError(option, why, hint)
    return config


def _run_config_of(argv: Sequence[str]) -> str:
    """The value of --run-config, which the other options' defaults depend on."""
    words = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    words.add_argument("--run-config", "--run_config", nargs="?", default="")
    return words.parse_known_args(argv)[0].run_config or ""


@lru_cache(maxsize=2)
def run_in(file: str) -> RunConfig:
    """The settings in a file of --run-config; without one the defaults of a run."""
    return config_in(file) if file else RUN


def of_scale(scale: str) -> PlanConfig:
    """With the GPUs and the settings of a scale."""
    return of_run(at_scale(STAGE_1.paper, scale, STAGE_1.tiny))


def of_run(run: RunConfig, file: str = "") -> PlanConfig:
    """With the settings of a run, which are those in `file` if it is given, and with its GPUs, in whole engines and
    groups of `hpz_ranks`."""
    scale, engine, learner = run.scale, run.engine, run.learner
    machines = MACHINES.get(scale)
    if machines is None or not machines.gpus:
        if file:
            raise ConfigError("--run-config", f"scale {scale} of the file has no GPUs to plan for", "set scale in it")
        raise ConfigError("--scale", f"{scale} has no GPUs to plan for", "give --dry-run to see the actors' placement")
    for option, dtype in (("--engine.dtype", engine.dtype), ("--learner.dtype", learner.dtype)):
        if dtype != "bfloat16":
            raise ConfigError(option, f"only bfloat16 is planned (got {dtype})", "set it in the file of --run-config")
    reserved = math.ceil(engine.replicas * engine.gpus_per_replica + learner.ranks * learner.gpus_per_rank)
    gpus = engine.replicas if shares_gpus(engine, learner) else reserved
    unit = math.lcm(engine.tensor_parallel, learner.hpz_ranks)
    settings = leaves(run)
    of_the_run: dict[str, Any] = {name: settings[setting] for name, setting in SETTINGS.items()}
    of_the_run |= {"scale": scale, "run_config": file, "gpu_memory_gb": machines.gpu_memory_gb}
    of_the_run["gpus"] = max(1, gpus // unit) * unit
    of_the_run["stage"] = run.stage if run.stage in STAGES else PlanConfig.stage
    return PlanConfig(**of_the_run)


def show_dry_run(config: PlanConfig) -> int:
    """Exit status: 0 where the placement is right, 1 where it is not; raises `ConfigError` where it is impossible."""
    from actors.launch.placement_dry_run import as_text, dry_run, problems

    machines = MACHINES[config.scale]
    machines = replace(machines, nodes=config.nodes or machines.nodes)
    wanted = with_values(
        at_scale(STAGE_1.paper, config.scale, STAGE_1.tiny),
        {"on_insufficient_resources": config.on_insufficient_resources},
    )
    seating = dry_run(wanted, machines)
    print(as_text(seating, wanted))
    return int(bool(problems(seating)))


def shape_of(model: str) -> ModelShape:
    """Of the model in a folder. Raises `ConfigError` if it does not exist or cannot be planned."""
    if not model:
        return QWEN3_14B
    path = local_folder(model, weights=False)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError("--model", f"{path} does not exist", "give a model's folder, hub id or config.json")
    try:
        return read_model(path)
    except ValueError as unknown:
        raise ConfigError("--model", str(unknown), "check its config.json, or give another dense model") from unknown


@lru_cache(maxsize=2)
def shape_of_trace(trace: str) -> StageShape:
    """Limits are the longest response and the most turns of the trace, which does not contain them."""
    try:
        rollouts = read_trace(Path(trace))
    except (ValueError, OSError) as error:
        raise ConfigError(
            "--trace", str(error), "give a file of RUN/trajectories, or a trace as in docs/scheduler.md"
        ) from error
    longest, turns = limits_of(rollouts)
    some = tuple(of_size(rollouts, SAMPLE_GROUPS * GROUP_ROLLOUTS))
    mean = sum(rollout.response_tokens for rollout in some) / len(some)
    return StageShape(max_response_tokens=longest, max_turns=turns, mean_response_tokens=mean, recorded=some)


def plan(config: PlanConfig) -> tuple[ModelShape, PoolPlan, PoolPlan | None]:
    """The colocated placement and the best separated one. Raises `ConfigError` for engines that vLLM cannot split."""
    model, parallel = shape_of(config.folder()), config.tensor_parallel
    if not model.splits(parallel):
        sizes = [str(size) for size in range(1, GPUS_PER_NODE + 1) if model.splits(size) and config.gpus % size == 0]
        raise ConfigError(
            "--tensor-parallel",
            f"vLLM cannot split the {model.heads} attention heads and {model.kv_heads} KV heads of {model.name} over "
            f"{parallel} GPUs",
            f"give one of {', '.join(sizes)}",
        )
    gpu = config.planned_gpu()
    stage, rollouts = config.shape(), rollouts_of(config)
    pools = pools_of(config.run(), engine_gpus=config.gpus, learner_gpus=config.gpus, colocated=True)
    pools = replace(pools, takes_rest=not config.gpu_memory_share)
    colocated = plan_pools(model, gpu, pools, stage=stage, rollouts=rollouts)
    separated = best_separated(model, gpu, pools, stage=stage, rollouts=rollouts)
    return model, colocated, separated


def rollouts_of(config: PlanConfig) -> int:
    """Rollouts of a step."""
    return config.prompts * config.run().algorithm.num_rollouts


def arithmetic(config: PlanConfig, model: ModelShape, colocated: PoolPlan) -> str:
    """The memory of one GPU, line by line."""
    memory, tp, gpu = colocated.memory, config.tensor_parallel, config.planned_gpu()
    turns = ", one after the other" if memory.sleeps else ""
    activations = memory.activations
    checkpointed, insides = (
        ("checkpointed: ", "one") if config.run().learner.activation_checkpointing else ("", "every")
    )
    billions = f"{model.parameters / 1e9:.1f}e9"
    rank = config.lora_rank
    served = f" + adapters of {adapter_parameters(model, rank) / 1e6:.0f}e6 x 2 bytes" if rank else ""
    state = _state(config, model, colocated.learner_gpus)
    tokens = max(config.micro_batch_tokens, longest_tokens(config.shape()))
    whole = " (a rollout is not split)" if tokens > config.micro_batch_tokens else ""
    inputs_gb = tokens * model.hidden * 2 * model.layers / GB
    left = "KV of its share" if config.gpu_memory_share else "left for KV    "
    return "\n".join(
        [
            f"one GPU of {gpu.memory_gb:g} GB with the peaks of {gpu.name}, colocated (an engine and a learner rank"
            f" share it{turns}):",
            f"  engine weights   {memory.engine_weights:7.1f} GB = {billions} x 2 bytes{served} / TP {tp}",
            f"  learner state    {memory.trained_state:7.1f} GB = {state} (ZeRO-{config.zero})",
            f"  gradient bucket  {memory.buckets:7.1f} GB   what ZeRO adds up over ranks at a time",
            f"  activations      {activations:7.1f} GB   {tokens} tokens at once{whole}, "
            f"{checkpointed}layers' inputs {inputs_gb:.1f} GB, {insides} layer's inside, a chunk of logits, gathered "
            "weights",
            f"  runtime          {memory.runtime:7.1f} GB   8 %: buffers, fragmentation (assumed)",
            f"  engine's own     {ENGINE_OWN_GB:7.1f} GB   vLLM's activations, CUDA graphs and context",
            f"  {left}  {memory.kv:7.1f} GB / {model.kv_bytes_of_gpu(tp) / 1024:g} KiB per token"
            f" ({model.layers} layers x {model.kv_heads_of_gpu(tp)} heads x {model.head_dim} x 2 x 2 bytes)"
            f" = {colocated.kv_tokens_per_replica:,} tokens per replica",
            f"  engine's share   {_share(config, memory):7.2f}      of the GPU, for its weights, buffers and KV"
            " (--engine.gpu-memory-share)",
        ]
    )


def _share(config: PlanConfig, memory: Memory) -> float:
    """The given share, or all that is left beside the learner, rounded down: an engine that asks for more than is free
    does not start."""
    share = (memory.engine_weights + ENGINE_OWN_GB + max(0.0, memory.kv)) / config.planned_gpu().memory_gb
    return config.gpu_memory_share or math.floor(100 * share - 1e-9) / 100


def checkpoints(config: PlanConfig, model: ModelShape, ranks: int) -> CheckpointPlan:
    """The budgets of the RL stages."""
    run = config.run()
    best = run.evaluate.every_steps > 0
    return plan_checkpoint(model, replace(run.learner, ranks=ranks), run.checkpoint, best=best)


def _of_sft(checkpoint: CheckpointPlan) -> str:
    """SFT's steps are many and short."""
    sft = SFT.paper
    often = replace(checkpoint, every_steps=sft.checkpoint.every_steps)
    return (
        f"SFT writes one every {often.every_steps} of its {sft.sft.steps:,} steps, "
        f"{often.written_gb(sft.sft.steps) / 1e3:.1f} TB in all."
    )


def _state(config: PlanConfig, model: ModelShape, ranks: int) -> str:
    """How a rank's share of the state is counted: bytes a parameter, shared by ranks as ZeRO has it."""
    each = state_bytes(RUN.learner.dtype, config.zero)
    gradients = gradient_bytes(RUN.learner.dtype, config.zero)
    on_device = [(each.weight, 3)] if config.offload else [
        (each.weight, 3), (gradients, 2), (each.master + each.moments, 1)
    ]  # fmt: skip
    whole = sum(size for size, spread_from in on_device if config.zero < spread_from)
    spread = sum(size for size, spread_from in on_device if config.zero >= spread_from)
    bytes_each = " + ".join(
        part for part in (f"{whole}" if whole else "", f"{spread} / {ranks} ranks" if spread else "") if part
    )
    billions = f"{model.parameters / 1e9:.1f}e9"
    if not config.lora_rank:
        return f"{billions} x ({bytes_each}) bytes"
    adapters = adapter_parameters(model, config.lora_rank)
    frozen = f"{each.weight} / {ranks} ranks" if config.zero == 3 else f"{each.weight}"
    return f"{billions} x ({frozen}) bytes + adapters of {adapters / 1e6:.0f}e6 x ({bytes_each})"


def report(config: PlanConfig, model: ModelShape, colocated: PoolPlan, separated: PoolPlan | None) -> str:
    stage, siblings = config.shape(), config.run().algorithm.num_rollouts
    lines = [
        f"{model.name}, {config.trace or config.stage}: {config.prompts} x {siblings} rollouts, at most"
        f" {stage.max_response_tokens} tokens and {stage.max_turns} turns. Computed, not measured.",
        "",
        arithmetic(config, model, colocated),
        "",
        f"{'placement':<12}{'engines':>8}{'ranks':>7}{'KV tokens':>11}{'in flight':>11}{'step':>8}{'range':>15}"
        f"{'MFU':>6}  limited by",
    ]
    placements = [placement for placement in (colocated, separated) if placement is not None]
    for placement in placements:
        span = f"{placement.least_s:.0f} to {placement.most_s:.0f} s"
        times = (
            "    does not fit"
            if placement.problems
            else f"{placement.step_s:>7.0f}s{span:>15}{placement.expected.learning.mfu:>6.0%}  {placement.limited_by}"
        )
        lines.append(
            f"{placement.name:<12}{placement.engine_gpus // config.tensor_parallel:>8}{placement.learner_gpus:>7}"
            f"{placement.kv_tokens_per_replica:>11,}{placement.in_flight:>11,}{times}"
        )
    fitting = [placement for placement in placements if not placement.problems]
    steps = {placement.name: by_staleness(config, model, placement) for placement in fitting}
    lines += ["", *(parts_line(placement) for placement in fitting)]
    lines += [
        f"A mean rollout waits {colocated.tools_s:.1f} s for tools. The range has a larger and a smaller share of every"
        " peak (scheduler/planner/gpus.py).",
        checkpoints(config, model, colocated.learner_gpus).summary() + ".",
        _of_sft(checkpoints(config, model, colocated.learner_gpus)),
        "A synchronous step is the sum of its parts, colocated and separated.",
        *(staleness_line(placement, steps[placement.name]) for placement in fitting),
        *(rule_line(placement, by_rule(config, model, placement)) for placement in fitting if config.trace),
    ]
    if len(fitting) == 2:
        best = {name: recommended(of_placement) for name, of_placement in steps.items()}
        better, other = sorted(best, key=lambda name: steps[name][best[name]])
        gain = steps[other][best[other]] / steps[better][best[better]]
        how = {one.name: f"{one.name} with {_options(one, best[one.name])}" for one in fitting}
        lines.append(f"{how[better]} is {gain:.2f} x faster per step than {how[other]}.")
    for placement in placements:
        lines += [f"DOES NOT FIT ({placement.name}): {problem}" for problem in placement.problems]
    return "\n".join(lines)


def parts_line(placement: PoolPlan) -> str:
    parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in placement.expected.parts.items())
    return f"{placement.name} [s]: {parts} (by {placement.weight_way})."


def by_staleness(config: PlanConfig, model: ModelShape, placement: PoolPlan) -> dict[int, float]:
    """Seconds of a step."""
    pools = pools_of(
        config.run(),
        engine_gpus=placement.engine_gpus,
        learner_gpus=placement.learner_gpus,
        colocated=placement.name == "colocated",
    )
    pools = replace(pools, takes_rest=not config.gpu_memory_share or not pools.colocated)
    rollouts, stage = rollouts_of(config), config.shape()
    return stale_steps(model, config.planned_gpu(), pools, placement.expected, stage=stage, rollouts=rollouts)


def _options(placement: PoolPlan, staleness: int) -> str:
    """The options of a run with this staleness."""
    awake = f" --engine.no-sleep --engine.gpu-memory-share {placement.awake_share:g}"
    return f"--staleness {staleness}{awake * (staleness > 0 and placement.memory.sleeps)}"


def staleness_line(placement: PoolPlan, steps: Mapping[int, float]) -> str:
    times = ", ".join(f"{_options(placement, staleness)} {seconds:.0f} s" for staleness, seconds in steps.items())
    best = recommended(steps)
    if best:
        gain = f"{steps[0] / steps[best]:.2f} x faster"
    elif len(steps) == 1:
        gain = "a larger one needs --engine.no-sleep, which does not fit"
    else:
        gain = "nearly as fast as a larger one" if steps[0] > min(steps.values()) else "no larger one is faster"
    return f"{placement.name}, a step with {times}: {_options(placement, best)} is recommended ({gain})."


def by_rule(config: PlanConfig, model: ModelShape, placement: PoolPlan) -> dict[str, RuleTimes]:
    """Simulated seconds of generation by placement rule."""
    stage, replicas, run = config.shape(), placement.engine_gpus // config.tensor_parallel, config.run()
    return rule_times(
        stage.recorded,
        per_replica=rollouts_of(config) / replicas,
        replicas=replicas,
        shape=EngineShape(
            kv_tokens=placement.kv_tokens_per_replica,
            block_tokens=run.engine.block_size,
            max_running=config.max_running,
            max_batched_tokens=run.engine.max_batched_tokens,
        ),
        cost=engine_cost(model, config.planned_gpu(), EXPECTED, config.tensor_parallel),
        max_response_tokens=stage.max_response_tokens,
        max_turns=stage.max_turns,
        placement=run.balancer,
    )


def rule_line(placement: PoolPlan, times: Mapping[str, RuleTimes]) -> str:
    each = ", ".join(f"{rule} {one.first_s:.0f} and {one.later_s:.0f} s" for rule, one in times.items())
    return (
        f"{placement.name}, generation in a first and a later step (simulated, with --staleness 0): {each}:"
        f" --balancer.rule {recommended_rule(times)} is recommended. With a staleness the default rule is"
        " faster on most traces: where draws overlap, a simple rule recomputes contexts."
    )


def row(config: PlanConfig, model: ModelShape, placement: PoolPlan) -> dict[str, Any]:
    """For JSON; what does not fit has no times."""
    fields = dataclasses.asdict(placement)
    if placement.problems:
        return fields | dict.fromkeys(("expected", "least_s", "most_s"))
    steps = by_staleness(config, model, placement)
    times = {"step_s": placement.step_s, "by_staleness_s": steps, "recommended_staleness": recommended(steps)}
    if config.trace:
        rules = by_rule(config, model, placement)
        by_name = {rule: dataclasses.asdict(one) for rule, one in rules.items()}
        times |= {"by_rule_s": by_name, "recommended_rule": recommended_rule(rules)}
    return fields | times | {"limited_by": placement.limited_by}


def main(argv: Sequence[str] | None = None) -> int:
    return exit_status_of(lambda: show_plan(sys.argv[1:] if argv is None else argv), expected=_is_expected)


def _is_expected(failed: Exception) -> bool:
    """Whether the settings cannot be planned, or a file cannot be read; anything else is a fault of the planner."""
    return isinstance(failed, ValueError | OSError)


def show_plan(argv: Sequence[str]) -> int:
    """Print the plan; returns 1 if no placement fits, else 0."""
    config = parsed(argv)
    if config.dry_run:
        return show_dry_run(config)
    model, colocated, separated = plan(config)
    if config.json:
        placements = [row(config, model, placement) for placement in (colocated, separated) if placement is not None]
        checkpoint = checkpoints(config, model, colocated.learner_gpus)
        sizes = dataclasses.asdict(checkpoint) | {"total_gb": checkpoint.total_gb, "on_disk_gb": checkpoint.on_disk_gb}
        head = {
            "model": model.name,
            "stage": "" if config.trace else config.stage,
            "trace": config.trace,
            "computed": True,
        }
        print(json.dumps({**head, "placements": placements, "checkpoint": sizes}))
    else:
        print(report(config, model, colocated, separated))
    return int(all(placement is None or placement.problems for placement in (colocated, separated)))


if __name__ == "__main__":
    sys.exit(main())
