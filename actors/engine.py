"""One generation engine: tokens in, tokens and log-probs out, weights swapped between two decode steps.

A plain class around vLLM's `AsyncLLM`, without Ray. vLLM runs in processes of its own; this one only talks to them.
Every wait on them has a deadline, and every way they can die becomes an `EngineError`.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from actors.weight_staging import StagedWeights, stage
from rstar_ray.deadline import within
from rstar_ray.errors import EngineError
from rstar_ray.trajectory import Completion, Sampling
from rstar_ray.weights import WeightBucket

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

CHECKSUM_POLL_S = 0.002
CLOSE_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine is started with; the same fields on CPU, CUDA and ROCm."""

    model: str  # a Hugging Face folder
    dtype: str = "float32"
    max_model_len: int = 2048  # prompt and response together [tokens]
    kv_tokens: int | None = None  # room of the KV cache [tokens]; None: what `gpu_memory_utilization` leaves
    block_size: int = 32  # tokens in a KV block; vLLM's CPU kernels want a multiple of 32
    max_num_seqs: int = 128  # sequences decoded at once
    enforce_eager: bool = True  # False: torch.compile and, on GPUs, graphs
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9  # share of the device's memory, weights included
    seed: int = 0  # of what no request seeds
    num_threads: int = 1  # CPU threads of a worker; unused on GPUs
    weight_backend: Literal["object_store", "nccl", "ipc"] = "object_store"
    start_deadline_s: float = 900.0
    generate_deadline_s: float = 3600.0  # for one completion, its time in the engine's queue included
    control_deadline_s: float = 120.0  # for any other answer of the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the engine found it has."""

    kv_capacity_tokens: int
    block_size: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The engine's state after its latest decode step."""

    kv_used_tokens: int = 0
    running: int = 0  # sequences being decoded
    waiting: int = 0  # requests vLLM holds back for want of room
    preemptions: int = 0  # since the start: sequences thrown out of the KV cache and computed again


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """How one swap went."""

    policy_version: int
    checksum: int  # of the weights as the workers loaded them (rstar_ray.weights.checksum)
    staged_s: float  # laying the weights out, while decoding went on
    paused_s: float  # from asking for the pause until decoding was free to go on


