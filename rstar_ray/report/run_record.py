"""Reads a run directory: steps on one axis over all RL stages, evaluations, launches, trajectories.

It needs neither the run's processes nor its model, and reads active and crashed runs too.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

from rstar_ray.errors import ConfigError
from rstar_ray.run_dir.durable import read_object
from rstar_ray.run_dir.folder import RunDir, flatten, with_current_names
from rstar_ray.run_dir.ledger import LEDGER
from rstar_ray.run_dir.metrics import OLD_NAMES, PHASES, current_row
from rstar_ray.run_dir.tail import GrowingRows
from rstar_ray.telemetry.registry import combined, is_step_metric

Row = dict[str, Any]
TABLES = {
    "metrics.jsonl": ("stage", "step", "step_s"),
    "evaluations.jsonl": ("stage", "step", "set"),
    "launches.jsonl": ("started_at", "versions"),
    LEDGER: ("stage", "step", "ids"),
}
"""A run's tables, and the required keys of their rows."""
TRAJECTORY = ("rollout_id", "group_id", "problem_id", "problem", "answer", "reward", "stop_reason", "turns")
"""Required keys of a trajectory."""
ALGORITHMS = {"paper": "GRPO-RoC", "release": "GRPO-RoC, released rule", "none": "plain GRPO"}


@dataclass(frozen=True, slots=True)
class StageSpan:
    """The steps (start, end] of an RL stage on the axis of all RL steps."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The data of one run that a report needs."""

    path: Path
    config: dict[str, Row]  # by stage
    sft: list[Row]
    steps: list[Row]  # of all RL stages, each with its `rl_step`
    spans: tuple[StageSpan, ...]
    evaluations: list[Row]  # each with its `rl_step`, oldest first; one per stage, step and set
    launches: list[Row]
    finished: list[Row]  # stages that ended, in the order they did
    faults: tuple[str, ...] = ()  # rows that could not be read, a line each

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def heldout(self) -> list[Row]:
        """Held-out evaluations of this run's policies; without any, the last evaluation of another policy."""
        rows = [row for row in self.evaluations if row["set"] == "held-out"]
        stages = {"sft", *(span.name for span in self.spans)}
        return [row for row in rows if row["stage"] in stages] or rows[-1:]

    @property
    def algorithm(self) -> str:
        """The algorithm of the RL stages, as text."""
        known = {ALGORITHMS.get(str(value), str(value)) for value in self.setting("algorithm.resample")}
        return " / ".join(sorted(known)) or "GRPO"

    def column(self, name: str) -> list[float]:
        """One metric of every RL step; NaN if it has no value."""
        return [math.nan if row[name] is None else float(row[name]) for row in self.steps]

    def setting(self, name: str) -> list[Any]:
        """The distinct values of a dotted setting over the stages, in their order."""
        values: list[Any] = []
        for stage, config in self.config.items():
            value = flatten(config).get(name)
            of_rl = name.startswith("algorithm.") or name == "prompts_per_step"  # of SFT: its batch of conversations
            rl_only = of_rl and self.spans and stage not in [span.name for span in self.spans]
            if value not in (None, "") and value not in values and not rl_only:
                values.append(value)
        return values

    def rollouts_drawn(self) -> list[int]:
        """Rollouts per prompt; plain GRPO draws as many as it keeps. Empty if only some stages are plain GRPO."""
        plain = [rule == "none" for rule in self.setting("algorithm.resample")]
        if len(set(plain)) > 1:
            return []
        return self.setting(f"algorithm.{'keep' if any(plain) else 'rollouts_per_prompt'}")


