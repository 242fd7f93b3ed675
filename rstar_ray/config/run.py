"""One stage of a run: every setting with its default."""

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
"""Largest seed of numpy, and so of vLLM."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints and trajectories are saved."""

    every_steps: Annotated[MayChange[int], at_least(1)] = 10
    """steps between checkpoints; the end of a stage always makes one"""
    keep: Annotated[MayChange[int], at_least(1)] = 2
    """newest checkpoints retained per stage, in addition to the one with the best held-out score
    (--evaluate.every-steps)"""
    grace_s: Annotated[MayChange[float], at_least(0)] = 120.0
    """after Ctrl-C or SIGTERM, longest time to finish the current step and save a checkpoint [s]; a second signal ends
    the run at once"""
    trajectories_every_steps: Annotated[MayChange[int], OF_RL, at_least(0)] = 10
    """interval at which all trajectories of a step are saved as readable jsonl, from the first step on [steps]; 0 saves
    none"""

    def __post_init__(self) -> None:
        check_bounds("checkpoint", self)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One stage of a run."""

    stage: SameAnswers[str] = "stage1"
    """name of the stage in the run directory"""
    scale: SameAnswers[Literal["auto", Scale]] = "auto"
    """preset of model, placement and budgets; auto selects it by the Ray cluster's resources and logs its choice"""
    run_dir: MayChange[str] = ""
    """directory for the run's results; empty: runs/<scale> below the command's working directory"""
    on_insufficient_resources: MayChange[OnInsufficientResources] = "fail"
    """where the cluster is smaller than the plan, for example after the loss of a node. fail: refuse and show the
    arithmetic; scale-down: run with as many replicas and ranks as fit"""
    seed: Annotated[int, at_least(0), at_most(MOST_SEED)] = 0
    """seed of data order, sampling and resampling"""
    deterministic: bool = False
    """on GPUs, use batch-invariant computation: results do not depend on what else is in the batch
    (docs/determinism.md); slower"""
    float32_head: Annotated[bool, BFLOAT16] = False
    """compute logits of a bfloat16 model in float32, in engines and learner, as MiniMax-M1 does (arXiv:2506.13585):
    rounding logits to bfloat16 makes the probabilities of engine and learner differ"""
    model: SameAnswers[str] = ""
    """policy to start from, a Hugging Face folder or hub id; empty uses the previous stage in the run directory"""
    steps: Annotated[SameAnswers[int], OF_RL, at_least(0)] = 300
    """largest number of training steps"""
    until: Annotated[SameAnswers[Until], OF_RL] = "steps"
    """when the stage ends. steps: after --steps; settled: when truncation stays near 10 % and the reward neither rises
    nor falls, at the earliest 60 steps after the warm-up (the paper's end of stage 1); solved: when all rollouts of
    over 70 % of the problems are correct (its end of stage 2)"""
    max_empty_steps: Annotated[MayChange[int], OF_RL, at_least(1)] = 10
    """consecutive steps without a group whose rewards differ, after which the run ends and reports the reason"""
    prompts_per_step: Annotated[SameAnswers[int], OF_RL, at_least(1)] = 512
    """prompt groups per step"""
    staleness: Annotated[MayChange[int], OF_RL, at_least(0)] = 0
    """training steps by which the weights that sample a token may be older than those that train on it. Rollouts of up
    to so many later steps run while a step waits, trains and publishes. 0 is synchronous (docs/async.md)"""
    drop_solved: Annotated[SameAnswers[bool], OF_RL] = False
    """before training, roll out every problem 8 times with the latest policy and drop those solved 8/8 (stage 3)"""
    own_folder: Annotated[
        MayChange[str], where("reward.name", has_own, "name a reward, tool, rule or agent of yours", warn_only=True)
    ] = ""
    """folder of the modules with your own code, such as rewards and tools; empty: the command's working directory"""
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
            f"none would treat tokens of older weights as on-policy (got none with --staleness {self.staleness})",
            "give --staleness 0, or in a new --run-dir another --algorithm.correction",
        )
        buffer, longest = self.algorithm.overlong_buffer, self.rollout.max_response_tokens
        require(
            buffer <= longest,
            "--algorithm.overlong-buffer",
            f"must be at most --rollout.max-response-tokens {longest} (got {buffer})",
            "lower it",
        )
        floor = self.data.mix_floor * len(self.data.mix)
        require(
            floor <= self.prompts_per_step,
            "--data.mix-floor",
            f"{self.data.mix_floor} per source are {floor} problems, above the {self.prompts_per_step} per draw",
            "lower it, or raise --prompts-per-step",
        )
        require(
            not (self.until == "solved" and self.data.skip_solved),
            "--data.skip-solved",
            "cannot be combined with --until solved, which counts solved problems among the drawn ones",
            "omit one of them, or give --until steps",
        )
        require(
            not (self.sleeps and self.staleness),
            "--engine.sleep",
            f"engines cannot sleep during updates with --staleness {self.staleness}, when they decode",
            "give --engine.no-sleep and a smaller --engine.gpu-memory-share, or --staleness 0",
        )
        require(
            not (self.agent.used and has_own_tools(self)),
            "--agent.run" if self.agent.run else "--agent.command",
            "an agent runs its own tools, without an environment (got --tools.use or --tools.environment too)",
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
                f"must be below --engine.max-context-tokens {context}, to leave room for a prompt (got {budget})",
                "lower it or raise --engine.max-context-tokens",
            )

    @property
    def sleeps(self) -> bool:
        """Whether engines free their memory for the learner during updates."""
        return self.engine.sleep and shares_gpus(self.engine, self.learner)

    @property
    def correction(self) -> Correction:
        """`--algorithm.correction` with `auto` resolved."""
        return self.loss.correction

    @property
    def loss(self) -> AlgorithmConfig:
        """The algorithm's settings as the loss uses them."""
        return self.algorithm.resolved(staleness=self.staleness, dtype=self.learner.dtype)

    @property
    def fresh_optimizer(self) -> bool:
        """Whether the stage starts with zero moments: after a reset, or from a policy without optimizer state."""
        return self.reset_optimizer or bool(self.model)

    @property
    def weight_way(self) -> WeightWay:
        """`--learner.weights-by` with `auto` resolved."""
        return weight_way(self.engine, self.learner)

    @property
    def warmup_steps(self) -> int:
        """Warm-up of an RL stage: only with fresh optimizer state, since Adam's first steps have full size whatever
        the gradient."""
        return self.optimizer.warmup_steps if self.fresh_optimizer else 0

    def check_paths(self) -> None:
        """Raise `ConfigError` for folders and files that are named but do not exist."""
        for option, path in (
            ("--model", self.model),
            ("--algorithm.reference-model", self.algorithm.loaded_reference),
            ("--data.train", self.data.train),
            ("--data.heldout", self.data.heldout),
            ("--sft.data", self.sft.data),
            ("--own-folder", self.own_folder),
            *(("--evaluate.files", path) for path in self.evaluate.files),
        ):
            require(not path or Path(path).exists(), option, f"{path} does not exist", "give an existing path")
        own = self.own_folder
        require(not own or Path(own).is_dir(), "--own-folder", f"{own} is a file", "give its folder")
        for option, folder in (
            ("--model", self.model),
            ("--algorithm.reference-model", self.algorithm.loaded_reference),
        ):
            config = Path(folder) / "config.json"
            require(
                not folder or config.is_file(), option, f"{config} does not exist", "give a Hugging Face model folder"
            )
