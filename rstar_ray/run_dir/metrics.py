"""The metrics of one step, and the log that writes them to `metrics.jsonl` and every sink.

Names, units and meanings are those of `rstar_ray/telemetry/registry.py`.
"""

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rstar_ray.algorithm.update import UpdateResult
from rstar_ray.reward.value import SOLVED
from rstar_ray.run_dir.best_effort import best_effort
from rstar_ray.run_dir.durable import cut_rows, to_row
from rstar_ray.run_dir.sinks import EXTERNAL, Sink, TensorBoard
from rstar_ray.telemetry.registry import STEP_METRICS, step_metric
from rstar_ray.trajectory import StopReason, TrajectorySummary

log = logging.getLogger(__name__)

PHASES = ("generate_s", "tools_s", "verify_s", "learn_s", "publish_s")
"""Parts of a step; `other_s` is the remainder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One step of a stage. A metric that has no meaning in this step is missing in `values`."""

    stage: str
    step: int  # from 1, within the stage
    values: Mapping[str, float]  # by the registry's names
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])  # text for the report, as JSON values

    def __post_init__(self) -> None:
        for name in self.values:
            step_metric(name)

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def plus(self, values: Mapping[str, float], **details: Any) -> "StepMetrics":
        """The same step with more metrics and details."""
        return replace(self, values={**self.values, **values}, details={**self.details, **details})

    def as_row(self) -> dict[str, Any]:
        """The row of `metrics.jsonl`."""
        return {"stage": self.stage, "step": self.step, **self.values, **self.details}


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerStats:
    """What the balancer did in one step."""

    values: Mapping[str, float]  # the registry's `balancer/...`
    rule: str
    quarantined: tuple[str, ...] = ()  # replicas that were restarted for a wrong report, each with the reason
    faults: tuple[str, ...] = ()  # counters that were not zero at the step's end
    held_s: Mapping[str, float] = field(default_factory=dict[str, float])  # time its queue was blocked, by reason

    @property
    def details(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("rule", "quarantined", "faults", "held_s")}