class Engine:
    """One replica. `start` first, `close` last; everything else from the same event loop."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self._eos_ids = _eos_token_ids(Path(settings.model))
        self._llm: AsyncLLM | None = None
        self._facts: EngineFacts | None = None
        self._load = EngineLoad()
        self._policy_version = 0
        self._dead: str | None = None
        self._swap = asyncio.Lock()

    @property
    def policy_version(self) -> int:
        """Of the weights that serve; 0 for those of the model folder."""
        return self._policy_version

    async def start(self) -> EngineFacts:
        """Start vLLM's processes. Raises `EngineError` where they do not come up."""
        assert self._llm is None
        starting = asyncio.to_thread(_start_vllm, self.settings, self._observe)
        try:
            self._llm = await self._within(starting, self.settings.start_deadline_s, "start")
            await self._ask(self._llm.update_weight_version("0"), "name the first weights")
        except (RuntimeError, ValueError, OSError) as failed:
            raise EngineError(f"the engine for {self.settings.model} did not start: {failed}") from failed
        cache = self._llm.vllm_config.cache_config
        assert cache.num_gpu_blocks is not None
        self._facts = EngineFacts(
            kv_capacity_tokens=(cache.num_gpu_blocks - 1) * cache.block_size,  # vLLM keeps one block for itself
            block_size=cache.block_size,
            max_model_len=self._llm.vllm_config.model_config.max_model_len,
        )
        return self._facts

    async def close(self) -> None:
        """End vLLM's processes; safe to call twice."""
        llm, self._llm = self._llm, None
        self._dead = self._dead or "it was closed"
        if llm is not None:
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # or it reports the end of vLLM's process as a fault
            shutting = asyncio.to_thread(llm.shutdown, timeout=CLOSE_GRACE_S)
            await self._within(shutting, self.settings.control_deadline_s, "shut down")

    async def generate(
        self, prompt_ids: Sequence[int], *, request_id: str, max_tokens: int, seed: int, sampling: Sampling
    ) -> Completion:
        """Sample until the end-of-turn token, which the completion then includes, or until `max_tokens`.

        Log-probs are those of the distribution sampled from, temperature and top-p included. A request that is under
        way when the weights change goes on under the new ones: see `update_weights`.
        """
        llm = self._alive()
        params = self._sampling_params(max_tokens, seed, sampling)
        prompt: Any = {"type": "token", "prompt_token_ids": list(prompt_ids)}
        output = await self._ask(
            _last(llm.generate(prompt, params, request_id)), f"complete {request_id}", self.settings.generate_deadline_s
        )
        return self._completion(output, request_id)

    async def update_weights(self, version: int, buckets: Sequence[WeightBucket]) -> WeightUpdate:
        """Serve the weights in `buckets` from the next decode step on.

        Decoding is paused for the swap alone. The prefix cache is emptied, and every request under way keeps its
        tokens and their log-probs but has its KV computed again under the new weights: no KV of older weights is ever
        read. A request under way therefore holds tokens of several versions; `Completion.policy_version` is the oldest.
        """
        llm = self._alive()
        async with self._swap:
            began = time.monotonic()
            staging = stage(buckets)
            staged = await asyncio.to_thread(staging.__enter__)
            try:
                staged_s = time.monotonic() - began
                paused_s = await self._swap_weights(llm, version, staged)
                checksum = await self._checksum(llm)
            finally:
                await asyncio.to_thread(staging.__exit__, None, None, None)
        self._policy_version = version
        return WeightUpdate(policy_version=version, checksum=checksum, staged_s=staged_s, paused_s=paused_s)

    def load(self) -> EngineLoad:
        return self._load

    async def _swap_weights(self, llm: "AsyncLLM", version: int, staged: StagedWeights) -> float:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        began = time.monotonic()
        await self._ask(llm.pause_generation(mode="keep", clear_cache=True), "pause for new weights")
        try:
            await self._ask(llm.start_weight_update(), "begin a weight update")
            await self._ask(llm.update_weights(WeightTransferUpdateRequest(staged.payload())), "load new weights")
            await self._ask(llm.finish_weight_update(str(version)), "finish a weight update")
        except BaseException as failed:
            self._dead = f"a swap to version {version} failed half-way: {failed!r}"
            raise EngineError(self._dead) from failed
        await self._ask(llm.resume_generation(), "go on after new weights")
        return time.monotonic() - began

    async def _checksum(self, llm: "AsyncLLM") -> int:
        """Poll: hashing runs in a thread of the worker, beside decoding."""
        while True:
            sums = await self._ask(llm.collective_rpc("loaded_checksum"), "checksum the new weights")
            if None not in sums:
                break
            await asyncio.sleep(CHECKSUM_POLL_S)
        if len(set(sums)) != 1:
            raise EngineError(f"the ranks of one engine loaded different weights: {sums}")
        return sums[0]

    def _sampling_params(self, max_tokens: int, seed: int, sampling: Sampling) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=seed,
            max_tokens=max_tokens,
            stop_token_ids=self._eos_ids,
            logprobs=0,  # the sampled token's alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    def _completion(self, output: "RequestOutput", request_id: str) -> Completion:
        completion = output.outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            raise EngineError(f"{request_id} ended by {completion.finish_reason!r}")
        token_ids = list(completion.token_ids)
        logprobs: Any = completion.logprobs
        versions = [int(span.version) for span in completion.weight_versions or ()]
        return Completion(
            token_ids=token_ids,
            logprobs=list(logprobs.logprobs),
            policy_version=min(versions, default=self._policy_version),
            ended=token_ids[-1] in self._eos_ids,
        )

    def _observe(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """vLLM's statistics of one step."""
        before, stats = self._load, scheduler_stats
        preempted = iteration_stats.num_preempted_reqs if iteration_stats else 0
        capacity = self._facts.kv_capacity_tokens if self._facts else 0
        self._load = EngineLoad(
            kv_used_tokens=round(stats.kv_cache_usage * capacity) if stats else before.kv_used_tokens,
            running=stats.num_running_reqs if stats else before.running,
            waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs if stats else before.waiting,
            preemptions=before.preemptions + preempted,
        )

    def _alive(self) -> "AsyncLLM":
        if self._llm is None or self._dead is not None:
            raise EngineError(f"the engine does not serve: {self._dead or 'it was not started'}")
        return self._llm

    async def _ask(self, awaitable: Awaitable[T], what: str, seconds: float | None = None) -> T:
        """Wait for the engine's answer; its death becomes an `EngineError`."""
        from vllm.exceptions import VLLMError

        try:
            return await self._within(awaitable, seconds or self.settings.control_deadline_s, what)
        except VLLMError as failed:
            if self._llm is not None and self._llm.errored:
                self._dead = f"vLLM's engine process died ({failed})"
            raise EngineError(f"could not {what}: {failed}") from failed

    async def _within(self, awaitable: Awaitable[T], seconds: float, what: str) -> T:
        return await within(awaitable, seconds, waiter="engine", owner="vLLM's engine process", reason=what)


def _start_vllm(settings: EngineSettings, observe: Any) -> "AsyncLLM":
    """Blocks for seconds: importing vLLM, starting its processes, loading the model."""
    os.environ.update(_environment(settings))
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(_engine_args(settings), stat_loggers=[_stat_logger(observe)])


def _environment(settings: EngineSettings) -> dict[str, str]:
    """Read by vLLM at its import here and in the processes it starts."""
    everywhere = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    everywhere["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")
    return everywhere | (_cpu_environment(settings) if _on_cpu() else {})


def _cpu_environment(settings: EngineSettings) -> dict[str, str]:
    """Several engines share a machine's cores, so none is bound to any; one rank needs no worker process."""
    one_rank = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if settings.tensor_parallel_size == 1 else {}
    return one_rank | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(settings.num_threads)}


