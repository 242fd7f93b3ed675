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
"""Upper bounds for one program: wall time, memory, and output that is read and kept per stream."""
LEAST_PROGRAM_S = 0.01
"""Lower bound of a program's CPU and wall time."""
TOOL_ROOM_S = 1.0
"""Wall time beyond the deadline of a tool that is a program, for its waits."""
CALL_ROOM = 1.1
"""Factor on a program's wall time: a call waits at least so long, because of start-up and the way of the result."""

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
    """GPUs one replica is split over"""
    dtype: Dtype = "bfloat16"
    """precision of the weights in the engine"""
    max_context_tokens: Annotated[int, at_least(1)] = 32_768
    """prompt and response together [tokens]"""
    kv_tokens: Annotated[MayChange[int], at_least(0)] = 0
    """KV cache per replica [tokens]; 0 lets the engine take what memory allows"""
    max_running: Annotated[MayChange[int], at_least(1)] = 256
    """rollouts one engine decodes at once"""
    max_batched_tokens: Annotated[MayChange[int], ON_GPUS, at_least(1)] = 8_192
    """tokens that one step of an engine may compute, prompts and decodes together (vLLM's max_num_batched_tokens)"""
    gpu_memory_share: Annotated[MayChange[float], within("(0, 0.95]")] = 0.6
    """share of the GPU's memory the engine may take"""
    sleep: Annotated[MayChange[bool], ON_GPUS] = False
    """vLLM's sleep mode, where an engine shares its GPU with a learner rank (NVIDIA): during updates the engine gives
    up weights and KV cache, so that each of the two may use most of the GPU. For 14B on less than 128 GB"""
    compile: Annotated[MayChange[bool], ON_GPUS] = True
    """torch.compile and graphs, on GPUs (enforce_eager is its opposite); the CPU never compiles"""
    block_size: MayChange[int] = 32
    """tokens in a block of KV; vLLM's kernels want a multiple of 16, those for CPUs of 32"""
    recompute_kv: Annotated[MayChange[bool], not_with("staleness", 0)] = False
    """with --staleness: after new weights, compute the contexts of running rollouts again, which costs prefill and
    spares them KV of older weights"""
    num_threads: Annotated[MayChange[int], ON_CPUS, at_least(1)] = 1
    """CPU threads of an engine's rank; unused on GPUs"""
    vllm_metrics: MayChange[bool] = False
    """export vLLM's own statistics too, as ray_vllm_*; they cost a few percent of a decode step, and 70 MB"""
    start_deadline_s: Annotated[MayChange[float], at_least(1)] = 900.0
    """longest an engine may take to come up [s]"""
    completion_deadline_s: Annotated[MayChange[float], at_least(1)] = 3_600.0
    """longest one completion may take, its time in the engine's queue included [s]"""
    answer_deadline_s: Annotated[MayChange[float], at_least(1)] = 120.0
    """longest an engine may take for any other answer [s]"""

    def __post_init__(self) -> None:
        check_bounds("engine", self)
        whole, where = (16, "a GPU") if self.gpus_per_replica else (32, "the CPU")
        require(
            self.block_size >= whole and self.block_size % whole == 0,
            "--engine.block-size",
            f"vLLM's kernels on {where} take no blocks of {self.block_size} tokens",
            f"give a multiple of {whole}",
        )
        require(
            not self.kv_tokens or self.kv_tokens >= self.max_context_tokens,
            "--engine.kv-tokens",
            f"{self.kv_tokens} cannot hold one rollout of {self.max_context_tokens} tokens",
            "give at least --engine.max-context-tokens, or 0 for what memory allows",
        )

    @property
    def eager(self) -> bool:
        """Without torch.compile and graphs; the CPU never compiles."""
        return self.gpus_per_replica == 0 or not self.compile

    @property
    def num_blocks(self) -> int | None:
        """Of the KV cache, one more than the tokens need, which vLLM keeps for itself; None: what memory allows."""
        return -(-self.kv_tokens // self.block_size) + 1 if self.kv_tokens else None


@dataclass(frozen=True, kw_only=True)
class BalancerConfig:
    """Which replica a rollout runs on, and when it starts (docs/scheduler.md)."""

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
    """share of rollouts that an engine may have to preempt (rule expected_kv); 0 derives it from the two costs below"""
    preemption_steps: Annotated[MayChange[float], LEARNED, DERIVED_RISK, at_least(0)] = 0.0
    """decode steps of a full batch in which a preempted rollout's context is computed again; 0 has each engine
    measure it when it starts"""
    idle_share: Annotated[MayChange[float], LEARNED, DERIVED_RISK, within("[0, 1]")] = 0.0
    """share of its part of a decode step that an empty seat does not save: 1 where a step takes as long without it;
    0 has each engine measure it when it starts"""

    def __post_init__(self) -> None:
        check_bounds("balancer", self)

    @property
    def measured(self) -> bool:
        """Engines must say what their steps cost."""
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
    """GPUs a rank reserves in Ray; 0 runs on the CPU"""
    own_gpus: MayChange[bool] = False
    """ranks on separate GPUs (separated pools) instead of sharing the replicas'"""
    cpus_per_rank: Annotated[MayChange[float], at_least(0)] = 1.0
    """CPU cores a rank reserves in Ray"""
    zero: MayChange[ZeroStage] = 3
    """what DeepSpeed's ZeRO spreads over ranks: 1 the optimizer's state, 2 gradients too, 3 weights too, 0 nothing"""
    offload: MayChange[bool] = False
    """keep the optimizer's state and the float32 weights in host memory (ZeRO offload): room for memory, time for it"""
    hpz_ranks: Annotated[MayChange[int], only_with("learner.zero", 3), WHOLE_MODEL, at_least(1)] = 1
    """consecutive ranks that together hold one more copy of the weights in the forward pass's precision, from which the
    backward pass gathers (ZeRO++ hpZ, arXiv:2306.10209): give the ranks of a node, so that only the first gather of a
    step crosses nodes; 1 holds no copy"""
    reduce_dtype: Annotated[MayChange[Dtype], not_with("learner.zero", 0)] = "float32"
    """precision in which gradients are summed over ranks; bfloat16 sends half the bytes and rounds each micro batch's
    sum (3 significant digits). Micro batches are always accumulated in float32"""
    liger: Annotated[MayChange[bool], LEARNS_ON_GPUS] = False
    """fused RMSNorm, rotary embedding and SwiGLU in the learner, by the package liger-kernel: less time and activation
    memory"""
    lora_rank: Annotated[int, at_least(0)] = 0
    """train LoRA adapters of this rank (arXiv:2106.09685), through PEFT, in place of the weights: little state to hold,
    and engines receive the adapters alone; wants some ten times the learning rate; 0 trains the weights"""
    lora_alpha: Annotated[int, not_with("learner.lora_rank", 0), at_least(1)] = 32
    """LoRA's strength: an adapter counts alpha / rank times"""
    attention: Literal["rows", "sdpa"] = "rows"
    """rows packs the rows of a micro batch end to end; sdpa pads them, for models whose layers mix packed rows"""
    dtype: Dtype = "bfloat16"
    """precision of the forward pass; master weights are float32"""
    micro_batch_tokens: Annotated[MayChange[int], at_least(1)] = 32_768
    """padded tokens of one forward and backward pass [tokens]"""
    max_padding: Annotated[MayChange[float], PADDED, within("[0, 1)")] = 0.05
    """share of padded tokens that may be padding, where rows are padded at all (attention sdpa)"""
    pass_tokens: Annotated[MayChange[int], PADDED, at_least(0)] = 1_024
    """what one more pass costs (launches, ZeRO's gathers), in tokens of padding that are worth saving it (attention
    sdpa)"""
    logprob_chunk_tokens: Annotated[MayChange[int], at_least(1)] = 4_096
    """tokens whose logits exist at one time [tokens]"""
    activation_checkpointing: MayChange[bool] = True
    """recompute activations in the backward pass to save memory"""
    num_threads: Annotated[MayChange[int], at_least(1)] = 1
    """CPU threads of a rank"""
    bucket_mb: Annotated[MayChange[int], at_least(1)] = 256
    """weights go to the engines in buckets of so much, or of one parameter where that is larger [MiB]"""
    weights_by: MayChange[Literal["auto", "object_store", "ipc", "nccl"]] = "auto"
    """how new weights reach the engines. ipc: every rank hands them to the engine on its GPU; nccl: a broadcast to
    engines on separate GPUs (RCCL on ROCm); object_store: through Ray's, on CPUs, for LoRA adapters, and for an
    engine that missed a version. auto takes the first of these that the placement allows"""
    check_old_logprobs_every: Annotated[MayChange[int], only_with("optimizer.updates_per_step", 1), at_least(0)] = 0
    """steps between those in which the old log-probs are computed by a separate pass and compared with the
    update's (old_logprobs_drift in metrics.jsonl); 0 never"""
    start_deadline_s: Annotated[MayChange[float], at_least(1)] = 900.0
    """longest the ranks may take to meet and to load the model; half of it until each has answered [s]"""
    step_deadline_s: Annotated[MayChange[float], at_least(1)] = 1_800.0
    """longest an update, a publish or a checkpoint may take [s]"""

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
            f"{self.ranks} ranks cannot be divided into groups of {self.hpz_ranks}",
            "give a divisor of --learner.ranks, or 1",
        )
        require(
            self.reduce_dtype == "float32" or self.dtype == "bfloat16",
            "--learner.reduce-dtype",
            f"gradients of a forward pass in {self.dtype} would lose precision in bfloat16",
            "give float32, or --learner.dtype bfloat16",
        )
        require(
            self.zero > 0 or not self.offload,
            "--learner.offload",
            "without ZeRO nothing is offloaded",
            "give --learner.zero 1, 2 or 3",
        )

    @property
    def bucket_bytes(self) -> int:
        return self.bucket_mb * 2**20

    @property
    def copy_ranks(self) -> int:
        """Ranks that share one more copy of the weights; 1: there is none."""
        return self.hpz_ranks if self.zero == 3 and not self.lora_rank else 1

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """ "cuda" is ROCm's name too."""
        return "cuda" if self.gpus_per_rank else "cpu"

    @property
    def packed(self) -> bool:
        """Whether the rows of a micro batch lie end to end, without padding."""
        return self.attention != "sdpa"


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """The sandbox executors that run the model's programs."""

    executors: Annotated[MayChange[int], at_least(1)] = 1
    """sandbox actors, spread over the nodes"""
    slots: Annotated[MayChange[int], at_least(0)] = 0
    """programs one executor runs at once; 0: one per core"""
    level: MayChange[Isolation] = "namespaces"
    """isolation required; landlock accepts it where namespaces are refused, process is for trusted programs alone"""
    time_limit_s: Annotated[float, at_most(MOST_PROGRAM_S), at_least(0.05)] = 4.0
    """one program's CPU time, all threads [s]"""
    wall_limit_s: Annotated[float, at_least(0), at_most(MOST_PROGRAM_S)] = 0.0
    """one program's time by the clock; 0: half as much again as its CPU time, and a second [s]"""
    memory_mb: Annotated[int, at_least(64), at_most(MOST_PROGRAM_MB)] = 384
    """one program's memory on top of the warm interpreter, with what it still imports [MiB]"""
    max_output_mb: Annotated[int, at_least(1), at_most(MOST_OUTPUT_MB)] = 4
    """more than this on one stream ends the program [MiB]"""
    max_output_chars: Annotated[int, at_least(16), at_most(MOST_OUTPUT_CHARS)] = 1_000
    """kept of each of stdout and stderr [characters]"""
    deadline_s: Annotated[MayChange[float], at_least(0.05)] = 120.0
    """longest a call may wait for its result, queueing included [s]"""
    max_waiting: Annotated[MayChange[int], at_least(1)] = 65_536
    """calls waiting at one executor at most"""
    attempts: Annotated[MayChange[int], at_least(1)] = 2
    """cells that a call may lose before it fails"""
    spare_cells: Annotated[MayChange[int], at_least(0)] = 1
    """idle cells per kind of warm server, beyond one per slot"""
    calls_per_cell: Annotated[MayChange[int], at_least(1)] = 2_000
    """calls after which a cell is replaced"""
    cells_per_server: Annotated[MayChange[int], at_least(1)] = 1_000
    """cells after which a warm server is replaced"""
    warm: MayChange[tuple[Literal["lean", "numpy", "sympy", "scipy"], ...]] = ("lean", "numpy", "sympy", "scipy")
    """kinds of warm server that are up from the start; lean is always one"""

    def __post_init__(self) -> None:
        check_bounds("sandbox", self)
        require("lean" in self.warm, "--sandbox.warm", f"{' '.join(self.warm) or 'none'} lacks lean", "add lean")
        require(
            self.wall_limit_s == 0 or self.wall_limit_s >= self.time_limit_s,
            "--sandbox.wall-limit-s",
            f"{self.wall_limit_s} would end programs that have CPU time left, {self.time_limit_s} s",
            "raise it, or give 0",
        )
        require(
            self.deadline_s >= self.wall_s * CALL_ROOM,
            "--sandbox.deadline-s",
            f"{self.deadline_s} leaves no room above the {self.wall_s:g} s by the clock that a program may take",
            f"give {math.ceil(self.wall_s * CALL_ROOM)} or more, or lower --sandbox.wall-limit-s or "
            "--sandbox.time-limit-s",
        )

    @property
    def wall_s(self) -> float:
        """One program's time by the clock, given or derived [s]."""
        return self.wall_limit_s or min(self.time_limit_s * 1.5 + 1.0, MOST_PROGRAM_S)
