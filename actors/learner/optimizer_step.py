"""One optimizer step: micro batches through a loss, summed over all ranks; not applied if it is not finite."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from actors.learner.losses import LossFn
from actors.learner.optimizer import RefusingAdamW
from rstar_ray.algorithm.batch import MicroBatch, TokenRow
from rstar_ray.algorithm.loss import LossStats
from rstar_ray.algorithm.update import UpdateResult
from rstar_ray.config import RunConfig
from rstar_ray.config.gpus import shares_gpus
from rstar_ray.run_dir.best_effort import best_effort
from rstar_ray.telemetry.registry import Reduction, combined, step_metric

MicroBatches = Sequence[Sequence[TokenRow]]  # of one rank; a micro batch may be empty


@dataclass(slots=True)
class _Counts:
    """Token counts of micro batches, of one rank or of all."""

    tokens: int = 0  # trained on
    input_tokens: int = 0
    padded_tokens: int = 0

    def add(self, batch: MicroBatch) -> None:
        self.tokens += len(batch.targets_N)
        self.input_tokens += batch.num_input_tokens
        self.padded_tokens += batch.num_padded_tokens


class OptimizerSteps:
    """Takes optimizer steps and counts them; every rank calls it with the same number of micro batches."""

    def __init__(self, config: RunConfig, rank: int, engine: Any, optimizer: RefusingAdamW) -> None:
        self._config = config
        self._rank = rank
        self._engine = engine
        self._optimizer = optimizer
        self._device = torch.device(engine.device)
        self._shares_gpu = shares_gpus(config.engine, config.learner)
        self.bad_updates = 0  # consecutive updates not applied
        self.step = 0  # applied

    def take(
        self, micro_batches: MicroBatches, batches: Sequence[MicroBatch], loss_of: LossFn, lr: float
    ) -> UpdateResult:
        """Apply the gradient of all ranks' micro batches; change nothing if loss or gradient is not finite."""
        started_s = time.perf_counter()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        counts, stats, losses = self._backward(batches, loss_of)
        counts, loss, metrics = self._over_ranks(counts, losses, stats)
        self._optimizer.refuse = not math.isfinite(loss)
        self._engine.step()
        grad_norm = self._grad_norm()
        applied = math.isfinite(loss) and math.isfinite(grad_norm)
        reason = "" if applied else self._bad_update(micro_batches, losses, loss, grad_norm)
        if applied:
            self.step += 1
            self.bad_updates = 0
        if self._shares_gpu:  # an engine on this GPU needs free memory to load weights or to restart
            torch.cuda.empty_cache()
        return UpdateResult(
            applied=applied,
            reason=reason,
            step=self.step,
            bad_updates=self.bad_updates,
            metrics={
                "loss": loss,
                "grad_norm": grad_norm,
                "lr": lr,
                **metrics,
                "trained_tokens": counts.tokens,
                "input_tokens": counts.input_tokens,
                "padding_frac": 1.0 - counts.input_tokens / max(counts.padded_tokens, 1),
                "update_s": time.perf_counter() - started_s,
                "updates_refused": int(not applied),
            },
        )

    def _backward(self, batches: Sequence[MicroBatch], loss_of: LossFn) -> tuple[_Counts, LossStats, list[Tensor]]:
        counts = _Counts()
        stats: LossStats = {}
        losses: list[Tensor] = []
        for index, batch in enumerate(batches):
            self._engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
            loss, of_batch = loss_of(index, batch)
            # DeepSpeed averages gradients over ranks; the loss is a share of one global sum.
            self._engine.backward(loss * self._config.learner.ranks)
            losses.append(loss.detach())
            counts.add(batch)
            for name, value in of_batch.items():
                stats[name] = _joined(name, stats[name], value) if name in stats else value
        return counts, stats, losses

    def _over_ranks(
        self, counts: _Counts, losses: Sequence[Tensor], stats: LossStats
    ) -> tuple[_Counts, float, dict[str, float]]:
        """Counts and loss summed over ranks, and the statistics as metrics: token means, or maxima."""
        maxima = [name for name in stats if step_metric(name)[0].reduction is Reduction.MAX]
        means = [name for name in stats if name not in maxima]
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        for of_batch in losses:
            loss = loss + of_batch.double()
        own = torch.tensor([counts.tokens, counts.input_tokens, counts.padded_tokens]).to(loss)
        summed = torch.cat([own, torch.stack([loss, *(stats[name] for name in means)])])
        dist.all_reduce(summed)
        tokens, input_tokens, padded_tokens, total, *sums = summed.tolist()
        metrics = {name: value / max(tokens, 1.0) for name, value in zip(means, sums, strict=True)}
        if maxima:
            largest = torch.stack([stats[name] for name in maxima])
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            metrics |= zip(maxima, largest.tolist(), strict=True)
        return _Counts(int(tokens), int(input_tokens), int(padded_tokens)), total, metrics

    def _grad_norm(self) -> float:
        """Global gradient norm of the last step before clipping; not finite if any gradient was not."""
        if self._config.learner.zero == 0:
            return self._optimizer.grad_norm
        norm = float(self._engine.get_global_grad_norm() or 0.0)
        return norm if norm >= 0 else math.inf  # DeepSpeed returns -1 if the norm is not finite

    def _bad_update(self, micro_batches: MicroBatches, losses: Sequence[Tensor], loss: float, grad_norm: float) -> str:
        """Count the refused update, save its rows, and return the reason; the run decides whether to continue."""
        self.bad_updates += 1
        by_rank: list[Any] = [None] * self._config.learner.ranks
        dist.all_gather_object(by_rank, suspects(micro_batches, losses))
        named = "; ".join(f"rank {rank}: {', '.join(names[:4])}" for rank, names in enumerate(by_rank) if names)
        reason = f"loss {loss:g}, gradient norm {grad_norm:g} ({named or 'no row identified as the cause'})"
        if self._config.optimizer.save_bad_updates:
            name = f"update-{self.step + 1:06d}-rank-{self._rank}"
            with best_effort(name):
                path = _free_path(Path(self._config.optimizer.save_bad_updates), name)
                save_rows([row for rows in micro_batches for row in rows], path)
        return reason


