"""Where a stage stands between two steps, and whether it should continue."""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rstar_ray.algorithm.stage_end import REMEMBERED, StepSigns, Until, reached
from rstar_ray.config import AlgorithmConfig, RunConfig
from rstar_ray.data.order import DataPosition
from rstar_ray.errors import ConfigError
from rstar_ray.run_dir.durable import read_object
from rstar_ray.run_dir.metrics import OLD_NAMES, StepMetrics

_MORE = "draw more rollouts (--algorithm.rollouts-per-prompt)"
LARGER_GROUPS = {
    "paper": f"{_MORE}, or keep more failures (--algorithm.least-failures)",
    "release": f"{_MORE}, or keep more failures (--algorithm.min-zero-reward-trace-num)",
    "random": "or keep more rollouts (--algorithm.keep)",
    "none": "or draw more rollouts (--algorithm.keep)",
}
"""For each resampling rule, the options that make it likelier that the rewards of a kept group differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgress:
    """State of a stage between two steps. With the learner's checkpoint it is all that a resume needs.

    Every other generator is derived from (seed, stage, purpose, step) when it is needed.
    """

    step: int = 0  # steps done
    policy_version: int = 0  # steps that changed the run's first policy, SFT's included
    position: DataPosition = field(default_factory=DataPosition)
    signs: tuple[StepSigns, ...] = ()  # of the latest steps, for the stage's end
    empty_steps: int = 0  # consecutive latest steps without a learning signal
    low_ess_steps: int = 0  # consecutive latest steps with an effective sample size below --algorithm.min-ess
    ended: str = ""  # why the stage has reached its end before its steps are done
    data: str = ""  # digest of its data (data/order.py); empty before its first step

    def after(
        self, metrics: StepMetrics, position: DataPosition, until: Until, *, warmup_steps: int, min_ess: float = 0.0
    ) -> "StageProgress":
        """The state after this step."""
        ess = metrics.values.get("ess_tokens", 1.0)  # missing where nothing was trained on
        latest = StepSigns(
            reward_mean=metrics["reward_mean"],
            frac_truncated=metrics["frac_truncated"],
            frac_all_correct=metrics["frac_all_correct"],
        )
        signs = (*self.signs, latest)[-REMEMBERED:]
        return StageProgress(
            step=metrics.step,
            policy_version=int(metrics["policy_version"]),
            position=position,
            signs=signs,
            empty_steps=0 if metrics["groups_kept"] else self.empty_steps + 1,
            low_ess_steps=self.low_ess_steps + 1 if ess < min_ess else 0,
            ended=reached(until, signs, steps_since_warmup=metrics.step - warmup_steps),
            data=self.data,
        )

    def as_json(self) -> dict[str, Any]:
        saved = asdict(self)
        if not self.position.visits:
            del saved["position"]["visits"]
        return saved

    @classmethod
    def read(cls, checkpoint: Path) -> "StageProgress":
        """Read from a checkpoint's folder. Raises `ConfigError` with the file's name where a field is missing."""
        names = {one.name for one in fields(cls)} - {"low_ess_steps"}  # older checkpoints do not have it
        return cls.from_json(read_object(checkpoint / "progress.json", *names))

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "StageProgress":
        return cls(
            step=saved["step"],
            policy_version=saved["policy_version"],
            position=DataPosition.from_json(saved["position"]),
            signs=tuple(map(_signs, saved["signs"])),
            empty_steps=saved["empty_steps"],
            low_ess_steps=saved.get("low_ess_steps", 0),
            ended=saved["ended"],
            data=saved["data"],
        )


def _signs(saved: dict[str, float]) -> StepSigns:
    return StepSigns(**{OLD_NAMES.get(name, name): value for name, value in saved.items()})


def refuse_other_data(config: RunConfig, progress: StageProgress, data: str) -> None:
    """Raise `ConfigError` where a resumed stage would draw from other data: its position is meaningless there.

    `data` is the digest of the current data.
    """
    if progress.step == 0 or progress.data == data:
        return
    option, path, kind, back = "--data.train", config.data.train, "problems", "as it was"
    if config.data.train:
        back += " (a stage begun by 0.1: without the columns that became metadata since)"
    if config.stage == "sft":
        option, path, kind, back = "--sft.data", config.sft.data, "conversations", "as it was"
    raise ConfigError(
        option,
        f"{config.stage} reached step {progress.step} with other {kind} than {path or 'scale tiny'} has now, and "
        "would draw some twice and others never",
        f"restore the file {back}, delete {config.stage} (python -m rstar_ray.run_dir forget), or name a new "
        "--run-dir, with a policy of this one as its --model",
    )


def nothing_to_learn(metrics: StepMetrics, empty_steps: int, algorithm: AlgorithmConfig) -> str:
    """The message for a run that ends because its batches stay empty, with a hint."""
    right, wrong = (f"{100 * share:.0f} %" for share in (metrics["frac_all_correct"], metrics["frac_all_wrong"]))
    hint = "give harder problems (--drop-solved)"
    if metrics["frac_all_wrong"] > metrics["frac_all_correct"]:
        hint = "give easier problems or larger budgets (--rollout.max-response-tokens, --rollout.max-turns)"
    if ":" in algorithm.resample and metrics["frac_all_correct"] + metrics["frac_all_wrong"] < 1:
        hint = f"let --algorithm.resample {algorithm.resample} keep rollouts of different reward"
    return (
        f"{metrics.stage}: {empty_steps} steps in a row, to step {metrics.step}, had no group whose kept rewards "
        f"differ; in the last one {right} of the groups are all right, {wrong} all wrong; {hint}, "
        f"{LARGER_GROUPS.get(algorithm.resample, _MORE)}"
    )
