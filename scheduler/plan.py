"""What fits where, and how long a step takes: arithmetic on a model's shape and a GPU's figures, nothing measured.

GB are 1e9 bytes. Times rest on shares of peak that are assumptions (`Gpu`), and on the simulated makespan of a step
being `OVER_BOUND` times its lower bound (docs/scheduler.md); calibrate against your own engine before relying on them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.bound import lower_bound
from scheduler.engine_model import EngineCost, EngineShape
from scheduler.traces import Stage, synthetic

GB = 1e9
OVER_BOUND = 1.2  # a simulated step under expected_kv over the bound used here: 1.1 to 1.4
BYTES_TRAINED = 16  # per parameter over all ranks: bf16 weights 2 and gradients 2, fp32 master 4 and two moments 8
LOGITS_CHUNK_TOKENS = 1_024  # log-probs are computed so many tokens at a time
SAMPLE_GROUPS = 48  # prompt groups of the synthetic trace that lengths are taken from
GROUP_ROLLOUTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder's sizes, as in a Hugging Face `config.json`."""

    name: str
    parameters: float
    layers: int
    hidden: int
    intermediate: int
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
    publish_gb_s: float = 20.0  # weights from learner to engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """GB on one GPU."""

    engine_weights: float
    trained_state: float
    activations: float
    runtime: float
    kv: float  # what is left; negative: it does not fit

    @property
    def total(self) -> float:
        return self.engine_weights + self.trained_state + self.activations + self.runtime + max(0.0, self.kv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
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


def read_model(path: Path) -> ModelShape:
    """From a `config.json`. Raises `ValueError` naming file and missing field."""
    row: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))

    def number(name: str, default: int | None = None) -> int:
        value = row.get(name, default)
        if not isinstance(value, int) or value < 1:
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
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
    )


def activations_gb(model: ModelShape, micro_batch_tokens: int) -> float:
    """Checkpointed: every layer's input, one layer's inside twice over, one chunk of logits, one gathered layer."""
    kept = micro_batch_tokens * model.hidden * 2 * model.layers
    layer = 2 * micro_batch_tokens * (8 * model.hidden + 3 * model.intermediate) * 2
    logits = 3 * LOGITS_CHUNK_TOKENS * model.vocabulary * 4
    gathered = 2 * (model.parameters / model.layers + model.vocabulary * model.hidden) * 2
    return (kept + layer + logits + gathered) / GB


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


def place(
    model: ModelShape,
    gpu: Gpu,
    stage: Stage,
    *,
    engine_gpus: int,
    learner_gpus: int,
    colocated: bool,
    tensor_parallel: int,
    micro_batch_tokens: int,
    rollouts: int,
) -> Placement:
    """Memory, KV, and the times of one step. `rollouts` are generated, half of them trained on (GRPO-RoC)."""
    trained = model.parameters * BYTES_TRAINED / learner_gpus / GB if colocated else 0.0
    activations = activations_gb(model, micro_batch_tokens) if colocated else 0.0
    weights = model.weights_gb / tensor_parallel
    runtime = gpu.memory_gb * gpu.runtime_share
    memory = Memory(
        engine_weights=weights,
        trained_state=trained,
        activations=activations,
        runtime=runtime,
        kv=gpu.memory_gb - weights - trained - activations - runtime,
    )
    replicas = max(1, engine_gpus // tensor_parallel)
    kv_tokens = max(0, int(memory.kv * tensor_parallel * GB / model.kv_bytes_per_token)) // 16 * 16
    sample = synthetic(stage, groups=SAMPLE_GROUPS, siblings=GROUP_ROLLOUTS, seed=0)
    mean_prompt = sum(rollout.prompt_tokens for rollout in sample) / len(sample)
    mean_response = sum(rollout.response_tokens for rollout in sample) / len(sample)
    longest = stage.max_response_tokens + 2_048
    problems: list[str] = []
    if kv_tokens < longest:
        problems.append(
            f"{memory.kv:.1f} GB are left for KV, {kv_tokens} tokens; one rollout may need {longest}: "
            + _mend(colocated, tensor_parallel, micro_batch_tokens)
        )
    learner_gb = model.parameters * BYTES_TRAINED / learner_gpus / GB + activations_gb(model, micro_batch_tokens)
    if learner_gb + runtime > gpu.memory_gb:
        problems.append(
            f"a learner rank needs {learner_gb:.1f} GB and {runtime:.1f} GB of runtime: use more learner GPUs, or "
            f"fewer than {micro_batch_tokens} tokens in a micro batch"
        )
    cost = engine_cost(model, gpu, tensor_parallel)
    share = rollouts / len(sample)  # the sample stands for all of them
    shape = EngineShape(kv_tokens=max(kv_tokens, longest))
    bound = lower_bound(sample, replicas=1, cost=cost, shape=shape)
    work_s, area_s = bound.work_s * share / replicas, bound.kv_area_s * share / replicas
    steps_s = cost.fixed_s * max(rollout.generated_tokens for rollout in sample)
    generate_s = OVER_BOUND * max(bound.longest_rollout_s, area_s, min(work_s + steps_s, 2 * area_s))
    tools_s = sum(turn.tool_seconds for rollout in sample for turn in rollout.turns) / len(sample)
    tokens = rollouts / 2 * (mean_prompt + mean_response)
    # Forward for the anchor (2), forward, recomputation and backward for the update (2 + 2 + 4).
    learn_s = 10 * model.parameters * tokens / (learner_gpus * gpu.tflops * 1e12 * gpu.train_share)
    publish_s = model.weights_gb / gpu.publish_gb_s
    return Placement(
        name="colocated" if colocated else "separated",
        engine_gpus=engine_gpus,
        learner_gpus=learner_gpus,
        memory=memory,
        kv_tokens_per_replica=kv_tokens,
        in_flight=min(rollouts, int(replicas * kv_tokens / (mean_prompt + mean_response / 2))),
        generate_s=generate_s,
        tools_s=tools_s,
        learn_s=learn_s,
        publish_s=publish_s,
        step_s=generate_s + learn_s + publish_s if colocated else max(generate_s, learn_s) + publish_s,
        problems=tuple(problems),
    )


def _mend(colocated: bool, tensor_parallel: int, micro_batch_tokens: int) -> str:
    ways = [f"tensor_parallel {2 * tensor_parallel} instead of {tensor_parallel}"]
    if colocated:
        ways += [f"micro_batch_tokens {micro_batch_tokens // 2} instead of {micro_batch_tokens}", "separated pools"]
    return ", or ".join([*ways, "GPUs with more memory"])


def best_separated(
    model: ModelShape,
    gpu: Gpu,
    stage: Stage,
    *,
    gpus: int,
    tensor_parallel: int,
    micro_batch_tokens: int,
    rollouts: int,
) -> Placement | None:
    """The split of `gpus` into two pools with the shortest step; None where there are too few to split."""
    step = max(tensor_parallel, gpus // 16)
    splits = [
        place(
            model,
            gpu,
            stage,
            engine_gpus=engine_gpus,
            learner_gpus=gpus - engine_gpus,
            colocated=False,
            tensor_parallel=tensor_parallel,
            micro_batch_tokens=micro_batch_tokens,
            rollouts=rollouts,
        )
        for engine_gpus in range(step, gpus, step)
    ]
    return min(splits, key=lambda split: (len(split.problems), split.step_s), default=None)
