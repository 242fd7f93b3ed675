"""Publishes weights from a learner to real vLLM engines; prints one JSON line: `python -m benchmarks.publish`.

Every round trains the tiny policy on tokens that the engines sampled, publishes while an engine decodes other requests,
samples conversations of several turns, and compares the engines' log-probs with the learner's. Every conversation moves
to the next engine between two turns, and every second one began before the publish, with the earlier weights.
"""

import asyncio
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.generation.engine import Engine
from actors.learner.rank import LearnerRank
from actors.weights.buckets import checksum
from actors.weights.transfer import LoadedWeights
from benchmarks.publish_large import large
from benchmarks.small import SMALL, spread
from rstar_ray.algorithm.batch import TokenRow
from rstar_ray.config import with_values
from rstar_ray.config.options import run_command
from rstar_ray.errors import ConfigError
from rstar_ray.tiny.tiny_model import make_tiny_model
from rstar_ray.trajectory import UNMODIFIED

MICRO_BATCH_TOKENS = 2_048


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What is measured."""

    publishes: int = 20
    """rounds"""
    parameters: float = 0.0
    """random weights of about so many parameters go to one engine instead, without a learner; 0 trains the tiny
    policy"""
    engines: int = 2
    """replicas that conversations move between"""
    conversations: int = 32
    """sampled in a round, all at once"""
    turns: int = 3
    """completions of a conversation"""
    completion_tokens: int = 64
    """longest completion [tokens]"""
    learning_rate: float = 3e-4
    """of the update before each publish; 0 shows the drift of publishing alone"""

    def __post_init__(self) -> None:
        for item in fields(self):
            idle = item.name not in ("publishes", "parameters") and getattr(self, item.name) != item.default
            if self.parameters and idle:
                option = f"--{item.name.replace('_', '-')}"
                raise ConfigError(option, "--parameters publishes to one engine, and samples nothing", "leave it out")


@dataclass(slots=True)
class Conversation:
    """One conversation: its tokens, and the policy version that sampled each (-1: not sampled)."""

    number: int
    token_ids: list[int]
    versions: list[int]
    logprobs: list[float]
    turn: int = 0

    def row(self, since_version: int) -> TokenRow:
        """A row for training and comparison, with the tokens sampled by this version or a later one."""
        return TokenRow(
            f"conversation {self.number}",
            np.array(self.token_ids, np.int32),
            np.array(self.versions) >= since_version,
            1.0 if self.number % 2 else -1.0,
            np.array(self.logprobs, np.float32),
        ).trimmed()


async def figures(bench: BenchSettings) -> dict[str, Any]:
    if bench.parameters:
        return await large(bench.parameters, bench.publishes)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder), seed=0)
        rank = LearnerRank(SMALL, Path(folder))
        rank.start()
        config = with_values(SMALL, {"engine.kv_tokens": 65_536})
        engines = [Engine(config, Path(folder), measures_cost=True) for _ in range(bench.engines)]
        try:
            for engine in engines:
                await engine.start()
            return await _rounds(bench, rank, engines)
        finally:
            for engine in engines:
                await engine.close()


async def _rounds(bench: BenchSettings, rank: LearnerRank, engines: Sequence[Engine]) -> dict[str, Any]:
    pauses, totals, copies, differences = [], [], [], []
    rows = [talk.row(0) for talk in await _sample(bench, engines, _begin(bench, range(bench.conversations)))]
    resumed = 0
    for version in range(1, bench.publishes + 1):
        weight = 1.0 / sum(row.num_sampled_tokens for row in rows)
        micro_batches = _micro_batches([replace(row, token_weight=weight) for row in rows])
        await asyncio.to_thread(rank.train_rl, [micro_batches], bench.learning_rate)
        begun = await _sample(bench, engines, _begin(bench, range(0, bench.conversations, 2)), turns=1)
        for engine in engines:
            update, total, copy = await _publish(rank, engine, version)
            pauses.append(update.load_s)
            totals.append(total)
            copies.append(copy)
        new = _begin(bench, range(1, bench.conversations, 2))
        talks = await _sample(bench, engines, [*begun, *new])
        # Log-probs sampled before an update that changed the weights differ from the learner's.
        since = version if bench.learning_rate > 0 else 0
        rows = [talk.row(since) for talk in talks]
        resumed += sum(row.num_sampled_tokens for row in rows[: len(begun)])
        differences.append(_differences(rank, rows))
    found = np.concatenate(differences)
    return {
        "benchmark": "publish",
        "device": "cpu",
        "publishes": bench.publishes,
        "engines": bench.engines,
        "bytes": sum(bucket.num_bytes for bucket in rank.served_weights().on_host()),
        "pause_ms": _ms(pauses),
        "total_ms": _ms(totals),
        "copy_ms": _ms(copies),
        "allowed_total_ms": round(3e3 * statistics.median(copies) + 100, 1),
        "compared_tokens": len(found),
        "of_them_in_conversations_begun_before_a_publish": resumed,
        "logprob_difference_mean": float(f"{found.mean():.3g}"),
        "logprob_difference_max": float(f"{found.max():.3g}"),
        "learning_rate": bench.learning_rate,
    }


async def _publish(rank: LearnerRank, engine: Engine, version: int) -> tuple[LoadedWeights, float, float]:
    """The swap, its total seconds while the engine decoded, and the seconds of copying the same bytes."""
    others = [asyncio.create_task(_complete(engine, [5, 6, 7], 1_000 * version + i, 400)) for i in range(16)]
    await asyncio.sleep(0.2)
    started = time.perf_counter()
    buckets = list(rank.served_weights().on_host())
    update = await engine.weights.update(version, buckets)
    total = time.perf_counter() - started
    assert update.checksum == checksum(buckets)
    started = time.perf_counter()
    for bucket in buckets:
        bucket.data.copy()
    copy = time.perf_counter() - started
    await asyncio.gather(*others)
    return update, total, copy


async def _complete(engine: Engine, prompt: Sequence[int], seed: int, tokens: int) -> Any:
    return await engine.generate(
        prompt, request_id=f"bench-{next(_ids)}", max_tokens=tokens, seed=seed, sampling=UNMODIFIED
    )


def _begin(bench: BenchSettings, numbers: Iterable[int]) -> list[Conversation]:
    """Conversations with the same first prompts in every round, so that a stale prefix block would be detected."""
    prompts = np.random.default_rng(0).integers(5, 100, (bench.conversations, 70)).tolist()
    return [
        Conversation(number, list(prompts[number]), [-1] * len(prompts[number]), [0.0] * len(prompts[number]))
        for number in numbers
    ]


async def _sample(
    bench: BenchSettings, engines: Sequence[Engine], talks: Sequence[Conversation], turns: int | None = None
) -> Sequence[Conversation]:
    """Continue for `turns` turns, or to the end; each turn uses the next engine."""

    async def converse(talk: Conversation) -> None:
        for _ in range(turns or bench.turns - talk.turn):
            engine = engines[(talk.number // 2 + talk.turn) % len(engines)]
            version = engine.policy_version
            seed = 10_000 * version + 100 * talk.turn + talk.number
            done = await _complete(engine, talk.token_ids, seed, bench.completion_tokens)
            tool = [int(token) for token in np.random.default_rng(seed).integers(5, 100, 20)]
            talk.token_ids += [*done.token_ids, *tool]
            talk.versions += [version] * len(done.token_ids) + [-1] * len(tool)
            talk.logprobs += [*done.logprobs, *([0.0] * len(tool))]
            talk.turn += 1

    await asyncio.gather(*(converse(talk) for talk in talks))
    return talks


def _micro_batches(rows: Sequence[TokenRow]) -> list[list[TokenRow]]:
    batches: list[list[TokenRow]] = [[]]
    for row in rows:
        if sum(len(other.token_ids) for other in batches[-1]) + len(row.token_ids) > MICRO_BATCH_TOKENS:
            batches.append([])
        batches[-1].append(row)
    return batches


def _differences(rank: LearnerRank, rows: Sequence[TokenRow]) -> Any:
    """|learner - engine| of every sampled token's log-probability."""
    expected = torch.cat(rank.logprobs(_micro_batches(rows))).numpy()
    seen = np.concatenate([row.rollout_logprobs[row.loss_mask] for row in rows if row.rollout_logprobs is not None])
    return np.abs(expected - seen)


def _ms(seconds: Sequence[float]) -> dict[str, float]:
    return spread([1e3 * one for one in seconds], digits=1)


_ids = iter(range(10**9))


def measure(bench: BenchSettings) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.disable(logging.WARNING)
    print(json.dumps(asyncio.run(figures(bench))))


if __name__ == "__main__":
    sys.exit(run_command(BenchSettings, measure, None, description=__doc__))
