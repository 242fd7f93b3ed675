"""Repeats a recorded step's update: the same rollouts, chosen by the same draw, against the same checkpoint.

The run directory holds everything that a step's update depends on: the trajectories' tokens, rewards and
log-probs, the settings, and the previous checkpoint. Nothing else is read, so a difference is meaningful.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from rstar_ray.algorithm.advantage import mean_advantage
from rstar_ray.algorithm.batch import rl_row
from rstar_ray.algorithm.batch_plan import ABOVE_CONTEXT, NO_SAMPLED_TOKEN, updates_of_groups
from rstar_ray.algorithm.lr_schedule import rl_learning_rate
from rstar_ray.algorithm.update import UpdateResult
from rstar_ray.config import RunConfig, with_values
from rstar_ray.context import Learner
from rstar_ray.errors import ConfigError, RStarError
from rstar_ray.rollouts import FinishedRollout, TrainingRow, TrajectoryRef, resample, training_rows
from rstar_ray.run_dir.code_version import code_version
from rstar_ray.run_dir.durable import read_rows
from rstar_ray.run_dir.folder import RunDir, checkpoint_name, flatten
from rstar_ray.run_dir.ledger import LEDGER, RolloutStatus
from rstar_ray.run_dir.manifest import damage
from rstar_ray.run_dir.metrics import current_row
from rstar_ray.run_dir.recorded_trajectories import recorded_trajectories
from rstar_ray.stages import previous_checkpoint
from rstar_ray.telemetry.registry import STEP_METRICS
from rstar_ray.trajectory import Trajectory

COMPARED = tuple(metric.name for metric in STEP_METRICS if metric.group == "update")
"""Metrics of an update that a step's row has."""
OF_THE_RUN = "replay with the rule of the run, which reads recorded fields alone: rewards, calls, outcomes, lengths"
ALIKE = 1e-3
"""Largest relative difference that counts as repeated: log-probs are recorded to four decimals."""
ALIKE_BELOW = 1e-4
"""Two figures below it are equal: recorded values are rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """The recorded data of one step."""

    config: RunConfig  # with the step's --staleness, which decides the loss
    step: int
    row: Mapping[str, Any]  # of metrics.jsonl
    handed_over: frozenset[str]  # ids of the rollouts sent to the learner
    left_out: Mapping[str, str]  # of these the rollouts that the learner did not train on, with the reason
    advantages: Mapping[str, float]  # of the rollouts sent, where known; rounded, the mean over their tokens
    trajectories: list[Trajectory]
    before: Path | None  # the checkpoint that the update starts from; None: --model


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure of the update, recorded and repeated."""

    name: str
    then: float
    now: float

    @property
    def difference(self) -> float:
        """Relative to the larger of the two; 0 where both are too small to tell apart."""
        largest = max(abs(self.then), abs(self.now))
        return abs(self.now - self.then) / largest if largest > ALIKE_BELOW else 0.0

    @property
    def alike(self) -> bool:
        return self.difference <= ALIKE

    def line(self) -> str:
        if not self.alike:
            verdict = f"differs by {self.difference:.2%}"
        elif max(abs(self.then), abs(self.now)) > ALIKE_BELOW or self.then == self.now:
            verdict = "same"
        else:
            verdict = f"below {ALIKE_BELOW:g}, to which log-probs are recorded: same"
        return f"{self.name:<18} {self.then:>14.6g} then {self.now:>14.6g} now   {verdict}"


def recorded_step(run: Path, stage: str, step: int) -> RecordedStep:
    """Load the data of one step. Raises `ConfigError` with a hint for missing parts."""
    run_dir = RunDir(run)
    configs = _configs(run_dir)
    if stage not in configs or stage == "sft":
        there = ", ".join(name for name in configs if name != "sft") or "none"
        raise ConfigError("--stage", f"{run} has no RL stage {stage!r}", f"choose one that it has: {there}")
    config = config_of(run_dir, stage)
    name, prefix = {"stage": stage, "step": step}, f"{stage}/{step}/"
    row, metrics = _row(run / LEDGER, name), current_row(_row(run / "metrics.jsonl", name))
    trained, left_out = row["ids"][RolloutStatus.TRAINED], row["ids"][RolloutStatus.LEFT_OUT]
    config = _with_staleness(config, run_dir, metrics)
    return RecordedStep(
        config=config,
        step=step,
        row=metrics,
        handed_over=frozenset(prefix + rollout for rollout in (*trained, *left_out)),
        left_out={prefix + rollout: row["reasons"].get(rollout, "") for rollout in left_out},
        advantages={
            prefix + rollout: value
            for rollout, value in row.get("advantages", {}).items()
            if value is not None  # earlier versions wrote null for a rollout without a sampled token
        },
        trajectories=recorded_trajectories(run_dir.trajectories_path / f"{checkpoint_name(stage, step)}.jsonl"),
        before=_before(run_dir, config, step),
    )


