"""A replica split over two ranks, real: vLLM on CPU in an actor that lies in a bundle of a placement group."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.util import placement_group
from safetensors.numpy import load_file

from actors.cluster.placement import in_bundle
from actors.generation.engine import Engine
from actors.weights.buckets import checksum
from rstar_ray.tiny.tiny_model import make_tiny_model
from rstar_ray.trajectory import UNMODIFIED, Completion
from tests import derived
from tests.actors.unpacked import NamedArray, pack

pytestmark = pytest.mark.real

PROMPT = [5, 6, 7]


@ray.remote(num_cpus=2)
class Replica:
    """One engine, before and after it takes new weights."""

    async def sample(self, model: Path, buckets: list[Any]) -> tuple[Completion, Completion, int]:
        engine = Engine(derived.engine(kv_tokens=4_096, tensor_parallel=2), model)
        await engine.start()
        try:
            before = await engine.generate(PROMPT, request_id="r", max_tokens=8, seed=0, sampling=UNMODIFIED)
            loaded = await engine.weights.update(1, buckets)
            after = await engine.generate(PROMPT, request_id="s", max_tokens=8, seed=0, sampling=UNMODIFIED)
        finally:
            await engine.close()
        return before, after, loaded.checksum


def expected_logprobs(model: Path, done: Completion) -> np.ndarray[Any, Any]:
    """By transformers."""
    import torch
    import transformers

    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = policy(torch.tensor([[*PROMPT, *done.token_ids]])).logits[0]
    of_sampled = logits.log_softmax(-1)[len(PROMPT) - 1 : -1].gather(-1, torch.tensor(done.token_ids)[:, None])
    return of_sampled[:, 0].numpy()


def test_a_split_replica_runs_in_one_bundle_and_each_rank_takes_its_part_of_new_weights(tmp_path: Path):
    """Left to itself vLLM takes its `ray` executor there, and does not start."""
    first, second = (tmp_path / name for name in ("first", "second"))
    make_tiny_model(first, seed=0)
    make_tiny_model(second, seed=1)
    weights = load_file(second / "model.safetensors")
    buckets = pack((NamedArray(name, array) for name, array in weights.items()), 2**20)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        group = placement_group([{"CPU": 2}])
        replica = Replica.options(**in_bundle(group, 0)).remote()  # type: ignore[attr-defined]
        before, after, total = ray.get(replica.sample.remote(first, buckets), timeout=600)
    finally:
        ray.shutdown()
    assert total == checksum(buckets)  # of both ranks
    for done, model, version in ((before, first, 0), (after, second, 1)):
        assert 0 < len(done.token_ids) <= 8 and set(done.policy_versions) == {version}
        assert np.abs(expected_logprobs(model, done) - np.array(done.logprobs)).max() <= 1e-4
