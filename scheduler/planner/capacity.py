"""What fits on which GPUs, and the time of a step: computed from a model's shape and a GPU's data sheet, not measured.

GB are 1e9 bytes. Times are from `scheduler.planner.step_time`, with a range for the assumed shares of peak
performance; calibrate them with your GPUs before you rely on them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from rstar_ray.algorithm.state_bytes import BYTES, RankBytes, rank_bytes
from rstar_ray.config import AlgorithmConfig, EngineConfig, LearnerConfig, OptimizerConfig, RunConfig
from rstar_ray.config.gpus import WeightWay
from scheduler.planner.gpus import EXPECTED, GPUS, GPUS_PER_NODE, OPTIMISTIC, PESSIMISTIC, Gpu, Shares
from scheduler.planner.model_shape import GB, ModelShape
from scheduler.planner.step_time import (
    PASSES,
    StepTime,
    generation,
    learning,
    overlapped_generation_s,
    publish_seconds,
)
from scheduler.traces.stage_traces import StageShape, synthetic
from scheduler.traces.trace import TraceRollout

GPU_SIZES_GB = tuple(sorted({gpu.memory_gb for gpu in GPUS.values()}))
LEAST_MICRO_BATCH_TOKENS = 1_024  # smaller ones are not suggested: a pass would be mostly overhead
LORA_RANK = 32  # suggested if the full model does not fit
OPTIONS = ("parallel", "sleep", "micro", "share", "offload", "lora", "separated")
HARDWARE = ("gpus", "memory")
"""Kinds of changes that the planner suggests, in the order in which they are combined."""
MEMORY_SHARES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of an engine; suggested if the given one does not fit
SAMPLE_GROUPS = 48  # prompt groups of the synthetic trace that lengths are taken from
STALENESS = (0, 1, 2)  # values that are compared
WORTH = 0.93  # a larger staleness is recommended only if a step takes less than this share: older tokens may be worse
ENGINE_OWN_GB = 2.7  # of an engine's share, for vLLM's activations, CUDA graphs and context

# The defaults of a run.
RUN = RunConfig()
LOGITS_CHUNK_TOKENS = RUN.learner.logprob_chunk_tokens
GROUP_ROLLOUTS = RUN.algorithm.rollouts_per_prompt  # of a sample, whose lengths they do not change


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """The GPUs of engines and learner ranks, and the settings that a step depends on."""

    engine_gpus: int
    learner_gpus: int
    colocated: bool  # an engine and a learner rank share every GPU
    engine: EngineConfig
    learner: LearnerConfig
    algorithm: AlgorithmConfig
    optimizer: OptimizerConfig
    takes_rest: bool = False  # an engine takes all free memory, regardless of `gpu_memory_share`

    @property
    def tensor_parallel(self) -> int:
        return self.engine.tensor_parallel

    @property
    def memory_share(self) -> float:
        """The share of a GPU that its engine takes for weights and KV; 0: all free memory."""
        return 0.0 if self.takes_rest else self.engine.gpu_memory_share

    @property
    def sleeps(self) -> bool:
        """Whether an engine frees its memory while the learner updates."""
        return self.engine.sleep and self.colocated

    def with_engine(self, **values: Any) -> "Pools":
        return replace(self, engine=replace(self.engine, **values))

    def with_learner(self, **values: Any) -> "Pools":
        return replace(self, learner=replace(self.learner, **values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of one GPU, in GB."""

    engine_weights: float
    trained_state: float  # with hpZ's copy of the weights
    buckets: float  # for the reduction of gradients over ranks
    activations: float
    runtime: float
    kv: float  # the rest; negative: it does not fit
    sleeps: bool  # the engine's part and an update's part are not held at the same time

    @property
    def total(self) -> float:
        engine = self.engine_weights + ENGINE_OWN_GB + max(0.0, self.kv)
        update = self.buckets + self.activations
        return self.trained_state + self.runtime + (max(engine, update) if self.sleeps else engine + update)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """One way to share the GPUs, and the time of a step with it."""

    name: str
    engine_gpus: int
    learner_gpus: int
    memory: Memory  # of a GPU with an engine
    kv_tokens_per_replica: int
    in_flight: int  # number of rollouts of mean length that all replicas hold together
    tools_s: float  # mean time that a rollout waits for tools
    expected: StepTime
    least_s: float  # of a step, with the optimistic shares of peak performance
    most_s: float
    problems: tuple[str, ...] = ()
    weight_way: WeightWay = "object_store"  # how new weights reach the engines
    awake_share: float = 0.0  # of a GPU's memory for an engine that no longer sleeps; 0: the engines do not sleep

    @property
    def step_s(self) -> float:
        return self.expected.total_s

    @property
    def limited_by(self) -> str:
        """The longest part of a step, with its share."""
        part, seconds = max(self.expected.parts.items(), key=lambda item: item[1])
        return f"{part} ({seconds / self.step_s:.0%})"


