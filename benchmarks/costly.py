"""Compares three placement rules on real engines where a preemption costs tens of decode steps (`--costly`).

A model of 24M random weights, prompts of 100 to 1,000 tokens, responses of up to 2,000 with forced lengths, and two
engines whose caches hold a fraction of all contexts. Each repeat runs another distribution with every rule;
`expected_kv` has seen one earlier step of each distribution, with other lengths. The simulator's result for each run,
with the costs that the engines measured, is printed beside it.
"""

import asyncio
import statistics
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from actors.balancer_service import BalancerService
from actors.remote import Remote
from benchmarks.replay import ReplayEngine, ReplayResult, at_once, balancer_actor, replay
from benchmarks.small import SMALL, spread
from benchmarks.trace_kinds import KINDS, Floats, Kind, Random, draw
from rstar_ray.config import RunConfig, with_values
from rstar_ray.tiny.tiny_model import make_random_model
from rstar_ray.trajectory import RolloutLimits
from scheduler.cost import EngineCost, placement_cost
from scheduler.simulator.engine_model import EngineShape
from scheduler.simulator.simulate import Simulator, SimulatorResult, SimulatorSettings
from scheduler.traces.trace import TraceRollout

MEDIUM = {
    "hidden_size": 512,
    "intermediate_size": 1_536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8_192,
}
"""24M weights: recomputing a context of 2,000 tokens takes tens of decode steps."""
SIBLINGS, TURNS = 4, 4
MAX_RUNNING = 64
PROMPT_TOKENS = (100.0, 1_000.0)
EARLIER_SEED = 1_000
DISTRIBUTIONS = ("bimodal", "heavy_tail", "log_normal")
RULES = ("expected_kv", "least_requests", "least_sessions")


