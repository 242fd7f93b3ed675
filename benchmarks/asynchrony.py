"""The gain of a staleness of 1 on real engines, as one JSON line per arm: `python -m benchmarks.asynchrony`.

Two vLLM engines and a learner on this machine's cores, forced lengths, 64 rollouts per step. Each step trains on all
rows of its draw and publishes to both engines. Runs with staleness 0 and 1 alternate; a figure is trained tokens per
second from the end of step 2 to the end of the last step. The idle core time of synchronous runs is the upper limit of
the gain. The simulator's results, with costs that the engines measured, are printed beside both.

Arms: long_tail (Pareto lengths), even (equal rollouts), slow_tools (a tenth of the calls takes seconds), and
recompute_kv: staleness 1 with live contexts retained, or recomputed, after each publish. A run of 12 steps takes 30 to
60 s on two cores, so an arm with three repeats takes 4 to 7 minutes. Nothing else may run meanwhile.
"""

import asyncio
import itertools
import json
import logging
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import psutil
import ray
import tyro

from actors.balancer_service import BalancerService
from actors.cluster.auth import require_token_auth
from actors.learner.rank import LearnerRank
from actors.remote import Remote
from actors.weights.buckets import WeightBucket
from benchmarks.replay import (
    EchoTools,
    Life,
    Replay,
    ReplayChat,
    ReplayEngine,
    at_once,
    balancer_actor,
    finished,
    replay_workers,
    reported,
    request_of,
    submit,
)
from benchmarks.small import SMALL
from benchmarks.trace_kinds import Kind, draw, log_normal
from rstar_ray.agent.rollout import RolloutState
from rstar_ray.algorithm.batch import TokenRow, rl_row
from rstar_ray.algorithm.batch_plan import plan_ranks
from rstar_ray.config import RunConfig, with_values
from rstar_ray.config.checks import at_least, check_bounds
from rstar_ray.draws import StalenessRule
from rstar_ray.outcome import Outcome
from rstar_ray.tiny.tiny_model import make_tiny_model
from rstar_ray.trajectory import RolloutLimits, ToolCall, ToolResult, Trajectory
from scheduler.cost import EngineCost
from scheduler.simulator.engine_model import EngineShape
from scheduler.simulator.simulate import SimulatorSettings
from scheduler.simulator.steps import LearnerTime, StepsSimulator
from scheduler.traces.trace import TraceRollout

Arm = Literal["long_tail", "even", "slow_tools", "recompute_kv"]
BUDGET, TURNS, SIBLINGS = 1_000, 4, 4
LIMITS = RolloutLimits(max_response_tokens=BUDGET + 1, max_turns=TURNS, max_context_tokens=2_048, max_calls_per_turn=1)
STALE = with_values(SMALL, {"engine.kv_tokens": 65_536, "staleness": 1})
COUNTED = 2  # counting begins at the end of this step
CALLS: Any = {
    "max_response_tokens": BUDGET,
    "max_turns": TURNS,
    "calls_mean": 1.0,
    "prompt_tokens": (60.0, 120.0),
    "tool_tokens_mean": 20.0,
}
ARMS: dict[str, Kind] = {
    "long_tail": Kind(
        summary="Pareto lengths", lengths_GS=lambda rng, shape: 50.0 * (1.0 + rng.pareto(1.1, shape)), **CALLS
    ),
    "even": replace(
        Kind(summary="all alike", lengths_GS=lambda rng, shape: np.full(shape, 180.0), **CALLS), calls_mean=0.0
    ),
    "slow_tools": replace(
        Kind(summary="a tenth of the calls takes seconds", lengths_GS=log_normal(180.0, 0.3, 0.3), **CALLS),
        tool_s=(0.05, 3.0),
        tool_shares=(0.9, 0.1),
    ),
}
ARMS["recompute_kv"] = ARMS["long_tail"]


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What is measured."""

    arms: tuple[Arm, ...] = ("long_tail", "even", "slow_tools")
    """one after the other"""
    repeats: Annotated[int, at_least(1)] = 3
    """alternating pairs of runs in each arm"""
    steps: Annotated[int, at_least(COUNTED + 1)] = 12
    """of a run"""
    rollouts: Annotated[int, at_least(SIBLINGS)] = 64
    """of a step"""
    learning_rate: float = 3e-4
    """of every update"""

    def __post_init__(self) -> None:
        check_bounds("", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run; seconds are means of its steps."""

    tokens_per_s: float
    idle_share: float  # of all cores' time
    learn_s: float
    publish_s: float
    pause_s: float  # of an engine, during a publish
    step_s: float
    differences: Mapping[int, Sequence[float]]  # |learner - engine| of log-probs, by the token's age in steps


