"""The time of a step by part, from data sheets and the shares of peak performance in `scheduler.planner.gpus`.

Legend: B sequences that decode together, K their context tokens, P parameters, N ranks, m micro batches per rank.

    decode step        max(weights read, 2 P B operations) + K KV bytes read + launches
    a trained token    2 operations per parameter, `passes` times, attention's, and element-wise reads and writes
    ZeRO-3, m times    weights gathered three times (forward, recomputation, backward), gradients reduced once
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rstar_ray.algorithm.state_bytes import BYTES
from rstar_ray.config import LearnerConfig
from rstar_ray.config.gpus import WeightWay
from scheduler.cost import EngineCost
from scheduler.planner.gpus import GPUS_PER_NODE, Gpu, Shares
from scheduler.planner.model_shape import GB, ModelShape
from scheduler.traces.trace import TraceRollout

WEIGHT = BYTES["bfloat16"]
PASSES = 4  # forward, recomputation, and backward (2), in forward passes; 3 without activation checkpointing
ADAM_BYTES = 28  # read and written per parameter: weight, gradient, two moments, and the three new values
HOST_MEMORY_GB_S = 150.0  # reached by all ranks of a node together in an optimizer's step on the host
HOST_LINK_SHARE = 0.4  # of PCIe bandwidth, by pinned copies of many tensors
STEADY_DRAWS = 5  # draws whose mean is the time of a step with a staleness; one less for each draw ahead
LOOKS = 2_000  # times at which a replica's batch is evaluated
DEVICE_COPIES = (
    6  # times that a published byte is read or written on the device: hash, bucket, copy, and into the model
)
HOST_GATHER_GB_S = 1.4  # by rank 0, to its host: a copy from the device, two in memory, and checksums
STORE_GB_S = 1.1  # through Ray's object store to another node, and into its shared memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Times of one replica, in seconds."""

    decode_s: float  # until half of its seats are empty, including prefills
    tail_s: float  # until the longest rollout ends, its tools included

    @property
    def total_s(self) -> float:
        return self.decode_s + self.tail_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Times of one update, in seconds."""

    compute_s: float
    exposed_s: float  # communication that is not overlapped with computation
    optimizer_s: float  # includes transfers to the host and back if offloaded
    mfu: float  # 6 operations per parameter and token, over the GPUs' peak in this time

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_s + self.optimizer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Times of one synchronous step by part, in seconds. The loop runs the parts in sequence
    (`rstar_ray/train_loop.py`), on shared GPUs and on separate pools."""

    generation: Generation
    learning: Learning
    publish_s: float
    host_s: float  # rewards, rows, metrics and records on the head; waking engines

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by name, in the order of a step."""
        return {
            "decode": self.generation.decode_s,
            "tail": self.generation.tail_s,
            "compute": self.learning.compute_s,
            "exposed communication": self.learning.exposed_s,
            "optimizer": self.learning.optimizer_s,
            "publish": self.publish_s,
            "host": self.host_s,
        }

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())


def decode_step_s(
    model: ModelShape, gpu: Gpu, shares: Shares, tensor_parallel: int, running: float, context: float
) -> float:
    """One decode step of a replica with `running` sequences, whose contexts have `context` tokens together."""
    bandwidth = gpu.bandwidth_tb_s * 1e12 * shares.decode_bandwidth  # of one GPU
    flops = gpu.matmul_tflops * 1e12 * shares.matmul * tensor_parallel
    weights_s = model.weights_gb * GB / (bandwidth * tensor_parallel)
    linear_s = max(weights_s, running * 2 * model.matmul_parameters / flops)
    return linear_s + context * model.kv_bytes_of_gpu(tensor_parallel) / bandwidth + shares.launch_s


def engine_cost(model: ModelShape, gpu: Gpu, shares: Shares, tensor_parallel: int) -> EngineCost:
    """The same costs for the simulator, whose decode step adds reading the weights and computing with them."""
    bandwidth = gpu.bandwidth_tb_s * 1e12 * shares.decode_bandwidth  # of one GPU
    flops = gpu.matmul_tflops * 1e12 * shares.matmul * tensor_parallel
    token_s = 2 * model.matmul_parameters / flops
    return EngineCost(
        fixed_s=model.weights_gb * GB / (bandwidth * tensor_parallel) + shares.launch_s,
        per_sequence_s=token_s,
        per_context_s=model.kv_bytes_of_gpu(tensor_parallel) / bandwidth,
        per_prefill_s=token_s,
        per_prefill_context_s=4 * model.layers * model.heads * model.head_dim / (flops * shares.attention),
    )


def generation(
    model: ModelShape,
    gpu: Gpu,
    shares: Shares,
    sample: Sequence[TraceRollout],
    *,
    rollouts: float,
    kv_tokens: int,
    max_running: int,
    tensor_parallel: int,
    siblings: int,
) -> Generation:
    """One replica that runs a number of rollouts of the sample's lengths, and starts one whenever a seat is free.

    The KV cache limits the seats, at the mean context. Preemptions and the balancer's delays are not modelled.
    """
    order, chosen = _chosen(sample, rollouts)
    at = chosen.copy()
    np.random.default_rng(0).shuffle(at)
    ran = _run(model, gpu, shares, order, [at], 0, kv_tokens, max_running, tensor_parallel)
    passed_s = ran.ends_s[0]
    return Generation(
        decode_s=float(ran.half_empty_s + _prefill_s(model, gpu, shares, order, chosen, tensor_parallel, siblings)),
        tail_s=float(passed_s - ran.half_empty_s + _tail_tools_s(order)),
    )


def overlapped_generation_s(
    model: ModelShape,
    gpu: Gpu,
    shares: Shares,
    sample: Sequence[TraceRollout],
    *,
    rollouts: float,
    kv_tokens: int,
    max_running: int,
    tensor_parallel: int,
    siblings: int,
    ahead: int,
    beside_s: float | None = None,
) -> float:
    """Seconds of generation in a step of a long stage, in which draws of `ahead` later steps run beside each.

    As `generation`; a draw begins when the step `ahead` + 1 before its own has ended. While tools delay a draw's end,
    `ahead` others fill the seats. `beside_s`: on separate GPUs, the time from a draw's end to its step's, in which
    engines decode later draws; the result is then the whole step. None: engines wait meanwhile, which is not counted.
    """
    order, chosen = _chosen(sample, rollouts)
    rng = np.random.default_rng(0)
    draws = [rng.permutation(chosen) for _ in range(ahead + 1 + STEADY_DRAWS)]
    prefill_s = _prefill_s(model, gpu, shares, order, chosen, tensor_parallel, siblings)
    tools_s = _tail_tools_s(order)
    others = (0.0, 0.0, 0.0) if beside_s is None else (prefill_s, tools_s, beside_s)
    ran = _run(model, gpu, shares, order, draws, ahead, kv_tokens, max_running, tensor_parallel, *others)
    steady_s = (ran.ends_s[STEADY_DRAWS] - ran.ends_s[ahead]) / (STEADY_DRAWS - ahead)
    return steady_s + prefill_s + tools_s / (ahead + 1) if beside_s is None else steady_s


@dataclass(frozen=True, slots=True)
class _Ran:
    """Times of decoding some draws on one replica, in seconds."""

    ends_s: Sequence[float]  # of each draw's step
    half_empty_s: float  # when half of the seats became empty and stayed so


def _chosen(sample: Sequence[TraceRollout], rollouts: float) -> tuple[Sequence[TraceRollout], NDArray[np.int64]]:
    """The sample by length, and the indices in it of a replica's share of a draw; of a single rollout, the longest."""
    order = sorted(sample, key=lambda rollout: rollout.generated_tokens)
    share, longest = max(1, round(rollouts)), len(order) - 1
    return order, np.linspace(0 if share > 1 else longest, longest, share).round().astype(int)


