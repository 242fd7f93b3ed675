"""An engine whose rollouts continue under newer weights, real: which KV it keeps, and for whom."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.generation.engine import Engine
from rstar_ray.trajectory import UNMODIFIED, Completion
from tests import derived
from tests.actors.test_engine import TOLERANCE, logprobs_of, policy, prompts, until, weights

pytestmark = pytest.mark.real
ids = itertools.count()


async def sample(engine: Engine, prompt: Sequence[int], salt: str, *, seed: int = 0) -> Completion:
    return await engine.generate(
        prompt, request_id=f"r{next(ids)}", max_tokens=900, seed=seed, sampling=UNMODIFIED, cache_salt=salt
    )


async def test_requests_of_one_draw_keep_their_kv_over_a_swap_and_share_none_with_the_next_draw(tmp_path: Path):
    """Kept KV shows in the log-probs: the new model, which computes a whole context itself, gives others."""
    policy(seed=0).save_pretrained(tmp_path)  # pyright: ignore
    old, new = policy(seed=10), policy(seed=11)
    config = derived.engine(max_context_tokens=1024, kv_tokens=32_000)
    ahead = Engine(replace(config, staleness=1), tmp_path)
    await ahead.start()
    try:
        await ahead.weights.update(10, weights(old))
        started = [asyncio.create_task(sample(ahead, p, "stage1/1", seed=i)) for i, p in enumerate(prompts(24))]
        await until(lambda: ahead.load().running == 24)
        await ahead.weights.update(11, weights(new))
        crossed = 0
        for prompt, completion in zip(prompts(24), await asyncio.gather(*started), strict=True):
            versions, seen = np.array(completion.policy_versions), np.array(completion.logprobs)
            by_old = np.abs(seen - logprobs_of(old, prompt, completion.token_ids))
            by_new = np.abs(seen - logprobs_of(new, prompt, completion.token_ids))
            assert sorted(versions) == [*versions] and (by_old[versions == 10] <= TOLERANCE).all()
            if 0 < (versions == 10).sum() < len(versions) - 1:
                crossed += 1
                assert by_new[versions == 11].max() > TOLERANCE
        assert crossed > 0 and ahead.load().preemptions == 0
        prompt, differences = prompts(1)[0], dict[str, float]()
        for salt in ("stage1/1", "stage1/2"):
            completion = await sample(ahead, prompt, salt)
            expected = logprobs_of(new, prompt, completion.token_ids)
            differences[salt] = float(np.abs(expected - np.array(completion.logprobs)).max())
        assert differences["stage1/2"] <= TOLERANCE < differences["stage1/1"]
    finally:
        await ahead.close()
