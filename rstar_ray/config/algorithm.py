"""What is computed: GRPO-RoC, its optimizer, and the SFT before it."""

from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Literal

from rstar_ray.config.checks import FINITE, at_least, check_bounds, require, within
from rstar_ray.config.modes import OF_RL, not_with, only_with, where
from rstar_ray.config.tree import MayChange

BY_PENALTY = only_with("algorithm.resample", "paper", "release")
AS_RELEASED = only_with("algorithm.resample", "release")
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

    A group is its own baseline: there is no critic, so there is neither a value loss nor a gamma or lambda of GAE.
    """

    rollouts_per_prompt: Annotated[int, not_with("algorithm.resample", "none")] = 32
    """2G rollouts drawn per prompt; with `--algorithm.resample none` only `keep` are drawn"""
    keep: Annotated[int, at_least(2)] = 16  # one reward alone differs from none: every advantage would be 0
    """G trajectories kept per prompt by resampling on correct, and trained on (down_sample_to_n)"""
    resample: str = "paper"
    """paper: sampled by penalty; release: the released code's top-k rule; random: as many drawn and kept, at random, to
    compare with; none: plain GRPO; module:function: a rule of your own (docs/own.md)"""
    advantage: str = "group"
    """group: the reward less the group's mean, divided by --algorithm.advantage-std (Eq. 7); rloo: the reward less the
    mean of the group's other rewards (arXiv:2402.14740); module:function: a rule of your own"""
    loss: str = "clipped"
    """clipped: PPO's objective with separate clips (Eq. 6); gspo: the same with one ratio per row (arXiv:2507.18071);
    cispo: a capped ratio as weight (arXiv:2506.13585); dppo: no token whose probability moved further than
    --algorithm.dppo-threshold (arXiv:2602.04879); module:function: a loss per token of your own"""
    least_failures: Annotated[int, only_with("algorithm.resample", "paper"), at_least(0)] = 0
    """with `--algorithm.resample paper`: smallest number of failures kept of a group that has them; 0 is the paper's
    floor(n_neg / 2), which keeps none of one failure, so that the group has no signal. Stages 2 and 3, and all stages
    at scale tiny, use 2, as the release does"""
    roc_error_ratio: Annotated[bool, BY_PENALTY] = True
    """count failed tool calls in the penalty of correct rollouts (p_err, Eq. 4; the release's name)"""
    roc_answer_format: Annotated[bool, BY_PENALTY] = True
    """count missing and repeated answers in the penalty of correct rollouts (p_format, Eq. 5; the release's name).
    Answers are counted where --reward.place reads them; inactive for code, instructions, calls, custom functions and
    environments, which read no marked answer"""
    min_zero_reward_trace_num: Annotated[int, AS_RELEASED, at_least(0)] = 2
    """failures kept of a group at least, where it has them (resample release, whose name it is)"""
    min_non_zero_reward_trace_num: Annotated[int, AS_RELEASED, at_least(0)] = 2
    """correct rollouts kept of a group at least, where it has them (resample release, whose name it is)"""
    reject_equal_reward: bool = True
    """leave out groups whose kept rewards are all equal; their advantages are 0, but with --algorithm.normalisation
    token or constant they would still count in what the others are divided by (the release's name)"""
    refill_rounds: Annotated[int, only_with("algorithm.reject_equal_reward", True), at_least(0)] = 0
    """how often a step draws a further problem for each one whose rollouts all have the same reward (dynamic sampling
    of DAPO, arXiv:2503.14476 section 3.2). 0: never, as in the paper, which trains on fewer groups then"""
    advantage_std: Deviation = "population"
    """what advantages are divided by (Eq. 7, which does not say which): the group's population or sample (n - 1)
    standard deviation; none is Dr. GRPO's choice"""
    overlong_buffer: Annotated[int, at_least(0)] = 0
    """tokens before --rollout.max-response-tokens over which a penalty of the reward grows linearly from 0 to 1 (soft
    overlong punishment of DAPO, arXiv:2503.14476 Eq. 13): advantages see it, resampling does not. 0: none, as in the
    paper"""
    clip_low: Annotated[float, not_with("algorithm.loss", "cispo", "dppo"), within("[0, 1)")] = 0.2
    """lower clip of the ratio, eps_low (Eq. 6)"""
    clip_high: Annotated[float, not_with("algorithm.loss", "dppo"), at_least(0)] = 0.28
    """upper clip of the ratio, eps_high (Eq. 6; clip-higher of DAPO, arXiv:2503.14476)"""
    dual_clip: Annotated[float, not_with("algorithm.loss", "cispo", "dppo")] = 0.0
    """where the advantage is negative, the objective is at least so many times it (arXiv:1912.09729; clip_ratio_c);
    above 1. 0: 3 where the old policy is the sampler, which leaves such a ratio no other bound, and none elsewhere"""
    dppo_threshold: Annotated[float, only_with("algorithm.loss", "dppo"), within("(0, 1]")] = 0.2
    """largest difference of a token's probability to the old policy's, in the direction of its advantage, at which the
    token counts (dppo)"""
    normalisation: Normalisation = "token"
    """what the loss is divided by (loss_agg_mode). token: the update's sampled tokens (DAPO, arXiv:2503.14476), so that
    long groups weigh more; group: each kept group's sampled tokens, then the groups (Eq. 6 as it is written); sequence:
    each row's, then the rows (GRPO); constant: one length for all (Dr. GRPO)"""
    entropy_coefficient: Annotated[float, FINITE] = 0.0
    """weight of an entropy bonus (entropy_coeff); above 0 rewards entropy, the paper has none"""
    kl_coefficient: Annotated[float, at_least(0)] = 0.0
    """weight of the KL term (beta, kl_loss_coef): Schulman's k3 estimate, to --algorithm.reference-model; the paper has
    none (kl in metrics.jsonl)"""
    reference_model: Annotated[str, READ_BY_THE_LOSS] = ""
    """policy that the KL term is taken to, a Hugging Face folder; needed where --algorithm.kl-coefficient is above 0. A
    loss of your own finds its log-probs in `ref_logprobs_N`, also without a KL term"""
    correction: Correction = "auto"
    """how the loss allows for tokens that another policy sampled: the engine's kernels differ from the learner's, and
    with --staleness its weights are older. sampler: the sampler is the old policy of the loss (Eq. 6 as it is written);
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
    """effective sample size of a step's tokens (ess_tokens in metrics.jsonl) below which the step counts for
    --algorithm.max-low-ess-steps; 0 never stops the run"""
    max_low_ess_steps: Annotated[MayChange[int], at_least(1)] = 3
    """steps in a row below --algorithm.min-ess after which the run takes a checkpoint and stops"""

    def __post_init__(self) -> None:
        check_bounds("algorithm", self)
        require(
            self.resample != "paper" or self.least_failures < self.keep,
            "--algorithm.keep",
            f"{self.keep} kept leave no place for a success beside {self.least_failures} failures",
            f"give {self.least_failures + 1} or more, or --algorithm.least-failures {self.keep - 1} or less",
        )
        require(
            self.keep <= self.num_rollouts,
            "--algorithm.keep",
            f"{self.keep} is above the {self.rollouts_per_prompt} rollouts of a prompt",
            "lower it or raise --algorithm.rollouts-per-prompt",
        )
        dual = self.dual_clip
        require(
            dual == 0 or 1 < dual < inf,
            "--algorithm.dual-clip",
            f"{dual} would clip what the other clips leave alone",
            "give one above 1, or 0 for the default",
        )
        require(
            self.loss != "dppo" or self.correction in ("auto", "none", "sampler"),
            "--algorithm.correction",
            f"{self.correction} would be a second correction beside --algorithm.loss dppo, which compares with the "
            "sampler",
            "leave out one of the two",
        )
        require(
            not self.kl_coefficient or bool(self.reference_model),
            "--algorithm.kl-coefficient",
            "a KL term has nothing to be taken to",
            "name a model folder with --algorithm.reference-model, or give 0",
        )
        low, high = self.correction_low, self.correction_high
        require(
            low <= high,
            "--algorithm.correction-low",
            f"{low} is above the upper end of the band, {high}",
            "lower it or raise --algorithm.correction-high",
        )

    def resolved(self, *, staleness: int, dtype: str) -> "AlgorithmConfig":
        """As the loss reads it: `correction` is not `auto`, and a `dual_clip` of 0 is no dual clip."""
        correction = self.correction
        if correction == "auto":
            other = "token" if dtype == "bfloat16" else "none"
            correction = "sampler" if staleness or self.loss == "dppo" else other
        dual_clip = self.dual_clip or (SAMPLER_DUAL_CLIP if correction == "sampler" else 0.0)
        return replace(self, correction=correction, dual_clip=dual_clip)

    @property
    def num_rollouts(self) -> int:
        """Rollouts drawn per prompt: plain GRPO trains on all it draws, so it draws only `keep`."""
        return self.keep if self.resample == "none" else self.rollouts_per_prompt


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up (arXiv:2508.20722 section 5.1)."""

    learning_rate: Annotated[float, OF_RL, at_least(0)] = 1e-6
    """peak learning rate"""
    warmup_steps: Annotated[int, OF_RL, FRESH_OPTIMIZER, at_least(0)] = 20
    """linear warm-up where the optimizer state is fresh (--reset-optimizer, --model) [training steps]; all updates of a
    step (--optimizer.updates-per-step) have its learning rate"""
    beta1: Annotated[float, within("[0, 1)")] = 0.9
    """AdamW's decay of the first moment; not published, torch's default here"""
    beta2: Annotated[float, within("(0, 1)")] = 0.999
    """AdamW's decay of the second moment; not published, torch's default here"""
    epsilon: Annotated[float, within("(0, inf)")] = 1e-8
    """AdamW's epsilon; not published, torch's default here"""
    weight_decay: Annotated[float, at_least(0)] = 0.0
    """decoupled weight decay, of all but norms and biases; not published, 0 here"""
    grad_clip: Annotated[float, at_least(0)] = 1.0
    """largest global gradient norm (max_grad_norm); 0 clips nothing; not published, 1 here"""
    updates_per_step: Annotated[int, OF_RL, at_least(1)] = 1
    """optimizer updates per step (mini-batches); each takes whole prompt groups, so a step with fewer groups takes
    fewer updates. 1 is strictly on policy, as in the paper"""
    max_bad_updates: Annotated[MayChange[int], at_least(1)] = 3
    """updates in a row, in SFT and RL, whose loss or gradient is not finite before the run stops; they are not applied
    and their batch counts as drawn"""
    save_bad_updates: MayChange[str] = ""
    """folder for the rows of updates that were not finite; empty saves none"""

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
    """peak of the schedule"""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """after warm-up: half a cosine down, or constant for --sft.stable-share, then linearly down (arXiv:2404.06395)"""
    warmup_share: Annotated[float, within("[0, 1)")] = 0.04
    """share of the steps that warm up"""
    stable_share: Annotated[float, only_with("sft.schedule", "wsd"), within("[0, 1)")] = 0.6
    """share of the steps after the warm-up that are constant (schedule wsd)"""
    final_share: Annotated[float, within("[0, 1]")] = 0.0
    """share of the peak that the schedule ends at"""
    data: str = ""
    """conversations, jsonl or parquet: `messages` with `tools`, ShareGPT or Glaive; empty generates the tiny world's"""
    max_left_out: Annotated[float, not_with("sft.data", ""), within("[0, 1]")] = 0.05
    """share of the conversations that may not fit and are left out; above it the run does not start"""
    num_conversations: Annotated[int, only_with("sft.data", ""), at_least(1)] = 6_000
    """conversations generated where no path is given"""

    def __post_init__(self) -> None:
        check_bounds("sft", self)
        require(
            self.warmup_steps < self.steps,
            "--sft.warmup-share",
            f"{self.warmup_share} of {self.steps} steps leaves none after the warm-up",
            "lower it or raise --sft.steps",
        )

    @property
    def warmup_steps(self) -> int:
        return round(self.warmup_share * self.steps)
