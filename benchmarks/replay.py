"""Replays traces on real engines: forced lengths with the real worker, balancer actor and agent loop.

The sampled tokens do not matter here, only their number and times: every completion has exactly the length in the
trace, and the tool answers at once with the number of tokens in the trace.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from uuid import uuid4
from zlib import crc32

import numpy as np
import ray

from actors.balancer_service import BalancerService, start_balancer
from actors.generation.engine import Engine, EngineFacts
from actors.generation.outbox import rollout_load
from actors.generation.worker import GenerationWorker
from actors.remote import Remote
from rstar_ray.agent.rollout import RolloutState
from rstar_ray.chat.template import Reading
from rstar_ray.config import BalancerConfig, RunConfig
from rstar_ray.errors import RStarError
from rstar_ray.outcome import Outcome
from rstar_ray.reward.find import boxed_answer
from rstar_ray.reward.judge import Judgement
from rstar_ray.rollouts import DroppedRollout
from rstar_ray.tools.environment import Reply
from rstar_ray.trajectory import (
    UNMODIFIED,
    Completion,
    Problem,
    RolloutLimits,
    RolloutRequest,
    Sampling,
    StopReason,
    ToolCall,
    ToolMemory,
    ToolResult,
    Trajectory,
)
from scheduler.cost import EngineCost
from scheduler.simulator.simulate import limits_of
from scheduler.traces.stage_traces import StageShape, synthetic
from scheduler.traces.trace import TraceRollout, TraceTurn

CALL, ANSWER, FILLER = 5, 6, 7
"""Last tokens of a completion that calls the tool and of one that answers, and the token of tools' answers.

The last token but one is the number of tokens of the tool's answer, so at most the vocabulary's size."""
DRAIN_S = 10.0
"""Limit until the balancer has received the last end."""
LONGEST_S = 600.0
"""Limit of a replay."""
LEAST_COMPLETION, MOST_TOOL_TOKENS = 2, 40
MIXED = StageShape(
    max_response_tokens=480,
    max_turns=3,
    mean_response_tokens=120,
    calls_mean=1.0,
    tool_tokens_mean=20,
    prompt_tokens_mean=80,
)
MIXED_LIMITS = RolloutLimits(max_response_tokens=481, max_turns=3, max_context_tokens=2_048, max_calls_per_turn=1)

_ids = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """One run of a trace."""

    seconds: float
    generated_tokens: int
    preemptions: int
    gaps_s: list[float]  # between a turn's last token and the next turn's submission, of every rollout

    @property
    def tokens_per_s(self) -> float:
        return self.generated_tokens / self.seconds


@dataclass(slots=True)
class Life:
    rollout: TraceRollout
    turn_ended_s: float = 0.0


@dataclass(slots=True)
class Replay:
    """State that the engines of one run share."""

    lives: dict[str, Life]
    gaps_s: list[float] = field(default_factory=list[float])


class ReplayEngine(Engine):
    """Samples the number of tokens in the trace; continues from run to run until `shut_down`."""

    def __init__(self, config: RunConfig, model: Path) -> None:
        super().__init__(config, model, measures_cost=True)
        self.replay = Replay({})

    async def start(self) -> EngineFacts:
        return self._facts or await super().start()

    async def measured_again(self) -> EngineCost:
        """Measure the cost of its steps while other engines run; workers report this to the balancer from now on."""
        assert self._facts is not None
        cost = await self.measure_cost()
        self._facts = replace(self._facts, cost=cost)
        return cost

    async def close(self) -> None:
        """Do nothing, so that the engine outlives a worker."""

    async def shut_down(self) -> None:
        await super().close()

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
        rollout_id, number = request_id.rsplit("/turn-", 1)
        life = self.replay.lives[rollout_id]
        if life.turn_ended_s:
            self.replay.gaps_s.append(time.perf_counter() - life.turn_ended_s)
        turn = life.rollout.turns[int(number)]
        length = min(max_tokens, turn.completion_tokens)
        done = await super().generate(
            prompt_ids,
            request_id=f"{next(_ids)}",
            max_tokens=length,
            seed=seed,
            sampling=sampling,
            cache_salt=cache_salt,
        )
        life.turn_ended_s = time.perf_counter()
        last = int(number) + 1 == len(life.rollout.turns)
        return replace(done, token_ids=[*done.token_ids[:-2], turn.tool_tokens, ANSWER if last else CALL], ended=True)

    async def bare(self, prompt_ids: Sequence[int], tokens: int, seed: int) -> list[int]:
        """Only `AsyncLLM.generate`."""
        prompt: Any = {"type": "token", "prompt_token_ids": list(prompt_ids)}
        params = self._sampling_params(tokens, seed, UNMODIFIED)
        output: Any = None
        async for part in self._vllm.alive().generate(prompt, params, f"{next(_ids)}"):
            output = part
        return list(output.outputs[0].token_ids)

    def _sampling_params(self, max_tokens: int, seed: int, sampling: Sampling) -> Any:
        params = super()._sampling_params(max_tokens, seed, sampling)
        params.stop_token_ids = []
        params.ignore_eos = True
        return params


class ReplayChat:
    """Prompts of the length in the trace, the same for a group; a completion's last token is a call or an answer."""

    def __init__(self, rollouts: Sequence[TraceRollout], salt: int) -> None:
        self._prompts = {rollout.group: prompt_of(rollout, salt) for rollout in rollouts}

    def prompt_ids(self, problem: Problem) -> list[int]:
        return self._prompts[problem.problem]

    def tool_answer_ids(self, results: Sequence[ToolResult]) -> list[int]:
        return [FILLER] * int(results[0].text)

    def user_answer_ids(self, text: str) -> list[int]:
        raise AssertionError("a replay has no environment")

    def read(self, token_ids: Sequence[int], *, after_tools: bool, own_tools: bool = False) -> Reading:
        text = self.decode(token_ids)
        calls = () if token_ids[-1] == ANSWER else (ToolCall(code=str(token_ids[-2])),)
        return Reading(text=text, spoken=text, calls=calls)

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


