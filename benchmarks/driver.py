"""The cost of full-size draws in the driver: `python -m benchmarks.driver` prints one JSON line.

`Draws` runs 50 steps of 512 prompts x 32 rollouts, two draws at a time, and each step makes its rows. Rollouts end at
once, as summaries. Memory must not grow, and the CPU time must be below 1 % of a step's time.
"""

import asyncio
import gc
import json
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import psutil
import tyro

from rstar_ray.config import RunConfig, with_values
from rstar_ray.config.checks import at_least, check_bounds
from rstar_ray.draws import Draws
from rstar_ray.rollouts import DroppedRollout, FinishedRollout, TrajectoryRef, resample, training_rows
from rstar_ray.stage_progress import StageProgress
from rstar_ray.trajectory import Problem, RolloutRequest, StopReason, TrajectorySummary

LEAST_STEP_S = 240.0
"""Lower limit of a step of this size on 64 GPUs, simulated (`python -m benchmarks.steps --replicas 64`) or planned."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What is measured."""

    steps: Annotated[int, at_least(4)] = 50
    prompts: Annotated[int, at_least(1)] = 512
    """of a step, with 32 rollouts each"""
    staleness: Annotated[int, at_least(0)] = 1

    def __post_init__(self) -> None:
        check_bounds("", self)


class EndAtOnce:
    """Rollouts that end in the order of their requests."""

    num_ended = 0

    async def run(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[FinishedRollout | DroppedRollout]:
        for number, request in enumerate(requests):
            self.num_ended += 1
            summary = TrajectorySummary(
                rollout_id=request.rollout_id,
                group_id=request.group_id,
                problem_id=request.problem.id,
                reward=float(number % 2),
                num_calls=3,
                num_failed=number % 3,
                num_answers=1,
                num_turns=4,
                num_prompt_tokens=300,
                num_response_tokens=4_000,
                num_sampled_tokens=3_700,
                stop_reason=StopReason.ANSWERED,
            )
            yield FinishedRollout(summary=summary, ref=TrajectoryRef(None, number))

    async def abandon(self) -> None: ...


async def main(bench: BenchSettings) -> dict[str, Any]:
    config = with_values(
        RunConfig(),
        {
            "stage": "stage1",
            "steps": bench.steps,
            "prompts_per_step": bench.prompts,
            "staleness": bench.staleness,
        },
    )
    problems = [Problem(id=f"p{number}", problem=f"problem {number}", answer="1") for number in range(40_000)]
    process, seconds, memory_mb, rows = psutil.Process(), list[float](), list[float](), 0
    async with Draws(problems, EndAtOnce(), config, StageProgress()) as draws:
        for step in range(1, bench.steps + 1):
            began_s = time.process_time()
            draw = await draws.take(step)
            rows += len(training_rows([resample(group, config, step) for group in draw.groups], config))
            seconds.append(time.process_time() - began_s)
            del draw
            gc.collect()
            memory_mb.append(process.memory_info().rss / 1e6)
    half = bench.steps // 2
    return {
        "benchmark": "driver",
        "rollouts": bench.prompts * config.algorithm.num_rollouts,
        "rows": rows,
        "cpu_s_of_a_step": round(statistics.median(seconds), 2),
        "share_of_a_step": round(statistics.median(seconds) / LEAST_STEP_S, 4),
        "memory_mb": {
            "first_half": round(max(memory_mb[:half])),
            "second_half": round(max(memory_mb[half:])),
            "last": round(memory_mb[-1]),
        },
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(tyro.cli(BenchSettings, description=__doc__)))))