def logits_gb(vocabulary: int, tokens: int, chunk_tokens: int = LOGITS_CHUNK_TOKENS) -> float:
    """One chunk in the backward pass: log-probs, their gradients and those of the entropy, in float32."""
    return 3 * min(chunk_tokens, tokens) * vocabulary * 4 / GB


def activations_gb(
    model: ModelShape, micro_batch_tokens: int, *, checkpointing: bool = True, chunk_tokens: int = LOGITS_CHUNK_TOKENS
) -> float:
    """Every layer's input, the activations of one layer (without checkpointing of every layer), their gradients in one
    layer, a chunk of logits, a gathered layer."""
    kept = micro_batch_tokens * model.hidden * 2 * model.layers
    layers = (1 if checkpointing else model.layers) + 1
    layer = layers * micro_batch_tokens * (8 * model.hidden + 3 * model.intermediate) * 2
    gathered = 2 * (model.parameters / model.layers + model.vocabulary * model.hidden) * 2
    return (kept + layer + gathered) / GB + logits_gb(model.vocabulary, micro_batch_tokens, chunk_tokens)


def update_gb(model: ModelShape, learner: LearnerConfig, longest: int) -> float:
    """Activations of a learner rank in an update with rollouts of up to `longest` tokens, which are not split."""
    return activations_gb(
        model,
        max(learner.micro_batch_tokens, longest),
        checkpointing=learner.activation_checkpointing,
        chunk_tokens=learner.logprob_chunk_tokens,
    )


def way_of(pools: Pools) -> WeightWay:
    """The transfer of weights from these ranks to these engines."""
    if pools.learner.lora_rank or pools.learner.weights_by == "object_store":
        return "object_store"
    if not pools.colocated:
        return "nccl"
    return "ipc" if pools.tensor_parallel == 1 else "object_store"


def pools_of(config: RunConfig, *, engine_gpus: int, learner_gpus: int, colocated: bool) -> Pools:
    """The settings of a run on this many GPUs."""
    return Pools(
        engine_gpus=engine_gpus,
        learner_gpus=learner_gpus,
        colocated=colocated,
        engine=config.engine,
        learner=config.learner,
        algorithm=config.algorithm,
        optimizer=config.optimizer,
    )


def plan_pools(model: ModelShape, gpu: Gpu, pools: Pools, *, stage: StageShape, rollouts: int) -> PoolPlan:
    """Memory, KV and times of one step, which generates `rollouts` and trains on a share of them (GRPO-RoC)."""
    longest, sample = longest_tokens(stage), _sample(stage)
    kv_tokens = kv_tokens_of(model, gpu, pools, longest)
    mean_prompt = sum(rollout.prompt_tokens for rollout in sample) / len(sample)
    mean_response = sum(rollout.response_tokens for rollout in sample) / len(sample)
    least, expected, most = (
        step_time(model, gpu, shares, pools, stage=stage, rollouts=rollouts)
        for shares in (OPTIMISTIC, EXPECTED, PESSIMISTIC)
    )
    return PoolPlan(
        name="colocated" if pools.colocated else "separated",
        engine_gpus=pools.engine_gpus,
        learner_gpus=pools.learner_gpus,
        memory=engine_memory(model, gpu, pools, longest),
        kv_tokens_per_replica=kv_tokens,
        in_flight=min(rollouts, int(_replicas(pools) * kv_tokens / (mean_prompt + mean_response / 2))),
        tools_s=sum(turn.tool_seconds for rollout in sample for turn in rollout.turns) / len(sample),
        expected=expected,
        least_s=least.total_s,
        most_s=most.total_s,
        problems=_advised(lacks(model, gpu, stage, pools), model, gpu, stage, pools),
        weight_way=way_of(pools),
        awake_share=awake(model, gpu, pools, longest).memory_share if pools.sleeps else 0.0,
    )