def repeatable(run: Path) -> list[tuple[str, int]]:
    """(stage, step) of the steps with recorded trajectories and a checkpoint before them."""
    run_dir, found = RunDir(run), list[tuple[str, int]]()
    _configs(run_dir)
    for path in sorted(run_dir.trajectories_path.glob("*-step-*.jsonl")):
        stage, _, step = path.stem.partition("-step-")
        try:
            _before(run_dir, config_of(run_dir, stage), int(step))
        except (RStarError, KeyError, ValueError):
            continue
        found.append((stage, int(step)))
    return found


def _configs(run_dir: RunDir) -> dict[str, Any]:
    """By stage. Raises `ConfigError` for what is not a run, or one that cannot be read."""
    if not run_dir.config_path.exists():
        raise ConfigError("RUN", f"{run_dir.path} is not a run directory", "name one that holds config.json")
    run_dir.refuse_newer()
    return run_dir.configs()


def config_of(run_dir: RunDir, stage: str) -> RunConfig:
    """The recorded settings of a stage. Raises `ConfigError` for settings of another version."""
    written = flatten(run_dir.configs()[stage])
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in written.items()}
    try:
        return with_values(RunConfig(), values)
    except (AttributeError, TypeError) as other:
        problem = f"{stage} was written by {run_dir.writer(stage)}; this is rstar_ray {code_version()} ({other})"
        raise ConfigError("RUN", problem, "replay with the version that wrote it") from other


def _with_staleness(config: RunConfig, run_dir: RunDir, row: Mapping[str, Any]) -> RunConfig:
    """The stage's settings with the --staleness of the step in this row of metrics.jsonl: a stage may resume with
    another. Raises `ConfigError` where nothing on disk says which loss the step had.
    """
    staleness = row.get("staleness")
    if staleness is None:  # a row of an earlier version
        staleness = _staleness_of_launches(config, run_dir, row["step"])
    sleep = config.engine.sleep and not staleness  # which --staleness excludes; the update does not depend on it
    return with_values(config, {"staleness": staleness, "engine.sleep": sleep})


def _staleness_of_launches(config: RunConfig, run_dir: RunDir, step: int) -> int:
    """A staleness with the loss that all launches of the stage had."""
    launches = run_dir.launches(config.stage)
    used = sorted({row["importance_correction"] for row in launches if "importance_correction" in row})
    if config.algorithm.correction != "auto" or used in ([], [config.correction]):
        return config.staleness
    if len(used) > 1:
        problem = f"metrics.jsonl has no staleness, and launches of {config.stage} had corrections {', '.join(used)}"
        raise ConfigError("--step", f"{problem}: the loss of step {step} is unknown", "replay a stage with one loss")
    return int(used == ["sampler"])


def rows_of(recorded: RecordedStep) -> list[TrainingRow]:
    """What the learner is given, by the run's own draw and advantages.

    Raises `ConfigError` where these are not the rollouts that the step was trained on, or not with these advantages: a
    rule has changed since, or reads what is not recorded.
    """
    config, groups = recorded.config, dict[str, list[FinishedRollout]]()
    for index, trajectory in enumerate(recorded.trajectories):
        ref = TrajectoryRef(recorded.trajectories, index)
        finished = FinishedRollout(summary=trajectory.summary, ref=ref)
        groups.setdefault(trajectory.summary.group_id, []).append(finished)
    rows = training_rows([resample(group, config, recorded.step) for group in groups.values()], config)
    chosen = {row.rollout_id for row in rows}
    if odd := chosen ^ recorded.handed_over:
        raise ConfigError(
            "--step",
            f"resampling chooses {len(chosen)} rollouts now and chose {len(recorded.handed_over)} then, "
            f"such as {min(odd)} only once",
            OF_THE_RUN
            if ":" in config.algorithm.resample
            else "replay with the version of rstar_ray that wrote the run",
        )
    for row in rows:
        now = mean_advantage(row.advantage)
        then = recorded.advantages.get(row.rollout_id, now)
        if abs(now - then) > ALIKE * max(1.0, abs(then)):
            raise ConfigError(
                f"--algorithm.advantage {config.algorithm.advantage}",
                f"it gives {now:.4g} for {row.rollout_id} now and gave {then:.4g} then",
                OF_THE_RUN,
            )
    return rows