def step_metrics(
    summaries: Sequence[TrajectorySummary],
    *,
    stage: str,
    step: int,
    policy_version: int,
    learner_version: int,
    kept_ids: Collection[str],
    left_out_ids: Collection[str] = (),
    seconds: Mapping[str, float],
    update: UpdateResult | None,
    staleness: int = 0,
    last_ended: str = "",
) -> StepMetrics:
    """The metrics of an RL step with all its rollouts in `summaries`.

    `learner_version` is that of the weights that the update starts from, `policy_version` that after the step.
    `kept_ids` are the rollout ids handed to the learner, `left_out_ids` those of them that it did not train on.
    `seconds` has the wall times that the driver measured: `rollout_s`, in which the step waited for its rollouts,
    `learn_s`, `publish_s`, `step_s`. `last_ended` is the id of the rollout that the step waited for.
    Raises `ValueError` when a kept id is not among the summaries.
    """
    kept, groups = set(kept_ids), _by_group(summaries)
    groups_kept = len({summary.group_id for summary in summaries if summary.rollout_id in kept})
    if unknown := kept - {summary.rollout_id for summary in summaries}:
        raise ValueError(f"kept_ids: {sorted(unknown)[:3]} are not among the step's {len(summaries)} rollouts")
    trained = [summary for summary in summaries if summary.rollout_id in kept - set(left_out_ids)]
    tokens_generated = sum(summary.num_sampled_tokens for summary in summaries)
    sampled = [summary for summary in summaries if summary.num_sampled_tokens]
    correct = [summary for summary in summaries if is_correct(summary)]
    calls_in_correct = sum(summary.num_calls for summary in correct)
    errors = {}
    if calls_in_correct:
        errors = {"tool_error_rate_correct": sum(summary.num_failed for summary in correct) / calls_in_correct}
    rollout_s = seconds["rollout_s"]
    sampling_s = seconds["step_s"] if staleness else rollout_s  # with staleness, engines sample all the time
    seconds = {**seconds, **share_rollout_time(rollout_s, summaries)}
    values: dict[str, float] = {
        "reward_mean": _mean([summary.reward for summary in summaries]),
        "pass_rate": _mean([float(is_correct(summary)) for summary in summaries]),
        "frac_all_correct": _mean([float(all(correct)) for correct in groups.values()]),
        "frac_all_wrong": _mean([float(not any(correct)) for correct in groups.values()]),
        "frac_groups_dropped": 1 - groups_kept / len(groups) if groups else 0.0,
        "groups_kept": groups_kept,
        "groups_dropped": len(groups) - groups_kept,
        **errors,
        "calls_in_correct": calls_in_correct,
        "response_tokens_mean": _mean([summary.num_response_tokens for summary in summaries]),
        "frac_truncated": _mean([float(summary.truncated) for summary in summaries]),
        "frac_max_turns": _mean([float(summary.stop_reason is StopReason.MAX_TURNS) for summary in summaries]),
        "turns_mean": _mean([summary.num_turns for summary in summaries]),
        "calls_mean": _mean([summary.num_calls for summary in summaries]),
        **calls_by_tool(summaries),
        **reward_components(summaries),
        "rollouts": len(summaries),
        "trained_trajectories": len(trained),
        "tokens_generated": tokens_generated,
        "tokens_per_s": tokens_generated / sampling_s if sampling_s > 0 else 0.0,
        "new_lines": sum(max(0, len(summary.lines) - 1) for summary in summaries),
        "restarts": sum(summary.restarts for summary in summaries),
        "judge_retries": sum(summary.judge_retries for summary in summaries),
        "policy_version": policy_version,
        "policy_version_min": min((summary.policy_version_min for summary in sampled), default=policy_version),
        "policy_version_max": max((summary.policy_version_max for summary in sampled), default=policy_version),
        **token_ages(trained, learner_version, staleness),
        **seconds,
        "other_s": max(0.0, seconds["step_s"] - sum(seconds[phase] for phase in PHASES)),
        **({} if update is None else update.metrics),
    }
    details = {"longest": longest_rollout(summaries), "last_ended": last_ended, "staleness": staleness}
    return StepMetrics(stage=stage, step=step, values=values, details=details)


def token_ages(summaries: Sequence[TrajectorySummary], learner_version: int, staleness: int = 0) -> dict[str, float]:
    """Age of the sampled tokens: mean, largest, and the share of each age up to `staleness` or the largest.

    The age is the number of training steps by which their weights are behind the learner's. Empty without a token.
    """
    tokens: Counter[int] = Counter()
    for summary in summaries:
        for version, count in summary.version_tokens:
            tokens[learner_version - version] += count
    if not (total := tokens.total()):
        return {}
    return {
        "token_age_mean": sum(age * count for age, count in tokens.items()) / total,
        "token_age_max": max(tokens),
        # an age without tokens too: Prometheus would otherwise keep its value of an earlier step
        **{f"token_age_frac/{age}": tokens[age] / total for age in sorted({*range(staleness + 1), *tokens})},
    }


def calls_by_tool(summaries: Sequence[TrajectorySummary]) -> dict[str, float]:
    """For each called tool, calls per rollout and the share of failed calls."""
    calls, failed = Counter[str](), Counter[str]()
    for summary in summaries:
        for tool, outcome in zip(summary.tools, summary.outcomes, strict=False):  # no tools: not recorded
            calls[tool] += 1
            failed[tool] += outcome.failed
    tools = sorted(filter(None, calls))
    return {f"tool_calls/{tool}": calls[tool] / len(summaries) for tool in tools} | {
        f"tool_error_rate/{tool}": failed[tool] / calls[tool] for tool in tools
    }