def step_time(
    model: ModelShape, gpu: Gpu, shares: Shares, pools: Pools, *, stage: StageShape, rollouts: int
) -> StepTime:
    """The time of one step with these shares of the GPU's peak performance."""
    sample, learner, replicas = _sample(stage), pools.learner, _replicas(pools)
    longest = longest_tokens(stage)
    generated = generation(
        model,
        gpu,
        shares,
        sample,
        rollouts=rollouts / replicas,
        kv_tokens=max(kv_tokens_of(model, gpu, pools, longest), longest),
        max_running=pools.engine.max_running,
        tensor_parallel=pools.tensor_parallel,
        siblings=pools.algorithm.num_rollouts,
    )
    anchored = pools.optimizer.updates_per_step > 1  # old log-probs by a separate pass
    learned = learning(
        model,
        gpu,
        shares,
        learner,
        sample,
        ranks=pools.learner_gpus,
        rows=rollouts * pools.algorithm.keep / pools.algorithm.num_rollouts,
        trained_parameters=_trained_parameters(model, learner),
        passes=PASSES - (not learner.activation_checkpointing) + anchored + bool(pools.algorithm.loaded_reference),
    )
    return StepTime(
        generation=generated,
        learning=learned,
        publish_s=sum(publish_parts(model, gpu, shares, pools).values()),
        host_s=rollouts * shares.rollout_s + (shares.wake_s if pools.sleeps else 0.0),
    )


def stale_steps(
    model: ModelShape, gpu: Gpu, pools: Pools, synchronous: StepTime, *, stage: StageShape, rollouts: int
) -> dict[int, float]:
    """Expected seconds of a step by staleness; `synchronous` is the time of a step without staleness.

    On shared GPUs, learner and engines are assumed to slow each other as if they took turns, so that rollouts of later
    steps only fill the tail. On separate GPUs engines decode beside the learner and the head. Engines that sleep allow
    no staleness: the times are of `awake` engines, if these fit.
    """
    found, longest = {0: synchronous.total_s}, longest_tokens(stage)
    if pools.sleeps:
        pools = awake(model, gpu, pools, longest)
        if lacks(model, gpu, stage, pools):
            return found
        synchronous = step_time(model, gpu, EXPECTED, pools, stage=stage, rollouts=rollouts)
    replicas, shares, parallel = _replicas(pools), EXPECTED, pools.tensor_parallel
    kv_tokens = max(kv_tokens_of(model, gpu, pools, longest), longest)
    update_s = synchronous.learning.total_s + synchronous.publish_s + synchronous.host_s
    for staleness in STALENESS[1:]:
        spent_s = overlapped_generation_s(
            model,
            gpu,
            shares,
            _sample(stage),
            rollouts=rollouts / replicas,
            kv_tokens=kv_tokens,
            max_running=pools.engine.max_running,
            tensor_parallel=parallel,
            siblings=pools.algorithm.num_rollouts,
            ahead=staleness,
            beside_s=None if pools.colocated else update_s,
        )
        found[staleness] = float(spent_s + update_s if pools.colocated else spent_s)
    return found


def awake(model: ModelShape, gpu: Gpu, pools: Pools, longest: int) -> Pools:
    """The engines without sleep mode, each with its share of memory, or with all that is free beside an update."""
    free = 1 - gpu.runtime_share - learner_gb(model, pools, longest) / gpu.memory_gb
    share = max(0.01, math.floor(100 * free - 1e-9) / 100)  # lower ones are refused as settings
    share = min(share, pools.memory_share or share)
    return replace(pools.with_engine(sleep=False, gpu_memory_share=share), takes_rest=False)


def recommended(steps: Mapping[int, float]) -> int:
    """The least staleness whose step is nearly as short as the shortest."""
    return min(staleness for staleness, seconds in steps.items() if seconds * WORTH <= min(steps.values()))


