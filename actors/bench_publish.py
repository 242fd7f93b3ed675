"""Weights from a learner to a real vLLM engine, as one JSON line: `python -m actors.bench_publish`.

Every round trains the tiny policy on what its own engine sampled, publishes while the engine decodes other requests,
samples conversations of several turns and compares the engine's log-probs with the learner's.
"""

import asyncio
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from actors.engine import Engine
from actors.learner_rank import LearnerRank
from actors.learner_settings import LearnerSettings
from actors.vllm_start import EngineSettings
from rstar_ray.batch import TokenRow
from rstar_ray.tiny.model import make_tiny_model
from rstar_ray.trajectory import Sampling
from rstar_ray.weights import checksum

MICRO_BATCH_TOKENS = 2_048


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What is measured."""

    publishes: int = 20
    """rounds"""
    conversations: int = 32
    """sampled in a round, all at once"""
    turns: int = 3
    """completions of a conversation"""
    completion_tokens: int = 64
    """longest completion [tokens]"""
    learning_rate: float = 3e-4
    """of the update before each publish; 0 shows the drift of publishing alone"""


async def main(bench: BenchSettings) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder), seed=0)
        rank = LearnerRank(LearnerSettings(model=folder, device="cpu"))
        rank.start()
        engine = Engine(EngineSettings(model=folder, kv_tokens=65_536))
        await engine.start()
        try:
            return await _rounds(bench, rank, engine)
        finally:
            await engine.close()


async def _rounds(bench: BenchSettings, rank: LearnerRank, engine: Engine) -> dict[str, Any]:
    pauses, totals, copies, differences = [], [], [], []
    rows = await _sample(bench, engine, 0)
    for version in range(1, bench.publishes + 1):
        micro_batches = _micro_batches(rows)
        count = sum(row.num_sampled_tokens for row in rows)
        await asyncio.to_thread(rank.train_rl, [micro_batches], [count], bench.learning_rate)
        others = [asyncio.create_task(_complete(engine, [5, 6, 7], 1_000 * version + i, 400)) for i in range(16)]
        await asyncio.sleep(0.2)
        started = time.perf_counter()
        buckets = list(rank.weight_buckets())
        update = await engine.update_weights(version, buckets)
        totals.append(time.perf_counter() - started)
        pauses.append(update.paused_s)
        assert update.checksum == checksum(buckets)
        started = time.perf_counter()
        for bucket in buckets:
            bucket.data.copy()
        copies.append(time.perf_counter() - started)
        await asyncio.gather(*others)
        rows = await _sample(bench, engine, version)
        differences.append(_differences(rank, rows))
    found = np.concatenate(differences)
    return {
        "benchmark": "publish",
        "device": "cpu",
        "publishes": bench.publishes,
        "bytes": sum(bucket.num_bytes for bucket in rank.weight_buckets()),
        "pause_ms": _spread(pauses),
        "total_ms": _spread(totals),
        "copy_ms": _spread(copies),
        "allowed_total_ms": round(3e3 * statistics.median(copies) + 100, 1),
        "compared_tokens": len(found),
        "logprob_difference_mean": float(f"{found.mean():.3g}"),
        "logprob_difference_max": float(f"{found.max():.3g}"),
        "learning_rate": bench.learning_rate,
    }


async def _complete(engine: Engine, prompt: Sequence[int], seed: int, tokens: int) -> Any:
    return await engine.generate(
        prompt, request_id=f"bench-{next(_ids)}", max_tokens=tokens, seed=seed, sampling=Sampling()
    )


async def _sample(bench: BenchSettings, engine: Engine, version: int) -> list[TokenRow]:
    """Conversations: the same first prompts in every round, so that a stale prefix block would show."""
    rng = np.random.default_rng(0)

    async def converse(number: int, context: list[int]) -> TokenRow:
        mask, logprobs = [False] * len(context), [0.0] * len(context)
        for turn in range(bench.turns):
            seed = 10_000 * version + 100 * turn + number
            done = await _complete(engine, context, seed, bench.completion_tokens)
            tool = [int(token) for token in np.random.default_rng(seed).integers(5, 100, 20)]
            context = [*context, *done.token_ids, *tool]
            mask += [True] * len(done.token_ids) + [False] * len(tool)
            logprobs += [*done.logprobs, *([0.0] * len(tool))]
        return TokenRow(
            f"round {version} conversation {number}",
            np.array(context, np.int32),
            np.array(mask),
            1.0 if number % 2 else -1.0,
            np.array(logprobs, np.float32),
        ).trimmed()

    prompts = rng.integers(5, 100, (bench.conversations, 70)).tolist()
    return await asyncio.gather(*(converse(number, prompt) for number, prompt in enumerate(prompts)))


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


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "p50": round(1e3 * statistics.median(seconds), 1),
        "min": round(1e3 * min(seconds), 1),
        "max": round(1e3 * max(seconds), 1),
    }


_ids = iter(range(10**9))

if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.disable(logging.WARNING)
    print(json.dumps(asyncio.run(main(tyro.cli(BenchSettings)))))