def prompt_of(rollout: TraceRollout, salt: int) -> list[int]:
    """A random prompt; another `salt` avoids hits in the cache of an earlier run."""
    rng = np.random.default_rng(crc32(f"{salt} {rollout.group}".encode()))
    return rng.integers(8, 60, rollout.prompt_tokens).tolist()


class EchoTools:
    """The tools of a worker and of each rollout; a call's answer is its code."""

    environment = ""

    def open(self, state: RolloutState) -> "EchoTools":
        return self

    async def execute(self, call: ToolCall) -> ToolResult:
        return ToolResult(outcome=Outcome.OK, text=call.code)

    async def converse(self, said: str) -> tuple[Reply, ToolMemory]:
        raise AssertionError("a replay has no environment")

    async def ended(self, reason: StopReason) -> tuple[float | None, ToolMemory]:
        raise AssertionError("a replay has no environment")

    def close(self) -> None: ...


def _engine_died() -> None:
    raise RStarError("replay: an engine died")  # the worker's error then ends the replay


async def _exact(completion: str, problem: Problem) -> Judgement:
    return Judgement(float(boxed_answer(completion) == problem.answer))


def mixed_trace(groups: int, siblings: int, *, seed: int) -> list[TraceRollout]:
    """Lengths as in the synthetic stages, at scale tiny, with tools that answer at once."""
    return [at_once(rollout) for rollout in synthetic(MIXED, groups=groups, siblings=siblings, seed=seed)]


def at_once(rollout: TraceRollout) -> TraceRollout:
    """The rollout with tools that answer at once, and answers short enough for one token to encode their length."""
    turns = [
        TraceTurn(max(LEAST_COMPLETION, turn.completion_tokens), min(MOST_TOOL_TOKENS, turn.tool_tokens))
        for turn in rollout.turns
    ]
    return replace(rollout, turns=tuple(turns))


def in_one_turn(rollout: TraceRollout) -> TraceRollout:
    """The same sampled tokens without a tool call between them."""
    return replace(rollout, turns=(TraceTurn(rollout.generated_tokens),))


def equal_trace(
    count: int, *, prompt: int, tokens: int, turns: int = 1, tool_tokens: int = 20, siblings: int = 1
) -> list[TraceRollout]:
    """`count` rollouts that differ only in the text of their prompts."""
    middle = TraceTurn(tokens, tool_tokens)
    parts = (*[middle] * (turns - 1), TraceTurn(tokens))
    return [TraceRollout(f"g{number // siblings}", prompt, parts) for number in range(count)]


@asynccontextmanager
async def balancer_actor(rule: str) -> AsyncGenerator[Remote[BalancerService]]:
    """A separate balancer, as an actor; Ray must run."""
    balancer = start_balancer(replace(BalancerConfig(), rule=cast(Any, rule)), name=f"balancer-{uuid4().hex[:12]}")
    try:
        yield balancer
    finally:
        ray.kill(balancer.handle)


async def replay(
    engines: Sequence[ReplayEngine],
    rollouts: Sequence[TraceRollout],
    balancer: Remote[BalancerService],
    *,
    salt: int,
    limits: RolloutLimits | None = None,
) -> ReplayResult:
    """Run the trace once with a balancer and new workers; the engines must have started.

    A balancer that is reused with the same limits knows the lengths that it has seen, as in training from the second
    step. The default limits are the trace's.
    """
    limits = limits or request_limits(rollouts)
    named = {f"{salt}/{rollout.group}/{number}": rollout for number, rollout in enumerate(rollouts)}
    shared = Replay({name: Life(rollout) for name, rollout in named.items()})
    chat = ReplayChat(rollouts, salt)
    before = sum(engine.load().preemptions for engine in engines)
    async with replay_workers(engines, balancer, chat, shared) as workers:
        wanted = [request_of(name, f"{salt}/{rollout.group}", rollout, limits) for name, rollout in named.items()]
        began = time.perf_counter()
        await submit(wanted, chat, balancer)
        left = len(rollouts)
        async with asyncio.timeout(LONGEST_S), finished(workers) as ended:
            while left:
                await ended.get()
                left -= 1
        seconds = time.perf_counter() - began
        await reported(balancer)
    await asyncio.sleep(0.1)  # so that the engines' last statistics arrive
    return ReplayResult(
        seconds=seconds,
        generated_tokens=sum(rollout.generated_tokens for rollout in rollouts),
        preemptions=sum(engine.load().preemptions for engine in engines) - before,
        gaps_s=shared.gaps_s,
    )