@dataclass(frozen=True, kw_only=True)
class CostlySize:
    """The amount of work, for the machine's size. If a cache holds only two or three of the longest rollouts, or a run
    is only a few times what fits at once, the last rollouts decide the time, and no rule makes a difference."""

    tokens: int = 72_000
    """sampled in one run, about"""
    kv_tokens: int = 12_288
    """KV cache of each of two engines [tokens]"""
    response_tokens: int = 2_000
    """of the longest rollout; fewer for a trial, at which a preemption costs less"""

    @property
    def limits(self) -> RolloutLimits:
        """The engines' context is a whole number of blocks."""
        context = -(-(int(PROMPT_TOKENS[1]) + self.response_tokens + 1) // 64) * 64
        return RolloutLimits(
            max_response_tokens=self.response_tokens + 1,
            max_turns=TURNS,
            max_context_tokens=context,
            max_calls_per_turn=1,
        )


def rollouts(name: str, size: CostlySize, seed: int) -> list[TraceRollout]:
    """Whole groups of this distribution, scaled to the response budget, until `size.tokens` tokens are sampled."""
    shape = KINDS[name]
    kind = replace(
        shape,
        lengths_GS=_scaled(shape, size.response_tokens / shape.max_response_tokens),
        max_response_tokens=size.response_tokens,
        max_turns=TURNS,
        calls_mean=1.0,
        prompt_tokens=PROMPT_TOKENS,
        tool_tokens_mean=20.0,
    )
    found: list[TraceRollout] = []
    for rollout in draw(kind, groups=max(1, size.tokens // 64), siblings=SIBLINGS, seed=seed):
        if len(found) % SIBLINGS == 0 and sum(one.generated_tokens for one in found) >= size.tokens:
            break
        found.append(at_once(rollout))
    return found


def _scaled(kind: Kind, share: float) -> Callable[[Random, tuple[int, int]], Floats]:
    return lambda rng, shape: kind.lengths_GS(rng, shape) * share


def config_of(size: CostlySize) -> RunConfig:
    """Settings of each of two engines, which share a machine's cores, or one GPU."""
    on_gpu = torch.cuda.is_available()
    return with_values(
        SMALL,
        {
            "engine.dtype": "bfloat16",
            "engine.max_context_tokens": size.limits.max_context_tokens,
            "engine.kv_tokens": size.kv_tokens,
            "engine.max_running": MAX_RUNNING,
            "engine.gpus_per_replica": 0.5 if on_gpu else 0.0,
            "engine.gpu_memory_share": 0.3,
        },
    )


@asynccontextmanager
async def _balancers() -> AsyncGenerator[dict[tuple[str, str], Remote[BalancerService]]]:
    """One balancer for each distribution and rule, so that lengths of one distribution are not expected in another."""
    async with AsyncExitStack() as stack:
        yield {
            (name, rule): await stack.enter_async_context(balancer_actor(rule))
            for name in DISTRIBUTIONS
            for rule in RULES
        }


@dataclass(frozen=True, slots=True)
class Run:
    """One trace under every rule."""

    name: str
    trace: list[TraceRollout]
    done: dict[str, ReplayResult]


async def compare(size: CostlySize, folder: Path, repeats: int) -> dict[str, Any]:
    """Tokens/s of `expected_kv` over those of the other rules, run by run."""
    model = make_random_model(folder, seed=0, **MEDIUM)
    engines = [ReplayEngine(config_of(size), model) for _ in range(2)]
    runs: list[Run] = []
    try:
        await asyncio.gather(*(engine.start() for engine in engines))
        cost = (await asyncio.gather(*(engine.measured_again() for engine in engines)))[0]  # together, as they run
        async with _balancers() as balancers:
            names = [DISTRIBUTIONS[number % len(DISTRIBUTIONS)] for number in range(repeats)]
            for place, name in enumerate(dict.fromkeys(names)):
                earlier = rollouts(name, size, seed=EARLIER_SEED)
                seen = await replay(
                    engines, earlier, balancers[name, "expected_kv"], salt=EARLIER_SEED + place, limits=size.limits
                )
                _show(f"{name}, the step before", seen)
            for number, name in enumerate(names):
                trace, done = rollouts(name, size, seed=number), dict[str, ReplayResult]()
                turn = number % len(RULES)  # rotate the order of rules
                for place, rule in enumerate((*RULES[turn:], *RULES[:turn])):
                    salt = len(RULES) * number + place
                    done[rule] = await replay(engines, trace, balancers[name, rule], salt=salt, limits=size.limits)
                    _show(f"{salt + 1} of {len(names) * len(RULES)}: {name}, {rule}", done[rule])
                runs.append(Run(name, trace, done))
            risks = {
                name: (
                    await balancers[name, "expected_kv"].call(lambda b: b.snapshot(), deadline_s=60, reason="its risk")
                ).risk
                for name in set(names)
            }
    finally:
        for engine in engines:
            await engine.shut_down()
    contexts = round(statistics.mean(_contexts(run.trace) for run in runs))
    again = placement_cost(cost, kv_tokens=size.kv_tokens, max_running=MAX_RUNNING, context_tokens=size.response_tokens)
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cost_s": asdict(cost),
        "steps_to_compute_the_longest_response_again": round(again.preemption_steps, 1),
        "kv_tokens": size.kv_tokens,
        "all_contexts_over_all_caches": round(contexts / (2 * size.kv_tokens), 1),
        "risk": risks,
        **{f"over_{rule}": _ratios(runs, rule) for rule in RULES[1:]},
        "runs": [_row(run, size, cost) for run in runs],
    }


def _show(what: str, run: ReplayResult) -> None:
    """Print progress to stderr: a run takes more than a minute on a CPU."""
    print(f"{what}: {run.tokens_per_s:.0f} tokens/s, {run.preemptions} preemptions", file=sys.stderr, flush=True)


def _contexts(trace: Sequence[TraceRollout]) -> int:
    """Tokens of all contexts at their ends, with each group's prompt counted once."""
    prompts = {rollout.group: rollout.prompt_tokens for rollout in trace}
    return sum(prompts.values()) + sum(rollout.response_tokens for rollout in trace)


def _ratios(runs: Sequence[Run], rule: str) -> dict[str, float]:
    found = [run.done["expected_kv"].tokens_per_s / run.done[rule].tokens_per_s for run in runs]
    return spread(found)


def _row(run: Run, size: CostlySize, cost: EngineCost) -> dict[str, Any]:
    steps = {rule: simulated(run.name, run.trace, rule, size, cost) for rule in RULES}
    return {
        "distribution": run.name,
        "tokens": run.done["expected_kv"].generated_tokens,
        "tokens_per_s": {rule: round(run.done[rule].tokens_per_s) for rule in RULES},
        "preemptions": {rule: run.done[rule].preemptions for rule in RULES},
        "simulated_tokens_per_s": {
            rule: round(step.generated_tokens / step.makespan_s) for rule, step in steps.items()
        },
        "simulated_preemptions": {rule: step.preemptions for rule, step in steps.items()},
    }


def simulated(
    name: str, trace: Sequence[TraceRollout], rule: str, size: CostlySize, cost: EngineCost
) -> SimulatorResult:
    """Simulate the same run; `expected_kv` has seen the same earlier step."""
    settings = SimulatorSettings(
        replicas=2,
        shape=EngineShape(
            kv_tokens=size.kv_tokens,
            max_running=MAX_RUNNING,
            max_batched_tokens=size.limits.max_context_tokens + MAX_RUNNING,
        ),
        cost=cost,
        max_response_tokens=size.limits.max_response_tokens,
        max_turns=size.limits.max_turns,
    )
    earlier = rollouts(name, size, seed=EARLIER_SEED) if rule == "expected_kv" else ()
    return Simulator(trace, rule, settings, history=earlier).run()
