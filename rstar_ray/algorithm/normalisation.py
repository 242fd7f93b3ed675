"""The weight of each token's loss, computed once for a whole update.

A loss is always the sum of weight times loss over sampled tokens. Because the weights depend on all rows of the
update, its gradient does not depend on how the rows are spread over ranks and micro batches.
"""

from collections import Counter
from collections.abc import Sequence

from rstar_ray.config.algorithm import Normalisation


def token_weights(
    sampled_R: Sequence[int], groups_R: Sequence[str], mode: Normalisation, *, constant_tokens: int = 1
) -> list[float]:
    """The weight [R] of each sampled token of a row, from all rows' counts of sampled tokens and their prompt groups.

    Rows without a sampled token count for nothing. token: divided by all sampled tokens of the update (DAPO,
    arXiv:2503.14476); group: by those of its kept group, then by the groups (arXiv:2508.20722 Eq. 6, averaged over
    prompts); sequence: by its row's, then by the rows (GRPO, arXiv:2402.03300 Eq. 3); constant: by a constant, then by
    the rows (Dr. GRPO, arXiv:2503.20783). `constant_tokens` is the length that Dr. GRPO divides by in place
    of each row's own.

    >>> token_weights([1, 3, 2], ["a", "a", "b"], "group")
    [0.125, 0.125, 0.25]
    """
    num_rows = max(1, sum(sampled > 0 for sampled in sampled_R))
    if mode == "token":
        return [1.0 / max(1, sum(sampled_R))] * len(sampled_R)
    if mode == "sequence":
        return [1.0 / (max(1, sampled) * num_rows) for sampled in sampled_R]
    if mode == "constant":
        return [1.0 / (constant_tokens * num_rows)] * len(sampled_R)
    tokens: Counter[str] = Counter()
    for sampled, group in zip(sampled_R, groups_R, strict=True):
        tokens[group] += sampled
    num_groups = max(1, sum(count > 0 for count in tokens.values()))
    return [1.0 / (max(1, tokens[group]) * num_groups) for group in groups_R]
