"""One generation engine: tokens in, tokens and log-probs out, weights swapped between two decode steps.

A plain class around vLLM's `AsyncLLM`, without Ray. vLLM runs in processes of its own; this one only talks to them.
Every wait on them has a deadline, and every way they can die becomes an `EngineError` within a second.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from actors.generation.vllm_start import EngineSettings, eos_token_ids, start_vllm
from actors.weights.buckets import WeightBucket
from actors.weights.staging import refuse_other_parameters, stage
from rstar_ray.deadline import within
from rstar_ray.errors import DeadlineExceeded, EngineError
from rstar_ray.trajectory import Completion, Sampling

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["Engine", "EngineFacts", "EngineLoad", "EngineSettings", "WeightUpdate"]

T = TypeVar("T")

CHECKSUM_POLL_S = 0.002
LIVENESS_POLL_S = 0.25
CLOSE_GRACE_S = 1.5


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
    preemptions: int = 0  # sequences thrown out of the KV cache for want of room, since the start
    steps: int = 0  # since the start


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """How one swap went."""

    policy_version: int
    checksum: (
        int | None
    )  # of the weights as the workers loaded them (actors.weights.buckets.checksum); see `end_transfer`
    paused_s: float  # from the pause's beginning until decoding was free to go on
    staged_s: float = 0.0  # laying the weights out, while decoding went on


class Engine:
    """One replica. `start` first, `close` last; all calls from the same event loop."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self._eos_ids = eos_token_ids(Path(settings.model))
        self._llm: AsyncLLM | None = None
        self._facts: EngineFacts | None = None
        self._load = EngineLoad()
        self._recomputed = 0  # preemptions that a swap caused and vLLM has not yet reported
        self._policy_version = 0
        self._swap = asyncio.Lock()
        self._paused_at = 0.0
        self._death: asyncio.Future[str] | None = None  # why the engine does not serve any more
        self._watch: asyncio.Task[None] | None = None
        self._processes: list[psutil.Process] = []

    @property
    def policy_version(self) -> int:
        """Of the weights that serve; 0 for those of the model folder."""
        return self._policy_version

    async def start(self) -> EngineFacts:
        """Start vLLM's processes. Raises `EngineError` where they do not come up."""
        assert self._llm is None
        starting = asyncio.to_thread(start_vllm, self.settings, self._observe)
        try:
            self._llm = await self._within(starting, self.settings.start_deadline_s, "start")
        except (RuntimeError, ValueError, OSError) as failed:
            raise EngineError(f"the engine for {self.settings.model} did not start: {failed}") from failed
        self._processes = _processes(self._llm)
        self._death = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._watch_for_death(self._llm))
        await self._ask(self._llm.update_weight_version("0"), "name its first weights")
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
        if llm is None:
            return
        self._mark_dead("it was closed")
        assert self._watch is not None
        self._watch.cancel()
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # or it reports the end of vLLM's process as a fault
        shutting = asyncio.to_thread(_end_processes, llm, self._processes)
        await self._within(shutting, self.settings.control_deadline_s, "shut down")

    async def generate(
        self, prompt_ids: Sequence[int], *, request_id: str, max_tokens: int, seed: int, sampling: Sampling
    ) -> Completion:
        """Sample until the end-of-turn token, which the completion then includes, or until `max_tokens`.

        Log-probs are those of the distribution sampled from, temperature and top-p included. Raises `ValueError` for
        a request that can never run, `EngineError` when the engine is gone.
        """
        llm = self._alive()
        assert self._facts is not None
        if not 0 < len(prompt_ids) < self._facts.max_model_len or max_tokens < 1:
            raise ValueError(
                f"{request_id}: {len(prompt_ids)} prompt tokens and max_tokens {max_tokens} leave nothing to sample "
                f"in a context of {self._facts.max_model_len}"
            )
        prompt: Any = {"type": "token", "prompt_token_ids": list(prompt_ids)}
        outputs = llm.generate(prompt, self._sampling_params(max_tokens, seed, sampling), request_id)
        output = await self._ask(_last(outputs), f"complete {request_id}", self.settings.generate_deadline_s)
        return self._completion(output, request_id)

    async def update_weights(self, version: int, buckets: Sequence[WeightBucket]) -> WeightUpdate:
        """Serve the weights in `buckets`, which must hold every parameter, from the next decode step on.

        Raises `EngineError` for parameters the model does not have, and goes on serving the old weights.
        """
        llm = self._alive()
        async with self._swap:
            began = time.monotonic()
            await asyncio.to_thread(refuse_other_parameters, Path(self.settings.model), buckets)
            staging = stage(buckets)
            staged = await asyncio.to_thread(staging.__enter__)
            try:
                staged_s = time.monotonic() - began
                await self.begin_transfer()
                await self.receive_transfer(staged.payload())
                # Asked for once decoding goes on, the checksum would wait for a decode step.
                ends = self._end_pause(llm, version), self._checksum(llm)
                paused_s, checksum = _all_or_raise(await asyncio.gather(*ends, return_exceptions=True))
            finally:
                await asyncio.to_thread(staging.__exit__, None, None, None)
        return WeightUpdate(policy_version=version, checksum=checksum, paused_s=paused_s, staged_s=staged_s)

    async def join_transfer(self, init_info: dict[str, Any]) -> None:
        """Meet the learner in vLLM's `nccl` (RCCL on ROCm) or `ipc` backend; returns once all have met.

        With `begin_`, `receive_` and `end_transfer` this is the engine's side of vLLM's trainer engines, which need
        the learner to enter the same collective at the same time. Untested: it needs GPUs.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._ask(
            self._alive().init_weight_transfer_engine(WeightTransferInitRequest(init_info)), "meet the learner"
        )

    async def begin_transfer(self) -> None:
        """Pause decoding and forget all KV, so that none of the old weights' is ever read again.

        The prefix cache is emptied. A request under way keeps its tokens and their log-probs, waits, and has its KV
        computed again under the new weights; its tokens are then of several versions.
        """
        llm = self._alive()
        # Not `pause_generation`: it sleeps for 20 ms more, so that callers see the last outputs before it returns.
        pausing = llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
        await self._ask(pausing, "pause for new weights")
        self._paused_at = time.monotonic()
        await self._swapping(llm.start_weight_update(), "begin a weight update")

    async def receive_transfer(self, update_info: dict[str, Any]) -> None:
        """Load one part of the new weights, described as the backend wants it."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._swapping(self._alive().update_weights(WeightTransferUpdateRequest(update_info)), "load new weights")

    async def end_transfer(self, version: int) -> WeightUpdate:
        """Serve what was received. No checksum: on GPUs the bytes come by a collective and are not read back."""
        paused_s = await self._end_pause(self._alive(), version)
        return WeightUpdate(policy_version=version, checksum=None, paused_s=paused_s)

    def load(self) -> EngineLoad:
        return self._load

    async def _end_pause(self, llm: "AsyncLLM", version: int) -> float:
        await self._swapping(llm.finish_weight_update(str(version)), "finish a weight update")
        self._recomputed += self._load.running  # by now the statistics of the last step have come
        await self._ask(llm.resume_generation(), "go on after new weights")
        self._policy_version = version
        return time.monotonic() - self._paused_at

    async def _swapping(self, awaitable: Awaitable[T], what: str) -> T:
        """A step of a swap: an engine whose weights are half old and half new must not serve."""
        try:
            return await self._ask(awaitable, what)
        except BaseException as failed:
            self._mark_dead(f"a swap of weights failed half-way: {failed}")
            raise

    async def _checksum(self, llm: "AsyncLLM") -> int:
        """Poll: hashing runs in a thread of the worker, beside decoding."""
        while True:
            sums = await self._ask(llm.collective_rpc("loaded_checksum"), "checksum the new weights")
            if None not in sums:
                break
            await asyncio.sleep(CHECKSUM_POLL_S)
        if len(set(sums)) != 1:
            self._mark_dead(f"its ranks loaded different weights: checksums {sums}")
            self._alive()
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
        spans = completion.weight_versions or ()
        versions = [int(span.version) for span in spans for _ in range(span.start, span.end)]
        return Completion(
            token_ids=token_ids,
            logprobs=list(logprobs.logprobs),
            policy_versions=versions or [self._policy_version] * len(token_ids),
            ended=token_ids[-1] in self._eos_ids,
        )

    def _observe(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """vLLM's statistics of one step. What a swap put back in the queue is not want of room."""
        before, stats = self._load, scheduler_stats
        preempted = iteration_stats.num_preempted_reqs if iteration_stats else 0
        by_swap = min(preempted, self._recomputed)
        self._recomputed -= by_swap
        capacity = self._facts.kv_capacity_tokens if self._facts else 0
        self._load = EngineLoad(
            kv_used_tokens=round(stats.kv_cache_usage * capacity) if stats else before.kv_used_tokens,
            running=stats.num_running_reqs if stats else before.running,
            waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs if stats else before.waiting,
            preemptions=before.preemptions + preempted - by_swap,
            steps=before.steps + 1,
        )

    async def _watch_for_death(self, llm: "AsyncLLM") -> None:
        """vLLM notices the end of its processes but leaves some calls waiting for ever."""
        while not llm.errored:
            await asyncio.sleep(LIVENESS_POLL_S)
        self._notice_death()

    def _notice_death(self) -> None:
        if self._llm is not None and self._llm.errored:
            self._mark_dead("vLLM's engine process died")

    def _mark_dead(self, why: str) -> None:
        assert self._death is not None
        if not self._death.done():
            self._death.set_result(why)

    def _alive(self) -> "AsyncLLM":
        if self._death is None:
            raise EngineError("the engine was not started")
        self._notice_death()
        if self._death.done() or self._llm is None:
            raise EngineError(f"the engine does not serve: {self._death.result()}")
        return self._llm

    async def _ask(self, awaitable: Awaitable[T], what: str, seconds: float | None = None) -> T:
        """Wait for the engine's answer; its death becomes an `EngineError`."""
        try:
            return await self._within(self._or_death(awaitable), seconds or self.settings.control_deadline_s, what)
        except (EngineError, DeadlineExceeded):
            raise
        except Exception as failed:
            self._notice_death()
            raise EngineError(f"the engine could not {what}: {failed}") from failed

    async def _or_death(self, awaitable: Awaitable[T]) -> T:
        assert self._death is not None
        answer = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait({answer, self._death}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not answer.done():
                answer.cancel()
        if answer.cancelled() or not answer.done():
            self._alive()
        return await answer

    async def _within(self, awaitable: Awaitable[T], seconds: float, what: str) -> T:
        return await within(awaitable, seconds, waiter="engine", owner="vLLM's engine process", reason=what)


def _processes(llm: "AsyncLLM") -> list[psutil.Process]:
    """vLLM's engine processes and their workers, as they are after the start."""
    manager = llm.engine_core.resources.engine_manager
    cores = [psutil.Process(process.pid) for process in getattr(manager, "processes", ()) if process.pid]
    return [process for core in cores for process in (core, *core.children(recursive=True))]


def _end_processes(llm: "AsyncLLM", processes: list[psutil.Process]) -> None:
    """vLLM asks its processes to end and may return while they still do; what outlives the grace time is killed."""
    llm.shutdown(timeout=CLOSE_GRACE_S)
    _, alive = psutil.wait_procs(processes, timeout=CLOSE_GRACE_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=CLOSE_GRACE_S)


def _all_or_raise(outcomes: Sequence[Any]) -> Sequence[Any]:
    """What `gather` brought, or the first failure of it, once all have ended."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


async def _last(outputs: Any) -> Any:
    """The only output of a request that asks for its final one; the request is aborted where we stop waiting."""
    async with contextlib.aclosing(outputs):
        return [output async for output in outputs][-1]