# -- learner --------------------------------------------------------------------------------------------------------
class RowLearner:
    """The product's learner rank in a separate process, without its actor."""

    def __init__(self, config: RunConfig, model: str) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        self._rank = LearnerRank(config, Path(model))
        self._rank.start()

    def niceness(self) -> int:
        """The scheduling priority of this process: Ray starts workers with 15."""
        return os.nice(0)

    def weights(self) -> list[WeightBucket]:
        """The current weights."""
        return list(self._rank.served_weights().on_host())

    def train(
        self, rows: Sequence[TokenRow], learning_rate: float, *, compares: bool
    ) -> tuple[list[list[float]], list[WeightBucket]]:
        """Log-probs of each row's sampled tokens before the update (with `compares`), and the new weights."""
        plan = plan_ranks(
            [len(row.token_ids) for row in rows], self._rank.config.learner, attention_tokens=float("inf")
        )
        found: dict[str, list[float]] = {}
        if compares:
            for batch in plan[0]:
                chosen = [rows[i] for i in batch]
                for row, logprobs in zip(chosen, self._rank.logprobs([chosen])[0].split(
                    [row.num_sampled_tokens for row in chosen]), strict=True):  # fmt: skip
                    found[row.name] = logprobs.tolist()
        self._rank.train_rl([[[rows[i] for i in batch] for batch in plan[0]]], learning_rate)
        return [found.get(row.name, []) for row in rows], self.weights()


# -- a run ----------------------------------------------------------------------------------------------------------
class TracedTools(EchoTools):
    """Tools that take the time in the trace."""

    def __init__(self, lives: Mapping[str, Life], rollout_id: str = "") -> None:
        self._lives = lives
        self._rollout_id = rollout_id
        self._calls = 0

    def open(self, state: RolloutState) -> "TracedTools":
        return TracedTools(self._lives, state.request.rollout_id)

    async def execute(self, call: ToolCall) -> ToolResult:
        turn = self._lives[self._rollout_id].rollout.turns[self._calls]
        self._calls += 1
        await asyncio.sleep(turn.tool_seconds)
        return ToolResult(outcome=Outcome.OK, text=call.code)


