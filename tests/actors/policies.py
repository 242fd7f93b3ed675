"""Small random policies and rows for the learner's tests."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rstar_ray.algorithm.batch import TokenRow
from rstar_ray.algorithm.batch_plan import plan_ranks
from rstar_ray.algorithm.normalisation import token_weights
from rstar_ray.config.algorithm import Normalisation
from tests import derived

VOCABULARY = 200


def save_policy(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random Qwen3 of the tiny scale's shape, as a Hugging Face folder."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        # Ids beyond which a random policy's sampled text has no meaning.
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    torch.manual_seed(seed)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape)).save_pretrained(folder)
    return folder


def draw_rows(count: int, seed: int = 0, low: int = 8, high: int = 60) -> list[TokenRow]:
    """Rows as of multi-turn rollouts: a prompt, then sampled tokens with gaps."""
    rng = np.random.default_rng(seed)
    rows: list[TokenRow] = []
    for number in range(count):
        length = int(rng.integers(low, high))
        mask = rng.random(length) < 0.7
        mask[:4], mask[4] = False, True
        rows.append(
            TokenRow(
                f"rollout-{number}",
                rng.integers(0, VOCABULARY, length).astype(np.int32),
                mask,
                float(rng.normal()),
                (rng.normal(-5.3, 0.2, length) * mask).astype(np.float32),
            ).trimmed()
        )
    return rows


def micro_batches(rows: Sequence[TokenRow], tokens: int = 512) -> list[list[TokenRow]]:
    plan = plan_ranks(
        [len(row.token_ids) for row in rows], derived.limits(micro_batch_tokens=tokens), attention_tokens=math.inf
    )[0]
    return [[rows[i] for i in batch] for batch in plan]


def weighted(rows: Sequence[TokenRow], mode: Normalisation = "token") -> list[TokenRow]:
    """The rows of one update; each is a separate group."""
    weights = token_weights([row.num_sampled_tokens for row in rows], [row.name for row in rows], mode)
    return [replace(row, token_weight=weight) for row, weight in zip(rows, weights, strict=True)]


def num_sampled(rows: Sequence[TokenRow]) -> int:
    return sum(row.num_sampled_tokens for row in rows)