def export_step(recorded: RecordedStep, path: Path) -> int:
    """The rows handed to the step's learner as tensors in a safetensors file, for other software; returns their number
    B.

    Padded on the right to the longest row, L tokens: `input_ids` [B, L] int64, `loss_mask` [B, L] bool (True where the
    policy sampled), `rollout_logprobs` [B, L] float32 (of the token at the same place, by the engine; recorded to four
    decimals), `advantages` [B, L] float32, `lengths` [B] int64, `rewards` [B] float32, `groups` [B] int64 (the number
    of the row's prompt), `updates` [B] int64 (the row's update in the step, from 0; -1 for a row that was not trained
    on). Token weights are normalised within each update.
    What is padded or not sampled is 0. The file's metadata has the settings of the loss, with `updates_per_step`, and
    the rollout ids as JSON. Raises as `rows_of`, and `ConfigError` for a path that cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    rows = rows_of(recorded)
    tokens = [rl_row(recorded.trajectories[row.ref.index], row.advantage, 1.0, row.line) for row in rows]
    shape = (len(rows), max((len(row.token_ids) for row in tokens), default=0))
    arrays = {
        "input_ids": np.zeros(shape, np.int64),
        "loss_mask": np.zeros(shape, np.bool_),
        "rollout_logprobs": np.zeros(shape, np.float32),
        "advantages": np.zeros(shape, np.float32),
        "lengths": np.array([len(row.token_ids) for row in tokens], np.int64),
        "rewards": np.array([recorded.trajectories[row.ref.index].summary.reward for row in rows], np.float32),
        "groups": np.unique([row.group_id for row in rows], return_inverse=True)[1].astype(np.int64),
        "updates": np.array(_updates(rows, recorded), np.int64),
    }
    for place, row in enumerate(tokens):
        length = len(row.token_ids)
        arrays["input_ids"][place, :length] = row.token_ids
        arrays["loss_mask"][place, :length] = row.loss_mask
        assert row.rollout_logprobs is not None
        arrays["rollout_logprobs"][place, :length] = row.rollout_logprobs
        arrays["advantages"][place, :length][row.loss_mask] = row.advantage
    settings = {
        "algorithm": asdict(recorded.config.loss),
        "temperature": recorded.config.rollout.policy_temperature,
        "max_context_tokens": recorded.config.engine.max_context_tokens,  # the length of normalisation `constant`
        "updates_per_step": recorded.config.optimizer.updates_per_step,
    }
    names = json.dumps([row.rollout_id for row in rows])
    try:
        save_file(arrays, path, metadata={"rollout_ids": names, "settings": json.dumps(settings)})
    except SafetensorError as failed:
        raise ConfigError("--export", str(failed), "name a file in an existing folder") from failed
    return len(rows)


def _updates(rows: Sequence[TrainingRow], recorded: RecordedStep) -> list[int]:
    """Each row's update in the step, from 0; -1 for a row that was excluded, or whose update was not applied."""
    reasons = recorded.left_out
    above = [reason for reason in reasons.values() if ABOVE_CONTEXT in reason]
    longest = min((int(reason.rpartition(" ")[2]) for reason in above), default=inf)
    refused = {name for name, reason in reasons.items() if reason != NO_SAMPLED_TOKEN and ABOVE_CONTEXT not in reason}
    usable = [index for index, row in enumerate(rows) if row.num_sampled_tokens and row.num_tokens <= longest]
    parts = updates_of_groups(
        [rows[index].num_tokens for index in usable],
        [rows[index].group_id for index in usable],
        recorded.config.optimizer.updates_per_step,
    )
    found = [-1] * len(rows)
    for number, part in enumerate(parts):
        if not any(rows[usable[place]].rollout_id in refused for place in part):
            for place in part:
                found[usable[place]] = number
    return found


async def repeat_update(recorded: RecordedStep, learner: Learner) -> list[Compared]:
    """Load the state before the step into a started learner, repeat the update, and compare. Raises as `rows_of`."""
    config, rows = recorded.config, rows_of(recorded)
    if not rows:
        raise ConfigError("--step", f"step {recorded.step} trained on nothing", "choose another")
    if recorded.before is not None:
        await learner.load_checkpoint(recorded.before)
    else:
        await learner.set_policy(Path(config.model))
    if recorded.step == 1 and config.fresh_optimizer:
        await learner.reset_optimizer()
    return compared(recorded.row, await learner.train_rl(rows, rl_learning_rate(config, recorded.step)))


def compared(row: Mapping[str, Any], now: UpdateResult) -> list[Compared]:
    """Every metric that both updates have."""
    return [
        Compared(name=name, then=float(row[name]), now=float(now.metrics[name]))
        for name in COMPARED
        if row[name] is not None and name in now.metrics
    ]


def _row(path: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    rows = read_rows(path) if path.exists() else []
    for row in rows:
        if all(row.get(name) == value for name, value in wanted.items()):
            return row
    labels = " ".join(f"{name} {value}" for name, value in wanted.items())
    raise ConfigError("--step", f"{path} has no row of {labels}", "choose a step that the run has completed")


def _before(run_dir: RunDir, config: RunConfig, step: int) -> Path | None:
    """The learner's state before the step. Raises `ConfigError` where it no longer exists."""
    if step == 1:
        if config.model:
            return None
        found: Sequence[Any] = [previous_checkpoint(run_dir, config.stage)]
    else:
        found = [one for one in run_dir.checkpoints(config.stage) if one.step == step - 1]
    if not found or found[0] is None or damage(found[0].path) is not None:
        raise ConfigError(
            "--step",
            f"{run_dir.checkpoints_path} has no undamaged checkpoint of {config.stage} before step {step}",
            "choose a step after a checkpoint (--help lists how), or keep more with --checkpoint.keep",
        )
    return found[0].path
