"""What only a GPU can show: the learner in bfloat16, the engine with graphs, and both on one device.

`make gpu-smoke` runs these; without a GPU they are skipped.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from actors.generation.engine import Engine
from actors.weights.buckets import checksum
from actors.weights.tensors import ServedWeights, TensorBucket
from rstar_ray.algorithm.state_bytes import rank_bytes
from rstar_ray.config.scales import local_resources
from rstar_ray.trajectory import UNMODIFIED, Completion
from scheduler.planner.capacity import logits_gb
from scheduler.planner.model_shape import GB
from tests import derived
from tests.actors.engine_line import Line
from tests.actors.policies import VOCABULARY, draw_rows, micro_batches, num_sampled, save_policy, weighted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.real,
    pytest.mark.skipif(not local_resources()["GPU"], reason="no GPU here"),
    pytest.mark.asyncio(loop_scope="module"),
]

SHAPE = {"hidden_size": 512, "intermediate_size": 1_536, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2_048}  # fmt: skip
SHARE = 0.3  # of the device, for the engine
DEADLINE_S = 60.0
LEAK_BYTES = 16 * 2**20
WORKSPACE_BYTES = 256 * 2**20
"""Of cuBLAS or hipBLASLt: 32 to 128 MiB for each thread that multiplies matrices, and autograd has a separate one."""
BFLOAT16_DIFFERENCE = 0.02
"""Of log-probs, in the mean: kernels of engine and learner round at other places."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"), **SHAPE)


@pytest.fixture(scope="module")
async def engine(folder: Path) -> AsyncIterator[Engine]:
    """First on the device: vLLM looks at what is free when it starts."""
    settings = derived.engine(
        dtype="bfloat16", max_context_tokens=1_024, kv_tokens=65_536, max_running=64, gpus_per_replica=1,
        gpu_memory_share=SHARE,
    )  # fmt: skip
    running = Engine(settings, folder)
    await running.start()
    yield running
    await running.close()


@pytest.fixture(scope="module")
def rank(folder: Path, engine: Engine) -> Iterator[Any]:
    """On the engine's device, after it."""
    from actors.learner.rank import LearnerRank

    one = LearnerRank(derived.learner(gpus_per_rank=1, dtype="bfloat16", zero=3, activation_checkpointing=True), folder)
    one.start()
    yield one
    one.release()
    one.close()
    gc.collect()


async def complete(engine: Engine, prompt: list[int], number: int, tokens: int = 200) -> Completion:
    return await engine.generate(
        prompt, request_id=f"gpu-{number}", max_tokens=tokens, seed=number, sampling=UNMODIFIED
    )


