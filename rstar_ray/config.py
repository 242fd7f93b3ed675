"""Every setting of a run, in small frozen records. Defaults live in the type, checks in `__post_init__`.

Each check raises `ConfigError` with the field as the command line spells it. `recipes/` says what differs.
"""

import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from rstar_ray.errors import ConfigError

C = TypeVar("C")


def _require(holds: bool, name: str, problem: str, mend: str) -> None:
    if not holds:
        raise ConfigError(name, problem, mend)


def _at_least(minimum: float, **named: float) -> None:
    for name, value in named.items():
        option = "--" + name.replace("__", ".").replace("_", "-")
        _require(value >= minimum, option, f"{value} is too small", f"give at least {minimum}")
        _require(math.isfinite(value), option, f"{value} is not finite", "give a finite number")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Budgets and sampling of training rollouts (arXiv:2508.20722, Table 2)."""

    max_response_tokens: int = 8_192
    """everything after the prompt, tool answers included [tokens]"""
    max_turns: int = 10
    """completions per rollout [turns]"""
    temperature: float = 1.0
    """softmax temperature of training rollouts"""
    top_p: float = 1.0
    """nucleus mass; 1 samples from the whole distribution, which the loss assumes"""
    instruct: bool = True
    """put the tool's schema and the answer format before the problem; off in the tiny world, where SFT teaches them"""
    deadline_s: float = 1_800.0
    """longest a step may wait for its rollouts without one finishing [s]"""

    def __post_init__(self) -> None:
        _at_least(1, rollout__max_response_tokens=self.max_response_tokens, rollout__max_turns=self.max_turns)
        _at_least(0, rollout__temperature=self.temperature)
        _at_least(1, rollout__deadline_s=self.deadline_s)
        _require(0 < self.top_p <= 1, "--rollout.top-p", f"{self.top_p} is no share", "give one in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """GRPO-RoC (arXiv:2508.20722 section 2.2)."""

    rollouts_per_prompt: int = 32
    """2G rollouts drawn per prompt; with `--algorithm.resample none` only `keep` are drawn"""
    keep: int = 16
    """G trajectories kept per prompt by resampling on correct, and trained on"""
    resample: Literal["paper", "release", "none"] = "paper"
    """paper: sampled by penalty; release: the released code's top-k rule; none: plain GRPO"""
    least_failures: int = 0
    """with `--algorithm.resample paper`: failures kept of a group at least, where it has them; 0 is the paper's
    floor(n_neg / 2), which keeps none of one failure, so that the group has no signal (release: 2)"""
    advantage_std: Literal["population", "sample", "none"] = "population"
    """what advantages are divided by (Eq. 7, which does not say which): the group's population or sample (n - 1)
    standard deviation; none is Dr. GRPO's choice"""
    clip_low: float = 0.2
    """lower clip of the ratio (Eq. 6)"""
    clip_high: float = 0.28
    """upper clip of the ratio (Eq. 6)"""
    normalisation: Literal["token", "group", "sequence", "constant"] = "token"
    """what the loss is divided by (loss_agg_mode). token: the update's sampled tokens (DAPO, arXiv:2503.14476), so that
    long groups weigh more; group: each kept group's sampled tokens, then the groups (Eq. 6 as it is written); sequence:
    each row's, then the rows (GRPO); constant: one length for all (Dr. GRPO)"""

    def __post_init__(self) -> None:
        _at_least(2, algorithm__keep=self.keep)  # one reward alone differs from none: every advantage would be 0
        _at_least(0, algorithm__clip_low=self.clip_low, algorithm__clip_high=self.clip_high)
        _at_least(0, algorithm__least_failures=self.least_failures)
        _require(
            self.least_failures < self.keep,
            "--algorithm.least-failures",
            f"{self.least_failures} of {self.keep} kept leaves no place for a success",
            "give one below --algorithm.keep",
        )
        low = self.clip_low
        _require(low < 1, "--algorithm.clip-low", f"{low} would clip no ratio: none is below 0", "give one below 1")
        _require(
            self.keep <= self.rollouts_per_prompt,
            "--algorithm.keep",
            f"{self.keep} is above the {self.rollouts_per_prompt} rollouts of a prompt",
            "lower it or raise --algorithm.rollouts-per-prompt",
        )

    @property
    def num_rollouts(self) -> int:
        """Rollouts drawn per prompt: plain GRPO trains on all it draws, so it draws only `keep`."""
        return self.keep if self.resample == "none" else self.rollouts_per_prompt


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up (arXiv:2508.20722 section 5.1)."""

    learning_rate: float = 1e-6
    """peak learning rate"""
    warmup_steps: int = 20
    """linear warm-up [optimizer steps]"""
    beta2: float = 0.999
    """AdamW's decay of the second moment; not published, torch's default here"""
    weight_decay: float = 0.0
    """decoupled weight decay; not published, 0 here"""
    grad_clip: float = 1.0
    """largest global gradient norm; not published, 1 here"""

    def __post_init__(self) -> None:
        _at_least(0, optimizer__learning_rate=self.learning_rate, optimizer__warmup_steps=self.warmup_steps)
        _require(0 < self.beta2 < 1, "--optimizer.beta2", f"{self.beta2} is no decay", "give one in (0, 1)")
        _at_least(0, optimizer__weight_decay=self.weight_decay, optimizer__grad_clip=self.grad_clip)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The generation replicas (vLLM)."""

    replicas: int = 1
    """engines; each is one Ray actor"""
    gpus_per_replica: float = 0.0
    """GPUs a replica reserves in Ray; 0 runs on the CPU, a fraction shares one GPU with a learner rank"""
    cpus_per_replica: float = 1.0
    """CPU cores a replica reserves in Ray"""
    tensor_parallel: int = 1
    """GPUs one replica is split over"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """precision of the weights in the engine"""
    max_context_tokens: int = 32_768
    """prompt and response together [tokens]"""
    kv_tokens: int = 0
    """KV cache per replica [tokens]; 0 lets the engine take what memory allows"""
    max_running: int = 256
    """rollouts one engine decodes at once"""
    gpu_memory_share: float = 0.6
    """share of the GPU's memory the engine may take"""
    start_deadline_s: float = 900.0
    """longest an engine may take to come up [s]"""

    def __post_init__(self) -> None:
        _at_least(1, engine__replicas=self.replicas, engine__tensor_parallel=self.tensor_parallel)
        _at_least(0, engine__gpus_per_replica=self.gpus_per_replica, engine__kv_tokens=self.kv_tokens)
        _at_least(0, engine__cpus_per_replica=self.cpus_per_replica)
        _at_least(1, engine__max_context_tokens=self.max_context_tokens, engine__max_running=self.max_running)
        _at_least(1, engine__start_deadline_s=self.start_deadline_s)
        _require(
            not self.kv_tokens or self.kv_tokens >= self.max_context_tokens,
            "--engine.kv-tokens",
            f"{self.kv_tokens} cannot hold one rollout of {self.max_context_tokens} tokens",
            "give at least --engine.max-context-tokens, or 0 for what memory allows",
        )
        share = self.gpu_memory_share
        _require(0 < share <= 0.95, "--engine.gpu-memory-share", f"{share} is no share", "give one in (0, 0.95]")


@dataclass(frozen=True, kw_only=True)
class BalancerConfig:
    """Which replica a rollout runs on, and when it starts (docs/scheduler.md)."""

    rule: Literal[
        "static",
        "round_robin",
        "consistent_hash",
        "least_requests",
        "least_sessions",
        "prefix_aware",
        "worst_case",
        "expected_kv",
    ] = "expected_kv"
    """placement rule"""
    risk: float = 0.01
    """share of rollouts that an engine may have to preempt (rule expected_kv); between 0 and 0.5"""

    def __post_init__(self) -> None:
        _require(
            0 < self.risk < 0.5,
            "--balancer.risk",
            f"{self.risk} is no share of rollouts that an engine may preempt",
            "give one between 0 and 0.5",
        )


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """The DeepSpeed learner."""

    ranks: int = 1
    """data-parallel ranks; each is one Ray actor"""
    gpus_per_rank: float = 0.0
    """GPUs a rank reserves in Ray; 0 runs on the CPU"""
    cpus_per_rank: float = 1.0
    """CPU cores a rank reserves in Ray"""
    zero_stage: Literal[0, 1, 2, 3] = 3
    """DeepSpeed ZeRO stage"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """precision of the forward pass; master weights are float32"""
    micro_batch_tokens: int = 32_768
    """padded tokens of one forward and backward pass [tokens]"""
    activation_checkpointing: bool = True
    """recompute activations in the backward pass to save memory"""
    num_threads: int = 1
    """CPU threads of a rank"""
    step_deadline_s: float = 1_800.0
    """longest one update may take [s]"""

    def __post_init__(self) -> None:
        _at_least(1, learner__ranks=self.ranks, learner__micro_batch_tokens=self.micro_batch_tokens)
        _at_least(0, learner__gpus_per_rank=self.gpus_per_rank, learner__cpus_per_rank=self.cpus_per_rank)
        _at_least(1, learner__num_threads=self.num_threads, learner__step_deadline_s=self.step_deadline_s)
        _require(
            self.dtype == "float32" or self.zero_stage > 0,
            "--learner.zero-stage",
            "bfloat16 without ZeRO has no float32 master weights",
            "give 1, 2 or 3, or --learner.dtype float32",
        )


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """The sandbox executors that run the model's programs."""

    executors: int = 1
    """sandbox actors, spread over the nodes"""
    slots: int = 2
    """programs one executor runs at once"""
    level: Literal["namespaces", "landlock", "process"] = "namespaces"
    """isolation required; landlock accepts it where namespaces are refused, process is for trusted programs alone"""
    time_limit_s: float = 4.0
    """one program's CPU time; its wall time is bounded too [s]"""
    memory_mb: int = 384
    """one program's memory, interpreter included [MB]"""
    max_output_chars: int = 1_000
    """kept of each of stdout and stderr [characters]"""
    deadline_s: float = 120.0
    """longest a call may wait for its result, queueing included [s]"""

    def __post_init__(self) -> None:
        _at_least(1, sandbox__executors=self.executors, sandbox__slots=self.slots)
        _at_least(64, sandbox__memory_mb=self.memory_mb)
        _at_least(16, sandbox__max_output_chars=self.max_output_chars)
        _at_least(0.05, sandbox__time_limit_s=self.time_limit_s, sandbox__deadline_s=self.deadline_s)
        _require(
            self.deadline_s > self.time_limit_s,
            "--sandbox.deadline-s",
            f"{self.deadline_s} leaves no room above the program's own {self.time_limit_s} s",
            "raise it above --sandbox.time-limit-s",
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Problems to train on: jsonl or parquet of {"id", "problem", "answer"}; empty means the tiny world's own."""

    train: str = ""
    """training problems, a path; empty generates the tiny world's"""
    heldout: str = ""
    """held-out problems, a path; empty generates the tiny world's"""
    integer_answers: bool = True
    """refuse training problems whose answer is no integer (arXiv:2508.20722 section 4.2)"""
    num_train: int = 4_000
    """problems generated where no path is given"""
    num_heldout: int = 240
    """held-out problems generated where no path is given"""
    num_filtered: int = 0
    """problems looked at where solved ones are dropped (--drop-solved); 0 looks at all"""

    def __post_init__(self) -> None:
        _at_least(1, data__num_train=self.num_train, data__num_heldout=self.num_heldout)
        _at_least(0, data__num_filtered=self.num_filtered)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """avg@k and pass@k on held-out problems (arXiv:2508.20722 section 5)."""

    num_problems: int = 0
    """problems of a set used, at most; 0 uses all"""
    samples: int = 16
    """k: rollouts per problem"""
    temperature: float = 0.6
    """softmax temperature"""
    top_p: float = 1.0
    """nucleus mass; 1 samples from the whole distribution"""
    max_response_tokens: int = 30_720
    """length budget [tokens]"""
    max_turns: int = 30
    """turn budget"""
    every_steps: int = 0
    """RL steps between evaluations on the held-out problems; 0 evaluates before the first and after the last alone"""
    files: tuple[str, ...] = ()
    """for recipes/evaluate.py: problem files to evaluate on; none evaluates on the held-out problems"""

    def __post_init__(self) -> None:
        _at_least(0, evaluate__num_problems=self.num_problems, evaluate__every_steps=self.every_steps)
        _at_least(1, evaluate__samples=self.samples)
        _require(0 < self.top_p <= 1, "--evaluate.top-p", f"{self.top_p} is no share", "give one in (0, 1]")
        _at_least(1, evaluate__max_response_tokens=self.max_response_tokens, evaluate__max_turns=self.max_turns)
        _at_least(0, evaluate__temperature=self.temperature)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When progress is saved and looked at."""

    every_steps: int = 10
    """steps between checkpoints; the end of a stage always makes one"""
    keep: int = 2
    """checkpoints kept per stage"""
    trajectories_every_steps: int = 10
    """steps between those whose trajectories are all kept as readable jsonl; 0 keeps none"""

    def __post_init__(self) -> None:
        _at_least(1, checkpoint__every_steps=self.every_steps, checkpoint__keep=self.keep)
        _at_least(0, checkpoint__trajectories_every_steps=self.trajectories_every_steps)


@dataclass(frozen=True, kw_only=True)
class DetectorConfig:
    """How long a process may be silent, and a run still, before that is a fault."""

    probe_every_s: float = 2.0
    """between two probes of a process [s]"""
    silent_s: float = 60.0
    """longest an actor may leave a probe unanswered before it is killed and fails over [s]"""
    learner_silent_s: float = 600.0
    """the same of a learner rank, whose checkpoint or compilation may hold it up [s]"""
    engine_step_s: float = 300.0
    """longest an engine with work may go without a decode step before it is killed: a cold compilation [s]"""
    still_s: float = 3_600.0
    """longest the whole run may go without anything getting on before it ends, naming the oldest wait [s]"""

    def __post_init__(self) -> None:
        _at_least(0.1, detector__probe_every_s=self.probe_every_s)
        for name in ("silent_s", "learner_silent_s", "engine_step_s", "still_s"):
            seconds = getattr(self, name)
            _require(
                seconds >= 3 * self.probe_every_s,
                f"--detector.{name.replace('_', '-')}",
                f"{seconds:g} s are not three probes, which come every {self.probe_every_s:g} s",
                "raise it, or lower --detector.probe-every-s",
            )


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """The non-reasoning SFT stage (arXiv:2508.20722 section 4.1): format, tool calls, instruction drills."""

    steps: int = 400
    """optimizer steps"""
    batch_size: int = 128
    """conversations per step"""
    learning_rate: float = 5e-6
    """peak of the schedule"""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """after warm-up: half a cosine down, or constant for 60 % and then linearly down"""
    warmup_share: float = 0.04
    """share of the steps that warm up"""
    data: str = ""
    """conversations, jsonl or parquet in the usual `messages` form; empty generates the tiny world's"""
    num_conversations: int = 6_000
    """conversations generated where no path is given"""

    def __post_init__(self) -> None:
        _at_least(1, sft__steps=self.steps, sft__batch_size=self.batch_size)
        _at_least(1, sft__num_conversations=self.num_conversations)
        _at_least(0, sft__learning_rate=self.learning_rate)
        share = self.warmup_share
        _require(0 <= share < 1, "--sft.warmup-share", f"{share} is no share", "give one in [0, 1)")
        _require(
            round(share * self.steps) < self.steps,
            "--sft.warmup-share",
            f"{share} of {self.steps} steps leaves none after the warm-up",
            "lower it or raise --sft.steps",
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One stage of a run."""

    stage: str = "stage1"
    """name of the stage in the run directory"""
    scale: Literal["auto", "tiny", "gpu", "mi300x-64"] = "auto"
    """model, placement and budgets together; auto picks by what the Ray cluster offers and says what it picked"""
    run_dir: str = ""
    """where the run's results go; empty is runs/<scale> below the folder of the command"""
    seed: int = 0
    """fixes data order, sampling and resampling"""
    model: str = ""
    """policy to start from, a Hugging Face folder; empty takes the stage before in the run directory"""
    steps: int = 300
    """training steps, at most"""
    until: Literal["steps", "settled", "solved"] = "steps"
    """when the stage ends: after --steps; settled: once truncation stays near 10 % and the reward on a plateau (the
    paper's end of stage 1); solved: once over 70 % of the problems are all right (its end of stage 2)"""
    max_empty_steps: int = 10
    """steps in a row without a group whose rewards differ, after which the run ends with the reason"""
    prompts_per_step: int = 512
    """prompt groups of one step"""
    drop_solved: bool = False
    """first roll out every problem 8 times with the latest policy and drop those solved 8/8 (stage 3)"""
    reset_optimizer: bool = False
    """start with fresh optimizer state and a warm-up (stages 1 and 3)"""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    balancer: BalancerConfig = field(default_factory=BalancerConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    evaluate: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    detector: DetectorConfig = field(default_factory=DetectorConfig)

    def __post_init__(self) -> None:
        _at_least(0, steps=self.steps, seed=self.seed)
        _at_least(1, prompts_per_step=self.prompts_per_step, max_empty_steps=self.max_empty_steps)
        context = self.engine.max_context_tokens
        for option, budget in (
            ("--rollout.max-response-tokens", self.rollout.max_response_tokens),
            ("--evaluate.max-response-tokens", self.evaluate.max_response_tokens),
        ):
            _require(
                budget < context,
                option,
                f"a response of {budget} tokens leaves no room for a prompt in a context of {context}",
                "lower it or raise --engine.max-context-tokens",
            )

    def check_paths(self) -> None:
        """Refuse folders and files that are named but not there."""
        for option, path in (
            ("--model", self.model),
            ("--data.train", self.data.train),
            ("--data.heldout", self.data.heldout),
            ("--sft.data", self.sft.data),
            *(("--evaluate.files", path) for path in self.evaluate.files),
        ):
            _require(not path or Path(path).exists(), option, f"{path} does not exist", "give an existing path")
        if self.model:
            config = Path(self.model) / "config.json"
            _require(config.is_file(), "--model", f"{config} does not exist", "give a Hugging Face model folder")


def differences(config: Any, default: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves in which two configurations differ, by dotted name."""
    found: dict[str, Any] = {}
    for item in fields(default):
        ours, theirs = getattr(config, item.name), getattr(default, item.name)
        if is_dataclass(theirs):
            found |= differences(ours, theirs, f"{prefix}{item.name}.")
        elif ours != theirs:
            found[f"{prefix}{item.name}"] = ours
    return found


def with_values(config: C, values: dict[str, Any]) -> C:
    """A copy with the leaves named by dotted path set; every check runs again."""
    nested: dict[str, dict[str, Any]] = {}
    flat: dict[str, Any] = {}
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if rest:
            nested.setdefault(head, {})[rest] = value
        else:
            flat[head] = value
    for head, inner in nested.items():
        flat[head] = with_values(getattr(config, head), inner)
    return cast(C, replace(cast(Any, config), **flat))
