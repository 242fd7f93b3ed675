"""A replica split over two ranks, real: vLLM on CPU in an actor that lies in a bundle of a placement group."""

from pathlib import Path

import pytest
import ray
from ray.util import placement_group

from actors.cluster.placement import in_bundle
from actors.generation.engine import Engine
from rstar_ray.tiny.tiny_model import make_tiny_model
from rstar_ray.trajectory import MODELS_OWN
from tests import derived

pytestmark = pytest.mark.real


@ray.remote(num_cpus=2)
class Replica:
    """One engine, once."""

    async def sample(self, model: Path) -> list[int]:
        engine = Engine(derived.engine(kv_tokens=4_096, tensor_parallel=2), model)
        await engine.start()
        try:
            done = await engine.generate([5, 6, 7], request_id="r", max_tokens=8, seed=0, sampling=MODELS_OWN)
        finally:
            await engine.close()
        return done.token_ids


def test_a_split_replica_runs_in_one_bundle(tmp_path: Path):
    """Left to itself vLLM takes its `ray` executor there, and does not start."""
    make_tiny_model(tmp_path, seed=0)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        group = placement_group([{"CPU": 2}])
        replica = Replica.options(**in_bundle(group, 0)).remote()  # type: ignore[attr-defined]
        token_ids = ray.get(replica.sample.remote(tmp_path), timeout=300)
        assert 0 < len(token_ids) <= 8
    finally:
        ray.shutdown()
