"""What is asked: budgets and sampling of rollouts, the problems, and what an evaluation is."""

from dataclasses import dataclass
from typing import Annotated, Literal

from rstar_ray.config.checks import at_least, at_most, require
from rstar_ray.config.modes import OF_RL, not_with, only_with
from rstar_ray.config.tree import MayChange, SameAnswers

MAX_TEMPERATURE = 2.0
"""The highest that vLLM accepts."""
NO_FILES = only_with("evaluate.files", (), told=True)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Budgets and sampling of training rollouts (arXiv:2508.20722, Table 2)."""

    max_response_tokens: Annotated[int, OF_RL] = 8_192
    """everything after the prompt, tool answers included [tokens]"""
    max_turns: Annotated[int, OF_RL] = 10
    """completions per rollout [turns]"""
    temperature: Annotated[float, OF_RL] = 1.0
    """softmax temperature of training rollouts"""
    top_p: Annotated[float, OF_RL] = 1.0
    """nucleus mass; 1 samples from the whole distribution, which the loss assumes"""
    instruct: bool = True
    """put the tool's schema and the answer format before the problem; off in the tiny world, where SFT teaches them"""
    deadline_s: MayChange[float] = 1_800.0
    """longest a step may wait for its rollouts without one finishing [s]"""

    def __post_init__(self) -> None:
        at_least(1, rollout__max_response_tokens=self.max_response_tokens, rollout__max_turns=self.max_turns)
        at_least(0, rollout__temperature=self.temperature)
        at_most(MAX_TEMPERATURE, rollout__temperature=self.temperature)
        at_least(1, rollout__deadline_s=self.deadline_s)
        require(0 < self.top_p <= 1, "--rollout.top-p", f"{self.top_p} is no share", "give one in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Problems to train on: jsonl or parquet of {"id", "problem", "answer"}; empty means the tiny world's own."""

    train: Annotated[str, OF_RL] = ""
    """training problems, a path; empty generates the tiny world's"""
    heldout: Annotated[str, NO_FILES] = ""
    """held-out problems, a path; empty generates the tiny world's"""
    integer_answers: Annotated[bool, OF_RL, not_with("data.train", ""), only_with("reward.name", "math")] = True
    """refuse training problems whose answer is no integer (arXiv:2508.20722 section 4.2); for the reward math"""
    num_train: Annotated[int, OF_RL, only_with("data.train", "")] = 4_000
    """problems generated where no path is given"""
    num_heldout: Annotated[int, NO_FILES, only_with("data.heldout", ""), only_with("scale", "tiny")] = 240
    """held-out problems generated where no path is given"""
    num_filtered: Annotated[int, OF_RL, only_with("drop_solved", True, told=True)] = 0
    """problems rolled out where solved ones are dropped (--drop-solved), drawn from the file at random by --seed;
    0 rolls out all"""

    def __post_init__(self) -> None:
        at_least(1, data__num_train=self.num_train, data__num_heldout=self.num_heldout)
        at_least(0, data__num_filtered=self.num_filtered)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """avg@k and pass@k on held-out problems (arXiv:2508.20722 section 5)."""

    protocol: MayChange[Literal["own", "paper", "release", "rstar2-agent-14b"]] = "own"
    """samples, temperature, top-p and budgets together: own, the stage's; paper, arXiv:2508.20722 section 5 (16 samples
    at 0.6, 30K tokens, 30 turns); release, the authors' code's (temperature 0, 5 turns); rstar2-agent-14b, the paper's
    with that model's prompt and tool (--chat.protocol); other options go over them"""
    num_problems: SameAnswers[int] = 0
    """problems of a set used, at most, drawn from the file at random; the same for every --seed; 0 uses all"""
    samples: int = 16
    """k: rollouts per problem"""
    temperature: float = 0.6
    """softmax temperature"""
    top_p: float = 1.0
    """nucleus mass; not published, 1 here"""
    max_response_tokens: int = 30_720
    """length budget [tokens]"""
    max_turns: int = 30
    """turn budget"""
    every_steps: Annotated[MayChange[int], OF_RL] = 0
    """RL steps between evaluations on the held-out problems; 0 evaluates before the first and after the last alone"""
    files: MayChange[tuple[str, ...]] = ()
    """for recipes/evaluate.py: problem files to evaluate on; none evaluates on the held-out problems"""

    def __post_init__(self) -> None:
        at_least(0, evaluate__num_problems=self.num_problems, evaluate__every_steps=self.every_steps)
        at_least(1, evaluate__samples=self.samples)
        at_least(1, evaluate__max_response_tokens=self.max_response_tokens, evaluate__max_turns=self.max_turns)
        at_least(0, evaluate__temperature=self.temperature)
        at_most(MAX_TEMPERATURE, evaluate__temperature=self.temperature)
        require(0 < self.top_p <= 1, "--evaluate.top-p", f"{self.top_p} is no share", "give one in (0, 1]")
