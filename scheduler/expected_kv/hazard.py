"""The chance to end per token in every bin of length, from the observations there and in neighbouring bins.

Legend: B bins of response length, A weights that are tried.

In a bin with `d` ends over `T` tokens at risk the rate is `(d + a) / (T + a / centre)`, the mean of a gamma
posterior: `a` ends' worth of belief in the bin's centre. The centre is what an earlier step found in this bin
(without one, one flat rate), times how far the bins just before it have differed from that. The data decide how
far the centre is trusted: all weights `a` are averaged by their evidence (gamma-Poisson, empirical Bayes), so
that lengths with a gap, a jump or a heavy tail are learned as they are, and smooth ones borrow from their
neighbours.

Lengths that no rollout has reached may behave differently: an excess of ends is believed to
last for a few bins only, a lack of them for as long as nothing contradicts it. So a step that gets harder costs
little.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

Floats = NDArray[np.float64]

WEIGHTS: Floats = np.array([0.02, 0.1, 0.5, 2.0, 8.0, 32.0, 128.0, 512.0])
MOST_WITHOUT_HISTORY = 8.0  # the largest weight where no earlier step vouches for the centre
DECAY = 0.8  # per bin, of what the bins before say
FAITH = 0.7  # per bin that nobody has reached: how much of an excess is believed to continue
PRIOR_ENDS = 1.0  # weight of a centre's own level against the bins before it
LEAST_SHARE = 1e-300  # of the tokens at risk: none has no logarithm
CAUTION = 0.85  # of the centre is assumed where nothing has been seen: lives may prove longer


def hazard_rates(deaths_B: Floats, tokens_B: Floats, expected_B: Floats, *, has_history: bool) -> Floats:
    """Ends per token [B], from ends and tokens at risk; `expected_B`: of an earlier step (`has_history`) or assumed."""
    centre_B = (1.0 if has_history else CAUTION) * expected_B * _levels(deaths_B, tokens_B * expected_B)
    weight_A1 = WEIGHTS[:, None] if has_history else WEIGHTS[WEIGHTS <= MOST_WITHOUT_HISTORY, None]
    tokens_AB = weight_A1 / centre_B
    share_AB = tokens_B / (tokens_AB + tokens_B)
    seen_AB = np.clip(np.where(tokens_B > 0.0, share_AB, 0.5), LEAST_SHARE, 1.0 - 2.0**-53)  # its logarithms are finite
    evidence_AB = gammaln(weight_A1 + deaths_B) - gammaln(weight_A1) + deaths_B * np.log(seen_AB)
    evidence_A = np.where(tokens_B > 0.0, evidence_AB + weight_A1 * np.log1p(-seen_AB), 0.0).sum(axis=1)
    belief_A = np.exp(evidence_A - evidence_A.max())
    rate_AB = (deaths_B + weight_A1) / (tokens_B + tokens_AB)
    return belief_A @ rate_AB / belief_A.sum()


def _levels(deaths_B: Floats, expected_B: Floats) -> Floats:
    """How many ends there are for each that was expected [B], by the bins before each bin."""
    level_B = np.ones(len(deaths_B))
    deaths = expected = PRIOR_ENDS
    faith = 0.0
    for number, (died, awaited) in enumerate(zip(deaths_B.tolist(), expected_B.tolist(), strict=True)):
        level = deaths / expected
        level_B[number] = level if level < 1.0 else level**faith
        faith = max(awaited / (PRIOR_ENDS + awaited), FAITH * faith)
        deaths = PRIOR_ENDS * (1.0 - DECAY) + DECAY * deaths + died
        expected = PRIOR_ENDS * (1.0 - DECAY) + DECAY * expected + awaited
    return level_B