def as_one(results: Sequence[UpdateResult]) -> UpdateResult:
    """Combine several optimizer steps into one result: token-weighted means, and the last step's position."""
    last = results[-1]
    if len(results) == 1:
        return last
    counted = [result for result in results if result.applied] or results
    return replace(
        last,
        applied=any(result.applied for result in results),
        reason="; ".join(result.reason for result in results if result.reason),
        bad_updates=max(result.bad_updates for result in results),
        refused=tuple(number for number, result in enumerate(results) if not result.applied),
        metrics={
            **combined(
                [result.metrics for result in counted],
                weights=[result.metrics["trained_tokens"] for result in counted],
            ),
            **{name: sum(result.metrics[name] for result in results) for name in ("update_s", "updates_refused")},
        },
    )


def suspects(micro_batches: MicroBatches, losses: Sequence[Tensor]) -> list[str]:
    """Names of rows in micro batches with a non-finite loss: rows with non-finite inputs, or else all of them."""
    broken = [
        row for rows, loss in zip(micro_batches, losses, strict=True) for row in rows if not math.isfinite(float(loss))
    ]
    certain = [row for row in broken if not _all_finite(row.advantage) or not _all_finite(row.rollout_logprobs)]
    return [row.name for row in certain or broken]


def save_rows(rows: Sequence[TokenRow], path: Path) -> None:
    """Save rows as one npz for inspection: `names`, and per row `advantage-i` (one, or one per sampled token),
    `ids-i`, `mask-i`, `logprobs-i`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {"names": np.array([row.name for row in rows])}
    for index, row in enumerate(rows):
        arrays[f"ids-{index}"], arrays[f"mask-{index}"] = row.token_ids, row.loss_mask
        arrays[f"advantage-{index}"] = np.array(row.advantage)
        if row.rollout_logprobs is not None:
            arrays[f"logprobs-{index}"] = row.rollout_logprobs
    np.savez_compressed(path, **arrays)


def _free_path(folder: Path, name: str) -> Path:
    """`name`.npz, or with a number where it exists: refused updates of one step, or of two stages, share a name."""
    numbered = (folder / f"{name}-{number}.npz" for number in count(2))
    return next(path for path in chain([folder / f"{name}.npz"], numbered) if not path.exists())


def _joined(name: str, one: Tensor, other: Tensor) -> Tensor:
    """Combine one statistic of two micro batches: maximum or sum."""
    return torch.maximum(one, other) if step_metric(name)[0].reduction is Reduction.MAX else one + other


def _all_finite(values: Any) -> bool:
    return values is None or bool(np.isfinite(values).all())
