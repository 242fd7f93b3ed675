"""Weights broadcast from a learner's rank into real engines, vLLM on CPU, by the code that GPUs run: gloo for NCCL."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.generation.engine import Engine
from actors.weights.buckets import checksum
from actors.weights.collective import CollectiveTransfer
from actors.weights.transfer import Publication
from rstar_ray.errors import EngineError
from rstar_ray.trajectory import MODELS_OWN, Completion
from tests import derived
from tests.actors.engine_line import Line
from tests.actors.policies import draw_rows, micro_batches, save_policy, weighted

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

DEADLINE_S = 30.0
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
async def engines(folder: Path) -> AsyncIterator[list[Engine]]:
    settings = derived.engine(max_context_tokens=256, kv_tokens=8_192, answer_deadline_s=DEADLINE_S)
    running = [Engine(settings, folder) for _ in range(2)]
    for engine in running:
        await engine.start()
    yield running
    for engine in running:
        await engine.close()


@pytest.fixture(scope="module")
def rank(folder: Path) -> Iterator[Any]:
    from actors.learner.rank import LearnerRank

    one = LearnerRank(derived.learner(bucket_mb=1), folder)
    one.start()
    yield one
    one.close()


async def send(transfer: CollectiveTransfer, rank: Any, engines: list[Engine], version: int) -> Publication:
    lines = [Line(engine, number) for number, engine in enumerate(engines)]
    return await asyncio.to_thread(transfer.send, rank.served_weights(), version, lines)


async def complete(engine: Engine, prompt: list[int], seed: int) -> Completion:
    return await engine.generate(prompt, request_id=f"r{seed}", max_tokens=40, seed=seed, sampling=MODELS_OWN)


async def test_a_broadcast_reaches_every_engine_whole_version_by_version_and_its_death_ends_it(
    engines: list[Engine], rank: Any
):
    transfer = CollectiveTransfer("127.0.0.1", torch.device("cpu"), DEADLINE_S)
    seeds = iter(range(1_000))
    for version in (1, 2):
        rank.train_rl([micro_batches(weighted(draw_rows(12, seed=version)))], 1e-2)
        under_way = asyncio.create_task(complete(engines[0], [5, 6, 7], next(seeds)))
        sent = await send(transfer, rank, engines, version)
        assert sent.failed == {}
        assert sent.checksum == checksum(rank.served_weights().on_host())
        assert {name: pulled.checksum for name, pulled in sent.took.items()} == {
            "generation/0": sent.checksum, "generation/1": sent.checksum,
        }  # fmt: skip
        assert len((await under_way).token_ids) > 0  # it waited, and went on
        for engine in engines:
            assert engine.policy_version == version
            done = await complete(engine, [9, 8, 7, 6], next(seeds))
            assert set(done.policy_versions) == {version}
            (theirs,) = rank.logprobs([[of_completion([9, 8, 7, 6], done)]])
            assert np.abs(theirs.numpy() - np.array(done.logprobs)).max() <= TOLERANCE

    # Through the object store meanwhile, as a replica that comes back takes them.
    buckets = list(rank.served_weights().on_host())
    assert (await engines[1].weights.update(3, buckets)).checksum == checksum(buckets)

    (core,) = engines[1]._vllm.processes
    sending = asyncio.create_task(send(transfer, rank, engines, 4))
    core.kill()
    sent = await sending
    assert sent.took == {} and sent.failed.keys() == {"generation/0", "generation/1"}
    with pytest.raises(EngineError, match=r"died|does not serve"):
        await complete(engines[1], [5], next(seeds))
    # The other stands still with weights that are half old and half new, or had not begun: it never serves a mixture.
    try:
        done = await complete(engines[0], [5], next(seeds))
        assert set(done.policy_versions) == {2}
    except EngineError as dead:
        assert "half-way" in str(dead) or "nothing more came" in str(dead)


def of_completion(prompt: list[int], done: Completion) -> Any:
    from rstar_ray.algorithm.batch import TokenRow

    ids = np.array([*prompt, *done.token_ids], np.int32)
    return TokenRow("row", ids, np.arange(len(ids)) >= len(prompt))