def prompts(count: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(2, VOCABULARY, (count, 40)).tolist()


async def test_a_rank_learns_in_bfloat16_within_what_the_planner_counts(rank: Any):
    import torch

    rows = weighted(draw_rows(24))
    torch.cuda.reset_peak_memory_stats()
    results = [rank.train_rl([micro_batches(rows)], 1e-4) for _ in range(3)]
    assert all(result.applied and np.isfinite(result.metrics["grad_norm"]) for result in results)
    assert rank.device.type != "cpu"
    state = rank_bytes(rank.facts().num_parameters, dtype="bfloat16", zero=3, ranks=1)
    held = torch.cuda.memory_allocated()
    assert 0.95 * (state.state + state.bucket) < held < 1.05 * (state.state + state.bucket) + WORKSPACE_BYTES
    assert rank.memory_bytes()["device"] < 1.5 * held


@pytest.mark.parametrize("float32_head", [False, True])
async def test_chunked_log_probs_hold_what_the_planner_counts(float32_head: bool):
    import torch

    from rstar_ray.algorithm.loss import token_logprobs

    vocabulary, chunk, tokens = 151_936, 512, 2_048
    hidden = torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.arange(tokens, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprobs, entropy = token_logprobs(
        hidden, weight, targets, chunk_tokens=chunk, temperature=1.0, float32_head=float32_head
    )
    (logprobs.sum() + 0.1 * entropy.sum()).backward()
    assert torch.cuda.max_memory_allocated() - before < 1.1 * logits_gb(vocabulary, chunk) * GB


async def test_new_weights_are_served_under_load_and_log_probs_agree_with_the_learners(engine: Engine, rank: Any):
    under_load = [asyncio.create_task(complete(engine, prompt, n, 600)) for n, prompt in enumerate(prompts(32))]
    await asyncio.sleep(0.5)
    rank.train_rl([micro_batches(weighted(draw_rows(24)))], 1e-4)
    buckets = list(rank.served_weights().on_host())
    update = await engine.weights.update(1, buckets)
    assert update.checksum == checksum(buckets)
    await asyncio.gather(*under_load)
    rows = draw_rows(16)
    differences = []
    for number, row in enumerate(rows):
        prompt = row.token_ids[:8].tolist()
        done = await complete(engine, prompt, 1_000 + number)
        assert set(done.policy_versions) == {1}
        ids = np.array([*prompt, *done.token_ids], np.int32)
        mask = np.arange(len(ids)) >= len(prompt)
        of_row = replace(row, token_ids=ids, loss_mask=mask, rollout_logprobs=None)
        assert num_sampled([of_row]) == len(done.token_ids)
        (theirs,) = rank.logprobs([[of_row]])
        differences.append(np.abs(theirs.numpy() - np.array(done.logprobs)).mean())
    assert np.mean(differences) < BFLOAT16_DIFFERENCE


async def test_by_ipc_the_engine_beside_a_rank_reads_its_weights_in_place_and_nothing_stays_behind(
    engine: Engine, rank: Any
):
    import torch

    from actors.weights.ipc import CudaExporter, IpcTransfer

    transfer = IpcTransfer(CudaExporter(), DEADLINE_S)
    weights = ServedWeights(rank.state.served_entries, rank.state.served, 8 * 2**20, everywhere=True)  # several buckets
    free = 0
    for version in range(2, 22):
        rank.train_rl([micro_batches(weighted(draw_rows(8)))], 1e-4)
        sent = await asyncio.to_thread(transfer.send, weights, version, [Line(engine, 0)])
        assert sent.failed == {}
        assert sent.checksum == sent.took["generation/0"].checksum == checksum(rank.served_weights().on_host())
        assert set((await complete(engine, prompts(1)[0], version, 8)).policy_versions) == {version}
        torch.cuda.empty_cache()
        if version == 3:  # the first ones' contexts stay
            free = torch.cuda.mem_get_info()[0]
    assert free - torch.cuda.mem_get_info()[0] < LEAK_BYTES


@pytest.mark.skipif(local_resources()["GPU"] < 2, reason="NCCL wants a GPU for each process")
async def test_by_broadcast_an_engine_on_another_gpu_has_the_ranks_weights(engine: Engine, rank: Any):
    import torch

    from actors.weights.collective import CollectiveTransfer

    def send(version: int) -> Any:
        other = torch.device("cuda", 1)
        with torch.cuda.device(other):
            transfer = CollectiveTransfer("127.0.0.1", other, DEADLINE_S)
            try:
                return transfer.send(cast(Any, OnAnotherGpu(rank.served_weights())), version, [Line(engine, 0)])
            finally:
                transfer.leave()

    sent = await asyncio.to_thread(send, 30)
    assert sent.failed == {}
    assert sent.checksum == sent.took["generation/0"].checksum == checksum(rank.served_weights().on_host())


class OnAnotherGpu:
    """The weights of a rank, copied to the GPU that they are sent from: the engine has the rank's own."""

    def __init__(self, weights: ServedWeights) -> None:
        self._weights = weights
        self.plan = weights.plan
        self.on_host = weights.on_host
        self.take_part = weights.take_part

    def on_device(self, data: Any) -> Iterator[TensorBucket]:
        for bucket in self._weights.on_device(data.to("cuda:0")):
            data[: len(bucket.data)].copy_(bucket.data)
            yield TensorBucket(bucket.entries, data[: len(bucket.data)])


async def test_a_checkpoint_of_a_gpu_continues_there(rank: Any, tmp_path: Path):
    rank.save_checkpoint(tmp_path, {"said": 1})
    rank.written()
    before = rank.logprobs([draw_rows(4)])
    rank.train_rl([micro_batches(weighted(draw_rows(24)))], 1e-3)
    assert rank.load_checkpoint(tmp_path) == {"said": 1}
    after = rank.logprobs([draw_rows(4)])
    assert all(np.array_equal(one.numpy(), other.numpy()) for one, other in zip(before, after, strict=True))


async def test_an_engine_killed_in_a_publish_is_reported_and_the_rank_continues(engine: Engine, rank: Any):
    """The last test of this file: the engine does not come back."""
    import torch

    from actors.weights.ipc import CudaExporter, IpcTransfer

    class Killed(Line):
        """The line to an engine whose process is killed as its second bucket is sent."""

        sent = 0

        def take(self, parcel: Any) -> Any:
            self.sent += 1
            if self.sent == 2:
                for process in engine._vllm.processes:
                    process.kill()
            return super().take(parcel)

    weights = ServedWeights(rank.state.served_entries, rank.state.served, 8 * 2**20, everywhere=True)
    transfer = IpcTransfer(CudaExporter(), DEADLINE_S)
    sent = await asyncio.to_thread(transfer.send, weights, 50, [Killed(engine, 0)])
    assert (sent.took, list(sent.failed)) == ({}, ["generation/0"])
    assert rank.train_rl([micro_batches(weighted(draw_rows(8)))], 1e-4).applied
    torch.cuda.synchronize()
