"""`--float32-head`: engine and learner compute the same unrounded logits of a bfloat16 model."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from actors.generation.engine import Engine
from actors.learner.policy import Policy
from rstar_ray.algorithm.batch import TokenRow, collate
from rstar_ray.trajectory import UNMODIFIED
from tests import derived
from tests.actors.policies import VOCABULARY, save_policy

ROUNDING = 1e-3
"""Log-probs of logits that are rounded to bfloat16 are off by more than this."""


def without_mixing(folder: Path) -> Path:
    """A policy whose layers add nothing to the embeddings, so that no kernel but the head's can round differently."""
    save_policy(folder, initializer_range=0.1, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def learner_logprobs(folder: Path, ids: list[int], num_prompt: int, *, float32_head: bool) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    policy = Policy(model.eval(), chunk_tokens=16, float32_head=float32_head)
    batch = collate([TokenRow("row", np.array(ids, np.int32), np.arange(len(ids)) >= num_prompt)])
    return policy(batch, 1.0)[0].numpy()


@pytest.mark.real
async def test_engine_and_learner_agree_on_unrounded_logits(tmp_path: Path):
    folder = without_mixing(tmp_path)
    settings = derived.engine(dtype="bfloat16", float32_head=True, max_context_tokens=512, kv_tokens=16_000)
    prompts = np.random.default_rng(0).integers(2, VOCABULARY, (4, 20)).tolist()
    engine = Engine(settings, folder)
    await engine.start()
    try:
        sampled = await asyncio.gather(
            *(
                engine.generate(prompt, request_id=f"r{i}", max_tokens=40, seed=i, sampling=UNMODIFIED)
                for i, prompt in enumerate(prompts)
            )
        )
    finally:
        await engine.close()
    gaps: dict[bool, float] = {}
    for float32_head in (True, False):
        of_rows = [
            learner_logprobs(folder, [*prompt, *done.token_ids], len(prompt), float32_head=float32_head)
            - np.array(done.logprobs)
            for prompt, done in zip(prompts, sampled, strict=True)
        ]
        gaps[float32_head] = float(np.abs(np.concatenate(of_rows)).max())
    assert gaps[True] < ROUNDING / 10 < ROUNDING < gaps[False]
