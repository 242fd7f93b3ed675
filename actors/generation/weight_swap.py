"""Loads new weights into a running engine, between two decode steps.

Weights from the object store are written to shared memory while decoding continues, followed by a short pause
(`update`). Weights from a learner's rank arrive during the pause (`begin`, `take`, `end`). An engine with an adapter
loads its matrices from the object store, usually without the model's weights.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from actors.generation.load_meter import LoadMeter
from actors.generation.served_adapter import ServedAdapter
from actors.generation.vllm_private import pause_decoding
from actors.generation.vllm_process import VllmProcess
from actors.weights.adapter_folder import is_adapter
from actors.weights.buckets import BucketPlan, WeightBucket, WeightEntry, as_rows, checksum
from actors.weights.model_parameters import refuse_other_parameters
from actors.weights.shared_memory import BY_FILE, shared_buckets
from actors.weights.transfer import LoadedWeights
from rstar_ray.errors import EngineError, TransferError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

PATIENCE = 2.0
"""Longest silence of a sender, as a multiple of its deadline for one engine: if an engine hangs, ranks that gather with
its sender wait for that deadline, and the other engines must wait longer."""


@dataclass(slots=True)
class _Swap:
    """A swap that has begun; its weights arrive in parcels."""

    version: int
    paused_at: float
    timeout: asyncio.TimerHandle  # fires unless another parcel arrives
    received: bool = False  # a parcel has arrived


class WeightSwap:
    """Swaps of one engine's weights, one at a time."""

    def __init__(
        self,
        vllm: VllmProcess,
        meter: LoadMeter,
        model: Path,
        deadline_s: float,
        adapter: ServedAdapter | None = None,
        *,
        keeps_kv: bool = False,
    ) -> None:
        """`deadline_s`: how long senders wait for an answer of an engine. `keeps_kv`: running requests and cached
        prefixes keep the KV that earlier weights computed."""
        self._keeps_kv = keeps_kv
        self._vllm = vllm
        self._meter = meter
        self._model = model
        self._adapter = adapter
        self._model_replaced = False  # with an adapter: the model's weights are no longer those of the folder
        self._deadline_s = deadline_s
        self._silent_s = PATIENCE * deadline_s
        self._one_at_a_time = asyncio.Lock()
        self._swap: _Swap | None = None
        self._asleep = False
        self.policy_version = 0  # of the serving weights; 0 for those of the model folder

    async def sleep(self) -> None:
        """Free GPU memory until the next weights arrive (vLLM's sleep mode). No request may be running.

        The model's weights are dropped, because new ones arrive before the next token; with an adapter they are moved
        to host memory.
        """
        async with self._one_at_a_time:
            if not self._asleep:
                self._asleep = True
                await self._step(self._vllm.alive().sleep(level=1 if self._adapter else 2), "sleep")

    async def _wake(self, llm: "AsyncLLM", part: str) -> None:
        """`part`: "weights", and after these are loaded "kv_cache", after which vLLM can decode."""
        await self._step(llm.wake_up([part]), f"wake its {part}")

    async def update(self, version: int, buckets: Sequence[WeightBucket], name: str = "") -> LoadedWeights:
        """Serve the weights in `buckets` from the next decode step on. They must contain every parameter; with an
        adapter, its matrices, and optionally the model's parameters.

        Engines of one node that receive the same weights under one `name` share one copy.

        Raises `EngineError` for other parameters than the model's, and continues to serve the old weights.
        """
        start_s = time.monotonic()
        if self._adapter is not None:
            async with self._one_at_a_time:
                if await self._wrote_adapter_alone(self._adapter, version, buckets):
                    return await self._reload_adapter(version, buckets, start_s)
        plan = tuple(bucket.entries for bucket in buckets)
        sharing = shared_buckets(name or uuid.uuid4().hex, buckets)
        shared = await asyncio.to_thread(sharing.__enter__)
        try:
            move_s = time.monotonic() - start_s
            await self._begin(version, plan)
            await self.take({"by": BY_FILE, "path": shared.path, "buckets": as_rows(plan)})
            loaded = await self.end()
        finally:
            await asyncio.to_thread(sharing.__exit__, None, None, None)
        return replace(loaded, move_s=move_s, laid_out=shared.laid_out)

    async def _wrote_adapter_alone(self, adapter: ServedAdapter, version: int, buckets: Sequence[WeightBucket]) -> bool:
        """Write the adapter's matrices to its folder; True if the version has no model parameters."""
        entries = [entry for bucket in buckets for entry in bucket.entries]
        await self._refuse_others(entries)
        alone = all(is_adapter(entry.name) for entry in entries)
        if alone and self._model_replaced:
            raise EngineError(f"version {version} adapts the weights of {self._model}, which were replaced here")
        await asyncio.to_thread(adapter.write, buckets)
        self._model_replaced = self._model_replaced or not alone
        return alone

    async def _reload_adapter(self, version: int, buckets: Sequence[WeightBucket], start_s: float) -> LoadedWeights:
        llm = self._vllm.alive()
        total = await asyncio.to_thread(checksum, buckets)
        move_s = time.monotonic() - start_s
        paused_at = await self._pause(llm)
        await self._step(llm.update_weight_version(str(version)), "set a version")
        resumed_at = await self._resume(llm, version)
        return LoadedWeights(checksum=total, move_s=move_s, load_s=resumed_at - paused_at)

    async def join(self, meeting: Mapping[str, Any]) -> None:
        """Join the group in which a learner's rank broadcasts; decoding is paused until all members have joined."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        llm = self._vllm.alive()
        request = WeightTransferInitRequest({"meeting": dict(meeting)})
        await self._vllm.ask(llm.init_weight_transfer_engine(request), "join the learner's group")

    async def begin(self, version: int, plan: BucketPlan) -> None:
        """Pause for weights that arrive by `take`. Raises `EngineError` like `update`, and then continues to serve."""
        if self._adapter is not None:
            raise EngineError("an engine with an adapter loads weights from the object store only")
        await self._begin(version, plan)

    async def _begin(self, version: int, plan: BucketPlan) -> None:
        llm = self._vllm.alive()
        await self._one_at_a_time.acquire()
        with self._released_if_failed():
            await self._refuse_others([entry for entries in plan for entry in entries])
            paused_at = await self._pause(llm)
            await self._step(llm.start_weight_update(), "begin a weight update")
            self._swap = _Swap(version, paused_at, self._give_up_later())

    async def take(self, parcel: Mapping[str, Any]) -> None:
        """Load a parcel (`actors.weights.arrivals`)."""
        swap = self._current()
        swap.received = True
        with self._released_if_failed():
            await self._load(self._vllm.alive(), dict(parcel))
            swap.timeout = self._give_up_later()

    async def end(self) -> LoadedWeights:
        """Serve the weights that were loaded.

        Raises `TransferError` if none were sent, and continues to serve the old weights.
        """
        swap = self._current()
        with self._released_if_failed():
            llm = self._vllm.alive()
            version = swap.version if swap.received else self.policy_version
            await self._step(llm.finish_weight_update(str(version)), "finish a weight update")
            if not swap.received:
                assert not self._asleep, "its old weights were dropped"
                await self._resume(llm, version)
                raise TransferError(f"no weights of version {swap.version} were sent; version {version} still serves")
            total = await self._checksum(llm)  # before decoding resumes, so that it does not wait for a decode step
            resumed_at = await self._resume(llm, swap.version)
        self._release()
        return LoadedWeights(checksum=total, load_s=resumed_at - swap.paused_at)

    def _current(self) -> _Swap:
        if self._swap is None:
            raise EngineError("no swap of weights has begun here")
        self._swap.timeout.cancel()
        return self._swap

    def _give_up_later(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._silent_s, self._give_up)

    def _give_up(self) -> None:
        """Mark the engine dead if no further weights arrive in a pause, because its weights are half old, half new."""
        self._vllm.mark_dead(f"a swap of weights began, and no weights arrived for {self._silent_s:g} s")
        self._release()

    def _release(self) -> None:
        if self._swap is not None:
            self._swap.timeout.cancel()
        self._swap = None
        self._one_at_a_time.release()

    @contextlib.contextmanager
    def _released_if_failed(self) -> Generator[None]:
        try:
            yield
        except BaseException:
            self._release()
            raise

    async def _refuse_others(self, entries: Sequence[WeightEntry]) -> None:
        adapter = {} if self._adapter is None else self._adapter.shapes
        await asyncio.to_thread(refuse_other_parameters, self._model, entries, adapter)

    async def _pause(self, llm: "AsyncLLM") -> float:
        """Pause decoding; returns the time of the pause. Unless KV is kept, all KV of the old weights is dropped.

        A running request keeps its tokens and their log-probs, so its tokens may be of several versions.
        """
        if self._asleep:  # decoding is paused already
            await self._wake(llm, "weights")
        else:
            await self._vllm.ask(pause_decoding(llm, keep_kv=self._keeps_kv), "pause for new weights")
        return time.monotonic()

    async def _load(self, llm: "AsyncLLM", payload: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._step(llm.update_weights(WeightTransferUpdateRequest(payload)), "load new weights")

    async def _resume(self, llm: "AsyncLLM", version: int) -> float:
        if self._asleep:
            await self._wake(llm, "kv_cache")
            self._asleep = False
        if self._adapter is not None:  # after the model's weights, because loading these removes adapters
            await self._step(llm.add_lora(self._adapter.loading), "load an adapter")
        if not self._keeps_kv:
            self._meter.expect_recompute()  # the statistics of the last step have arrived by now
        await self._vllm.ask(llm.resume_generation(), "resume after new weights")
        self.policy_version = version
        return time.monotonic()

    async def _step(self, awaitable: Awaitable[T], what: str) -> T:
        """Run one step of a swap; a failure marks the engine dead, because its weights may be half old, half new."""
        try:
            return await self._vllm.ask(awaitable, what)
        except BaseException as failed:
            self._vllm.mark_dead(f"a swap of weights failed half-way: {failed}")
            raise

    async def _checksum(self, llm: "AsyncLLM") -> int:
        sums = await self._step(llm.collective_rpc("loaded_checksum"), "report the checksum of new weights")
        if len(set(sums)) != 1:
            self._vllm.mark_dead(f"its ranks loaded different weights: checksums {sums}")
            self._vllm.alive()
        return sums[0]
