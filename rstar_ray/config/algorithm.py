"""Settings of the algorithm: GRPO-RoC, its optimizer, and the SFT before it."""

from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Any, Literal

from rstar_ray.config.checks import FINITE, at_least, check_bounds, require, within
from rstar_ray.config.modes import OF_RL, Condition, not_with, only_with, value_of, where
from rstar_ray.config.tree import MayChange


def _read_by(setting: str, *rules: str) -> Condition:
    """Holds with one of these rules, and with one of the user's, which may read the setting."""
    known = only_with(setting, *rules)

    def holds(config: Any) -> bool:
        return known.holds(config) or ":" in value_of(config, setting)

    return replace(known, holds=holds)


BY_PENALTY = _read_by("algorithm.resample", "paper", "release")
AS_RELEASED = _read_by("algorithm.resample", "release")
TRUNCATED = where(
    "algorithm.correction",
    lambda config: config.correction in ("token", "sequence"),
    "give --algorithm.correction token or sequence, or leave it out",
)
READ_BY_THE_LOSS = where(
    "algorithm.kl_coefficient",
    lambda config: config.algorithm.kl_coefficient > 0 or ":" in config.algorithm.loss,
    "give --algorithm.kl-coefficient or a loss of your own, or leave it out",
)
Normalisation = Literal["token", "group", "sequence", "constant"]
Correction = Literal["auto", "none", "sampler", "token", "sequence", "icepop"]
SAMPLER_DUAL_CLIP = 3.0
"""Default of `dual_clip` where the old policy is the sampler (the value of arXiv:1912.09729)."""
Deviation = Literal["population", "sample", "none"]
FRESH_OPTIMIZER = where(
    "reset_optimizer", lambda config: config.fresh_optimizer, "give --reset-optimizer or --model", warn_only=True
)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """GRPO-RoC (arXiv:2508.20722 section 2.2).

    The group's mean reward is the baseline. There is no critic, so there is no value loss and no GAE gamma or lambda.
    """

    rollouts_per_prompt: Annotated[int, not_with("algorithm.resample", "none")] = 32
    """2G rollouts drawn per prompt; with `--algorithm.resample none` only `keep` are drawn"""
    keep: Annotated[int, at_least(2)] = 16  # with one trajectory, every advantage would be 0
    """G trajectories kept per prompt by resampling on correct, and trained on (down_sample_to_n)"""
    resample: str = "paper"
    """which rollouts of a group are kept. paper: sampled by penalty; release: the released code's top-k rule; random:
    the same numbers, chosen at random, as a baseline; none: plain GRPO, all; module:function: your own rule
    (docs/algorithm.md)"""
    advantage: str = "group"
    """group: the reward minus the group's mean, divided by --algorithm.advantage-std (Eq. 7); rloo: the reward minus
    the mean of the group's other rewards (arXiv:2402.14740); module:function: your own rule"""
    loss: str = "clipped"
    """clipped: PPO's objective with separate clips (Eq. 6); gspo: the same with one ratio per row (arXiv:2507.18071);
    cispo: a capped ratio as weight (arXiv:2506.13585); dppo: masks tokens whose probability moved further than
    --algorithm.dppo-threshold (arXiv:2602.04879); module:function: your own loss per token"""
    least_failures: Annotated[int, _read_by("algorithm.resample", "paper"), at_least(0)] = 0
    """with `--algorithm.resample paper`: minimum number of failures kept in a group that has them. 0 is the paper's
    floor(n_neg / 2), which drops a single failure and leaves the group without a signal. Stages 2 and 3, and all
    stages at scale tiny, use 2, as the release does"""
    roc_error_ratio: Annotated[bool, BY_PENALTY] = True
    """count failed tool calls in the penalty of correct rollouts (p_err, Eq. 4; the release's name)"""
    roc_answer_format: Annotated[bool, BY_PENALTY] = True
    """count missing and repeated answers in the penalty of correct rollouts (p_format, Eq. 5; the release's name).
    Answers are counted where --reward.place reads them; inactive for code, instructions, calls, custom functions and
    environments, which read no marked answer"""
    min_zero_reward_trace_num: Annotated[int, AS_RELEASED, at_least(0)] = 2
    """minimum number of failures kept in a group that has them (resample release; the release's name)"""
    min_non_zero_reward_trace_num: Annotated[int, AS_RELEASED, at_least(0)] = 2
    """minimum number of correct rollouts kept in a group that has them (resample release; the release's name)"""
    reject_equal_reward: bool = True
    """drop groups whose kept rewards are all equal, before --algorithm.advantage is called. Built-in rules would give
    them advantages of 0, but they would count in the divisor of the loss, and GRPO as published counts them (the
    release's name)"""
    refill_rounds: Annotated[int, only_with("algorithm.reject_equal_reward", True), at_least(0)] = 0
    """rounds per step in which each problem whose rollouts all have the same reward is replaced by another problem
    (dynamic sampling of DAPO, arXiv:2503.14476 section 3.2). 0: never, as in the paper; the step then trains on fewer
    groups"""
    advantage_std: Annotated[Deviation, _read_by("algorithm.advantage", "group")] = "population"
    """divisor of advantages: the group's population or sample (n - 1) standard deviation (Eq. 7 does not specify
    which); none: no division, as in Dr. GRPO"""
    overlong_buffer: Annotated[int, at_least(0)] = 0
    """tokens before --rollout.max-response-tokens over which a penalty on the reward grows linearly from 0 to 1 (soft
    overlong punishment of DAPO, arXiv:2503.14476 Eq. 13). It affects advantages, not resampling. 0: no penalty, as in
    the paper"""
    clip_low: Annotated[float, not_with("algorithm.loss", "cispo", "dppo"), within("[0, 1)")] = 0.2
    """lower clip of the ratio, eps_low (Eq. 6)"""
    clip_high: Annotated[float, not_with("algorithm.loss", "dppo"), at_least(0)] = 0.28
    """upper clip of the ratio, eps_high (Eq. 6; clip-higher of DAPO, arXiv:2503.14476)"""
    dual_clip: Annotated[float, not_with("algorithm.loss", "cispo", "dppo")] = 0.0
    """lower bound of the objective for a negative advantage, as a multiple of the advantage (dual clip,
    arXiv:1912.09729; clip_ratio_c); above 1. 0 means 3 where the old policy is the sampler, since such a ratio has no
    other bound, and no dual clip elsewhere"""
    dppo_threshold: Annotated[float, _read_by("algorithm.loss", "dppo"), within("(0, 1]")] = 0.2
    """largest change of a token's probability from the old policy's, in the direction of its advantage; tokens above it
    are masked (dppo)"""
    normalisation: Normalisation = "token"
    """how the loss is averaged (loss_agg_mode). token: over the update's sampled tokens (DAPO, arXiv:2503.14476), so
    that long groups weigh more; group: over each kept group's sampled tokens, then over groups (Eq. 6 as written);
    sequence: over each row's tokens, then over rows (GRPO); constant: one length for all rows (Dr. GRPO)"""
    entropy_coefficient: Annotated[float, FINITE] = 0.0
    """weight of an entropy bonus (entropy_coeff); a positive value rewards entropy. The paper has no bonus"""
    kl_coefficient: Annotated[float, at_least(0)] = 0.0
    """weight of the KL term (beta, kl_loss_coef): Schulman's k3 estimate against --algorithm.reference-model (kl in
    metrics.jsonl). The paper has no KL term"""
    reference_model: Annotated[str, READ_BY_THE_LOSS] = ""
    """reference policy of the KL term: a Hugging Face folder, which each learner rank loads whole, or the address of a
    vLLM server, such as http://127.0.0.1:8000, which a resumed run may change; required where
    --algorithm.kl-coefficient is above 0. Your own loss receives its log-probs as `ref_logprobs_N`, also without a KL
    term"""
    correction: Correction = "auto"
    """off-policy correction: the engine's kernels differ from the learner's, and with --staleness its weights are
    older. sampler: the sampler is the old policy of the loss (Eq. 6 as written);
    token: truncated importance sampling (TIS) per token; sequence: TIS with the product over the row; icepop: the
    token's weight inside a band, 0 outside (arXiv:2510.18855); none: no correction. auto: sampler with --staleness or
    --algorithm.loss dppo; otherwise token where --learner.dtype is bfloat16, none in float32"""
    correction_cap: Annotated[float, TRUNCATED, within("(0, inf)")] = 2.0
    """largest weight under token and sequence (TIS, tis_imp_ratio_cap)"""
    correction_low: Annotated[float, only_with("algorithm.correction", "icepop"), at_least(0)] = 0.5
    """lower end of IcePop's band"""
    correction_high: Annotated[float, only_with("algorithm.correction", "icepop"), within("(0, inf)")] = 5.0
    """upper end of IcePop's band"""
    min_ess: Annotated[MayChange[float], within("[0, 1)")] = 0.3
    """effective sample size of a step's tokens (ess_tokens in metrics.jsonl) below which the step counts towards
    --algorithm.max-low-ess-steps; 0 never stops the run"""
    max_low_ess_steps: Annotated[MayChange[int], at_least(1)] = 3
    """consecutive steps below --algorithm.min-ess after which the run saves a checkpoint and stops"""

    def __post_init__(self) -> None:
        check_bounds("algorithm", self)
        require(
            self.resample != "paper" or self.least_failures < self.keep,
            "--algorithm.keep",
            f"must be above --algorithm.least-failures {self.least_failures}, to keep a success (got {self.keep})",
            f"give {self.least_failures + 1} or more, or --algorithm.least-failures {self.keep - 1} or less",
        )
        require(
            self.keep <= self.num_rollouts,
            "--algorithm.keep",
            f"must be at most --algorithm.rollouts-per-prompt {self.rollouts_per_prompt} (got {self.keep})",
            "lower it or raise --algorithm.rollouts-per-prompt",
        )
        dual = self.dual_clip
        require(
            dual == 0 or 1 < dual < inf,
            "--algorithm.dual-clip",
            f"must be 0 or a finite value above 1 (got {dual})",
            "give a value above 1, or 0 for the default",
        )
        require(
            self.loss != "dppo" or self.correction in ("auto", "none", "sampler"),
            "--algorithm.correction",
            f"{self.correction} would be a second correction: --algorithm.loss dppo already compares with the sampler",
            "leave out one of the two",
        )
        require(
            not self.kl_coefficient or bool(self.reference_model),
            "--algorithm.kl-coefficient",
            f"the KL term has no reference policy (got {self.kl_coefficient})",
            "name a model folder or a server with --algorithm.reference-model, or give 0",
        )
        low, high = self.correction_low, self.correction_high
        require(
            low <= high,
            "--algorithm.correction-low",
            f"must be at most --algorithm.correction-high {high} (got {low})",
            "lower it or raise --algorithm.correction-high",
        )

    @property
    def served_reference(self) -> str:
        """The address of a reference model that a server holds; empty for others."""
        served = self.reference_model.startswith(("http://", "https://"))
        return self.reference_model.rstrip("/") if served else ""

    @property
    def loaded_reference(self) -> str:
        """The folder of a reference model that learner ranks hold; empty for others."""
        return "" if self.served_reference else self.reference_model

    def resolved(self, *, staleness: int, dtype: str) -> "AlgorithmConfig":
        """The values that the loss uses: `correction` without `auto`, and a `dual_clip` of 0 for no dual clip."""
        correction = self.correction
        if correction == "auto":
            other = "token" if dtype == "bfloat16" else "none"
            correction = "sampler" if staleness or self.loss == "dppo" else other
        dual_clip = self.dual_clip or (SAMPLER_DUAL_CLIP if correction == "sampler" else 0.0)
        return replace(self, correction=correction, dual_clip=dual_clip)

    @property
    def num_rollouts(self) -> int:
        """Rollouts drawn per prompt; `keep` for plain GRPO, which trains on all of them."""
        return self.keep if self.resample == "none" else self.rollouts_per_prompt


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up (arXiv:2508.20722 section 5.1)."""

    learning_rate: Annotated[float, OF_RL, at_least(0)] = 1e-6
    """peak learning rate"""
    warmup_steps: Annotated[int, OF_RL, FRESH_OPTIMIZER, at_least(0)] = 20
    """linear warm-up [training steps], only with fresh optimizer state (--reset-optimizer, --model); all updates of a
    step (--optimizer.updates-per-step) use the same learning rate"""
    beta1: Annotated[float, within("[0, 1)")] = 0.9
    """AdamW's decay of the first moment; not published, torch's default here"""
    beta2: Annotated[float, within("(0, 1)")] = 0.999
    """AdamW's decay of the second moment; not published: torch's 0.999 here, and 0.95 at scale tiny"""
    epsilon: Annotated[float, within("(0, inf)")] = 1e-8
    """AdamW's epsilon; not published, torch's default here"""
    weight_decay: Annotated[float, at_least(0)] = 0.0
    """decoupled weight decay, except for norms and biases; not published, 0 here"""
    grad_clip: Annotated[float, at_least(0)] = 1.0
    """largest global gradient norm (max_grad_norm); 0 disables clipping; not published, 1 here"""
    updates_per_step: Annotated[int, OF_RL, at_least(1)] = 1
    """optimizer updates per step (mini-batches). Each uses whole prompt groups, so a step with fewer groups makes
    fewer updates. 1 is strictly on-policy, as in the paper"""
    max_bad_updates: Annotated[MayChange[int], at_least(1)] = 3
    """consecutive updates with a non-finite loss or gradient, in SFT and RL, after which the run stops. Such updates
    are skipped, and their batch counts as drawn"""
    save_bad_updates: MayChange[str] = ""
    """folder for the rows of non-finite updates; empty saves none"""

    def __post_init__(self) -> None:
        check_bounds("optimizer", self)


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """The non-reasoning SFT stage (arXiv:2508.20722 section 4.1): format, tool calls, instruction drills."""

    steps: Annotated[int, at_least(1)] = 400
    """optimizer steps"""
    batch_size: Annotated[int, at_least(1)] = 128
    """conversations per step"""
    learning_rate: Annotated[float, at_least(0)] = 5e-6
    """peak learning rate"""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """after warm-up. cosine: half a cosine down; wsd: constant for --sft.stable-share, then linearly down
    (arXiv:2404.06395)"""
    warmup_share: Annotated[float, within("[0, 1)")] = 0.04
    """share of the steps that warm up"""
    stable_share: Annotated[float, only_with("sft.schedule", "wsd"), within("[0, 1)")] = 0.6
    """share of the steps after the warm-up that are constant (schedule wsd)"""
    final_share: Annotated[float, within("[0, 1]")] = 0.0
    """final learning rate, as a share of the peak"""
    data: str = ""
    """conversations, jsonl or parquet: `messages` with `tools`, ShareGPT or Glaive; empty: generated conversations
    about arithmetic problems (scale tiny only)"""
    max_left_out: Annotated[float, not_with("sft.data", ""), within("[0, 1]")] = 0.05
    """largest share of conversations that may be excluded because they do not fit; above it the run does not start"""
    num_conversations: Annotated[int, only_with("sft.data", ""), at_least(1)] = 6_000
    """conversations to generate where --sft.data is empty"""

    def __post_init__(self) -> None:
        check_bounds("sft", self)
        require(
            self.warmup_steps < self.steps,
            "--sft.warmup-share",
            f"leaves no steps after the warm-up (got {self.warmup_share} of {self.steps} steps)",
            "lower it or raise --sft.steps",
        )

    @property
    def warmup_steps(self) -> int:
        return round(self.warmup_share * self.steps)