def reward_components(summaries: Sequence[TrajectorySummary]) -> dict[str, float]:
    """The mean of each component over the rollouts that have it."""
    values: dict[str, list[float]] = {}
    for summary in summaries:
        for name, value in summary.reward_components.items():
            values.setdefault(name, []).append(value)
    return {f"reward_component/{name}": _mean(found) for name, found in sorted(values.items())}


def longest_rollout(summaries: Sequence[TrajectorySummary]) -> dict[str, Any] | None:
    """The rollout that took longest, without its wait for a replica; None without a rollout."""
    if not summaries:
        return None
    longest = max(summaries, key=lambda summary: summary.generate_s + summary.tool_s + summary.verify_s)
    return {
        "rollout_id": longest.rollout_id,
        "tokens": longest.num_response_tokens,
        "turns": longest.num_turns,
        "generate_s": round(longest.generate_s, 4),
        "tool_s": round(longest.tool_s, 4),
        "verify_s": round(longest.verify_s, 4),
        "turn_s": [(round(generate_s, 3), round(tool_s, 3)) for generate_s, tool_s in longest.turn_s],
        "placements": [asdict(placement) for placement in longest.placements],
    }


def _by_group(summaries: Sequence[TrajectorySummary]) -> dict[str, list[bool]]:
    """Whether each sibling is correct, by group."""
    groups: dict[str, list[bool]] = {}
    for summary in summaries:
        groups.setdefault(summary.group_id, []).append(is_correct(summary))
    return groups


def is_correct(summary: TrajectorySummary) -> bool:
    """Whether the rollout counts as solved; see `rstar_ray.reward.value`."""
    return summary.reward >= SOLVED


def share_rollout_time(rollout_s: float, summaries: Sequence[TrajectorySummary]) -> dict[str, float]:
    """Divide the wall seconds of the rollout phase among generation, tools and verification.

    Rollouts overlap, so no phase has separate wall seconds; each gets the share that the
    rollouts, summed, spent in it. The three add up to `rollout_s`.
    """
    spent_s = {
        "generate_s": sum(summary.generate_s for summary in summaries),
        "tools_s": sum(summary.tool_s for summary in summaries),
        "verify_s": sum(summary.verify_s for summary in summaries),
    }
    total_s = sum(spent_s.values())
    if total_s <= 0:
        return {"generate_s": rollout_s, "tools_s": 0.0, "verify_s": 0.0}
    return {phase: rollout_s * seconds / total_s for phase, seconds in spent_s.items()}


def progress_line(row: StepMetrics, num_steps: int) -> str:
    """One line for the console: the metrics that have a `console` format, in the registry's order."""
    shown = [
        metric.console.format(row.values[metric.name])
        for metric in STEP_METRICS
        if metric.console and metric.name in row.values
    ]
    return " | ".join([f"{row.stage} {row.step:>{len(str(num_steps))}}/{num_steps}", *shown])