class RunFiles:
    """A run directory's tables, read as they grow."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self._metrics, self._evaluations, self._launches, self._ledger = (
            GrowingRows(self.path / name, *needs) for name, needs in TABLES.items()
        )

    def record(self, *, begun: bool = False) -> RunRecord:
        """The current state, without the ledger. `begun` allows a run that has no finished step yet.

        Raises `ConfigError` if there is no run, or one of a newer version.
        """
        tables = (self._metrics, self._evaluations, self._launches, self._ledger)
        for table in tables:
            table.read()
        config_path = self.path / "config.json"
        rows, evaluations = self._metrics.rows, self._evaluations.rows
        if not rows and not evaluations and not (begun and config_path.exists()):
            raise ConfigError(
                "run_dir",
                f"{self.path} holds no metrics and no evaluations",
                "name the directory of a run, or wait until it has begun",
            )
        RunDir(self.path).refuse_newer()
        configs, unread = _configs(config_path)
        finished, unread_ends = _objects(self.path / "finished", "stage", "step", "finished_at")
        steps = [row for row in rows if "reward_mean" in row]
        spans = stage_spans(steps)
        starts = {span.name: span.start for span in spans}
        return RunRecord(
            path=self.path,
            config=configs,
            sft=[current_row(row) for row in rows if "reward_mean" not in row],
            steps=[current_row(row) | {"rl_step": starts[row["stage"]] + row["step"]} for row in steps],
            spans=spans,
            evaluations=_newest_evaluations(evaluations, spans),
            launches=self._launches.rows,
            finished=sorted(finished, key=lambda row: row["finished_at"]),
            faults=(*(fault for table in tables for fault in table.faults), *unread, *unread_ends),
        )

    def ledger(self) -> list[Row]:
        """The status of every rollout, one row per step; the last row of a step that was written twice."""
        self._ledger.read()
        return list({(row["stage"], row["step"]): row for row in self._ledger.rows}.values())


def read_run(path: Path | str) -> RunRecord:
    """Raises `ConfigError` where there is no run."""
    return RunFiles(path).record()


def _configs(path: Path) -> tuple[dict[str, Row], list[str]]:
    """config.json by stage, and reasons why parts of it cannot be used."""
    if not path.exists():
        return {}, []
    try:
        read = read_object(path)
    except ConfigError as unread:
        return {}, [f"{path.name} is ignored: {unread.problem}"]
    stages = {name: with_current_names(config) for name, config in read.items() if isinstance(config, dict)}
    return stages, [f"{path.name}: {name} is not a stage and is ignored" for name in read.keys() - stages.keys()]


def _objects(folder: Path, *names: str) -> tuple[list[Row], list[str]]:
    """The folder's JSON files that have these keys, and reasons why others cannot be used."""
    found: list[Row] = []
    unread: list[str] = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(read_object(path, *names))
        except ConfigError as broken:
            unread.append(f"{folder.name}/{path.name} is ignored: {broken.problem}")
    return found, unread


def read_ledger(run: RunRecord) -> list[Row]:
    """The result of `RunFiles.ledger`."""
    return RunFiles(run.path).ledger()


def stage_spans(steps: Sequence[Row]) -> tuple[StageSpan, ...]:
    """RL stages one after the other, in the order of their first rows."""
    last: dict[str, int] = {}
    for row in steps:
        last[row["stage"]] = max(row["step"], last.get(row["stage"], 0))
    spans: list[StageSpan] = []
    for name, num_steps in last.items():
        start = spans[-1].end if spans else 0
        spans.append(StageSpan(name, start, start + num_steps))
    return tuple(spans)


def _newest_evaluations(rows: Sequence[Row], spans: Sequence[StageSpan]) -> list[Row]:
    """A repeated evaluation replaces the earlier one."""
    newest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        rl_step = _rl_step(row["stage"], row["step"], spans)
        named = {OLD_NAMES.get(name, name): value for name, value in row.items()}
        newest[row["stage"], row["step"], *identity_of(row)] = named | {"rl_step": rl_step}
    return sorted(newest.values(), key=lambda row: row["rl_step"])


IDENTIFYING = ("set", "model", "k", "num_problems", "temperature", "top_p", "max_response_tokens", "max_turns")
"""Settings that identify an evaluation: rows that differ in any of them are listed separately."""


def identity_of(row: Row) -> tuple[Any, ...]:
    """Values of `IDENTIFYING`, and the digest of all other settings that may change answers (rewards, tools, chat,
    seed), from the end of the result file's name. The step in that name is not part of the key: the last row is used.
    """
    digest = Path(row["problems"]).stem.rpartition("-")[2]
    return (*(row[name] for name in IDENTIFYING), digest)


def _rl_step(stage: str, step: int, spans: Sequence[StageSpan]) -> int:
    """Position on the axis: 0 for SFT, the last step for an evaluation outside the stages."""
    for span in spans:
        if span.name == stage:
            return span.start + step
    return 0 if stage == "sft" or not spans else spans[-1].end


