"""Budgets and sampling of rollouts, problems, and evaluations."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from rstar_ray.config.checks import Bound, at_least, check_bounds, require, within
from rstar_ray.config.modes import OF_RL, not_with, only_with
from rstar_ray.config.tree import MayChange, SameAnswers

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""Temperatures that vLLM samples with. It raises lower ones, which the learner would not know."""
TEMPERATURE = Bound(
    lambda value: value == 0 or MIN_TEMPERATURE <= value <= MAX_TEMPERATURE,
    f"must be 0 (greedy) or from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}",
)
NO_FILES = only_with("evaluate.files", (), warn_only=True)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Budgets and sampling of training rollouts (arXiv:2508.20722, Table 2)."""

    max_response_tokens: Annotated[int, OF_RL, at_least(1)] = 8_192
    """length budget after the prompt, including tool results [tokens]"""
    max_turns: Annotated[int, OF_RL, at_least(1)] = 10
    """largest number of completions per rollout [turns]"""
    temperature: Annotated[float, OF_RL, TEMPERATURE] = 1.0
    """softmax temperature of training rollouts"""
    top_p: Annotated[float, OF_RL, within("(0, 1]")] = 1.0
    """nucleus sampling mass; 1 samples from the whole distribution, which the loss assumes"""
    instruct: bool = True
    """add the tool's schema and the answer format before the problem; off at scale tiny, whose SFT teaches them"""
    deadline_s: Annotated[MayChange[float], at_least(1)] = 1_800.0
    """longest time a step may wait without a finished rollout [s]"""

    def __post_init__(self) -> None:
        check_bounds("rollout", self)

    @property
    def policy_temperature(self) -> float:
        """Temperature of the trained distribution; 1 for greedy rollouts."""
        return self.temperature or 1.0


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Problems: jsonl or parquet of {"id", "problem", "answer"}; empty: arithmetic problems (scale tiny only)."""

    train: Annotated[str, OF_RL] = ""
    """path of the training problems; empty: generated arithmetic problems (scale tiny only)"""
    heldout: Annotated[str, NO_FILES] = ""
    """path of the held-out problems; empty: generated arithmetic problems (scale tiny only)"""
    integer_answers: Annotated[bool, OF_RL, not_with("data.train", ""), only_with("reward.name", "math")] = True
    """refuse training problems whose answer is not an integer (arXiv:2508.20722 section 4.2); for the reward math"""
    num_train: Annotated[int, OF_RL, only_with("data.train", ""), at_least(1)] = 4_000
    """problems to generate where --data.train is empty"""
    num_heldout: Annotated[int, NO_FILES, only_with("data.heldout", ""), only_with("scale", "tiny"), at_least(1)] = 240
    """held-out problems to generate where --data.heldout is empty"""
    num_filtered: Annotated[int, OF_RL, only_with("drop_solved", True, warn_only=True), at_least(0)] = 0
    """problems that --drop-solved rolls out, drawn from the file at random by --seed; 0 rolls out all"""

    mix: Annotated[tuple[str, ...], OF_RL] = ()
    """sources and their weights in every draw, such as math=3 search=1. A source is the problems with this `family`;
    other problems are not drawn. Empty draws from all problems uniformly"""
    mix_floor: Annotated[int, OF_RL, not_with("data.mix", ()), at_least(0)] = 0
    """minimum number of problems that each source of --data.mix has in every draw; the weights divide the others"""
    skip_solved: Annotated[int, OF_RL, at_least(0)] = 0
    """steps for which a problem is not drawn again after all its rollouts were correct in its last visit; 0 skips none.
    With --staleness K the results of the last K steps are not known yet. A problem comes back once per epoch: where an
    epoch is much longer than this, only refills skip problems"""
    max_skipped: Annotated[float, OF_RL, not_with("data.skip_solved", 0), within("[0, 1)")] = 0.5
    """largest share of the problems (with --data.mix of each source) that --data.skip-solved excludes. The latest
    solved are excluded first, and as many remain as a draw needs"""

    def __post_init__(self) -> None:
        check_bounds("data", self)
        _ = self.weights

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the sources in `mix`, all above 0. Raises `ConfigError` for an invalid mix."""
        weights: dict[str, float] = {}
        for one in self.mix:
            source, _, text = one.rpartition("=")
            try:
                weight = float(text)
            except ValueError:
                weight = 0.0
            right = bool(source) and source not in weights and 0 < weight < math.inf
            require(right, "--data.mix", f"must be SOURCE=WEIGHT, each source once, weight above 0 (got {one!r})",
                    "use a form such as math=3 search=1")  # fmt: skip
            weights[source] = weight
        return weights


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """avg@k and pass@k on held-out problems (arXiv:2508.20722 section 5)."""

    protocol: MayChange[Literal["own", "paper", "release", "rstar2-agent-14b"]] = "own"
    """preset of samples, temperature, top-p and budgets. own: the stage's; paper: arXiv:2508.20722 section 5 (16
    samples at 0.6, 30K tokens, 30 turns); release: the authors' code's (temperature 0, 5 turns); rstar2-agent-14b: the
    paper's with that model's prompt and tool (--chat.protocol). Explicit options override the preset"""
    num_problems: Annotated[SameAnswers[int], at_least(0)] = 0
    """largest number of problems used per set, drawn from the file at random, the same for every --seed; 0 uses all"""
    samples: Annotated[int, at_least(1)] = 16
    """k: rollouts per problem"""
    temperature: Annotated[float, TEMPERATURE] = 0.6
    """softmax temperature"""
    top_p: Annotated[float, within("(0, 1]")] = 1.0
    """nucleus sampling mass; not published, 1 here"""
    max_response_tokens: Annotated[int, at_least(1)] = 30_720
    """length budget [tokens]"""
    max_turns: Annotated[int, at_least(1)] = 30
    """turn budget"""
    every_steps: Annotated[MayChange[int], OF_RL, at_least(0)] = 0
    """interval between evaluations on the held-out problems [RL steps]; 0 evaluates only before the first step and
    after the last"""
    files: MayChange[tuple[str, ...]] = ()
    """for recipes/evaluate.py: problem files to evaluate on; empty uses the held-out problems"""

    def __post_init__(self) -> None:
        check_bounds("evaluate", self)
