"""What fits where, and how long a step takes: arithmetic on a model's shape and a GPU's figures, nothing measured.

GB are 1e9 bytes. Times rest on shares of peak that are assumptions (`Gpu`), and on the simulated makespan of a step
being `OVER_BOUND` times its lower bound (docs/scheduler.md); calibrate against your own engine before relying on them.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from rstar_ray.algorithm.state_bytes import RankBytes, rank_bytes, state_bytes
from rstar_ray.config import EngineConfig, LearnerConfig, RunConfig
from rstar_ray.config.gpus import WeightWay
from rstar_ray.experts import experts_in
from scheduler.cost import EngineCost
from scheduler.simulator.bound import lower_bound
from scheduler.simulator.engine_model import EngineShape
from scheduler.traces.stage_traces import StageShape, synthetic
from scheduler.traces.trace import TraceRollout

GB = 1e9
OVER_BOUND = 1.2  # a simulated step under expected_kv over the bound used here: 1.1 to 1.4
GPU_SIZES_GB = (80.0, 96.0, 141.0, 192.0, 256.0, 288.0)
LEAST_MICRO_BATCH_TOKENS = 1_024  # smaller ones are not offered: a pass would be mostly overhead
LORA_RANK = 32  # offered where the full model does not fit
MEMORY_SHARES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of an engine; offered where the one given does not do
SAMPLE_GROUPS = 48  # prompt groups of the synthetic trace that lengths are taken from

# What a run would do that sets nothing.
RUN = RunConfig()
STATE = state_bytes(RUN.learner.dtype, RUN.learner.zero)
LOGITS_CHUNK_TOKENS = RUN.learner.logprob_chunk_tokens
GROUP_ROLLOUTS = RUN.algorithm.rollouts_per_prompt
TRAINED_SHARE = RUN.algorithm.keep / GROUP_ROLLOUTS  # of the rollouts
PASSES = 4 if RUN.learner.activation_checkpointing else 3  # of a forward's work: forward, recomputation, backward
ANCHOR_PASSES = 1 if RUN.optimizer.updates_per_step > 1 else 0  # old log-probs by a separate pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder's sizes, as in a Hugging Face `config.json`."""

    name: str
    parameters: float
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def weights_gb(self) -> float:
        return self.parameters * 2 / GB

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of every layer in bf16."""
        return self.layers * self.kv_heads * self.head_dim * 2 * 2


QWEN3_14B = ModelShape(
    name="Qwen3-14B",
    parameters=14.8e9,
    layers=40,
    hidden=5_120,
    intermediate=17_408,
    heads=40,
    kv_heads=8,
    head_dim=128,
    vocabulary=151_936,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU; peaks from its data sheet (MI300X by default), shares of them assumed."""

    memory_gb: float = 192.0
    bandwidth_tb_s: float = 5.3
    tflops: float = 1_307.0  # dense bf16
    bandwidth_share: float = 0.7
    prefill_share: float = 0.4
    train_share: float = 0.35
    runtime_share: float = 0.08  # of memory: context, graphs, communication buffers, fragmentation
    gather_gb_s: float = 1.4  # by rank 0, to its host: a copy off the device, two in memory, and the sums
    move_gb_s: float = 1.1  # through Ray's object store to another node, and into its shared memory
    load_gb_s: float = 10.0  # from there to the device
    collective_gb_s: float = 40.0  # gathered over all ranks, or broadcast: the slowest link, several nodes
    device_load_gb_s: float = 100.0  # into an engine's own weights, on its device: read and written three times


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Which GPUs engines and learner ranks get, and the settings of both."""

    engine_gpus: int
    learner_gpus: int
    colocated: bool  # an engine and a learner rank share every GPU
    engine: EngineConfig
    learner: LearnerConfig
    takes_rest: bool = False  # an engine takes all memory that is left, whatever `gpu_memory_share` says

    @property
    def tensor_parallel(self) -> int:
        return self.engine.tensor_parallel

    @property
    def memory_share(self) -> float:
        """Of a GPU, that its engine takes for weights and KV; 0: all that is left."""
        return 0.0 if self.takes_rest else self.engine.gpu_memory_share

    def with_engine(self, **values: Any) -> "Pools":
        return replace(self, engine=replace(self.engine, **values))

    def with_learner(self, **values: Any) -> "Pools":
        return replace(self, learner=replace(self.learner, **values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """GB on one GPU."""

    engine_weights: float
    trained_state: float
    buckets: float  # in which gradients are added up over ranks
    activations: float
    runtime: float
    kv: float  # what is left; negative: it does not fit

    @property
    def total(self) -> float:
        held = self.engine_weights + self.trained_state + self.buckets + self.activations + self.runtime
        return held + max(0.0, self.kv)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """One way to share the GPUs, and what a step costs there."""

    name: str
    engine_gpus: int
    learner_gpus: int
    memory: Memory  # of a GPU with an engine
    kv_tokens_per_replica: int
    in_flight: int  # rollouts that all replicas hold together at mean length
    generate_s: float
    tools_s: float  # of it, waiting for tools in a mean rollout
    learn_s: float
    publish_s: float
    step_s: float
    problems: tuple[str, ...] = ()
    weight_way: WeightWay = "object_store"  # how new weights reach the engines


def read_model(path: Path) -> ModelShape:
    """From a dense model's `config.json`; null is as absent. Raises `ValueError` naming file and field."""
    try:
        content: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # no JSON, or no UTF-8
        raise ValueError(f"{path}: no JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: no JSON object")
    row = cast(dict[str, Any], content)
    if experts := experts_in(row):
        raise ValueError(f"{path}: {experts}, a mixture of experts; only dense models are planned")

    def number(name: str, default: int | None = None) -> int:
        value = default if row.get(name) is None else row[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{path}: {name!r} is {value!r}, not a whole number of at least 1")
        return value

    hidden, layers, heads = number("hidden_size"), number("num_hidden_layers"), number("num_attention_heads")
    kv_heads, vocabulary = number("num_key_value_heads", heads), number("vocab_size")
    head_dim, intermediate = number("head_dim", hidden // heads), number("intermediate_size")
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    embeddings = vocabulary * hidden * (1 if row.get("tie_word_embeddings") else 2)
    return ModelShape(
        name=str(row.get("_name_or_path") or path.parent.name),
        parameters=float(layers * (attention + 3 * hidden * intermediate) + embeddings),
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
    )


def logits_gb(vocabulary: int, tokens: int) -> float:
    """Of one chunk, in the backward pass: log-probs, their gradients and the entropy's part of these, in float32."""
    return 3 * min(LOGITS_CHUNK_TOKENS, tokens) * vocabulary * 4 / GB


def activations_gb(model: ModelShape, micro_batch_tokens: int) -> float:
    """Checkpointed: every layer's input, one layer's inside twice over, one chunk of logits, one gathered layer."""
    kept = micro_batch_tokens * model.hidden * 2 * model.layers
    layer = 2 * micro_batch_tokens * (8 * model.hidden + 3 * model.intermediate) * 2
    gathered = 2 * (model.parameters / model.layers + model.vocabulary * model.hidden) * 2
    return (kept + layer + gathered) / GB + logits_gb(model.vocabulary, micro_batch_tokens)


def engine_cost(model: ModelShape, gpu: Gpu, tensor_parallel: int) -> EngineCost:
    """Decode reads the weights once a step and every context once; prefill is bound by arithmetic."""
    bandwidth = gpu.bandwidth_tb_s * 1e12 * gpu.bandwidth_share * tensor_parallel
    flops = gpu.tflops * 1e12 * gpu.prefill_share * tensor_parallel
    return EngineCost(
        fixed_s=model.weights_gb * GB / bandwidth + 1e-3,
        per_sequence_s=20e-6,
        per_context_s=model.kv_bytes_per_token / bandwidth,
        per_prefill_s=2 * model.parameters / flops,
        per_prefill_context_s=4 * model.layers * model.hidden / flops,
    )


def publish_seconds(
    model: ModelShape, gpu: Gpu, way: WeightWay = "object_store", *, lora_rank: int = 0
) -> dict[str, float]:
    """Of one version, by part; all nodes move and all engines load at one time. Of LoRA the adapters alone are sent."""
    published_gb = adapters_gb(model, lora_rank) if lora_rank else model.weights_gb
    speeds = {
        "object_store": {"gather": gpu.gather_gb_s, "move": gpu.move_gb_s, "load": gpu.load_gb_s},
        "nccl": {"gather": gpu.collective_gb_s, "move": gpu.collective_gb_s, "load": gpu.device_load_gb_s},
        "ipc": {"gather": gpu.collective_gb_s, "move": math.inf, "load": gpu.device_load_gb_s},
    }
    return {part: published_gb / gb_s for part, gb_s in speeds[way].items()}


def way_of(pools: Pools) -> WeightWay:
    """How weights get from these ranks to these engines where nothing else is asked for."""
    if pools.learner.lora_rank:
        return "object_store"
    if not pools.colocated:
        return "nccl"
    return "ipc" if pools.tensor_parallel == 1 else "object_store"


def pools_of(config: RunConfig, *, engine_gpus: int, learner_gpus: int, colocated: bool) -> Pools:
    """What a run sets, on so many GPUs."""
    return Pools(
        engine_gpus=engine_gpus,
        learner_gpus=learner_gpus,
        colocated=colocated,
        engine=config.engine,
        learner=config.learner,
    )


def step_seconds(*, generate_s: float, learn_s: float, publish_s: float) -> float:
    """Without staleness the loop does one after the other, on shared GPUs and on separate pools alike."""
    return generate_s + learn_s + publish_s


def plan_pools(model: ModelShape, gpu: Gpu, pools: Pools, *, stage: StageShape, rollouts: int) -> PoolPlan:
    """Memory, KV, and the times of one step. `rollouts` are generated, a share of them trained on (GRPO-RoC)."""
    memory = engine_memory(model, gpu, pools)
    kv_tokens = kv_tokens_of(model, gpu, pools)
    replicas, sample = max(1, pools.engine_gpus // pools.tensor_parallel), _sample(stage)
    mean_prompt = sum(rollout.prompt_tokens for rollout in sample) / len(sample)
    mean_response = sum(rollout.response_tokens for rollout in sample) / len(sample)
    cost = engine_cost(model, gpu, pools.tensor_parallel)
    share = rollouts / len(sample)  # the sample stands for all of them
    shape = EngineShape(kv_tokens=max(kv_tokens, longest_tokens(stage)), max_running=pools.engine.max_running)
    bound = lower_bound(sample, replicas=1, cost=cost, shape=shape)
    work_s, area_s = bound.work_s * share / replicas, bound.kv_area_s * share / replicas
    steps_s = cost.fixed_s * max(rollout.generated_tokens for rollout in sample)
    generate_s = OVER_BOUND * max(bound.longest_rollout_s, area_s, min(work_s + steps_s, 2 * area_s))
    tools_s = sum(turn.tool_seconds for rollout in sample for turn in rollout.turns) / len(sample)
    tokens = rollouts * TRAINED_SHARE * (mean_prompt + mean_response)
    flops_per_parameter = 2 * (PASSES + ANCHOR_PASSES)
    flops = pools.learner_gpus * gpu.tflops * 1e12 * gpu.train_share
    learn_s = flops_per_parameter * model.parameters * tokens / flops
    publish_s = sum(publish_seconds(model, gpu, way_of(pools), lora_rank=pools.learner.lora_rank).values())
    return PoolPlan(
        name="colocated" if pools.colocated else "separated",
        engine_gpus=pools.engine_gpus,
        learner_gpus=pools.learner_gpus,
        memory=memory,
        kv_tokens_per_replica=kv_tokens,
        in_flight=min(rollouts, int(replicas * kv_tokens / (mean_prompt + mean_response / 2))),
        generate_s=generate_s,
        tools_s=tools_s,
        learn_s=learn_s,
        publish_s=publish_s,
        step_s=step_seconds(generate_s=generate_s, learn_s=learn_s, publish_s=publish_s),
        problems=_advised(lacks(model, gpu, stage, pools), model, gpu, stage, pools),
        weight_way=way_of(pools),
    )


def _advised(problems: Sequence[str], model: ModelShape, gpu: Gpu, stage: StageShape, pools: Pools) -> tuple[str, ...]:
    """With what would help."""
    if not problems:
        return ()
    advice = ", or ".join(remedies(model, gpu, stage, pools)) or "no one or two changes help; use a smaller model"
    return tuple(f"{problem}: {advice}" for problem in problems)


@lru_cache(maxsize=8)
def _sample(stage: StageShape) -> tuple[TraceRollout, ...]:
    """A few groups that stand for all of a stage's; many ways to share GPUs are compared on the same ones."""
    return tuple(synthetic(stage, groups=SAMPLE_GROUPS, siblings=GROUP_ROLLOUTS, seed=0))


def longest_tokens(stage: StageShape) -> int:
    """KV of the longest rollout: a prompt may have 2,048 tokens."""
    return stage.max_response_tokens + 2_048


def _held(model: ModelShape, pools: Pools) -> RankBytes:
    """By a learner rank of what is trained."""
    trained = adapter_parameters(model, pools.learner.lora_rank) if pools.learner.lora_rank else model.parameters
    return rank_bytes(trained, dtype=RUN.learner.dtype, zero=pools.learner.zero, ranks=pools.learner_gpus)


def trained_gb(model: ModelShape, pools: Pools) -> float:
    """A learner rank's share of weights, gradients and the optimizer's state; frozen weights are held alone."""
    held = _held(model, pools)
    frozen = 0.0
    if pools.learner.lora_rank:
        frozen = model.parameters * STATE.weight / (pools.learner_gpus if pools.learner.zero == 3 else 1)
    return (held.state - (held.offloaded if pools.learner.offload else 0.0) + frozen) / GB


def buckets_gb(model: ModelShape, pools: Pools) -> float:
    """In which a learner rank adds up gradients over ranks."""
    return _held(model, pools).bucket / GB


def adapter_parameters(model: ModelShape, rank: int) -> float:
    """Of LoRA on every linear layer but the head: `rank` rows for what goes in, and as many for what comes out."""
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = 2 * (model.hidden + query) + 2 * (model.hidden + key)
    return float(model.layers * rank * (attention + 3 * (model.hidden + model.intermediate)))


def adapters_gb(model: ModelShape, rank: int) -> float:
    """As engines hold them, in bfloat16."""
    return adapter_parameters(model, rank) * STATE.weight / GB


def engine_memory(model: ModelShape, gpu: Gpu, pools: Pools) -> Memory:
    """Of a GPU with an engine."""
    trained = trained_gb(model, pools) if pools.colocated else 0.0
    activations = activations_gb(model, pools.learner.micro_batch_tokens) if pools.colocated else 0.0
    buckets = buckets_gb(model, pools) if pools.colocated else 0.0
    adapters = adapters_gb(model, pools.learner.lora_rank) if pools.learner.lora_rank else 0.0
    weights = (model.weights_gb + adapters) / pools.tensor_parallel
    runtime = gpu.memory_gb * gpu.runtime_share
    left = gpu.memory_gb - weights - trained - buckets - activations - runtime
    return Memory(
        engine_weights=weights,
        trained_state=trained,
        buckets=buckets,
        activations=activations,
        runtime=runtime,
        kv=min(left, pools.memory_share * gpu.memory_gb - weights) if pools.memory_share else left,
    )


def kv_tokens_of(model: ModelShape, gpu: Gpu, pools: Pools) -> int:
    """KV capacity of one replica, in whole blocks."""
    kv_gb = engine_memory(model, gpu, pools).kv
    return (
        max(0, int(kv_gb * pools.tensor_parallel * GB / model.kv_bytes_per_token))
        // RUN.engine.block_size
        * RUN.engine.block_size
    )


def lacks(model: ModelShape, gpu: Gpu, stage: StageShape, pools: Pools) -> list[str]:
    """What does not fit."""
    problems: list[str] = []
    kv_tokens, longest = kv_tokens_of(model, gpu, pools), longest_tokens(stage)
    if kv_tokens < longest:
        kv_gb = engine_memory(model, gpu, pools).kv
        problems.append(f"{kv_gb:.1f} GB are left for KV, {kv_tokens} tokens; one rollout may need {longest}")
    activations = activations_gb(model, pools.learner.micro_batch_tokens)
    learner_gb = trained_gb(model, pools) + buckets_gb(model, pools) + activations
    runtime = gpu.memory_gb * gpu.runtime_share
    if learner_gb + runtime > gpu.memory_gb:
        problems.append(f"a learner rank needs {learner_gb:.1f} GB and {runtime:.1f} GB of runtime")
    elif pools.colocated and pools.memory_share * gpu.memory_gb + learner_gb + runtime > gpu.memory_gb:
        problems.append(
            f"an engine's share of {pools.memory_share:g} is {pools.memory_share * gpu.memory_gb:.1f} GB, and beside a "
            f"learner rank {gpu.memory_gb - learner_gb - runtime:.1f} GB are left"
        )
    return problems


def remedies(model: ModelShape, gpu: Gpu, stage: StageShape, pools: Pools) -> list[str]:
    """The least single changes after which all fits, one of each kind; where there is none, pairs of changes."""
    found: dict[str, str] = {}
    for kind, change, other_gpu, other in _changes(gpu, pools):
        if kind not in found and not lacks(model, other_gpu, stage, other):
            found[kind] = change
    if found:
        return list(found.values())
    for kind, change, other_gpu, other in _changes(gpu, pools):
        for also, more, last_gpu, last in _changes(other_gpu, other):
            pair = " and ".join(sorted((kind, also)))
            if also != kind and pair not in found and not lacks(model, last_gpu, stage, last):
                found[pair] = f"{change} and {more}"
    return list(found.values())[:3]


def _changes(gpu: Gpu, pools: Pools) -> Iterator[tuple[str, str, Gpu, Pools]]:
    """Kind, words, and what one change leads to; within a kind the least change first."""
    gpus = pools.engine_gpus if pools.colocated else pools.engine_gpus + pools.learner_gpus
    for parallel in (2 * pools.tensor_parallel, 4 * pools.tensor_parallel, 8 * pools.tensor_parallel):
        if parallel <= 8 and pools.engine_gpus % parallel == 0:  # the engines of one machine
            words = f"--engine.tensor-parallel {parallel} instead of {pools.tensor_parallel}"
            yield "parallel", words, gpu, pools.with_engine(tensor_parallel=parallel)
    tokens = pools.learner.micro_batch_tokens // 2
    while tokens >= LEAST_MICRO_BATCH_TOKENS:
        words = f"--learner.micro-batch-tokens {tokens} instead of {pools.learner.micro_batch_tokens}"
        yield "micro", words, gpu, pools.with_learner(micro_batch_tokens=tokens)
        tokens //= 2
    for share in MEMORY_SHARES if pools.memory_share else ():
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
    """Engines and ranks on separate GPUs, of which an engine takes all that there is."""
    return replace(pools, colocated=False, engine_gpus=engine_gpus, learner_gpus=learner_gpus, takes_rest=True)


def best_separated(model: ModelShape, gpu: Gpu, pools: Pools, *, stage: StageShape, rollouts: int) -> PoolPlan | None:
    """The split of these engines' GPUs into two pools with the shortest step; None where there are too few to split."""
    gpus = pools.engine_gpus
    step = max(1, gpus // 16 // pools.tensor_parallel) * pools.tensor_parallel  # engines are whole
    splits = [
        plan_pools(model, gpu, apart(pools, engine_gpus, gpus - engine_gpus), stage=stage, rollouts=rollouts)
        for engine_gpus in range(step, gpus, step)
    ]
    return min(splits, key=lambda split: (len(split.problems), split.step_s), default=None)
