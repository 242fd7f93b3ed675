"""Weights sent from a learner's rank into real engines, vLLM on CPU, by the code that GPUs run.

gloo is in NCCL's place, and files of shared memory are in the place of CUDA's handles.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from actors.generation import vllm_start
from actors.generation.engine import Engine
from actors.weights.buckets import checksum
from actors.weights.collective import CollectiveTransfer
from actors.weights.ipc import IpcTransfer
from actors.weights.transfer import Publication
from rstar_ray.errors import EngineError, TransferError
from rstar_ray.trajectory import UNMODIFIED, Completion
from tests import derived
from tests.actors import stand_in_memory
from tests.actors.engine_line import Line
from tests.actors.policies import draw_rows, micro_batches, save_policy, weighted

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

DEADLINE_S = 30.0
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def files() -> Iterator[None]:
    """In the place of GPU memory, in the engines' workers."""
    arguments = vllm_start.engine_arguments

    def with_files(*args: Any) -> dict[str, Any]:
        return {**arguments(*args), "worker_extension_cls": f"{stand_in_memory.__name__}.WorkerExtension"}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_start, "engine_arguments", with_files)
        patch.setenv("RSTAR_TEST_MEMORY", "files")
        yield


@pytest.fixture(scope="module")
async def engines(folder: Path, files: None) -> AsyncIterator[list[Engine]]:
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
    return await engine.generate(prompt, request_id=f"r{seed}", max_tokens=40, seed=seed, sampling=UNMODIFIED)


async def test_by_ipc_each_engine_reads_its_own_ranks_memory_through_vllms_ipc_engine(engines: list[Engine], rank: Any):
    transfer = IpcTransfer(cast(Any, stand_in_memory.SharedFile()), DEADLINE_S)
    for version, engine in ((1, engines[0]), (2, engines[0]), (1, engines[1])):
        rank.train_rl([micro_batches(weighted(draw_rows(12, seed=version)))], 1e-2)
        under_way = asyncio.create_task(complete(engine, [5, 6, 7], 900 + version))
        sent = await asyncio.to_thread(transfer.send, rank.served_weights(), version, [Line(engine, 0)])
        assert sent.failed == {}
        assert sent.checksum == sent.took["generation/0"].checksum == checksum(rank.served_weights().on_host())
        assert len((await under_way).token_ids) > 0
        await refuse_other_logprobs(engine, rank, version, 800 + version)


async def refuse_other_logprobs(engine: Engine, rank: Any, version: int, seed: int) -> None:
    """Unless the engine samples from the weights of the rank."""
    done = await complete(engine, [9, 8, 7, 6], seed)
    assert set(done.policy_versions) == {version}
    (theirs,) = rank.logprobs([[of_completion([9, 8, 7, 6], done)]])
    assert np.abs(theirs.numpy() - np.array(done.logprobs)).max() <= TOLERANCE


async def test_an_update_that_receives_no_weights_leaves_the_engine_as_it_was(engines: list[Engine], rank: Any):
    engine = engines[1]  # it has the rank's weights
    before = engine.policy_version
    await engine.weights.begin(9, rank.served_weights().plan)
    with pytest.raises(TransferError, match=f"version {before} still serves"):
        await engine.weights.end()
    await refuse_other_logprobs(engine, rank, before, 950)


async def test_a_broadcast_reaches_every_engine_whole_version_by_version_and_its_death_ends_it(
    engines: list[Engine], rank: Any
):
    transfer = CollectiveTransfer("127.0.0.1", torch.device("cpu"), DEADLINE_S)
    seeds = iter(range(1_000))
    for version in (3, 4):
        rank.train_rl([micro_batches(weighted(draw_rows(12, seed=version)))], 1e-2)
        under_way = asyncio.create_task(complete(engines[0], [5, 6, 7], next(seeds)))
        sent = await send(transfer, rank, engines, version)
        assert sent.failed == {}
        assert sent.checksum == checksum(rank.served_weights().on_host())
        assert {name: pulled.checksum for name, pulled in sent.took.items()} == {
            "generation/0": sent.checksum, "generation/1": sent.checksum,
        }  # fmt: skip
        assert len((await under_way).token_ids) > 0  # it waited, and continued
        for engine in engines:
            assert engine.policy_version == version
            await refuse_other_logprobs(engine, rank, version, next(seeds))

    # Through the object store meanwhile, as a replica that comes back takes them.
    buckets = list(rank.served_weights().on_host())
    assert (await engines[1].weights.update(5, buckets)).checksum == checksum(buckets)

    (core,) = engines[1]._vllm.processes
    sending = asyncio.create_task(send(transfer, rank, engines, 6))
    core.kill()
    sent = await sending
    assert sent.took == {} and sent.failed.keys() == {"generation/0", "generation/1"}
    with pytest.raises(EngineError, match=r"died|does not serve"):
        await complete(engines[1], [5], next(seeds))
    # The other stands still with weights that are half old and half new, or had not begun: it never serves a mixture.
    try:
        done = await complete(engines[0], [5], next(seeds))
        assert set(done.policy_versions) == {4}
    except EngineError as dead:
        assert "half-way" in str(dead) or "no weights arrived" in str(dead)


def of_completion(prompt: list[int], done: Completion) -> Any:
    from rstar_ray.algorithm.batch import TokenRow

    ids = np.array([*prompt, *done.token_ids], np.int32)
    return TokenRow("row", ids, np.arange(len(ids)) >= len(prompt))