def publish_parts(model: ModelShape, gpu: Gpu, shares: Shares, pools: Pools) -> dict[str, float]:
    """Seconds to publish one version, by part; with LoRA only the adapters are sent."""
    rank = pools.learner.lora_rank
    return publish_seconds(
        gpu,
        shares,
        way_of(pools),
        published_gb=adapters_gb(model, rank) if rank else model.weights_gb,
        bucket_gb=pools.learner.bucket_bytes / GB,
        ranks=pools.learner_gpus,
    )


def _replicas(pools: Pools) -> int:
    return max(1, pools.engine_gpus // pools.tensor_parallel)


def _trained_parameters(model: ModelShape, learner: LearnerConfig) -> float:
    return adapter_parameters(model, learner.lora_rank) if learner.lora_rank else model.parameters


def _advised(problems: Sequence[str], model: ModelShape, gpu: Gpu, stage: StageShape, pools: Pools) -> tuple[str, ...]:
    """Add a hint to each problem."""
    if not problems:
        return ()
    advice = (
        ", or ".join(remedies(model, gpu, stage, pools)) or "no three options help, nor two changes with other GPUs"
    )
    return tuple(f"{problem}: {advice}" for problem in problems)


def _sample(stage: StageShape) -> tuple[TraceRollout, ...]:
    """A few groups that represent a stage; all ways to share GPUs are compared on the same ones."""
    return stage.recorded or _synthetic(stage)


@lru_cache(maxsize=8)
def _synthetic(stage: StageShape) -> tuple[TraceRollout, ...]:
    return tuple(synthetic(stage, groups=SAMPLE_GROUPS, siblings=GROUP_ROLLOUTS, seed=0))


def longest_tokens(stage: StageShape) -> int:
    """KV tokens of the longest rollout; a synthetic prompt may have 2,048 tokens."""
    longest_prompt = max((rollout.prompt_tokens for rollout in stage.recorded), default=2_048)
    return stage.max_response_tokens + longest_prompt


def _held(model: ModelShape, pools: Pools) -> RankBytes:
    """Bytes that a learner rank holds for the trained parameters."""
    trained = _trained_parameters(model, pools.learner)
    return rank_bytes(trained, dtype=pools.learner.dtype, zero=pools.learner.zero, ranks=pools.learner_gpus)


def trained_gb(model: ModelShape, pools: Pools) -> float:
    """What a learner rank holds between updates: its share of weights, gradients and optimizer state (of frozen weights
    only the weights), hpZ's copy of the weights, and a reference model."""
    held, learner = _held(model, pools), pools.learner
    weights = model.parameters * BYTES[learner.dtype]
    others = weights / learner.copy_ranks if learner.copy_ranks > 1 else 0.0
    if learner.lora_rank:
        others = weights / (pools.learner_gpus if learner.zero == 3 else 1)
    if pools.algorithm.loaded_reference:  # whole on every rank
        others += weights
    return (held.state - (held.offloaded if learner.offload else 0.0) + others) / GB


def buckets_gb(model: ModelShape, pools: Pools) -> float:
    """Buckets of a learner rank for the reduction of gradients over ranks."""
    return _held(model, pools).bucket / GB


def learner_gb(model: ModelShape, pools: Pools, longest: int) -> float:
    """Memory of a learner rank in an update."""
    return trained_gb(model, pools) + buckets_gb(model, pools) + update_gb(model, pools.learner, longest)


def adapter_parameters(model: ModelShape, rank: int) -> float:
    """Parameters of LoRA on every linear layer but the head: `rank` rows for the input and `rank` for the output."""
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = 2 * (model.hidden + query) + 2 * (model.hidden + key)
    return float(model.layers * rank * (attention + 3 * (model.hidden + model.intermediate)))


def adapters_gb(model: ModelShape, rank: int) -> float:
    """The size of adapters in engines, in bfloat16."""
    return adapter_parameters(model, rank) * BYTES["bfloat16"] / GB


def engine_memory(model: ModelShape, gpu: Gpu, pools: Pools, longest: int) -> Memory:
    """Memory of a GPU with an engine."""
    trained = trained_gb(model, pools) if pools.colocated else 0.0
    activations = update_gb(model, pools.learner, longest) if pools.colocated else 0.0
    buckets = buckets_gb(model, pools) if pools.colocated else 0.0
    adapters = adapters_gb(model, pools.learner.lora_rank) if pools.learner.lora_rank else 0.0
    weights = (model.weights_gb + adapters) / pools.tensor_parallel
    runtime = gpu.memory_gb * gpu.runtime_share
    update = 0.0 if pools.sleeps else buckets + activations
    taken = weights + ENGINE_OWN_GB
    left = gpu.memory_gb - taken - trained - update - runtime
    kv = min(left, pools.memory_share * gpu.memory_gb - taken) if pools.memory_share else left
    if (blocks := pools.engine.num_blocks) is not None:
        kv = min(kv, blocks * pools.engine.block_size * model.kv_bytes_of_gpu(pools.tensor_parallel) / GB)
    return Memory(
        engine_weights=weights,
        trained_state=trained,
        buckets=buckets,
        activations=activations,
        runtime=runtime,
        kv=kv,
        sleeps=pools.sleeps,
    )


def kv_tokens_of(model: ModelShape, gpu: Gpu, pools: Pools, longest: int) -> int:
    """KV capacity of one replica, in whole blocks."""
    kv_gb, block = engine_memory(model, gpu, pools, longest).kv, pools.engine.block_size
    tokens = max(0, int(kv_gb * GB / model.kv_bytes_of_gpu(pools.tensor_parallel) + 1e-6))
    return tokens // block * block


def lacks(model: ModelShape, gpu: Gpu, stage: StageShape, pools: Pools) -> list[str]:
    """The parts that do not fit, as text for the user."""
    problems: list[str] = []
    if pools.colocated and pools.tensor_parallel > 1:  # as RunConfig refuses it
        problems.append(f"an engine over {pools.tensor_parallel} GPUs needs them whole, and shares none with a learner")
    longest, context, block = longest_tokens(stage), pools.engine.max_context_tokens, pools.engine.block_size
    kv_tokens = kv_tokens_of(model, gpu, pools, longest)
    if kv_tokens < max(longest + block, context):  # vLLM reserves a block, and does not start with less than a context
        kv_gb = engine_memory(model, gpu, pools, longest).kv
        problems.append(
            f"{kv_gb:.1f} GB are left for KV, {kv_tokens} tokens; one rollout may need {max(longest, context)}, and "
            f"vLLM reserves one block ({block} tokens)"
        )
    learner = learner_gb(model, pools, longest)
    runtime = gpu.memory_gb * gpu.runtime_share
    beside = trained_gb(model, pools) if pools.sleeps else learner  # what the learner holds beside a running engine
    if learner + runtime > gpu.memory_gb:
        problems.append(f"a learner rank needs {learner:.1f} GB and {runtime:.1f} GB of runtime")
    elif pools.colocated and pools.memory_share * gpu.memory_gb + beside + runtime > gpu.memory_gb:
        problems.append(
            f"an engine's share of {pools.memory_share:g} is {pools.memory_share * gpu.memory_gb:.1f} GB, and beside a "
            f"learner rank {gpu.memory_gb - beside - runtime:.1f} GB are left"
        )
    return problems


def remedies(model: ModelShape, gpu: Gpu, stage: StageShape, pools: Pools) -> list[str]:
    """The fewest changes with which everything fits, one of each kind; options are tried before other GPUs."""
    kinds = OPTIONS + HARDWARE
    for count, allowed in ((1, OPTIONS), (2, OPTIONS), (3, OPTIONS), (1, kinds), (2, kinds)):
        found: dict[tuple[str, ...], str] = {}
        for changed, words, other_gpu, other in _combined(model, gpu, stage, pools, allowed, count):
            if changed not in found and not lacks(model, other_gpu, stage, other):
                found[changed] = words
        if found:
            return list(found.values()) if count == 1 else list(found.values())[:3]
    return []


def _combined(
    model: ModelShape, gpu: Gpu, stage: StageShape, pools: Pools, kinds: Sequence[str], count: int
) -> Iterator[tuple[tuple[str, ...], str, Gpu, Pools]]:
    """Each `count` changes of different kinds as (kinds, text, GPU, pools)."""
    for kind, change, other_gpu, other in _changes(model, gpu, stage, pools):
        if kind not in kinds:
            continue
        if count == 1:
            yield (kind,), change, other_gpu, other
            continue
        later = kinds[kinds.index(kind) + 1 :]
        for others, more, last_gpu, last in _combined(model, other_gpu, stage, other, later, count - 1):
            yield (kind, *others), f"{change}{' and ' if count == 2 else ', '}{more}", last_gpu, last


def _changes(model: ModelShape, gpu: Gpu, stage: StageShape, pools: Pools) -> Iterator[tuple[str, str, Gpu, Pools]]:
    """Each change as (kind, text, result); within a kind the smallest change first."""
    gpus = pools.engine_gpus if pools.colocated else pools.engine_gpus + pools.learner_gpus
    for parallel in (2 * pools.tensor_parallel, 4 * pools.tensor_parallel, 8 * pools.tensor_parallel):
        within = parallel <= GPUS_PER_NODE  # as an engine is
        if within and pools.engine_gpus % parallel == 0 and model.splits(parallel):
            words = f"--engine.tensor-parallel {parallel} instead of {pools.tensor_parallel}"
            yield "parallel", words, gpu, pools.with_engine(tensor_parallel=parallel)
    if pools.colocated and not pools.engine.sleep:
        for share in reversed(MEMORY_SHARES) if pools.memory_share else (0.0,):
            given = {"gpu_memory_share": share} if share else {}
            words = "--engine.sleep" + (f" with --engine.gpu-memory-share {share:g}" if share else "") + " (NVIDIA)"
            yield "sleep", words, gpu, pools.with_engine(sleep=True, **given)
    tokens = pools.learner.micro_batch_tokens // 2
    while tokens >= max(LEAST_MICRO_BATCH_TOKENS, longest_tokens(stage)):  # a row is not split
        words = f"--learner.micro-batch-tokens {tokens} instead of {pools.learner.micro_batch_tokens}"
        yield "micro", words, gpu, pools.with_learner(micro_batch_tokens=tokens)
        tokens //= 2
    for share in sorted(MEMORY_SHARES, key=lambda share: abs(share - pools.memory_share)) if pools.memory_share else ():
        words = f"--engine.gpu-memory-share {share:g} instead of {pools.memory_share:g}"
        yield "share", words, gpu, pools.with_engine(gpu_memory_share=share)
    if not pools.learner.offload:
        yield "offload", "--learner.offload (optimizer state in host memory)", gpu, pools.with_learner(offload=True)
    if not pools.learner.lora_rank:
        words = f"--learner.lora-rank {LORA_RANK} (adapters in place of the weights)"
        yield "lora", words, gpu, pools.with_learner(lora_rank=LORA_RANK)
    if pools.colocated:
        for engines in range(pools.tensor_parallel, gpus, pools.tensor_parallel):
            split = apart(pools, engines, gpus - engines)
            yield "separated", "separated pools", gpu, split
    for times in (2, 4, 8, 16, 32, 64):
        more = replace(pools, engine_gpus=times * pools.engine_gpus, learner_gpus=times * pools.learner_gpus)
        yield "gpus", f"{times * gpus} GPUs", gpu, more
    for size_gb in GPU_SIZES_GB:
        if size_gb > gpu.memory_gb:
            yield "memory", f"GPUs of {size_gb:g} GB", replace(gpu, memory_gb=size_gb), pools


def apart(pools: Pools, engine_gpus: int, learner_gpus: int) -> Pools:
    """Engines and ranks on separate GPUs, where an engine takes all memory."""
    return replace(pools, colocated=False, engine_gpus=engine_gpus, learner_gpus=learner_gpus, takes_rest=True)


def best_separated(model: ModelShape, gpu: Gpu, pools: Pools, *, stage: StageShape, rollouts: int) -> PoolPlan | None:
    """The split of the engines' GPUs into two pools with the shortest step; None if there are too few to split."""
    gpus = pools.engine_gpus
    step = max(1, gpus // 16 // pools.tensor_parallel) * pools.tensor_parallel  # whole engines only
    splits = [
        plan_pools(model, gpu, apart(pools, engine_gpus, gpus - engine_gpus), stage=stage, rollouts=rollouts)
        for engine_gpus in range(step, gpus, step)
        if (gpus - engine_gpus) % pools.learner.hpz_ranks == 0
    ]
    return min(splits, key=lambda split: (len(split.problems), split.step_s), default=None)
