"""Compares the learner's throughput with a bare DeepSpeed loop and TRL (one JSON line): `python -m benchmarks.learner`.

`own_loss` is the cost of a loss by import path instead of the built-in one.

Each pair trains the same random policy on the same rows in this process, in alternating runs; a figure is the median
of the ratios of adjacent runs, with the smallest and the largest. The bare loop pads a fixed number of rows in the
given order, computes the log-softmax of all logits, and masks. TRL's GRPOTrainer receives tensors padded as it pads
them.
"""

import inspect
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from actors.learner.rank import LearnerRank
from actors.weights.buckets import checksum
from benchmarks.small import SMALL
from rstar_ray.algorithm.batch import TokenRow
from rstar_ray.algorithm.batch_plan import padding_waste, plan_ranks
from rstar_ray.algorithm.rules import rule
from rstar_ray.algorithm.surrogate import SampledTokens, clipped
from rstar_ray.config import AlgorithmConfig, RunConfig, with_values
from rstar_ray.config.options import run_command
from rstar_ray.tiny.tiny_model import make_tiny_model

Batch = dict[str, torch.Tensor]


class Loop(Protocol):
    """An update for comparison."""

    def batches(self, rows: Sequence[TokenRow], per_batch: int) -> list[Batch]: ...
    def padded_tokens(self, batch: Batch) -> int: ...
    def update(self, batches: Sequence[Batch], count: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What is measured."""

    rows: int = 64
    """rows of an update"""
    repeats: int = 5
    """alternating runs"""
    zero: Literal[0, 1, 2, 3] = 1
    """DeepSpeed's ZeRO of both"""
    micro_batch_tokens: int = 2_048
    """tokens of a micro batch; the bare loop takes as many rows as fit at the longest"""
    threads: int = 1
    """CPU threads"""


def figures_of(bench: BenchSettings) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder), seed=0)
        changed = {
            "learner.zero": bench.zero,
            "learner.num_threads": bench.threads,
            "learner.micro_batch_tokens": bench.micro_batch_tokens,
        }
        config = with_values(SMALL, changed)
        rank = LearnerRank(config, Path(folder))
        rank.start()
        bare = BareLoop(folder, config)
        trl = TrlLoop(folder, bench)
        rng = np.random.default_rng(0)
        equal = np.full(bench.rows, 128)
        spread = np.exp(rng.normal(np.log(110), 0.6, bench.rows)).clip(32, 500).astype(int)
        figures: dict[str, Any] = {
            "benchmark": "learner",
            "device": "cpu",
            "threads": bench.threads,
            "zero": bench.zero,
            "parameters": rank.facts().num_parameters,
            "equal_lengths": compare(rank, bare, equal, bench),
            "log_normal_lengths": compare(rank, bare, spread, bench),
            "against_trl": compare(rank, trl, spread, bench),
            "own_loss": own_loss(rank, spread, bench),
            "publish": publish(rank, bench.repeats),
        }
    return figures


