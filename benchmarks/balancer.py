"""The balancer on real engines, as one JSON line: `python -m benchmarks.balancer`.

Overhead: the same prompts and forced lengths alternately through balancer and agent loop, and with `AsyncLLM.generate`
alone.
Under pressure: two engines with a small KV cache and mixed lengths, alternately with `expected_kv` and
`least_requests`, both after one step whose lengths they have seen.
Costly (`--costly`): the same with preemptions that cost tens of decode steps, a larger model and several distributions
of lengths, also against `least_sessions` (benchmarks/costly.py).
Calibration (`--calibrate`): fits the engine model to a few runs of equal rollouts on one engine, and predicts others.
"""

import asyncio
import itertools
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import ray
from scipy.optimize import least_squares

from actors.cluster.auth import require_token_auth
from benchmarks.costly import CostlySize, compare
from benchmarks.replay import (
    MIXED_LIMITS,
    ReplayEngine,
    ReplayResult,
    balancer_actor,
    equal_trace,
    in_one_turn,
    mixed_trace,
    replay,
    replay_bare,
    request_limits,
)
from benchmarks.small import SMALL, spread
from rstar_ray.config import EngineConfig, RunConfig, with_values
from rstar_ray.config.checks import at_least, check_bounds
from rstar_ray.config.options import run_command
from rstar_ray.errors import ConfigError
from rstar_ray.tiny.tiny_model import make_tiny_model
from scheduler.cost import EngineCost
from scheduler.simulator.engine_model import EngineShape
from scheduler.simulator.simulate import Simulator, SimulatorSettings
from scheduler.traces.trace import TraceRollout

ROOMY_KV_TOKENS, SMALL_KV_TOKENS = 65_536, 4_096
PRESSED = ((SMALL_KV_TOKENS, 16), (16_384, 128))
"""KV tokens of each of two engines, and prompt groups of 8 that share them: about 25 and 100 rollouts per engine."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What is measured."""

    repeats: Annotated[int, at_least(1)] = 5
    """alternating runs"""
    calibrate: bool = False
    """fit the engine model to this machine and predict unseen runs, instead of the comparisons"""
    costly: bool = False
    """the comparison where a preemption costs tens of decode steps, instead of the others"""
    size: CostlySize = field(default_factory=CostlySize)
    """of that one"""
    out: str = ""
    """with --calibrate: file for the fitted cost, as `python -m scheduler.simulator --cost` reads it"""

    def __post_init__(self) -> None:
        check_bounds("", self)
        if self.calibrate and self.costly:
            raise ConfigError("--calibrate", "--costly measures something else", "give one of them")
        if self.out and not self.calibrate:
            raise ConfigError("--out", "nothing is fitted", "give --calibrate too")
        if self.size != CostlySize() and not self.costly:
            raise ConfigError("--size", "it is of the costly comparison", "give --costly too")


async def figures(bench: BenchSettings) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder), seed=0)
        model = Path(folder)
        roomy = with_values(SMALL, {"engine.kv_tokens": ROOMY_KV_TOKENS, "engine.max_running": 64})
        if bench.costly:
            found = await compare(bench.size, model, bench.repeats)
            return {"benchmark": "balancer on real engines, costly preemptions", **found}
        if bench.calibrate:
            return await _calibrate(bench, model, roomy, with_values(roomy, {"engine.kv_tokens": SMALL_KV_TOKENS}))
        return {
            "benchmark": "balancer on real engines",
            "device": "cpu",
            **await _overhead(bench, model, roomy),
            "under_pressure": [await _pressure(bench, model, roomy, *pressed) for pressed in PRESSED],
        }


