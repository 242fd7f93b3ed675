"""The losses of one update's micro batches, as functions of their place and their tensors."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from rstar_ray.algorithm.batch import MicroBatch, TokenRow
from rstar_ray.algorithm.loss import LossStats, likelihood_loss, policy_loss
from rstar_ray.algorithm.rules import rule
from rstar_ray.algorithm.surrogate import SampledTokens
from rstar_ray.algorithm.update import SeenTokens
from rstar_ray.config import RunConfig

Forward = Callable[[MicroBatch, float], tuple[Tensor, Tensor]]
"""Log-probability and entropy of each sampled token at a temperature."""
LossFn = Callable[[int, MicroBatch], tuple[Tensor, LossStats]]
"""The loss of the update's micro batch of this number."""


class PolicyLoss:
    """The RL loss of one update.

    Without `old`, the update's own log-probs, detached, are the old ones: the weights that the forward pass uses are
    those before the update, so both are the same computation, and the ratio is exactly 1.
    """

    def __init__(
        self,
        forward: Forward,
        config: RunConfig,
        *,
        old: Sequence[Tensor] | None,
        reference: Callable[[MicroBatch], Tensor] | None,
    ) -> None:
        self._forward = forward
        self._algorithm, self._temperature = config.loss, config.rollout.policy_temperature
        self._rule = rule("loss", config.algorithm, config.own_folder)
        self._old = old
        self._reference = reference
        self.drift = 0.0  # largest difference so far between `old` and the update's own
        self.seen: list[tuple[Tensor, Tensor]] = []  # by micro batch: entropies [N], and `old` less the engine's [N]

    def __call__(self, index: int, batch: MicroBatch) -> tuple[Tensor, LossStats]:
        logprobs_N, entropy_N = self._forward(batch, self._temperature)
        own_N = logprobs_N.detach()
        old_N = own_N if self._old is None else self._old[index]
        if self._old is not None and len(old_N):
            self.drift = max(self.drift, float((old_N - own_N).abs().max()))
        self.seen.append((entropy_N.detach(), old_N - batch.rollout_logprobs_N))
        tokens = SampledTokens(
            logprobs_N=logprobs_N,
            entropy_N=entropy_N,
            old_logprobs_N=old_N,
            rollout_logprobs_N=batch.rollout_logprobs_N,
            advantages_N=batch.advantages_N,
            weights_N=batch.weights_N,
            rows_N=batch.rows_N,
            ref_logprobs_N=None if self._reference is None else self._reference(batch),
        )
        return policy_loss(tokens, self._algorithm, self._rule)


def seen_by_row(rows: Sequence[TokenRow], seen: tuple[Tensor, Tensor]) -> Iterator[tuple[str, SeenTokens]]:
    """What `PolicyLoss` saw of a micro batch, row by row: as `collate` lays them out, end to end."""
    entropies_N, diffs_N = (values.float().cpu().numpy() for values in seen)
    start = 0
    for row in rows:
        own = slice(start, start + row.num_sampled_tokens)
        yield row.name, SeenTokens(entropies=entropies_N[own], logprob_diffs=diffs_N[own])
        start = own.stop


class SftLoss:
    """Cross-entropy; of the model's own distribution, whatever temperature rollouts are sampled at."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def __call__(self, index: int, batch: MicroBatch) -> tuple[Tensor, LossStats]:
        logprobs_N, entropy_N = self._forward(batch, 1.0)
        return likelihood_loss(logprobs_N, entropy_N, batch.weights_N)