def _on_cpu() -> bool:
    import torch

    return torch.version.cuda is None and torch.version.hip is None


def _engine_args(settings: EngineSettings) -> "AsyncEngineArgs":
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    blocks = None if settings.kv_tokens is None else -(-settings.kv_tokens // settings.block_size) + 1
    return AsyncEngineArgs(
        model=settings.model,
        skip_tokenizer_init=True,
        generation_config="vllm",  # sampling comes from the request alone
        dtype=settings.dtype,  # type: ignore[arg-type]
        seed=settings.seed,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        num_gpu_blocks_override=blocks,
        max_num_seqs=settings.max_num_seqs,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        enforce_eager=settings.enforce_eager,
        tensor_parallel_size=settings.tensor_parallel_size,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,  # of vLLM's own loggers; ours is asked for by name
        weight_transfer_config=WeightTransferConfig(backend=settings.weight_backend),
        worker_extension_cls="actors.weight_sync.WorkerExtension",
        **(_cpu_args(settings) if _on_cpu() else {}),
    )


def _cpu_args(settings: EngineSettings) -> dict[str, Any]:
    """What the CPU backend needs on top.

    Chunked prefill is off: vLLM 0.32 rewinds a seeded request's generator after a partial prefill, which torch's CPU
    generators cannot do, and the engine dies of it.
    """
    one_rank = {"distributed_executor_backend": "uni"} if settings.tensor_parallel_size == 1 else {}
    return one_rank | {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": settings.max_model_len + settings.max_num_seqs,
        "kv_cache_memory_bytes": None if settings.kv_tokens is None else _kv_bytes(settings),
    }


def _kv_bytes(settings: EngineSettings) -> int:
    """Enough for `kv_tokens`; the number of blocks decides what is allocated. Skips vLLM's warm-up run."""
    config = json.loads((Path(settings.model) / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    blocks = -(-(settings.kv_tokens or 0) // settings.block_size) + 1
    return 2 * 4 * heads * head_dim * config["num_hidden_layers"] * settings.block_size * blocks


def _stat_logger(observe: Any) -> Any:
    from vllm.v1.metrics.loggers import StatLoggerBase

    class LoadLogger(StatLoggerBase):
        """Hands every step's statistics on; keeps nothing."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
            observe(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None: ...

    return LoadLogger


async def _last(outputs: Any) -> Any:
    """The only output of a request that asks for its final one."""
    async with contextlib.aclosing(outputs):
        output = None
        async for output in outputs:
            pass
        return output


def _eos_token_ids(model: Path) -> list[int]:
    """The end-of-turn tokens the folder names: all that ever stops a completion early."""
    for name in ("generation_config.json", "config.json"):
        path = model / name
        if path.is_file() and (eos := json.loads(path.read_text()).get("eos_token_id")) is not None:
            return [eos] if isinstance(eos, int) else list(eos)
    raise EngineError(f"{model} names no eos_token_id in generation_config.json or config.json")