def draw_of(arm: str, bench: BenchSettings, number: int) -> list[TraceRollout]:
    """The rollouts of one draw, the same for every run."""
    rollouts = draw(ARMS[arm], groups=bench.rollouts // SIBLINGS, siblings=SIBLINGS, seed=number)
    slow = arm == "slow_tools"
    return [
        replace(
            short,
            group=f"{number}:{rollout.group}",
            turns=tuple(
                replace(turn, tool_seconds=asked.tool_seconds if slow else 0.0)
                for turn, asked in zip(short.turns, rollout.turns, strict=True)
            ),
        )
        for rollout, short in zip(rollouts, map(at_once, rollouts), strict=True)
    ]


async def train(
    engines: Sequence[ReplayEngine],
    learner: Any,
    balancer: Remote[BalancerService],
    bench: BenchSettings,
    arm: str,
    *,
    staleness: int,
    steps: int,
    compares: bool = False,
) -> Run:
    """Run `steps` steps."""
    salt = next(_salts)
    draws = {step: draw_of(arm, bench, step) for step in range(1, steps + 1)}
    named = {
        f"{salt}/{rollout.group}/{number}": (step, rollout)
        for step, rollouts in draws.items()
        for number, rollout in enumerate(rollouts)
    }
    shared = Replay({name: Life(rollout) for name, (_, rollout) in named.items()})
    chat = ReplayChat([rollout for rollouts in draws.values() for rollout in rollouts], salt)
    rule = StalenessRule(staleness, last=steps)
    ended: dict[int, list[Trajectory]] = defaultdict(list)
    learned_s, published_s, pauses_s, ends_s = list[float](), list[float](), list[float](), list[float]()
    differences: dict[int, list[float]] = defaultdict(list)
    first_version = engines[0].policy_version + 1
    idle: list[float] = []
    buckets = await learner.weights.remote()  # the engines still have weights of the previous run
    await asyncio.gather(*(engine.weights.update(first_version, buckets, f"{salt}-0") for engine in engines))
    async with (
        replay_workers(engines, balancer, chat, shared, TracedTools(shared.lives)) as workers,
        finished(workers) as queue,
    ):
        for step in range(1, steps + 1):
            rule.end(step - 1)
            begun = rule.begin()
            await submit(
                [
                    replace(
                        request_of(name, f"{salt}/{rollout.group}", rollout, LIMITS),
                        draw=number,
                        cache_salt=f"{salt}/{number}",
                    )
                    for name, (number, rollout) in named.items()
                    if number in begun
                ],
                chat,
                balancer,
            )
            while len(ended[step]) < len(draws[step]):
                one = await queue.get()
                assert isinstance(one, Trajectory), one
                ended[named[one.summary.rollout_id][0]].append(one)
            drawn_s = time.perf_counter()
            trajectories = ended.pop(step)
            weight = 1.0 / sum(int(one.loss_mask.sum()) for one in trajectories)
            rows = [rl_row(one, 1.0 if n % 2 else -1.0, weight) for n, one in enumerate(trajectories)]
            logprobs, buckets = await learner.train.remote(rows, bench.learning_rate, compares=compares)
            learned_s.append(time.perf_counter() - drawn_s)
            for row, one, expected in zip(rows, trajectories, logprobs, strict=True):
                _compare(differences, row, one, expected, first_version + step - 1)
            began_s = time.perf_counter()
            loaded = await asyncio.gather(
                *(engine.weights.update(first_version + step, buckets, f"{salt}-{step}") for engine in engines)
            )
            version = first_version + step
            await balancer.call(lambda b, v=version: b.set_policy_version(v), deadline_s=10, reason="the weights")
            ends_s.append(time.perf_counter())
            published_s.append(ends_s[-1] - began_s)
            pauses_s += [one.load_s for one in loaded]
            if step in (COUNTED, steps):
                times = psutil.cpu_times()
                idle.append(times.idle + times.iowait)
        await reported(balancer)
    seconds = ends_s[-1] - ends_s[COUNTED - 1] if steps > COUNTED else ends_s[-1]
    tokens = sum(rollout.generated_tokens for step in range(COUNTED + 1, steps + 1) for rollout in draws[step])
    return Run(
        tokens_per_s=tokens / seconds,
        idle_share=(idle[-1] - idle[0]) / (seconds * (psutil.cpu_count() or 1)),
        learn_s=statistics.mean(learned_s[1:]),
        publish_s=statistics.mean(published_s),
        pause_s=statistics.mean(pauses_s),
        step_s=seconds / max(1, steps - COUNTED),
        differences=differences,
    )


def _compare(
    differences: dict[int, list[float]], row: TokenRow, one: Trajectory, expected: Sequence[float], version: int
) -> None:
    """Add differences, except of each turn's last two tokens, which the replay has replaced."""
    if not expected or row.rollout_logprobs is None:
        return
    versions = one.policy_versions[one.loss_mask]
    seen = row.rollout_logprobs[row.loss_mask]
    sampled = 0
    for turn in one.turns:
        for place in range(sampled, sampled + turn.num_tokens - 2):
            age = version - int(versions[place])
            differences[age].append(abs(float(seen[place]) - expected[place]))
        sampled += turn.num_tokens


# -- arms -----------------------------------------------------------------------------------------------------------
async def compare(
    bench: BenchSettings,
    arm: str,
    pairs: Mapping[str, Sequence[ReplayEngine]],
    learner: Any,
    staleness: Mapping[str, int],
) -> dict[str, Any]:
    """`pairs`: the engines of each of the two kinds of runs that alternate."""
    runs: dict[str, list[Run]] = {name: [] for name in pairs}
    simulated: dict[str, list[float]] = {name: [] for name in pairs}
    began_s = time.perf_counter()
    compares = arm == "recompute_kv"
    taken = taken_by_learner(await learner.niceness.remote())
    measured = [engine for engines in pairs.values() for engine in engines][:2]
    async with balancer_actor("expected_kv") as balancer:
        before: EngineCost | None = None
        for number in range(-1, bench.repeats):  # the first run, which is not counted, teaches the lengths
            for name, engines in pairs.items():
                steps = bench.steps if number >= 0 else COUNTED + 1
                run = await train(
                    engines, learner, balancer, bench, arm,
                    staleness=staleness[name], steps=steps, compares=compares,
                )  # fmt: skip
                after = await _cost(measured)
                if number >= 0 and before is not None:
                    runs[name].append(run)
                    cost = _mean([before, after])  # the machine's speed changes between runs
                    simulated[name].append(
                        simulated_s(bench, arm, cost, run, staleness=staleness[name], taken=taken) / run.step_s
                    )
                before = after
    first, second = pairs
    ratios = [b.tokens_per_s / a.tokens_per_s for a, b in zip(runs[first], runs[second], strict=True)]
    found: dict[str, Any] = {
        "benchmark": "asynchrony",
        "arm": arm,
        "steps": bench.steps,
        "rollouts": bench.rollouts,
        "seconds": round(time.perf_counter() - began_s),
        "tokens_per_s": {name: _spread([run.tokens_per_s for run in ran]) for name, ran in runs.items()},
        f"{second}_over_{first}": _spread(ratios),
        "pause_ms": {name: _spread([1e3 * run.pause_s for run in ran]) for name, ran in runs.items()},
    }
    if compares:
        return found | {"logprob_difference_by_age": {name: _by_age(ran) for name, ran in runs.items()}}
    idle = statistics.median(run.idle_share for run in runs[first])
    gain, allowed = statistics.median(ratios), 1.0 / (1.0 - idle)
    return found | {
        "idle_core_share": {name: _spread([run.idle_share for run in ran]) for name, ran in runs.items()},
        "most_gain_by_idle_time": round(allowed, 3),
        "share_of_it": round((gain - 1.0) / (allowed - 1.0), 3),
        "learn_s": {name: round(statistics.mean(run.learn_s for run in ran), 3) for name, ran in runs.items()},
        "publish_s": {name: round(statistics.mean(run.publish_s for run in ran), 3) for name, ran in runs.items()},
        "step_s": {name: round(statistics.median(run.step_s for run in ran), 3) for name, ran in runs.items()},
        "simulated_over_measured": {name: _spread(ratios) for name, ratios in simulated.items()},
    }


async def _cost(engines: Sequence[ReplayEngine]) -> EngineCost:
    """Mean of the costs that the engines measure at the same time, as they also run together."""
    return _mean(await asyncio.gather(*(engine.measured_again() for engine in engines)))


def _mean(costs: Sequence[EngineCost]) -> EngineCost:
    return EngineCost(
        **{name: statistics.mean(getattr(cost, name) for cost in costs) for name in EngineCost.__dataclass_fields__}
    )


def taken_by_learner(niceness: int) -> float:
    """Share of each engine's time that the learner takes while all three run.

    Linux gives a process 1.25 times the CPU time of one that is nicer by 1. A third core is the learner's alone.
    """
    cores, weight = psutil.cpu_count() or 1, 1.25 ** (os.nice(0) - niceness)
    return 0.0 if cores > 2 else cores * weight / (2 + weight) / 2


def simulated_s(bench: BenchSettings, arm: str, cost: EngineCost, run: Run, *, staleness: int, taken: float) -> float:
    """Mean simulated step. `taken`: share of the engines' time that the learner takes."""
    engine = STALE.engine
    settings = SimulatorSettings(
        replicas=2,
        shape=EngineShape(
            kv_tokens=engine.kv_tokens,
            block_tokens=engine.block_size,
            max_running=engine.max_running,
            max_batched_tokens=engine.max_context_tokens + engine.max_running,
        ),
        cost=cost,
        max_response_tokens=LIMITS.max_response_tokens,
        max_turns=LIMITS.max_turns,
    )
    learner = LearnerTime(learn_s=run.learn_s, engines_pause_s=taken * run.learn_s, publish_s=run.publish_s)
    found = StepsSimulator(
        lambda step: draw_of(arm, bench, step),
        "expected_kv",
        settings,
        steps=bench.steps,
        staleness=staleness,
        learner=learner,
        continues=False,
    ).run_steps()
    return (found.steps[-1].ended_s - found.steps[COUNTED - 1].ended_s) / (bench.steps - COUNTED)


def _by_age(runs: Sequence[Run]) -> dict[int, dict[str, float]]:
    ages = sorted({age for run in runs for age in run.differences})
    found: dict[int, dict[str, float]] = {}
    for age in ages:
        joined = np.concatenate([run.differences.get(age, []) for run in runs])
        mean, most = float(joined.mean()), float(np.quantile(joined, 0.99))
        found[age] = {"tokens": len(joined), "mean": float(f"{mean:.3g}"), "p99": float(f"{most:.3g}")}
    return found


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


async def main(bench: BenchSettings) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        make_tiny_model(model, seed=0)
        learner: Any = ray.remote(RowLearner).remote(STALE, folder)
        again = with_values(STALE, {"engine.recompute_kv": True})
        engines = [ReplayEngine(STALE, model) for _ in range(2)]
        others = [ReplayEngine(again, model) for _ in range(2)] if "recompute_kv" in bench.arms else []
        try:
            for engine in (*engines, *others):
                await engine.start()
            for arm in bench.arms:
                if arm == "recompute_kv":
                    pairs = {"kv_recomputed": others, "kv_kept": engines}
                    staleness = dict.fromkeys(pairs, 1)
                else:
                    pairs = {"staleness_0": engines, "staleness_1": engines}
                    staleness = {"staleness_0": 0, "staleness_1": 1}
                print(json.dumps(await compare(bench, arm, pairs, learner, staleness)), flush=True)
        finally:
            for engine in (*engines, *others):
                await engine.shut_down()


_salts = itertools.count()

if __name__ == "__main__":
    require_token_auth()
    logging.disable(logging.WARNING)
    settings = tyro.cli(BenchSettings, description=__doc__)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    asyncio.run(main(settings))