@asynccontextmanager
async def replay_workers(
    engines: Sequence[ReplayEngine],
    balancer: Remote[BalancerService],
    chat: ReplayChat,
    shared: Replay,
    tools: Any = None,
) -> AsyncGenerator[Sequence[GenerationWorker]]:
    """New workers for started engines; the default `tools` answer at once."""
    workers: list[GenerationWorker] = []
    try:
        for number, engine in enumerate(engines):
            engine.replay = shared
            worker = GenerationWorker(
                f"generation/{number}",
                engine=engine,
                max_running=engine.config.max_running,
                chat=chat,
                balancer=balancer,
                tools=cast(Any, tools or EchoTools()),
                judge=_exact,
                die=_engine_died,
            )
            workers.append(worker)
            await worker.start()
            await worker.serve()
        yield workers
    finally:
        for worker in workers:
            await worker.close()


async def submit(requests: Sequence[RolloutRequest], chat: ReplayChat, balancer: Remote[BalancerService]) -> None:
    starts = [RolloutState.start(one, chat.prompt_ids(one.problem)) for one in requests]
    items = [(rollout_load(start), start) for start in starts]
    await balancer.call(lambda b: b.submit(items), deadline_s=DRAIN_S, reason="the trace")


@asynccontextmanager
async def finished(workers: Sequence[GenerationWorker]) -> AsyncGenerator[asyncio.Queue[Trajectory | DroppedRollout]]:
    """A queue of finished rollouts of all workers. A worker's error ends the block."""
    ended = asyncio.Queue[Trajectory | DroppedRollout]()

    async def drain(worker: GenerationWorker) -> None:
        acknowledged = 0
        while True:
            batch = await worker.take_finished(LONGEST_S, acknowledged)
            acknowledged = batch.number
            for one in batch.items:
                ended.put_nowait(one)

    async with asyncio.TaskGroup() as drains:
        tasks = [drains.create_task(drain(worker)) for worker in workers]
        yield ended
        for task in tasks:
            task.cancel()


async def reported(balancer: Remote[BalancerService]) -> None:
    """Wait until the balancer has received every end; results arrive here earlier."""
    until = time.monotonic() + DRAIN_S
    while time.monotonic() < until:
        now = await balancer.call(lambda b: b.snapshot(), deadline_s=DRAIN_S, reason="the last reports")
        if not now.waiting + now.in_flight:
            return
        await asyncio.sleep(0.01)
    raise RStarError(f"replay: the balancer still had rollouts {DRAIN_S:g} s after the last result")


async def replay_bare(
    engine: ReplayEngine, rollouts: Sequence[TraceRollout], *, salt: int, concurrency: int
) -> ReplayResult:
    """Sample the same tokens with `AsyncLLM.generate` alone, `concurrency` rollouts at a time."""
    room, gaps = asyncio.Semaphore(concurrency), list[float]()
    before = engine.load().preemptions

    async def one(number: int, rollout: TraceRollout) -> None:
        async with room:
            context, ended = prompt_of(rollout, salt), 0.0
            for turn in rollout.turns:
                if ended:
                    gaps.append(time.perf_counter() - ended)
                tokens = await engine.bare(context, turn.completion_tokens, number)
                ended = time.perf_counter()
                context = [*context, *tokens, *[FILLER] * turn.tool_tokens]

    began = time.perf_counter()
    await asyncio.gather(*(one(number, rollout) for number, rollout in enumerate(rollouts)))
    return ReplayResult(
        seconds=time.perf_counter() - began,
        generated_tokens=sum(rollout.generated_tokens for rollout in rollouts),
        preemptions=engine.load().preemptions - before,
        gaps_s=gaps,
    )


def request_limits(rollouts: Sequence[TraceRollout]) -> RolloutLimits:
    """The smallest limits with which every rollout ends by itself."""
    budget, turns = limits_of(rollouts)
    return RolloutLimits(
        max_response_tokens=budget + 1,
        max_turns=turns,
        max_context_tokens=max(rollout.prompt_tokens + rollout.response_tokens for rollout in rollouts) + 1,
        max_calls_per_turn=1,
    )


def request_of(name: str, group: str, rollout: TraceRollout, limits: RolloutLimits) -> RolloutRequest:
    problem = Problem(id=name, problem=rollout.group, answer="0")
    return RolloutRequest(rollout_id=name, group_id=group, problem=problem, seed=0, limits=limits, sampling=UNMODIFIED)
