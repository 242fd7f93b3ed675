"""Learner throughput against a bare DeepSpeed loop, as one JSON line: `python -m actors.bench_learner`.

Both train the same random policy on the same rows in this process, run after run in turn; a figure is the median of
the ratios of neighbouring runs, with the smallest and the largest beside it. The bare loop pads a fixed
number of rows in the order given, takes the log-softmax of all logits, and masks.
"""

import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from actors.learner_rank import LearnerRank
from actors.learner_settings import LearnerSettings
from rstar_ray.batch import TokenRow
from rstar_ray.batch_plan import BatchLimits, padding_waste, plan_ranks
from rstar_ray.weights import checksum


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What is measured."""

    rows: int = 64
    """rows of an update"""
    repeats: int = 5
    """alternating runs"""
    zero_stage: int = 1
    """DeepSpeed ZeRO stage of both"""
    micro_batch_tokens: int = 2_048
    """tokens of a micro batch; the bare loop takes as many rows as fit at the longest"""
    threads: int = 1
    """CPU threads"""


def main(bench: BenchSettings) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        make_policy(Path(folder))
        settings = LearnerSettings(
            model=folder,
            device="cpu",
            zero_stage=bench.zero_stage,  # type: ignore[arg-type]
            num_threads=bench.threads,
            batch=BatchLimits(micro_batch_tokens=bench.micro_batch_tokens),
        )
        rank = LearnerRank(settings)
        rank.start()
        bare = BareLoop(folder, settings)
        rng = np.random.default_rng(0)
        equal = np.full(bench.rows, 128)
        spread = np.exp(rng.normal(np.log(110), 0.6, bench.rows)).clip(32, 500).astype(int)
        figures: dict[str, Any] = {
            "benchmark": "learner",
            "device": "cpu",
            "threads": bench.threads,
            "zero_stage": bench.zero_stage,
            "parameters": rank.facts().num_parameters,
            "equal_lengths": compare(rank, bare, equal, bench),
            "log_normal_lengths": compare(rank, bare, spread, bench),
            "publish": publish(rank, bench.repeats),
        }
    return figures


def compare(rank: LearnerRank, bare: "BareLoop", lengths: Any, bench: BenchSettings) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    rows = [
        TokenRow(
            f"row-{number}",
            rng.integers(0, 200, length).astype(np.int32),
            np.arange(length) >= 20,
            float(rng.normal()),
            np.zeros(length, np.float32),
        )
        for number, length in enumerate(lengths.tolist())
    ]
    sizes = [len(row.token_ids) for row in rows]
    plan = plan_ranks(sizes, 1, replace(rank.settings.batch, packed=rank.settings.packed))
    micro_batches = [[rows[i] for i in batch] for batch in plan[0]]
    count = sum(row.num_sampled_tokens for row in rows)
    per_batch = max(1, bench.micro_batch_tokens // max(sizes))
    padded = [bare.pad(rows[start : start + per_batch]) for start in range(0, len(rows), per_batch)]

    def ours() -> None:
        assert rank.train_rl([micro_batches], [count], 0.0).applied

    def theirs() -> None:
        bare.update(padded, count)

    ours_s, theirs_s = alternate(ours, theirs, bench.repeats)
    ratios = [their / our for our, their in zip(ours_s, theirs_s, strict=True)]
    tokens = sum(sizes)
    return {
        "tokens_per_s": round(tokens / statistics.median(ours_s)),
        "bare_tokens_per_s": round(tokens / statistics.median(theirs_s)),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min_max": [round(min(ratios), 3), round(max(ratios), 3)],
        "padding_waste": 0.0 if rank.settings.packed else round(padding_waste(sizes, plan), 4),
        "bare_padding_waste": round(1 - tokens / sum(batch["input_ids"].numel() for batch in padded), 4),
    }


def alternate(one: Callable[[], None], other: Callable[[], None], repeats: int) -> tuple[list[float], list[float]]:
    """CPU seconds of each, in turn, after one run of each to warm up: on a shared machine the wall clock lies."""
    one()
    other()
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for run, times in zip((one, other), seconds, strict=True):
            started = time.process_time()
            run()
            times.append(time.process_time() - started)
    return seconds


def publish(rank: LearnerRank, repeats: int) -> dict[str, Any]:
    """Packing and checking the weights, against copying their bytes."""
    made, copied = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        buckets = list(rank.weight_buckets())
        checksum(buckets)
        made.append(time.perf_counter() - started)
        started = time.perf_counter()
        for bucket in buckets:
            bucket.data.copy()
        copied.append(time.perf_counter() - started)
    num_bytes = sum(bucket.num_bytes for bucket in rank.weight_buckets())
    return {
        "bytes": num_bytes,
        "pack_and_checksum_ms": round(1e3 * statistics.median(made), 2),
        "copy_ms": round(1e3 * statistics.median(copied), 2),
    }


class BareLoop:
    """What one would write first: DeepSpeed around transformers, fixed micro batches, full logits."""

    def __init__(self, folder: str, settings: LearnerSettings) -> None:
        import deepspeed
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.engine = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.0),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": settings.zero_stage},
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": settings.grad_clip,
                "steps_per_print": None,
            },
            dist_init_required=False,
        )[0]

    def pad(self, rows: Sequence[TokenRow]) -> dict[str, torch.Tensor]:
        width = max(len(row.token_ids) for row in rows)

        def padded(values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
            out = torch.zeros(len(rows), width, dtype=dtype)
            for index, value in enumerate(values):
                out[index, : len(value)] = torch.from_numpy(np.asarray(value))
            return out

        return {
            "input_ids": padded([row.token_ids for row in rows], torch.int64),
            "attention_mask": padded([np.ones(len(row.token_ids)) for row in rows], torch.int64),
            "loss_mask": padded([row.loss_mask for row in rows], torch.bool),
            "advantages": torch.tensor([row.advantage for row in rows])[:, None],
        }

    def update(self, batches: Sequence[dict[str, torch.Tensor]], count: int) -> None:
        for index, batch in enumerate(batches):
            self.engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
            logits = self.engine(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
            ).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
            ratio = (logprobs - logprobs.detach()).exp()
            advantages = batch["advantages"]
            objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
            self.engine.backward(-(objective * batch["loss_mask"][:, 1:]).sum() / count)
        self.engine.step()


def make_policy(folder: Path) -> None:
    """A random Qwen3 of the tiny scale's shape."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=200,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.disable(logging.WARNING)
    print(json.dumps(main(tyro.cli(BenchSettings))))
