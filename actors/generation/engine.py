"""One generation engine: samples tokens with log-probs, and swaps weights between two decode steps.

A plain class around vLLM's `AsyncLLM`, without Ray. vLLM runs in separate processes.
"""

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.generation.load_meter import LoadMeter
from actors.generation.served_adapter import ServedAdapter
from actors.generation.vllm_private import cache_sizes, refuse_without_prefix_salts
from actors.generation.vllm_process import VllmProcess
from actors.generation.vllm_start import eos_token_ids
from actors.generation.weight_swap import WeightSwap
from actors.weights.adapter_folder import AdapterSettings
from rstar_ray.config import RunConfig
from rstar_ray.errors import DeadlineExceeded, EngineError, RStarError
from rstar_ray.trajectory import UNMODIFIED, Completion, EngineTimes, Sampling
from scheduler.cost import EngineCost
from scheduler.records import ReplicaLoad

SampleFn = Callable[[Sequence[int], int], Awaitable[object]]
"""`(prompt_ids, num_tokens)`: sample that many tokens after the prompt."""

ROUNDS = 3
FEW_TOKENS, MORE_TOKENS = 4, 16  # sampled per request
SHORT_PROMPT, LONG_PROMPT = 16, 2_048  # maximum tokens
MANY = 32  # maximum concurrent requests
FIRST_TOKEN, TOKENS = 8, 50  # range of token ids in prompts, which every vocabulary has
CONTEXTS_S = 5.0  # maximum time to prefill all long prompts: a real model on a CPU takes seconds for one
LEAST_STEP_S = 1e-6  # lower bound, because measurements are noisy


