"""Hardware settings: engines, balancer, learner ranks and sandbox."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from rstar_ray.config.checks import at_least, at_most, check_bounds, require, within
from rstar_ray.config.modes import not_with, only_with
from rstar_ray.config.tree import MayChange

Dtype = Literal["float32", "bfloat16"]
ZeroStage = Literal[0, 1, 2, 3]
Isolation = Literal["namespaces", "landlock", "process"]
MOST_PROGRAM_S = 3_600.0
MOST_PROGRAM_MB = 2**22
MOST_OUTPUT_MB = 4_096
MOST_OUTPUT_CHARS = 2**24
"""Upper bounds for one program: wall time, memory, and output that is read and retained per stream."""
LEAST_PROGRAM_S = 0.01
"""Lower bound of a program's CPU and wall time."""
TOOL_ROOM_S = 1.0
"""Wall time that a program tool gets beyond its deadline, for its waits [s]."""
CALL_ROOM = 1.1
"""A call's deadline is at least this factor times the program's wall time, for start-up and the result's transfer."""

ON_GPUS = not_with("engine.gpus_per_replica", 0.0)
LEARNS_ON_GPUS = not_with("learner.gpus_per_rank", 0.0)
ON_CPUS = only_with("engine.gpus_per_replica", 0.0)
LEARNED = only_with("balancer.rule", "expected_kv")
DERIVED_RISK = only_with("balancer.risk", 0.0)
WHOLE_MODEL = only_with("learner.lora_rank", 0)
PADDED = only_with("learner.attention", "sdpa")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The generation replicas (vLLM)."""

    replicas: Annotated[MayChange[int], at_least(1)] = 1
    """engines; each is one Ray actor"""
    gpus_per_replica: Annotated[MayChange[float], at_least(0)] = 0.0
    """GPUs a replica reserves in Ray; 0 runs on the CPU, a fraction shares one GPU with a learner rank"""
    cpus_per_replica: Annotated[MayChange[float], at_least(0)] = 1.0
    """CPU cores a replica reserves in Ray"""
    tensor_parallel: Annotated[MayChange[int], at_least(1)] = 1
    """GPUs that one replica is split over"""
    dtype: Dtype = "bfloat16"
    """precision of the weights in the engine"""
    max_context_tokens: Annotated[int, at_least(1)] = 32_768
    """largest context: prompt and response together [tokens]"""
    kv_tokens: Annotated[MayChange[int], at_least(0)] = 0
    """KV cache per replica [tokens]; 0 uses the memory that is available"""
    max_running: Annotated[MayChange[int], at_least(1)] = 256
    """rollouts one engine decodes at once"""
    max_batched_tokens: Annotated[MayChange[int], ON_GPUS, at_least(1)] = 8_192
    """tokens that one engine step may compute, prefill and decode together (vLLM's max_num_batched_tokens)"""
    gpu_memory_share: Annotated[MayChange[float], within("(0, 0.95]")] = 0.6
    """share of the GPU's memory that the engine may use"""
    sleep: Annotated[MayChange[bool], ON_GPUS] = False
    """vLLM's sleep mode, where an engine shares its GPU with a learner rank (NVIDIA): during updates the engine frees
    its weights and KV cache, so that each of the two can use most of the GPU. For 14B on less than 128 GB"""
    compile: Annotated[MayChange[bool], ON_GPUS] = True
    """torch.compile and CUDA graphs, on GPUs (the opposite of enforce_eager); engines on CPUs never compile"""
    block_size: MayChange[int] = 32
    """tokens per KV block; a multiple of 16 for vLLM's GPU kernels, of 32 for its CPU kernels"""
    recompute_kv: Annotated[MayChange[bool], not_with("staleness", 0)] = False
    """with --staleness: recompute the contexts of running rollouts after new weights arrive. This costs prefill, but
    no rollout continues on KV of older weights"""
    num_threads: Annotated[MayChange[int], ON_CPUS, at_least(1)] = 1
    """CPU threads of an engine's rank; unused on GPUs"""
    vllm_metrics: MayChange[bool] = False
    """also export vLLM's statistics as ray_vllm_*; this costs a few percent of a decode step, and 70 MB"""
    start_deadline_s: Annotated[MayChange[float], at_least(1)] = 900.0
    """longest time an engine may take to start [s]"""
    completion_deadline_s: Annotated[MayChange[float], at_least(1)] = 3_600.0
    """longest time one completion may take, including its time in the engine's queue [s]"""
    answer_deadline_s: Annotated[MayChange[float], at_least(1)] = 120.0
    """longest time an engine may take to answer any other call [s]"""

    def __post_init__(self) -> None:
        check_bounds("engine", self)
        whole, where = (16, "a GPU") if self.gpus_per_replica else (32, "the CPU")
        require(
            self.block_size >= whole and self.block_size % whole == 0,
            "--engine.block-size",
            f"vLLM's kernels on {where} need a multiple of {whole} (got {self.block_size})",
            f"give a multiple of {whole}",
        )
        require(
            not self.kv_tokens or self.kv_tokens >= self.max_context_tokens,
            "--engine.kv-tokens",
            f"cannot hold one rollout of {self.max_context_tokens} tokens (got {self.kv_tokens})",
            "give at least --engine.max-context-tokens, or 0 to use the available memory",
        )

    @property
    def eager(self) -> bool:
        """Whether the engine runs without torch.compile and CUDA graphs."""
        return self.gpus_per_replica == 0 or not self.compile

    @property
    def num_blocks(self) -> int | None:
        """Blocks of the KV cache, with one more that vLLM reserves; None: as many as memory allows."""
        return -(-self.kv_tokens // self.block_size) + 1 if self.kv_tokens else None


@dataclass(frozen=True, kw_only=True)
class BalancerConfig:
    """Placement of rollouts on replicas, and their admission (docs/scheduler.md)."""

    rule: MayChange[
        Literal[
            "static",
            "round_robin",
            "consistent_hash",
            "least_requests",
            "least_sessions",
            "prefix_aware",
            "worst_case",
            "expected_kv",
        ]
    ] = "expected_kv"
    """placement rule"""
    risk: Annotated[MayChange[float], LEARNED, within("[0, 0.9999]")] = 0.0
    """accepted share of rollouts that an engine has to preempt (rule expected_kv); 0 derives it from the two costs
    below"""
    preemption_steps: Annotated[MayChange[float], LEARNED, DERIVED_RISK, at_least(0)] = 0.0
    """cost of recomputing a preempted rollout's context, in decode steps of a full batch; with 0 each engine measures
    it at start-up"""
    idle_share: Annotated[MayChange[float], LEARNED, DERIVED_RISK, within("[0, 1]")] = 0.0
    """cost of an empty batch slot, as a share of a running rollout's part of a decode step: 1 where a step takes as
    long with the slot empty; with 0 each engine measures it at start-up"""

    def __post_init__(self) -> None:
        check_bounds("balancer", self)

    @property
    def measured(self) -> bool:
        """Whether engines must measure the cost of their steps."""
        given = self.risk > 0 or (self.preemption_steps > 0 and self.idle_share > 0)
        return self.rule == "expected_kv" and not given


MAX_LORA_RANK = 512
"""Largest rank that vLLM serves."""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """The DeepSpeed learner."""

    ranks: Annotated[MayChange[int], at_least(1)] = 1
    """data-parallel ranks; each is one Ray actor"""
    gpus_per_rank: Annotated[MayChange[float], at_least(0)] = 0.0
    """GPUs that a rank reserves in Ray; 0 runs on the CPU"""
    own_gpus: MayChange[bool] = False
    """place ranks on separate GPUs (disaggregated) instead of sharing the replicas' GPUs"""
    cpus_per_rank: Annotated[MayChange[float], at_least(0)] = 1.0
    """CPU cores a rank reserves in Ray"""
    zero: MayChange[ZeroStage] = 3
    """DeepSpeed's ZeRO stage. 0: no sharding; 1 shards the optimizer state over ranks, 2 also gradients, 3 also
    weights"""
    offload: MayChange[bool] = False
    """keep the optimizer state and the float32 weights in host memory (ZeRO offload): uses less GPU memory, takes more
    time"""
    hpz_ranks: Annotated[MayChange[int], only_with("learner.zero", 3), WHOLE_MODEL, at_least(1)] = 1
    """consecutive ranks that together hold a secondary copy of the weights in the forward pass's precision, from which
    the backward pass gathers (ZeRO++ hpZ, arXiv:2306.10209). Set it to the ranks per node, so that only the first
    gather of a step crosses nodes; 1 holds no copy"""
    reduce_dtype: Annotated[MayChange[Dtype], not_with("learner.zero", 0)] = "float32"
    """precision in which gradients are summed over ranks; bfloat16 sends half the bytes and rounds each micro batch's
    sum (3 significant digits). Micro batches are always accumulated in float32"""
    liger: Annotated[MayChange[bool], LEARNS_ON_GPUS] = False
    """fused RMSNorm, rotary embedding and SwiGLU in the learner, from the package liger-kernel: saves time and
    activation memory"""
    lora_rank: Annotated[int, at_least(0)] = 0
    """train LoRA adapters of this rank (arXiv:2106.09685), through PEFT, instead of the weights: little optimizer
    state, and engines receive only the adapters. Needs about ten times the learning rate. 0 trains the weights"""
    lora_alpha: Annotated[int, not_with("learner.lora_rank", 0), at_least(1)] = 32
    """LoRA's alpha: an adapter is scaled by alpha / rank"""
    attention: Literal["rows", "sdpa"] = "rows"
    """rows: the rows of a micro batch are packed end to end; sdpa: they are padded, for models whose layers would mix
    packed rows"""
    dtype: Dtype = "bfloat16"
    """precision of the forward pass; master weights are float32"""
    micro_batch_tokens: Annotated[MayChange[int], at_least(1)] = 32_768
    """padded tokens of one forward and backward pass [tokens]"""
    max_padding: Annotated[MayChange[float], PADDED, within("[0, 1)")] = 0.05
    """largest share of padding among a micro batch's tokens (attention sdpa)"""
    pass_tokens: Annotated[MayChange[int], PADDED, at_least(0)] = 1_024
    """fixed cost of one more pass (kernel launches, ZeRO's gathers), in tokens of padding (attention sdpa)"""
    logprob_chunk_tokens: Annotated[MayChange[int], at_least(1)] = 4_096
    """tokens whose logits are in memory at the same time [tokens]"""
    activation_checkpointing: MayChange[bool] = True
    """recompute activations in the backward pass to save memory"""
    num_threads: Annotated[MayChange[int], at_least(1)] = 1
    """CPU threads of a rank"""
    bucket_mb: Annotated[MayChange[int], at_least(1)] = 256
    """size of the buckets in which weights are sent to engines; a larger parameter is one bucket [MiB]"""
    weights_by: MayChange[Literal["auto", "object_store", "ipc", "nccl"]] = "auto"
    """how new weights reach the engines. ipc: every rank shares them with the engine on its GPU; nccl: a broadcast to
    engines on separate GPUs (RCCL on ROCm); object_store: through Ray's object store, on CPUs, for LoRA adapters, and
    for an engine that missed a version. auto selects the first of these that the placement allows"""
    check_old_logprobs_every: Annotated[MayChange[int], only_with("optimizer.updates_per_step", 1), at_least(0)] = 0
    """interval at which a separate pass computes the old log-probs and compares them with the update's
    (old_logprobs_drift in metrics.jsonl) [steps]; 0 never"""
    start_deadline_s: Annotated[MayChange[float], at_least(1)] = 900.0
    """longest time the ranks may take to form a group and load the model; each must answer within half of it [s]"""
    step_deadline_s: Annotated[MayChange[float], at_least(1)] = 1_800.0
    """longest time an update, a publish or a checkpoint may take [s]"""

    def __post_init__(self) -> None:
        check_bounds("learner", self)
        require(
            self.lora_rank <= MAX_LORA_RANK,
            "--learner.lora-rank",
            f"vLLM serves adapters of rank {MAX_LORA_RANK} at most (got {self.lora_rank})",
            "use a smaller rank",
        )
        require(
            not self.lora_rank or self.weights_by in ("auto", "object_store"),
            "--learner.weights-by",
            f"adapters are published through the object store (got {self.weights_by})",
            "use auto, or --learner.lora-rank 0",
        )
        require(
            self.dtype == "float32" or self.zero > 0,
            "--learner.zero",
            "bfloat16 without ZeRO has no float32 master weights",
            "give 1, 2 or 3, or --learner.dtype float32",
        )
        require(
            self.ranks % self.hpz_ranks == 0,
            "--learner.hpz-ranks",
            f"must divide --learner.ranks {self.ranks} (got {self.hpz_ranks})",
            "give a divisor of --learner.ranks, or 1",
        )
        require(
            self.reduce_dtype == "float32" or self.dtype == "bfloat16",
            "--learner.reduce-dtype",
            f"bfloat16 would reduce the precision of gradients from a {self.dtype} forward pass",
            "give float32, or --learner.dtype bfloat16",
        )
        require(
            self.zero > 0 or not self.offload,
            "--learner.offload",
            "has no effect without ZeRO (got --learner.zero 0)",
            "give --learner.zero 1, 2 or 3",
        )

    @property
    def bucket_bytes(self) -> int:
        return self.bucket_mb * 2**20

    @property
    def copy_ranks(self) -> int:
        """Ranks that share a secondary copy of the weights; 1: there is no copy."""
        return self.hpz_ranks if self.zero == 3 and not self.lora_rank else 1

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """ "cuda" is ROCm's name too."""
        return "cuda" if self.gpus_per_rank else "cpu"

    @property
    def packed(self) -> bool:
        """Whether the rows of a micro batch are packed end to end, without padding."""
        return self.attention != "sdpa"


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """The sandbox executors that run the model's programs."""

    executors: Annotated[MayChange[int], at_least(1)] = 1
    """sandbox actors, spread over the nodes"""
    slots: Annotated[MayChange[int], at_least(0)] = 0
    """programs that one executor runs concurrently; 0: one per core"""
    level: MayChange[Isolation] = "namespaces"
    """required isolation; landlock works where namespaces are not permitted, process is for trusted programs only"""
    time_limit_s: Annotated[float, at_most(MOST_PROGRAM_S), at_least(0.05)] = 4.0
    """CPU time limit of one program, all threads together [s]"""
    wall_limit_s: Annotated[float, at_least(0), at_most(MOST_PROGRAM_S)] = 0.0
    """wall time limit of one program [s]; 0: 1.5 times its CPU time limit plus 1 s"""
    memory_mb: Annotated[int, at_least(64), at_most(MOST_PROGRAM_MB)] = 384
    """memory limit of one program, in addition to the warm interpreter; includes modules that it imports [MiB]"""
    max_output_mb: Annotated[int, at_least(1), at_most(MOST_OUTPUT_MB)] = 4
    """output limit per stream; a program that writes more is ended [MiB]"""
    max_output_chars: Annotated[int, at_least(16), at_most(MOST_OUTPUT_CHARS)] = 1_000
    """output retained from each of stdout and stderr [characters]"""
    deadline_s: Annotated[MayChange[float], at_least(0.05)] = 120.0
    """longest time a call may wait for its result, including queueing [s]"""
    max_waiting: Annotated[MayChange[int], at_least(1)] = 65_536
    """largest number of calls waiting at one executor"""
    attempts: Annotated[MayChange[int], at_least(1)] = 2
    """attempts at a call, each in another worker, before it fails"""
    spare_workers: Annotated[MayChange[int], at_least(0)] = 1
    """idle workers per kind of warm server, beyond one per slot"""
    calls_per_worker: Annotated[MayChange[int], at_least(1)] = 2_000
    """calls after which a worker is replaced"""
    workers_per_server: Annotated[MayChange[int], at_least(1)] = 1_000
    """workers after which a warm server is replaced"""
    warm: MayChange[tuple[Literal["lean", "numpy", "sympy", "scipy"], ...]] = ("lean", "numpy", "sympy", "scipy")
    """kinds of warm server that are started with the executor; must include lean"""

    def __post_init__(self) -> None:
        check_bounds("sandbox", self)
        require(
            "lean" in self.warm,
            "--sandbox.warm",
            f"must include lean (got {' '.join(self.warm) or 'none'})",
            "add lean",
        )
        require(
            self.wall_limit_s == 0 or self.wall_limit_s >= self.time_limit_s,
            "--sandbox.wall-limit-s",
            f"must be at least --sandbox.time-limit-s {self.time_limit_s}, or programs end with CPU time left (got "
            f"{self.wall_limit_s})",
            "raise it, or give 0",
        )
        require(
            self.deadline_s >= self.wall_s * CALL_ROOM,
            "--sandbox.deadline-s",
            f"must be at least {CALL_ROOM} times the wall time limit of {self.wall_s:g} s (got {self.deadline_s})",
            f"give {math.ceil(self.wall_s * CALL_ROOM)} or more, or lower --sandbox.wall-limit-s or "
            "--sandbox.time-limit-s",
        )

    @property
    def wall_s(self) -> float:
        """Wall time limit of one program, given or derived [s]."""
        return self.wall_limit_s or min(self.time_limit_s * 1.5 + 1.0, MOST_PROGRAM_S)