@dataclass(frozen=True, slots=True)
class TrajectoryFile:
    """The readable trajectories of one training step or one evaluation."""

    path: Path
    stage: str
    step: int
    problem_set: str  # empty for a training step
    rl_step: int  # 0 before RL

    @property
    def title(self) -> str:
        return f"{stage_title(self.stage)}, {self.problem_set or f'step {self.step}'}"

    def rows(self) -> list[Row]:
        """The complete rows."""
        table = GrowingRows(self.path, *TRAJECTORY)
        table.read()
        return table.rows


def trajectory_files(run: RunRecord) -> list[TrajectoryFile]:
    """Files, oldest first; an evaluation follows the training step whose weights it used."""
    files = _trajectory_files(run)
    return sorted(files, key=lambda file: (file.rl_step, file.problem_set != "", file.path.name))


def unread_files(run: RunRecord, files: Sequence[TrajectoryFile]) -> list[str]:
    """A line for each trajectory file that could not be read, except for files that are still empty."""
    read = {file.path.name for file in files}
    return [
        f"trajectories/{path.name} is ignored: its first line is not a trajectory"
        for path in sorted((run.path / "trajectories").glob("*.jsonl"))
        if path.name not in read and not _just_begun(path)
    ]


def _just_begun(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as lines:
        return not lines.readline().endswith(b"\n")


def _trajectory_files(run: RunRecord) -> Iterator[TrajectoryFile]:
    """Files named `<stage>-step-<step>` or `<stage>-<problem set>`, whose rows have the stage and step."""
    for path in (run.path / "trajectories").glob("*.jsonl"):
        try:
            with path.open("rb") as lines:
                first = lines.readline()
            if not first.endswith(b"\n"):
                continue  # empty, or torn in its first row
            row = json.loads(first)
            stage, step = row["stage"], row["step"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        rest = path.stem.removeprefix(f"{stage}-")
        problem_set = "" if re.fullmatch(r"step-\d+", rest) else rest
        yield TrajectoryFile(path, stage, step, problem_set, _rl_step(stage, step, run.spans))


def stage_title(stage: str) -> str:
    """The display name of a stage such as `stage1`."""
    return "SFT" if stage == "sft" else re.sub(r"^stage(\d+)$", r"Stage \1", stage)


def seconds_by_phase(steps: Sequence[Row]) -> dict[str, list[float]]:
    """Seconds of every phase in each step, bottom layer first; `other_s` is the remainder of the step."""
    layers: dict[str, list[float]] = {phase: [float(row[phase]) for row in steps] for phase in PHASES}
    layers["other_s"] = [max(0.0, row["step_s"] - sum(row[phase] for phase in PHASES)) for row in steps]
    return layers


def pooled(steps: Sequence[Row]) -> dict[str, float]:
    """Combine the metrics of several steps, each by its reduction in the registry.

    The mean of `tokens_per_s` is weighted by time, so that it is the throughput over all these steps.
    """
    names = dict.fromkeys(name for row in steps for name, value in row.items() if isinstance(value, int | float))
    known = [name for name in names if is_step_metric(name)]
    values = combined([{name: row[name] for name in known if row.get(name) is not None} for row in steps])
    if timed := [row for row in steps if row.get("tokens_per_s") and row.get("tokens_generated")]:
        speeds, tokens = ([row[name] for row in timed] for name in ("tokens_per_s", "tokens_generated"))
        values["tokens_per_s"] = harmonic_mean(speeds, tokens)  # tokens / speed is the step's time
    return values


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over `window` values, leaving NaN out; shorter at the ends."""
    means: list[float] = []
    for position in range(len(values)):
        reach = min(window // 2, position, len(values) - 1 - position)
        near = [value for value in values[position - reach : position + reach + 1] if not math.isnan(value)]
        means.append(sum(near) / len(near) if near else math.nan)
    return means


def smoothed(values: Sequence[float]) -> list[float]:
    """A smoothed series of a metric, with the same smoothing everywhere."""
    return smooth(values, max(3, len(values) // 12))


def ends(values: Sequence[float]) -> tuple[float, float] | None:
    """Means of the first and last 5 values that are not NaN (fewer, at most a third, in a short series)."""
    known = [value for value in values if not math.isnan(value)]
    if len(known) < 2:
        return None
    width = max(1, min(5, len(known) // 3))
    return sum(known[:width]) / width, sum(known[-width:]) / width