def _run(
    model: ModelShape,
    gpu: Gpu,
    shares: Shares,
    order: Sequence[TraceRollout],
    draws: Sequence[NDArray[np.int64]],
    ahead: int,
    kv_tokens: int,
    max_running: int,
    tensor_parallel: int,
    prefill_s: float = 0.0,
    tools_s: float = 0.0,
    beside_s: float = 0.0,
) -> _Ran:
    """`prefill_s`: of a draw, when it begins. A draw ends `tools_s` after its last token, and its step `beside_s`
    later; steps end in order."""
    chosen = np.concatenate(draws)
    draw_of = np.repeat(np.arange(len(draws)), len(draws[0]))
    prompts = np.array([order[at].prompt_tokens for at in chosen], float)
    generated = np.array([order[at].generated_tokens for at in chosen], float)
    growth = np.array([order[at].response_tokens for at in chosen]) / generated
    held = float((generated * (prompts + growth * generated / 2)).sum() / generated.sum())  # by a running rollout
    seats = max(1, min(max_running, int(kv_tokens / held), (ahead + 1) * len(draws[0])))

    stride = max(1.0, generated.sum() / seats / LOOKS / len(draws))
    left, context, grows, of = (np.zeros(0) for _ in range(4))
    begun, following, passed_s, half_empty_s = 0, 0, 0.0, math.nan
    unfinished, ends_s = [len(draw) for draw in draws], list[float]()
    while following < len(chosen) or len(left):
        begins = min(len(draws), bisect_right(ends_s, passed_s) + 1 + ahead)
        passed_s, begun = passed_s + (begins - begun) * prefill_s, begins
        if not len(left) and following == begun * len(draws[0]):  # until a step ends
            passed_s = ends_s[begun - 1 - ahead]
            continue
        if free := min(seats - len(left), begun * len(draws[0]) - following):
            coming = slice(following, following + free)
            held_now = ((left, generated), (context, prompts), (grows, growth), (of, draw_of))
            left, context, grows, of = (np.concatenate([now, every[coming]]) for now, every in held_now)
            following += free
        if math.isnan(half_empty_s) and following == len(chosen) and len(left) <= seats / 2:
            half_empty_s = passed_s
        steps = min(stride, max(1.0, float(left.min())))
        passed_s += steps * decode_step_s(
            model, gpu, shares, tensor_parallel, len(left), float((context + grows * steps / 2).sum())
        )
        left, context = left - steps, context + grows * steps
        running = left > 0
        for draw in of[~running]:
            unfinished[int(draw)] -= 1
        while len(ends_s) < len(draws) and not unfinished[len(ends_s)]:
            ends_s.append(max(passed_s + tools_s, ends_s[-1] if ends_s else 0.0) + beside_s)
        left, context, grows, of = left[running], context[running], grows[running], of[running]
    return _Ran(ends_s, passed_s if math.isnan(half_empty_s) else half_empty_s)