# -- against a bare engine --------------------------------------------------------------------------------------------
async def _overhead(bench: BenchSettings, model: Path, config: RunConfig) -> dict[str, Any]:
    mixed = mixed_trace(32, 8, seed=0)
    traces = {"single_turn": [in_one_turn(rollout) for rollout in mixed], "multi_turn": mixed}
    engine = ReplayEngine(config, model)
    await engine.start()
    found: dict[str, Any] = {}
    try:
        await replay_bare(engine, traces["multi_turn"][:64], salt=-1, concurrency=64)
        for name, trace in traces.items():
            ratios, ours, bare = [], [], []
            async with balancer_actor("expected_kv") as balancer:
                await replay([engine], trace[:64], balancer, salt=-2, limits=MIXED_LIMITS)
                for number in range(bench.repeats):
                    bare.append(await replay_bare(engine, trace, salt=2 * number, concurrency=64))
                    ours.append(await replay([engine], trace, balancer, salt=2 * number + 1, limits=MIXED_LIMITS))
                    ratios.append(ours[-1].tokens_per_s / bare[-1].tokens_per_s)
            found[f"{name}_over_bare"] = spread(ratios)
            found[f"{name}_tokens_per_s"] = round(statistics.median(one.tokens_per_s for one in ours))
            if ours[-1].gaps_s:
                found["from_turn_to_turn_ms"] = {"ours": _quantiles(ours), "bare": _quantiles(bare)}
    finally:
        await engine.shut_down()
    return found


# -- under pressure ---------------------------------------------------------------------------------------------------
async def _pressure(
    bench: BenchSettings, model: Path, config: RunConfig, kv_tokens: int, groups: int
) -> dict[str, Any]:
    config = with_values(config, {"engine.kv_tokens": kv_tokens, "engine.max_running": 256})
    engines = [ReplayEngine(config, model), ReplayEngine(config, model)]
    for engine in engines:
        await engine.start()
    runs: dict[str, list[ReplayResult]] = {"least_requests": [], "expected_kv": []}
    try:
        async with balancer_actor("least_requests") as other, balancer_actor("expected_kv") as ours:
            for number in range(-1, bench.repeats):  # the first run teaches the lengths, and is not counted
                trace = mixed_trace(groups, 8, seed=number + 1)
                for place, (rule, balancer) in enumerate(zip(runs, (other, ours), strict=True)):
                    salt = 100 + 2 * number + place
                    found = await replay(engines, trace, balancer, salt=salt, limits=MIXED_LIMITS)
                    if number >= 0:
                        runs[rule].append(found)
    finally:
        for engine in engines:
            await engine.shut_down()
    ratios = [
        ours.tokens_per_s / other.tokens_per_s
        for ours, other in zip(runs["expected_kv"], runs["least_requests"], strict=True)
    ]
    return {
        "kv_tokens": kv_tokens,
        "rollouts": 8 * groups,
        "tokens_per_s_over_least_requests": spread(ratios),
        "tokens_per_s": {rule: round(statistics.median(r.tokens_per_s for r in runs[rule])) for rule in runs},
        "preemptions": {rule: [one.preemptions for one in results] for rule, results in runs.items()},
    }


# -- the simulator, fitted ---------------------------------------------------------------------------------------
async def _calibrate(bench: BenchSettings, model: Path, roomy: RunConfig, small: RunConfig) -> dict[str, Any]:
    equal = [
        equal_trace(4, prompt=32, tokens=200),
        equal_trace(16, prompt=32, tokens=200),
        equal_trace(64, prompt=32, tokens=150),
        equal_trace(64, prompt=500, tokens=60),
        equal_trace(16, prompt=1_200, tokens=60),
        equal_trace(24, prompt=100, tokens=150),
        equal_trace(32, prompt=40, tokens=30, turns=4),
        equal_trace(64, prompt=40, tokens=10, turns=6),
    ]
    unseen = mixed_trace(16, 8, seed=77)
    places = (("expected_kv", roomy), ("least_requests", small), ("expected_kv", small))
    engines = {config: ReplayEngine(config, model) for config in (roomy, small)}
    fitted: list[list[ReplayResult]] = [[] for _ in equal]
    found: list[list[ReplayResult]] = [[] for _ in places]
    salts = itertools.count()
    try:
        for engine in engines.values():
            await engine.start()
        async with balancer_actor("round_robin") as balancer:
            await replay([engines[roomy]], equal[0], balancer, salt=next(salts))
            for _ in range(bench.repeats):  # alternating, so that variations of the machine affect all alike
                for trace, runs in zip(equal, fitted, strict=True):
                    runs.append(await replay([engines[roomy]], trace, balancer, salt=next(salts)))
                for (rule, config), runs in zip(places, found, strict=True):
                    async with balancer_actor(rule) as new:
                        runs.append(await replay([engines[config]], unseen, new, salt=next(salts)))
    finally:
        for engine in engines.values():
            await engine.shut_down()
    seconds = [statistics.median(one.seconds for one in runs) for runs in fitted]
    cost = fit(equal, seconds, roomy.engine)
    rows = [
        _predicted(unseen, rule, cost, config.engine, runs) for (rule, config), runs in zip(places, found, strict=True)
    ]
    if bench.out:
        Path(bench.out).write_text(json.dumps(asdict(cost), indent=2) + "\n")
    over_measured = [
        round(_simulated(trace, "round_robin", cost, roomy.engine)[0] / real, 3)
        for trace, real in zip(equal, seconds, strict=True)
    ]
    return {
        "benchmark": "calibration",
        "device": "cpu",
        "cost": asdict(cost),
        "fitted_runs_s": [spread([one.seconds for one in runs]) for runs in fitted],
        "fitted_runs_predicted_over_measured": over_measured,
        "unseen": rows,
    }