class MetricsLog:
    """Appends the steps of one stage to `metrics.jsonl` and to every sink, and logs a line for each.

    Opening it cuts the rows that a stopped run wrote after `after_step`, the step of the checkpoint from which the
    stage resumes (0 for a fresh start), so no step is ever logged twice. Rows of other stages stay. Each row is on
    disk when `write` returns. A sink that fails is logged once, and the run continues.
    """

    def __init__(
        self,
        run_path: Path,
        *,
        stage: str,
        after_step: int,
        num_steps: int,
        print_every: int = 1,
        projects: Mapping[str, str] | None = None,
    ) -> None:
        """`projects`: project by external sink (`sinks.projects`); TensorBoard's files are always written."""
        self._path = run_path / "metrics.jsonl"
        self._run_path = run_path
        self._projects = projects or {}
        self._stage = stage
        self._after_step = after_step
        self._num_steps = num_steps
        self._print_every = print_every
        self._entered = False
        self._file: TextIO | None = None  # None after it could not be opened
        self._sinks: dict[str, Sink] = {}

    def __enter__(self) -> Self:
        self._entered = True
        with best_effort(f"{self._path.name} of {self._stage}"):
            cut_rows(self._path, stage=self._stage, after_step=self._after_step)
            self._file = self._path.open("a", encoding="utf-8")
        with best_effort("TensorBoard's file"):
            folder = self._run_path / "tensorboard" / self._stage
            self._sinks["TensorBoard's file"] = TensorBoard(folder, first_step=self._after_step + 1)
        for option, project in self._projects.items():
            with best_effort(option):
                self._sinks[option] = EXTERNAL[option](self._run_path, project=project, stage=self._stage)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._file is not None:
            with best_effort(f"the end of {self._path.name}"):
                self._file.close()
        for name, sink in self._sinks.items():
            with best_effort(f"the end of {name}"):
                sink.close()

    def write(self, row: StepMetrics) -> None:
        """Log one step; steps must come in order, each once."""
        assert self._entered, "MetricsLog is used inside `with`"
        assert row.stage == self._stage, f"a row of {row.stage} in the log of {self._stage}"
        assert row.step > self._after_step, f"step {row.step} of {row.stage} is already logged"
        self._after_step = row.step
        with best_effort(f"step {row.step} in {self._path.name}"):
            if self._file is not None:
                self._file.write(to_row(row.as_row()))
                self._file.flush()  # a row that could not be written stays in the buffer, before the next row
        sinks, self._sinks = self._sinks, {}
        for name, sink in sinks.items():
            with best_effort(f"{name} from step {row.step} on"):
                sink.write(row.step, row.values)
                self._sinks[name] = sink  # a sink that failed is not called again
        if row.step % self._print_every == 0 or row.step in (1, self._num_steps) or "val_loss" in row.values:
            log.info(progress_line(row, self._num_steps))


OLD_NAMES = {
    "share_truncated": "frac_truncated",
    "share_max_turns": "frac_max_turns",
    "share_all_right": "frac_all_correct",
    "share_all_wrong": "frac_all_wrong",
    "groups_equal_dropped": "groups_dropped",
    "tool_error_share": "tool_error_rate",
    "tool_error_share_correct": "tool_error_rate_correct",
    "clip_share": "clip_frac",
    "before_s": "inter_step_s",
    "balancer/waiting_most": "balancer/queue_len_max",
    "balancer/in_flight_most": "balancer/in_flight_max",
    "balancer/kv_used_share": "balancer/kv_util_mean",
    "balancer/kv_used_share_most": "balancer/kv_util_max",
    "balancer/kv_reserved_share": "balancer/kv_reserved_mean",
    "balancer/kv_reserved_share_most": "balancer/kv_reserved_max",
    "balancer/preemptions": "balancer/num_preemptions",
    "balancer/moves": "balancer/num_moves",
    "balancer/recomputed_tokens": "balancer/num_recomputed_tokens",
    "balancer/risk": "balancer/preemption_risk",
}
"""Names in rows of `metrics.jsonl` and `evaluations.jsonl` written before 25 November 2026, and current names."""
OLD_SECTIONS = ("balancer", "publish", "memory_bytes")
"""Objects in such rows whose numbers now have separate keys: `publish/load_s`."""


def current_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `metrics.jsonl` of any version, with current names. A metric without a value in this step is None."""
    flat = {name: value for name, value in row.items() if name not in OLD_SECTIONS}
    for section in OLD_SECTIONS:
        inside: Mapping[str, Any] = row.get(section) or {}
        flat |= {f"{section}/{name}": value for name, value in inside.items() if isinstance(value, int | float)}
    named = {OLD_NAMES.get(name, name): value for name, value in flat.items()}
    text: dict[str, Any] = dict(row.get("balancer") or {})
    balancer = {name: text[name] for name in ("rule", "faults", "held_s") if name in text}
    if balancer:
        balancer["quarantined"] = text.get("quarantined", text.get("set_aside", ()))
    empty = {metric.name: None for metric in STEP_METRICS if len(metric.labels) == 1}
    return empty | {"longest": None, "last_ended": ""} | named | {"balancer": balancer or None}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