def _prefill_s(
    model: ModelShape,
    gpu: Gpu,
    shares: Shares,
    order: Sequence[TraceRollout],
    chosen: NDArray[np.int64],
    tensor_parallel: int,
    siblings: int,
) -> float:
    """Prefill of a draw's prompts, once for all siblings, and of its tools' answers."""
    tool_tokens = (order[at].response_tokens - order[at].generated_tokens for at in chosen)
    tokens = sum(order[at].prompt_tokens / siblings for at in chosen) + sum(tool_tokens)
    return 2 * model.matmul_parameters * tokens / (gpu.matmul_tflops * 1e12 * shares.matmul * tensor_parallel)


def _tail_tools_s(order: Sequence[TraceRollout]) -> float:
    """The longest wait for tools among the longest tenth of rollouts."""
    return max(sum(turn.tool_seconds for turn in rollout.turns) for rollout in order[-len(order) // 10 :])


def trained_token_s(
    model: ModelShape, gpu: Gpu, shares: Shares, lengths: Sequence[int], *, fused: bool, passes: int
) -> float:
    """Computation per token of rows of these lengths: matrix products, attention, and element-wise kernels."""
    flops = gpu.matmul_tflops * 1e12 * shares.matmul
    matmul_s = 2 * passes * model.matmul_parameters / flops
    mean_keys = sum(length**2 for length in lengths) / sum(lengths) / 2  # to which a token attends
    attention_flops = 4 * mean_keys * model.heads * model.head_dim * model.layers * (passes + 0.5)
    elements_s = passes * model.elementwise_bytes(fused=fused) / (gpu.bandwidth_tb_s * 1e12 * shares.stream_bandwidth)
    return matmul_s + attention_flops / (flops * shares.attention) + elements_s


def learning(
    model: ModelShape,
    gpu: Gpu,
    shares: Shares,
    learner: LearnerConfig,
    sample: Sequence[TraceRollout],
    *,
    ranks: int,
    rows: float,
    trained_parameters: float,
    passes: int,
) -> Learning:
    """One update on `rows` rows of the sample's lengths; `passes` counts forward passes (4 with recomputation)."""
    lengths = [rollout.prompt_tokens + rollout.response_tokens for rollout in sample]
    tokens = rows * sum(lengths) / len(lengths) / ranks  # of a rank
    compute_s = tokens * trained_token_s(model, gpu, shares, lengths, fused=learner.liger, passes=passes)
    micro_batches = max(1, math.ceil(tokens / learner.micro_batch_tokens))
    traffic_s = _traffic_s(model, gpu, shares, learner, ranks, micro_batches, trained_parameters)
    exposed_s = max((1 - shares.hidden) * traffic_s, traffic_s - compute_s)
    optimizer_s = _optimizer_s(gpu, learner, ranks, micro_batches, trained_parameters)
    spent_s = compute_s + exposed_s + optimizer_s
    mfu = 6 * model.parameters * tokens / (gpu.tflops * 1e12 * spent_s)
    return Learning(compute_s=compute_s, exposed_s=exposed_s, optimizer_s=optimizer_s, mfu=mfu)


def _traffic_s(
    model: ModelShape, gpu: Gpu, shares: Shares, learner: LearnerConfig, ranks: int, micro_batches: int, trained: float
) -> float:
    """ZeRO's communication between ranks: weights gathered, gradients reduced."""
    if ranks == 1:
        return 0.0
    apart_gb_s, near_gb_s = gpu.between_gb_s(ranks) * shares.links, gpu.links_gb_s * shares.links
    weights_gb, gradients_gb = model.weights_gb, trained * BYTES[learner.reduce_dtype] / GB
    if learner.zero == 3:
        gathers = 3 * micro_batches if learner.activation_checkpointing else 2 * micro_batches
        across = 1 if learner.copy_ranks > 1 else gathers  # hpZ: the first of a step fills the copy
        gathered_s = weights_gb * (across / apart_gb_s + (gathers - across) / near_gb_s)
    else:
        gathered_s = weights_gb / apart_gb_s if learner.zero else 0.0  # once, after the optimizer's step
    reductions = micro_batches if learner.zero >= 2 else 1
    sides = 2 if learner.zero == 0 else 1  # an all-reduce instead of a reduce-scatter
    return (ranks - 1) / ranks * (gathered_s + sides * reductions * gradients_gb / apart_gb_s)


def _optimizer_s(gpu: Gpu, learner: LearnerConfig, ranks: int, micro_batches: int, trained: float) -> float:
    """AdamW's step. Offloaded, each micro batch moves gradients to the host, and all but the first move the sum back
    first (DeepSpeed 0.19, stage3.py, `partition_grads`)."""
    held_gb = trained / (ranks if learner.zero else 1) / GB
    if not learner.offload:
        return held_gb * ADAM_BYTES / (gpu.bandwidth_tb_s * 1e3 * 0.75)
    link_gb_s = gpu.host_gb_s * HOST_LINK_SHARE
    moved_s = held_gb * (4 * (2 * micro_batches - 1) + 4 + WEIGHT) / link_gb_s
    return moved_s + held_gb * ADAM_BYTES * min(ranks, GPUS_PER_NODE) / HOST_MEMORY_GB_S


def device_load_gb_s(gpu: Gpu, shares: Shares) -> float:
    """The rate at which an engine loads weights from its GPU's memory."""
    return gpu.bandwidth_tb_s * 1e3 * shares.stream_bandwidth / DEVICE_COPIES


def publish_seconds(
    gpu: Gpu, shares: Shares, way: WeightWay, *, published_gb: float, bucket_gb: float, ranks: int
) -> dict[str, float]:
    """Seconds per part of a publish; all nodes move, and all engines load, together. All ranks send each bucket."""
    rounds_s = math.ceil(published_gb / bucket_gb) * shares.bucket_s
    collective_s = published_gb / (gpu.between_gb_s(ranks) * shares.links) if ranks > 1 else 0.0
    load_s = published_gb / device_load_gb_s(gpu, shares)
    if way == "object_store":
        speeds = {"gather": HOST_GATHER_GB_S, "move": STORE_GB_S, "load": gpu.host_gb_s * HOST_LINK_SHARE}
        return {part: published_gb / gb_s for part, gb_s in speeds.items()}
    return {"gather": collective_s + rounds_s, "move": collective_s if way == "nccl" else 0.0, "load": load_s}