def fit(traces: Sequence[Sequence[TraceRollout]], seconds: Sequence[float], engine: EngineConfig) -> EngineCost:
    """The costs with which simulated times match the engine's, by least squares of log seconds."""
    start = np.log([2e-3, 1e-4, 1e-7, 2e-5, 1e-8, 1e-4])

    def errors(logs: Any) -> Any:
        cost = _cost(np.exp(logs))
        times = [_simulated(trace, "round_robin", cost, engine)[0] for trace in traces]
        return np.log(np.array(times) / np.array(seconds))

    return _cost(np.exp(least_squares(errors, start, diff_step=1e-2, max_nfev=60).x))


def _cost(values: Any) -> EngineCost:
    fixed, sequence, context, prefill, prefill_context, request = map(float, values)
    return EngineCost(
        fixed_s=fixed,
        per_sequence_s=sequence,
        per_context_s=context,
        per_prefill_s=prefill,
        per_prefill_context_s=prefill_context,
        per_request_s=request,
    )


def _simulated(trace: Sequence[TraceRollout], rule: str, cost: EngineCost, engine: EngineConfig) -> tuple[float, int]:
    """Simulated seconds and preemptions."""
    limits = request_limits(trace)
    simulated = SimulatorSettings(
        replicas=1,
        shape=EngineShape(
            kv_tokens=engine.kv_tokens,
            block_tokens=engine.block_size,
            max_running=engine.max_running,
            max_batched_tokens=engine.max_context_tokens + engine.max_running,
        ),
        cost=cost,
        max_response_tokens=limits.max_response_tokens,
        max_turns=limits.max_turns,
    )
    result = Simulator(trace, rule, simulated).run()
    return result.makespan_s, result.preemptions


def _predicted(
    trace: Sequence[TraceRollout], rule: str, cost: EngineCost, engine: EngineConfig, runs: Sequence[ReplayResult]
) -> dict[str, Any]:
    seconds, preemptions = _simulated(trace, rule, cost, engine)
    return {
        "rule": rule,
        "kv_tokens": engine.kv_tokens,
        "measured_tokens_per_s": round(statistics.median(run.tokens_per_s for run in runs)),
        "predicted_over_measured": spread([run.seconds / seconds for run in runs]),
        "measured_preemptions": [run.preemptions for run in runs],
        "predicted_preemptions": preemptions,
    }


def _quantiles(runs: Sequence[ReplayResult]) -> dict[str, float]:
    """Milliseconds between a turn's end and the next turn's start; turns that end together wait for each other."""
    gaps = [1e3 * gap for one in runs for gap in one.gaps_s]
    return {"p50": round(float(np.percentile(gaps, 50)), 2), "p99": round(float(np.percentile(gaps, 99)), 2)}


def measure(bench: BenchSettings) -> None:
    require_token_auth()
    logging.disable(logging.WARNING)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    print(json.dumps(asyncio.run(figures(bench))))


if __name__ == "__main__":
    sys.exit(run_command(BenchSettings, measure, None, description=__doc__))
