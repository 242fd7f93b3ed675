"""Compares an evaluation with a bare engine; prints one JSON line.

python -m benchmarks.evaluation --problems 32 --samples 16 --repeats 5

The same requests alternately: in an evaluation with all its actors, and with `Engine.generate` alone, as many at once
as the engine decodes. Tokens per second are counted until nine tenths of the rollouts have ended, without the tail. The
policy has random weights, so that rollouts run to their budget.
"""

import asyncio
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from actors.cluster.auth import require_token_auth
from actors.generation.engine import Engine
from actors.system import TrainingActors
from benchmarks.small import SMALL
from rstar_ray.chat.load_chat import load_chat
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.config import RunConfig, with_values
from rstar_ray.config.options import run_command
from rstar_ray.evaluation.evaluator import run_evaluation
from rstar_ray.rollouts import DroppedRollout, FinishedRollout, Rollouts
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.seeds import derive_seed
from rstar_ray.tiny.tiny_model import make_tiny_model
from rstar_ray.tiny.tiny_problems import Split, generate_problems
from rstar_ray.trajectory import RolloutRequest

SHARE = 0.9
"""Share of the rollouts that are counted, until the last of them ends."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What is measured."""

    problems: int = 32
    """problems of an evaluation"""
    samples: int = 16
    """rollouts of each"""
    tokens: int = 128
    """longest response"""
    repeats: int = 5
    """alternating runs"""


@dataclass
class Timed:
    """`Rollouts` that records when each ends, and its number of tokens."""

    inner: Rollouts
    began_s: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    requests: list[RolloutRequest] = field(default_factory=list[RolloutRequest])

    async def run(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[FinishedRollout | DroppedRollout]:
        self.began_s, self.ends, self.requests = time.perf_counter(), [], list(requests)
        async for end in self.inner.run(requests):
            assert isinstance(end, FinishedRollout), end
            self.ends.append((time.perf_counter(), end.summary.num_sampled_tokens))
            yield end

    def tokens_per_s(self) -> float:
        return rate(self.began_s, self.ends)


def rate(began_s: float, ends: Sequence[tuple[float, int]]) -> float:
    """Tokens per second until `SHARE` of all have ended."""
    counted = sorted(ends)[: max(1, int(SHARE * len(ends)))]
    return sum(tokens for _, tokens in counted) / (counted[-1][0] - began_s)


async def bare(engine: Engine, chat: TokenizerChat, requests: Sequence[RolloutRequest], *, at_once: int) -> float:
    """Tokens per second of the same completions with the engine alone."""
    places = asyncio.Semaphore(at_once)
    ends: list[tuple[float, int]] = []
    began_s = time.perf_counter()

    async def one(request: RolloutRequest) -> None:
        async with places:
            completion = await engine.generate(
                chat.prompt_ids(request.problem),
                request_id=f"bare/{began_s}/{request.rollout_id}",
                max_tokens=request.limits.max_response_tokens,
                seed=derive_seed(request.seed, "turn", 0),
                sampling=request.sampling,
            )
            ends.append((time.perf_counter(), len(completion.token_ids)))

    await asyncio.gather(*map(one, requests))
    return rate(began_s, ends)


async def compared(
    bench: BenchSettings, config: RunConfig, model: Path, engine: Engine, chat: TokenizerChat
) -> dict[str, Any]:
    """Run evaluations and the bare engine alternately."""
    actors = TrainingActors(config, model, chat=chat)
    ours, theirs = [], []
    try:
        await actors.start(learner=False)
        await actors.serving()
        timed = Timed(actors.replicas.rollouts)
        for number in range(-1, bench.repeats):  # the first warms both up
            problems = generate_problems(number + 1, Split.HELD_OUT, bench.problems)
            with tempfile.TemporaryDirectory() as folder:
                context = replace(actors.context(RunDir(Path(folder)), lambda: False), rollouts=timed)
                await run_evaluation(config, {"bench": problems}, context, step=0, model=model)
            alone = await bare(engine, chat, timed.requests, at_once=config.engine.max_running)
            if number >= 0:
                ours.append(timed.tokens_per_s())
                theirs.append(alone)
    finally:
        await actors.close()
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return {
        "tokens_per_s": round(statistics.median(ours)),
        "bare_tokens_per_s": round(statistics.median(theirs)),
        "over_bare": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in sorted(ratios)],
    }


async def figures(bench: BenchSettings) -> dict[str, Any]:
    config = with_values(
        SMALL,
        {
            "scale": "tiny",
            "stage": "evaluate",
            "engine.kv_tokens": 65_536,
            "engine.max_running": 64,
            "rollout.instruct": False,
            "evaluate.samples": bench.samples,
            "evaluate.temperature": 1.0,
            "evaluate.max_response_tokens": bench.tokens,
            "evaluate.max_turns": 1,
            "sandbox.slots": 2,
        },
    )
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder), seed=0)
        chat = load_chat(model, config.chat, instruct=False)
        engine = Engine(config, model, stop_token_ids=chat.profile.stop_token_ids)
        await engine.start()
        try:
            return {
                "benchmark": "evaluation on real engines",
                "device": "cpu",
                "evaluation": await compared(bench, config, model, engine, chat),
            }
        finally:
            await engine.close()


def measure(bench: BenchSettings) -> None:
    require_token_auth()
    logging.disable(logging.WARNING)
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    print(json.dumps(asyncio.run(figures(bench))))


if __name__ == "__main__":
    sys.exit(run_command(BenchSettings, measure, None, description=__doc__))
