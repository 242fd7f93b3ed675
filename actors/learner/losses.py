"""The losses of one update, as functions of a micro batch's index and its tensors."""

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
"""Loss of a micro batch, given its index in the update."""
LogprobsFn = Callable[[int, MicroBatch], Tensor]
"""Log-probs [N] of a micro batch's sampled tokens, given its index in the update."""


class PolicyLoss:
    """The RL loss of one update.

    Without `old`, the detached log-probs of the forward pass serve as old log-probs. This is exact: the pass runs
    before the weights change, and the ratio is 1.
    """

    def __init__(
        self,
        forward: Forward,
        config: RunConfig,
        *,
        old: Sequence[Tensor] | None,
        reference: LogprobsFn | None,
    ) -> None:
        self._forward = forward
        self._algorithm, self._temperature = config.loss, config.rollout.policy_temperature
        self._rule = rule("loss", config.algorithm, config.own_folder)
        self._old = old
        self._reference = reference
        self.drift = 0.0  # largest difference so far between `old` and the current log-probs
        self.seen: list[tuple[Tensor, Tensor]] = []  # by micro batch: entropies [N], old - rollout log-probs [N]

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
            ref_logprobs_N=None if self._reference is None else self._reference(index, batch),
        )
        return policy_loss(tokens, self._algorithm, self._rule)


def seen_by_row(rows: Sequence[TokenRow], seen: tuple[Tensor, Tensor]) -> Iterator[tuple[str, SeenTokens]]:
    """Split an entry of `PolicyLoss.seen` by row; `collate` concatenates the rows in order."""
    entropies_N, diffs_N = (values.float().cpu().numpy() for values in seen)
    start = 0
    for row in rows:
        own = slice(start, start + row.num_sampled_tokens)
        yield row.name, SeenTokens(entropies=entropies_N[own], logprob_diffs=diffs_N[own])
        start = own.stop


class SftLoss:
    """Cross-entropy at temperature 1, whatever the sampling temperature of rollouts."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def __call__(self, index: int, batch: MicroBatch) -> tuple[Tensor, LossStats]:
        logprobs_N, entropy_N = self._forward(batch, 1.0)
        return likelihood_loss(logprobs_N, entropy_N, batch.weights_N)