def compare(rank: LearnerRank, other: "Loop", lengths: Any, bench: BenchSettings) -> dict[str, Any]:
    rows = random_rows(lengths)
    count = sum(row.num_sampled_tokens for row in rows)
    sizes = [len(row.token_ids) for row in rows]
    plan = plan_ranks(sizes, rank.config.learner, attention_tokens=float("inf"))
    micro_batches = [[rows[i] for i in batch] for batch in plan[0]]
    per_batch = max(1, bench.micro_batch_tokens // max(sizes))
    padded = other.batches(rows, per_batch)

    def ours() -> None:
        assert rank.train_rl([micro_batches], 0.0).applied

    def theirs() -> None:
        other.update(padded, count)

    ours_s, theirs_s = alternate(ours, theirs, bench.repeats)
    ratios = [their / our for our, their in zip(ours_s, theirs_s, strict=True)]
    tokens = sum(sizes)
    return {
        "tokens_per_s": round(tokens / statistics.median(ours_s)),
        "reference_tokens_per_s": round(tokens / statistics.median(theirs_s)),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min_max": [round(min(ratios), 3), round(max(ratios), 3)],
        "padding_waste": 0.0 if rank.config.learner.packed else round(padding_waste(sizes, plan), 4),
        "reference_padding_waste": round(1 - tokens / sum(other.padded_tokens(batch) for batch in padded), 4),
    }


def random_rows(lengths: Any) -> list[TokenRow]:
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
    count = sum(row.num_sampled_tokens for row in rows)
    return [replace(row, token_weight=1.0 / count) for row in rows]


def by_path(tokens: SampledTokens, algorithm: AlgorithmConfig) -> torch.Tensor:
    """The built-in loss as a user's rule."""
    return -clipped(tokens, algorithm).objective_N


def own_loss(rank: LearnerRank, lengths: Any, bench: BenchSettings) -> dict[str, Any]:
    """The cost of a loss by import path: the ratio of whole updates, and the cost of its calls.

    Updates vary by more than the calls cost, so `share_of_update` is the result; the ratio only shows that nothing else
    is slower.
    """
    rows = random_rows(lengths)
    plan = plan_ranks([len(row.token_ids) for row in rows], rank.config.learner, attention_tokens=float("inf"))
    micro_batches = [[rows[i] for i in batch] for batch in plan[0]]
    built_in = rank.config
    own = with_values(built_in, {"algorithm.loss": "benchmarks.learner:by_path"})

    def update(config: RunConfig) -> None:
        rank.config = config
        assert rank.train_rl([micro_batches], 0.0).applied

    built_in_s, own_s = alternate(lambda: update(built_in), lambda: update(own), bench.repeats)
    rank.config = built_in
    few = torch.zeros(1)
    tokens = SampledTokens(
        logprobs_N=few, entropy_N=few, old_logprobs_N=few, rollout_logprobs_N=few, advantages_N=few, weights_N=few,
        rows_N=few.long(),
    )  # fmt: skip
    bare, calls = inspect.unwrap(rule("loss", own.algorithm, own.own_folder)), 500

    def call_s(call: Callable[[], Any]) -> float:
        return min(timeit.repeat(call, timer=time.process_time, number=calls, repeat=20)) / calls

    by_rule_s = call_s(lambda: rule("loss", own.algorithm, own.own_folder)(tokens, own.algorithm))
    extra_s = by_rule_s - call_s(lambda: bare(tokens, own.algorithm))
    ratios = [mine / theirs for mine, theirs in zip(own_s, built_in_s, strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_min_max": [round(min(ratios), 4), round(max(ratios), 4)],
        "extra_us_per_call": round(1e6 * extra_s, 2),
        "share_of_update": round(extra_s * len(micro_batches) / statistics.median(built_in_s), 6),
    }


def alternate(one: Callable[[], None], other: Callable[[], None], repeats: int) -> tuple[list[float], list[float]]:
    """CPU seconds of alternating runs after a warm-up of each; wall time is unreliable on a shared machine."""
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
    """Compare packing and checksums of the weights with copying their bytes."""
    made, copied = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        buckets = list(rank.served_weights().on_host())
        checksum(buckets)
        made.append(time.perf_counter() - started)
        started = time.perf_counter()
        for bucket in buckets:
            bucket.data.copy()
        copied.append(time.perf_counter() - started)
    num_bytes = sum(bucket.num_bytes for bucket in rank.served_weights().on_host())
    return {
        "bytes": num_bytes,
        "pack_and_checksum_ms": round(1e3 * statistics.median(made), 2),
        "copy_ms": round(1e3 * statistics.median(copied), 2),
    }


def padded(values: Sequence[Any], width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows padded with 0 on the right to `width`."""
    out = torch.zeros(len(values), width, dtype=dtype)
    for index, value in enumerate(values):
        out[index, : len(value)] = torch.from_numpy(np.asarray(value))
    return out


class BareLoop:
    """A minimal loop: DeepSpeed with transformers, fixed micro batches, full logits."""

    def __init__(self, folder: str, config: RunConfig) -> None:
        import deepspeed
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.engine = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.0),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": config.learner.zero},
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": config.optimizer.grad_clip,
                "steps_per_print": None,
            },
            dist_init_required=False,
        )[0]

    def batches(self, rows: Sequence[TokenRow], per_batch: int) -> list[Batch]:
        """Rows in the given order, each micro batch padded to its longest."""
        return [self._pad(rows[start : start + per_batch]) for start in range(0, len(rows), per_batch)]

    def padded_tokens(self, batch: Batch) -> int:
        return batch["input_ids"].numel()

    def _pad(self, rows: Sequence[TokenRow]) -> Batch:
        width = max(len(row.token_ids) for row in rows)
        return {
            "input_ids": padded([row.token_ids for row in rows], width, torch.int64),
            "attention_mask": padded([np.ones(len(row.token_ids)) for row in rows], width, torch.int64),
            "loss_mask": padded([row.loss_mask for row in rows], width, torch.bool),
            "advantages": torch.tensor([row.advantage for row in rows])[:, None],
        }

    def update(self, batches: Sequence[Batch], count: int) -> None:
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


class TrlLoop:
    """The update of TRL's GRPOTrainer on tensors padded as TRL does: the whole batch to its longest, then split."""

    def __init__(self, folder: str, bench: BenchSettings) -> None:
        import transformers
        from datasets import Dataset
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer

        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        arguments = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            num_generations=8,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=max(1, bench.rows // 8),
            gradient_checkpointing=False,
            beta=0.0,
            epsilon_high=0.28,
            loss_type="dapo",
            learning_rate=0.0,
            max_grad_norm=1.0,
            report_to=[],
        )
        self.trainer = GRPOTrainer(
            model=folder,
            reward_funcs=_no_reward,
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "1"}] * 8),
            processing_class=tokenizer,
        )
        assert self.trainer.model is not None
        self.model = self.trainer.model.train()
        self._optimizer: Any = self.trainer.create_optimizer()
        # Its train loop sets this.
        self.trainer.current_gradient_accumulation_steps = arguments.gradient_accumulation_steps

    def batches(self, rows: Sequence[TokenRow], per_batch: int) -> list[Batch]:
        prompts = [int(row.loss_mask.argmax()) for row in rows]
        completions = [row.token_ids[start:] for row, start in zip(rows, prompts, strict=True)]
        width = max(map(len, completions))
        whole = {
            "prompt_ids": padded([row.token_ids[:n] for row, n in zip(rows, prompts, strict=True)], 20, torch.int64),
            "prompt_mask": padded([np.ones(n) for n in prompts], 20, torch.int64),
            "completion_ids": padded(completions, width, torch.int64),
            "completion_mask": padded([np.ones(len(ids)) for ids in completions], width, torch.int64),
            "advantages": torch.tensor([row.advantage for row in rows]),
        }
        sampled = whole["completion_mask"].sum()
        return [
            {name: tensor[start : start + per_batch] for name, tensor in whole.items()}
            | {"num_items_in_batch": sampled}
            for start in range(0, len(rows), per_batch)
        ]

    def padded_tokens(self, batch: Batch) -> int:
        return batch["prompt_ids"].numel() + batch["completion_ids"].numel()

    def update(self, batches: Sequence[Batch], count: int) -> None:
        for batch in batches:
            self.trainer.accelerator.backward(self.trainer.compute_loss(self.model, batch))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def _no_reward(completions: Sequence[str], **_: Any) -> list[float | None]:
    return [0.0] * len(completions)


def main(bench: BenchSettings) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.disable(logging.WARNING)
    print(json.dumps(figures_of(bench)))


if __name__ == "__main__":
    sys.exit(run_command(BenchSettings, main, None, description=__doc__))