async def measure_cost(
    sample: SampleFn,
    *,
    context_tokens: int,
    kv_tokens: int,
    max_running: int,
    clock: Callable[[], float] = time.perf_counter,
) -> EngineCost:
    """Measure the cost of steps. `context_tokens`: limit per request; `kv_tokens`: limit of all requests."""
    room = min(context_tokens, kv_tokens) - MORE_TOKENS
    short = min(SHORT_PROMPT, max(1, room // 2))
    long = max(short + 1, min(LONG_PROMPT, room // 2))
    many, many_long = (max(1, min(MANY, max_running, kv_tokens // (of + 2 * MORE_TOKENS))) for of in (short, long))
    ids = random.Random(0)

    def prompts(tokens: int, requests: int) -> list[list[int]]:
        """New prompts, which are not in the prefix cache and share no KV with each other."""
        return [[FIRST_TOKEN + ids.randrange(TOKENS) for _ in range(tokens)] for _ in range(requests)]

    async def seconds(asked: Sequence[Sequence[int]], tokens: int) -> float:
        began = clock()
        await asyncio.gather(*(sample(prompt_ids, tokens) for prompt_ids in asked))
        return clock() - began

    async def step_s(tokens: int, requests: int) -> tuple[float, float]:
        """Seconds of a decode step of `requests` requests after prompts of `tokens` tokens, and of all before it."""
        asked = prompts(tokens, requests)
        await seconds(asked, 1)
        few = min([await seconds(asked, FEW_TOKENS) for _ in range(ROUNDS)])
        more = min([await seconds(asked, MORE_TOKENS) for _ in range(ROUNDS)])
        step = max(LEAST_STEP_S, (more - few) / (MORE_TOKENS - FEW_TOKENS))
        return step, few - FEW_TOKENS * step

    async def prefill_s(tokens: int) -> float:
        return min([await seconds(prompts(tokens, 1), 1) for _ in range(ROUNDS)])

    brief, whole = await prefill_s(short), await prefill_s(long)
    many_long = max(1, min(many_long, int(CONTEXTS_S / max(LEAST_STEP_S, whole))))
    (one, start_one), (all_short, start_all) = await step_s(short, 1), await step_s(short, many)
    all_long, _ = await step_s(long, many_long)
    per_sequence_s = min(one, max(0.0, (all_short - one) / max(1, many - 1)))
    without_context_s = one + (many_long - 1) * per_sequence_s
    per_prefill_s = max(0.0, (whole - brief) / (long - short))
    start_s = (start_all - start_one) / max(1, many - 1)  # with the prompt, whose last block is never cached
    return EngineCost(
        fixed_s=max(LEAST_STEP_S, one - per_sequence_s),
        per_sequence_s=per_sequence_s,
        per_context_s=max(0.0, (all_long - without_context_s) / (many_long * (long - short))),
        per_prefill_s=per_prefill_s,
        per_request_s=max(0.0, start_s - short * per_prefill_s),
    )


if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts about a started engine."""

    kv_capacity_tokens: int
    block_size: int
    max_model_len: int
    cost: EngineCost | None = None  # of its steps; None if not measured


class Engine:
    """One engine. Call `start` first and `close` last, all from the same event loop."""

    def __init__(
        self,
        config: RunConfig,
        model: Path,
        *,
        adapter: AdapterSettings | None = None,
        measures_cost: bool = False,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """Serves the model in the folder `model`, or the base model and adapter of `adapter`.

        `measures_cost`: measure the cost of steps at the start, for the balancer. `stop_token_ids`: end a completion;
        default: those of the model folder.
        """
        self.config = config.engine
        self._measures_cost = measures_cost
        self._stop_ids = list(stop_token_ids) or eos_token_ids(model)
        self._vllm = VllmProcess(config, model, adapter)
        self._meter = LoadMeter()
        self._adapter = None if adapter is None else ServedAdapter(adapter, self.config.dtype)
        weights = model if adapter is None else Path(adapter.base)
        self._staleness = config.staleness
        keeps_kv = config.staleness > 0 and not self.config.recompute_kv
        deadline_s = self.config.answer_deadline_s
        self.weights = WeightSwap(self._vllm, self._meter, weights, deadline_s, self._adapter, keeps_kv=keeps_kv)
        self._facts: EngineFacts | None = None

    @property
    def policy_version(self) -> int:
        """The version of the serving weights; 0 for those of the model folder."""
        return self.weights.policy_version

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Process ids of vLLM's processes; empty before the start."""
        return tuple(process.pid for process in self._vllm.processes)

    async def start(self) -> EngineFacts:
        """Start vLLM's processes. Raises `EngineError` if they fail, or lack a feature that the settings need."""
        if self._staleness:
            refuse_without_prefix_salts(self._staleness)
        llm = await self._vllm.start(self._meter.observe)
        await self._vllm.ask(llm.update_weight_version("0"), "set the version of its first weights")
        if self._adapter is not None:
            await asyncio.to_thread(self._adapter.create, self._vllm.folder / "adapter")
            await self._vllm.ask(llm.add_lora(self._adapter.loading), "load an adapter")
        num_blocks, block_size, max_model_len = cache_sizes(llm)
        self._facts = EngineFacts(
            kv_capacity_tokens=num_blocks * block_size, block_size=block_size, max_model_len=max_model_len
        )
        self._meter.kv_capacity_tokens = self._facts.kv_capacity_tokens
        if self._measures_cost:
            self._facts = replace(self._facts, cost=await self.measure_cost())
        return self._facts

    async def measure_cost(self) -> EngineCost:
        """Measure the cost of the engine's steps; no other request may run meanwhile."""
        assert self._facts is not None
        count = itertools.count()
        # An earlier measurement used the same prompts, which would be cached.
        await self._vllm.ask(self._vllm.alive().reset_prefix_cache(), "reset its prefix cache")

        async def sample(prompt_ids: Sequence[int], tokens: int) -> None:
            params = self._sampling_params(tokens, 0, UNMODIFIED)
            params.stop_token_ids, params.ignore_eos = [], True
            prompt: Any = {"type": "token", "prompt_token_ids": list(prompt_ids)}
            outputs = self._vllm.alive().generate(
                prompt, params, f"cost/{next(count)}", lora_request=self._lora_request
            )
            await self._vllm.ask(_last(outputs), "measure its costs", self.config.start_deadline_s)

        return await measure_cost(
            sample,
            context_tokens=self._facts.max_model_len,
            kv_tokens=self._facts.kv_capacity_tokens,
            max_running=self.config.max_running,
        )

    async def until_dead(self) -> None:
        """Wait until the engine no longer serves; then raise `EngineError` with the reason."""
        await self._vllm.until_dead()

    async def close(self) -> None:
        """End vLLM's processes; safe to call twice."""
        await self._vllm.close()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        request_id: str,
        max_tokens: int,
        seed: int,
        sampling: Sampling,
        cache_salt: str = "",
    ) -> Completion:
        """Sample until a stop token, which the completion includes, or until `max_tokens`.

        Log-probs are of the distribution sampled from, after temperature and top-p. The tokens depend only on the
        prompt, the seed and the weights. `cache_salt`: only KV that was cached under the same salt is reused.

        Raises `ValueError` for a request that can never run, `EngineError` if the engine has ended, and `RStarError`
        if this completion is not done within `--engine.completion-deadline-s`: the engine continues to serve.
        """
        llm = self._vllm.alive()
        assert self._facts is not None
        if not 0 < len(prompt_ids) < self._facts.max_model_len or max_tokens < 1:
            raise ValueError(
                f"{request_id}: {len(prompt_ids)} prompt tokens and max_tokens {max_tokens} leave nothing to sample "
                f"in a context of {self._facts.max_model_len}"
            )
        prompt: Any = {"type": "token", "prompt_token_ids": list(prompt_ids)}
        if cache_salt:
            prompt["cache_salt"] = cache_salt
        params = self._sampling_params(max_tokens, seed, sampling)
        outputs = llm.generate(prompt, params, request_id, lora_request=self._lora_request)
        sampling_s = self.config.completion_deadline_s
        try:
            output = await self._vllm.ask(_last(outputs), f"complete {request_id}", sampling_s, may_refuse=True)
        except DeadlineExceeded as late:
            raise RStarError(str(late)) from late
        return self._completion(output, request_id)

    async def stream(
        self, prompt_ids: Sequence[int], *, request_id: str, max_tokens: int, seed: int, sampling: Sampling
    ) -> AsyncGenerator[list[int], None]:
        """Like `generate`, but yields each token as it is sampled, without its log-prob; closing the iterator
        aborts the request.
        """
        from vllm.sampling_params import RequestOutputKind

        llm = self._vllm.alive()
        params = self._sampling_params(max_tokens, seed, sampling)
        params.output_kind, params.logprobs, params.flat_logprobs = RequestOutputKind.DELTA, None, False
        prompt: Any = {"type": "token", "prompt_token_ids": list(prompt_ids)}
        asked = llm.generate(prompt, params, request_id, lora_request=self._lora_request)
        deadline_s = self.config.completion_deadline_s
        try:
            while True:
                output = await self._vllm.ask(anext(asked, None), f"continue {request_id}", deadline_s)
                if output is None:
                    return
                if token_ids := list(output.outputs[0].token_ids):
                    yield token_ids
        finally:
            with contextlib.suppress(RuntimeError):  # the generator is running: cancelling its read aborts the request
                await asked.aclose()

    @property
    def _lora_request(self) -> "LoRARequest | None":
        return self._adapter.request if self._adapter is not None else None

    def load(self) -> ReplicaLoad:
        """The load after the latest decode step."""
        return replace(self._meter.load, policy_version=self.policy_version)

    def _sampling_params(self, max_tokens: int, seed: int, sampling: Sampling) -> "SamplingParams":
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        return SamplingParams(
            **asdict(sampling),
            seed=seed,
            max_tokens=max_tokens,
            stop_token_ids=self._stop_ids,
            logprobs=0,  # only of the sampled token
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
            policy_versions=versions or [self.policy_version] * len(token_ids),
            ended=token_ids[-1] in self._stop_ids,
            times=_times(output.metrics),
        )


def _times(stats: Any) -> EngineTimes | None:
    """Times of a request from vLLM's statistics; None if there are none."""
    if stats is None or not stats.first_token_ts:
        return None
    return EngineTimes(
        prefill_s=max(0.0, stats.first_token_ts - stats.scheduled_ts),
        decode_s=max(0.0, stats.last_token_ts - stats.first_token_ts),
    )


async def _last(outputs: Any) -> Any:
    """The last output of a request; the request is aborted if the wait is cancelled."""
    async with contextlib.aclosing(outputs):
        return [output async for output in outputs][-1]
