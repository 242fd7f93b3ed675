"""One stage of a run: every setting, each with its only default."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from rstar_ray.config.agent import AgentConfig
from rstar_ray.config.algorithm import AlgorithmConfig, Correction, OptimizerConfig, SftConfig
from rstar_ray.config.chat import ChatConfig
from rstar_ray.config.checks import at_least, at_most, check_bounds, require
from rstar_ray.config.detector import DetectorConfig
from rstar_ray.config.gpus import WeightWay, check_gpus, shares_gpus, weight_way
from rstar_ray.config.machines import BalancerConfig, EngineConfig, LearnerConfig, SandboxConfig
from rstar_ray.config.modes import OF_RL, OF_SFT, OF_TRAINING, only_with, where
from rstar_ray.config.own_code import RewardConfig, ToolsConfig, has_own, has_own_tools
from rstar_ray.config.rollout import DataConfig, EvaluationConfig, RolloutConfig
from rstar_ray.config.telemetry import TelemetryConfig
from rstar_ray.config.tiny import TinyConfig
from rstar_ray.config.tree import MayChange, SameAnswers

BFLOAT16 = where(
    "learner.dtype",
    lambda config: "bfloat16" in (config.engine.dtype, config.learner.dtype),
    "give --engine.dtype bfloat16 or --learner.dtype bfloat16, or leave it out",
)
Scale = Literal["tiny", "gpu", "gpu-8", "mi300x-64"]
Until = Literal["steps", "settled", "solved"]
OnInsufficientResources = Literal["fail", "scale-down"]
MOST_SEED = 2**32 - 1
"""Seed range of numpy, and so of vLLM."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When progress is saved and looked at."""

    every_steps: Annotated[MayChange[int], at_least(1)] = 10
    """steps between checkpoints; the end of a stage always makes one"""
    keep: Annotated[MayChange[int], at_least(1)] = 2
    """newest checkpoints kept per stage; the one with the best held-out score is kept too (--evaluate.every-steps)"""
    grace_s: Annotated[MayChange[float], at_least(0)] = 120.0
    """after Ctrl-C or SIGTERM, longest until the step under way has ended in a checkpoint; a second ends at once [s]"""
    trajectories_every_steps: Annotated[MayChange[int], OF_RL, at_least(0)] = 10
    """steps between those whose trajectories are all kept as readable jsonl, from the first on; 0 keeps none"""

    def __post_init__(self) -> None:
        check_bounds("checkpoint", self)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One stage of a run."""

    stage: SameAnswers[str] = "stage1"
    """name of the stage in the run directory"""
    scale: SameAnswers[Literal["auto", Scale]] = "auto"
    """model, placement and budgets together; auto picks by what the Ray cluster offers and says what it picked"""
    run_dir: MayChange[str] = ""
    """where the run's results go; empty is runs/<scale> below the folder of the command"""
    on_insufficient_resources: MayChange[OnInsufficientResources] = "fail"
    """where the cluster is smaller than the plan, as when a node is missing: refuse with the arithmetic, or run with as
    many replicas and ranks as fit"""
    seed: Annotated[int, at_least(0), at_most(MOST_SEED)] = 0
    """fixes data order, sampling and resampling"""
    deterministic: bool = False
    """on GPUs, compute what does not depend on what else is computed beside it (docs/determinism.md): slower"""
    float32_head: Annotated[bool, BFLOAT16] = False
    """compute logits in float32 where the model is bfloat16, in engines and learner alike, as MiniMax-M1 does
    (arXiv:2506.13585): rounding logits to bfloat16 moves the probabilities of engine and learner apart"""
    model: SameAnswers[str] = ""
    """policy to start from, a Hugging Face folder or a hub's id; empty takes the stage before in the run directory"""
    steps: Annotated[SameAnswers[int], OF_RL, at_least(0)] = 300
    """training steps, at most"""
    until: Annotated[SameAnswers[Until], OF_RL] = "steps"
    """when the stage ends: after --steps; settled: once truncation stays near 10 % and the reward neither rises nor
    falls, at the earliest 60 steps after the warm-up (the paper's end of stage 1); solved: once over 70 % of the
    problems are all right (its end of stage 2)"""
    max_empty_steps: Annotated[MayChange[int], OF_RL, at_least(1)] = 10
    """steps in a row without a group whose rewards differ, after which the run ends with the reason"""
    prompts_per_step: Annotated[SameAnswers[int], OF_RL, at_least(1)] = 512
    """prompt groups of one step"""
    staleness: Annotated[MayChange[int], OF_RL, at_least(0)] = 0
    """training steps by which the weights that sample a token may be older than those that train on it: rollouts of so
    many later steps run while a step waits, learns and publishes. 0 is synchronous (docs/async.md)"""
    drop_solved: Annotated[SameAnswers[bool], OF_RL] = False
    """first roll out every problem 8 times with the latest policy and drop those solved 8/8 (stage 3)"""
    own_folder: Annotated[
        MayChange[str], where("reward.name", has_own, "name something of your own", warn_only=True)
    ] = ""
    """folder of the modules that hold your own reward and tools; empty is the folder of the command"""
    reset_optimizer: Annotated[SameAnswers[bool], OF_TRAINING] = False
    """reset the optimizer state and warm up (stages 1 and 3); a stage that starts from --model always does"""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    algorithm: Annotated[SameAnswers[AlgorithmConfig], OF_RL] = field(default_factory=AlgorithmConfig)
    optimizer: Annotated[SameAnswers[OptimizerConfig], OF_TRAINING] = field(default_factory=OptimizerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    balancer: BalancerConfig = field(default_factory=BalancerConfig)
    learner: Annotated[SameAnswers[LearnerConfig], OF_TRAINING] = field(default_factory=LearnerConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    data: SameAnswers[DataConfig] = field(default_factory=DataConfig)
    sft: Annotated[SameAnswers[SftConfig], OF_SFT] = field(default_factory=SftConfig)
    tiny: Annotated[SameAnswers[TinyConfig], OF_SFT, only_with("sft.data", "")] = field(default_factory=TinyConfig)
    evaluate: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: Annotated[CheckpointConfig, OF_TRAINING] = field(default_factory=CheckpointConfig)
    detector: DetectorConfig = field(default_factory=DetectorConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        check_bounds("", self)
        check_gpus(self.engine, self.learner)
        require(
            not (self.staleness and self.algorithm.correction == "none"),
            "--algorithm.correction",
            f"none takes tokens of older weights for the newest's (got none with --staleness {self.staleness})",
            "leave out --algorithm.correction, or give --staleness 0",
        )
        buffer, longest = self.algorithm.overlong_buffer, self.rollout.max_response_tokens
        require(
            buffer <= longest,
            "--algorithm.overlong-buffer",
            f"{buffer} tokens are more than --rollout.max-response-tokens {longest}",
            "lower it",
        )
        floor = self.data.mix_floor * len(self.data.mix)
        require(
            floor <= self.prompts_per_step,
            "--data.mix-floor",
            f"{self.data.mix_floor} for each source are {floor} problems, above the {self.prompts_per_step} of a draw",
            "lower it, or raise --prompts-per-step",
        )
        require(
            not (self.sleeps and self.staleness),
            "--engine.sleep",
            f"engines decode during updates with --staleness {self.staleness}",
            "give --engine.no-sleep and a smaller --engine.gpu-memory-share, or --staleness 0",
        )
        require(
            not (self.agent.used and has_own_tools(self)),
            "--agent.run" if self.agent.run else "--agent.command",
            "an agent brings its tools, and no environment answers it (got --tools.use or --tools.environment too)",
            "leave out one of them",
        )
        context = self.engine.max_context_tokens
        for option, budget in (
            ("--rollout.max-response-tokens", self.rollout.max_response_tokens),
            ("--evaluate.max-response-tokens", self.evaluate.max_response_tokens),
        ):
            require(
                budget < context,
                option,
                f"a response of {budget} tokens leaves no room for a prompt in a context of {context}",
                "lower it or raise --engine.max-context-tokens",
            )

    @property
    def sleeps(self) -> bool:
        """Whether engines give their memory to the learner during updates."""
        return self.engine.sleep and shares_gpus(self.engine, self.learner)

    @property
    def correction(self) -> Correction:
        """`--algorithm.correction` with `auto` resolved."""
        return self.loss.correction

    @property
    def loss(self) -> AlgorithmConfig:
        """The algorithm as the loss reads it."""
        return self.algorithm.resolved(staleness=self.staleness, dtype=self.learner.dtype)

    @property
    def fresh_optimizer(self) -> bool:
        """Whether the stage starts with zero moments: reset, or a policy from elsewhere, which brings no moments."""
        return self.reset_optimizer or bool(self.model)

    @property
    def weight_way(self) -> WeightWay:
        """`--learner.weights-by` with `auto` resolved."""
        return weight_way(self.engine, self.learner)

    @property
    def warmup_steps(self) -> int:
        """Of an RL stage: only where the optimizer state is fresh, since Adam's first steps are full-size whatever the
        gradient."""
        return self.optimizer.warmup_steps if self.fresh_optimizer else 0

    def check_paths(self) -> None:
        """Refuse folders and files that are named but do not exist."""
        for option, path in (
            ("--model", self.model),
            ("--algorithm.reference-model", self.algorithm.reference_model),
            ("--data.train", self.data.train),
            ("--data.heldout", self.data.heldout),
            ("--sft.data", self.sft.data),
            ("--own-folder", self.own_folder),
            *(("--evaluate.files", path) for path in self.evaluate.files),
        ):
            require(not path or Path(path).exists(), option, f"{path} does not exist", "give an existing path")
        own = self.own_folder
        require(not own or Path(own).is_dir(), "--own-folder", f"{own} is a file", "give the folder that it is in")
        for option, folder in (
            ("--model", self.model),
            ("--algorithm.reference-model", self.algorithm.reference_model),
        ):
            config = Path(folder) / "config.json"
            require(
                not folder or config.is_file(), option, f"{config} does not exist", "give a Hugging Face model folder"
            )
