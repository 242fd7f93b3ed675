"""Many ranks on this machine under ZeRO-3, with gloo for NCCL and files for GPU memory, as `mi300x-64` places them."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.learner.gang import Learner
from actors.weights.transfer import EngineSeat
from rstar_ray.config import RunConfig
from tests.actors import stand_in_memory
from tests.actors.policies import draw_rows, save_policy
from tests.actors.test_learner import learning, training_rows

pytestmark = [pytest.mark.real, pytest.mark.slow]  # eight processes of torch on a few cores

RANKS = 8
DOOMED = 5
ROWS = [*draw_rows(11, low=8, high=30), *draw_rows(2, seed=1, low=200, high=250)]  # two ranks have nearly all tokens


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray

    hook = f"{stand_in_memory.__name__}.of_learner"
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, namespace="many-ranks", object_store_memory=100 * 2**20,
        runtime_env={"worker_process_setup_hook": hook},
    )  # fmt: skip
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@asynccontextmanager
async def engines(ray: Any) -> AsyncIterator[list[EngineSeat]]:
    """One for each rank, of which one dies at the second bucket of the first version."""
    actor = ray.remote(num_cpus=0)(stand_in_memory.StandInEngine)
    handles = [
        actor.options(name=f"generation/{rank}").remote((1, 1) if rank == DOOMED else None) for rank in range(RANKS)
    ]
    yield [EngineSeat(name=f"generation/{rank}", incarnation="1", ranks=1, sender=rank) for rank in range(len(handles))]
    for handle in handles:
        ray.kill(handle)


async def entropies(learner: Learner, rows: Any) -> list[float]:
    """Of three updates: from the second on they show what the updates before did to the weights. The loss does not:
    it is measured against the log-probs before each update."""
    found = [(await learner.train_rl(rows, 1e-2)).metrics["entropy"] for _ in range(3)]
    assert abs(found[2] - found[0]) > 0.05, found
    return found


async def test_eight_ranks_learn_from_uneven_rows_and_an_engine_that_dies_in_a_publish_harms_no_other(
    cluster: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = training_rows(ROWS, cluster)
    async with learning(folder, micro_batch_tokens=256) as one:
        alone = await entropies(one, rows)
    monkeypatch.setattr(RunConfig, "weight_way", property(lambda _: "ipc"))
    async with (
        learning(folder, ranks=RANKS, zero=3, micro_batch_tokens=256, bucket_mb=1) as eight,
        engines(cluster) as seats,
    ):
        assert await entropies(eight, rows) == pytest.approx(alone, abs=1e-5)
        sent = await eight.publish(1, seats)
        others = [seat for seat in seats if seat.sender != DOOMED]
        assert sent.failed.keys() == {f"generation/{DOOMED}"} and "bucket 2" in sent.failed[f"generation/{DOOMED}"]
        assert {name: loaded.checksum for name, loaded in sent.took.items()} == {
            seat.name: sent.checksum for seat in others
        }
        again = await eight.publish(2, others)
        assert (again.failed, again.checksum, len(again.took)) == ({}, sent.checksum, RANKS - 1)
        assert (await eight.train_rl(rows, 1e-3)).applied
    assert not list(stand_in_memory.FOLDER.glob("rstar-test-*"))


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"hpz_ranks": 2}, 1e-5),
        ({"hpz_ranks": 2, "dtype": "bfloat16", "reduce_dtype": "bfloat16", "correction": "none"}, 0.02),
    ],
)
async def test_four_ranks_that_copy_weights_in_pairs_and_reduce_in_bfloat16_learn_as_one_rank(
    cluster: Any, folder: Path, settings: dict[str, Any], tolerance: float
):
    rows = training_rows(ROWS, cluster)
    async with learning(folder, micro_batch_tokens=256) as one:
        alone = await entropies(one, rows)
    async with learning(folder, ranks=4, zero=3, micro_batch_tokens=256, **settings) as four:
        assert await entropies(four, rows) == pytest.approx(alone, abs=tolerance)
