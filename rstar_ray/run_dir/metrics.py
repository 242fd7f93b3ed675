"""The figures of one step, and the log that keeps and shows them."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rstar_ray.algorithm.update import UpdateFigures
from rstar_ray.reward.value import SOLVED
from rstar_ray.run_dir.best_effort import best_effort
from rstar_ray.run_dir.durable import cut_rows, to_row
from rstar_ray.run_dir.sinks import Sink, TensorBoard, WeightsAndBiases
from rstar_ray.trajectory import Placement, StopReason, TrajectorySummary

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimings:
    """Wall seconds of a step's phases, as the driver's clock saw them."""

    rollout_s: float  # first submission to last verified trajectory
    learn_s: float
    publish_s: float
    step_s: float  # the whole step; what the phases leave over is the driver's own


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFigures:
    """What the balancer did in one step; shares are of all replicas' KV caches together."""

    rule: str
    waiting_most: int
    in_flight_most: int
    kv_used_share: float  # mean, as engines report it
    kv_used_share_most: float
    kv_reserved_share: float  # mean of what residents are counted on to need, now or later
    kv_reserved_share_most: float
    preemptions: int
    moves: int
    recomputed_tokens: int  # contexts that went on elsewhere, and of preempted rollouts, as far as can be told
    wait_p50_s: float  # submission to grant
    wait_p99_s: float
    risk: float = 0.0  # share of rollouts that the rule lets engines preempt; 0 where it does not ask
    set_aside: tuple[str, ...] = ()  # replicas that get no more work, with the reason
    faults: tuple[str, ...] = ()  # counters that were not back to zero at the step's end
    held_s: Mapping[str, float] = field(default_factory=dict[str, float])  # that its queue stood still, by what held it


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishFigures:
    """Where the time of one version's way from the learner to the engines went; the slowest replica counts."""

    gather_s: float  # the ranks' part: gathered, laid side by side, summed up
    move_s: float  # into the shared memory of an engine's node
    load_s: float  # an engine's decoding stood still
    num_bytes: int
    copies: int  # laid out in shared memory: one a node


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestRollout:
    """The rollout of a step that took most seconds of its own; what it waited for a place is not among them."""

    rollout_id: str
    tokens: int  # after the prompt
    turns: int
    generate_s: float
    tool_s: float
    verify_s: float
    turn_s: tuple[tuple[float, float], ...] = ()  # of every turn: generating, in tools
    placements: tuple[Placement, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One RL step. `None` where a figure has no meaning: no correct call to divide by, no update taken.

    Means are over all rollouts of the step, before resampling; `generate_s`, `tools_s` and
    `verify_s` share out the rollout phase (see `share_rollout_time`), so the phases add up to
    at most `step_s`.
    """

    stage: str
    step: int  # from 1, within the stage
    policy_version: int  # after the step's publish
    reward_mean: float
    pass_rate: float  # share of rollouts with a reward of 1 or more
    tool_error_share_correct: float | None  # failed calls / calls, inside correct trajectories
    calls_in_correct: int  # what it divides by, to pool steps
    response_tokens_mean: float
    share_truncated: float
    turns_mean: float
    calls_mean: float
    share_all_right: float  # of groups, before resampling: nothing is left to learn from them
    share_all_wrong: float
    groups_kept: int
    groups_equal_dropped: int  # no reward differs among the kept siblings
    rollouts: int
    trained_trajectories: int
    tokens_generated: int  # sampled by the policy; tool text is not
    tokens_per_s: float  # tokens_generated per second of the rollout phase
    generate_s: float
    tools_s: float
    verify_s: float
    learn_s: float
    publish_s: float
    step_s: float
    loss: float | None = None  # these as in `UpdateFigures`
    grad_norm: float | None = None
    entropy: float | None = None
    clip_share: float | None = None
    logprob_diff_mean: float | None = None
    logprob_diff_max: float | None = None
    lr: float | None = None
    ratio_mean: float | None = None
    ratio_max: float | None = None
    kl: float | None = None
    correction_mean: float | None = None
    old_logprobs_drift: float | None = None
    share_max_turns: float = 0.0  # ended by --rollout.max-turns or --tools.max-environment-turns
    policy_version_min: int = 0  # of those that sampled the step's tokens: older ones are stale
    policy_version_max: int = 0
    restarts: int = 0  # rollouts begun again because a tool had lost its state
    judge_retries: int = 0  # comparisons and reward functions that hung or crashed, and were asked again
    balancer: PlacementFigures | None = None
    longest: LongestRollout | None = None
    memory_bytes: Mapping[str, int] = field(default_factory=dict[str, int])  # of the run's processes, by what they are
    publish: PublishFigures | None = None  # the parts of publish_s; None where nothing was published
    before_s: float = 0.0  # since the step before ended: its record, checkpoint and evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class SftMetrics:
    """One optimiser step of supervised fine-tuning."""

    step: int  # from 1
    loss: float  # nats per trained token
    lr: float
    tokens_per_s: float
    step_s: float
    val_loss: float | None = None  # only at the steps that measure it
    stage: str = "sft"


def step_metrics(
    summaries: Sequence[TrajectorySummary],
    *,
    stage: str,
    step: int,
    policy_version: int,
    kept_ids: Collection[str],
    left_out_ids: Collection[str] = (),
    timings: StepTimings,
    update: UpdateFigures | None,
) -> StepMetrics:
    """The figures of a step with all its rollouts in `summaries`.

    `kept_ids` are the rollout ids handed to the learner, `left_out_ids` those of them that it did not train on;
    `update` is None when nothing was left to train on. Raises `ValueError` when a kept id is not among the summaries.
    """
    kept, groups = set(kept_ids), _by_group(summaries)
    groups_kept = {summary.group_id for summary in summaries if summary.rollout_id in kept}
    if unknown := kept - {summary.rollout_id for summary in summaries}:
        raise ValueError(f"kept_ids: {sorted(unknown)[:3]} are not among the step's {len(summaries)} rollouts")
    tokens_generated = sum(summary.num_sampled_tokens for summary in summaries)
    sampled = [summary for summary in summaries if summary.num_sampled_tokens]
    generate_s, tools_s, verify_s = share_rollout_time(timings.rollout_s, summaries)
    row = StepMetrics(
        stage=stage,
        step=step,
        policy_version=policy_version,
        reward_mean=_mean([summary.reward for summary in summaries]),
        pass_rate=_mean([float(is_correct(summary)) for summary in summaries]),
        tool_error_share_correct=tool_error_share_correct(summaries),
        calls_in_correct=sum(summary.num_calls for summary in summaries if is_correct(summary)),
        response_tokens_mean=_mean([summary.num_response_tokens for summary in summaries]),
        share_truncated=_mean([float(summary.truncated) for summary in summaries]),
        share_max_turns=_mean([float(summary.stop_reason is StopReason.MAX_TURNS) for summary in summaries]),
        turns_mean=_mean([summary.num_turns for summary in summaries]),
        calls_mean=_mean([summary.num_calls for summary in summaries]),
        share_all_right=_mean([float(all(right)) for right in groups.values()]),
        share_all_wrong=_mean([float(not any(right)) for right in groups.values()]),
        groups_kept=len(groups_kept),
        groups_equal_dropped=len(groups) - len(groups_kept),
        rollouts=len(summaries),
        trained_trajectories=len(kept - set(left_out_ids)),
        tokens_generated=tokens_generated,
        tokens_per_s=tokens_generated / timings.rollout_s if timings.rollout_s > 0 else 0.0,
        generate_s=generate_s,
        tools_s=tools_s,
        verify_s=verify_s,
        learn_s=timings.learn_s,
        publish_s=timings.publish_s,
        step_s=timings.step_s,
        policy_version_min=min((summary.policy_version_min for summary in sampled), default=policy_version),
        policy_version_max=max((summary.policy_version_max for summary in sampled), default=policy_version),
        restarts=sum(summary.restarts for summary in summaries),
        judge_retries=sum(summary.judge_retries for summary in summaries),
        longest=longest_rollout(summaries),
    )
    return (
        row
        if update is None
        else replace(row, **{each.name: getattr(update, each.name) for each in fields(UpdateFigures)})
    )


def longest_rollout(summaries: Sequence[TrajectorySummary]) -> LongestRollout | None:
    """None without a rollout."""
    if not summaries:
        return None
    longest = max(summaries, key=lambda summary: summary.generate_s + summary.tool_s + summary.verify_s)
    return LongestRollout(
        rollout_id=longest.rollout_id,
        tokens=longest.num_response_tokens,
        turns=longest.num_turns,
        generate_s=round(longest.generate_s, 4),
        tool_s=round(longest.tool_s, 4),
        verify_s=round(longest.verify_s, 4),
        turn_s=tuple((round(generate_s, 3), round(tool_s, 3)) for generate_s, tool_s in longest.turn_s),
        placements=longest.placements,
    )


def _by_group(summaries: Sequence[TrajectorySummary]) -> dict[str, list[bool]]:
    """Which siblings are right, by group."""
    groups: dict[str, list[bool]] = {}
    for summary in summaries:
        groups.setdefault(summary.group_id, []).append(is_correct(summary))
    return groups


def is_correct(summary: TrajectorySummary) -> bool:
    """Whether the rollout counts as solved; see `rstar_ray.reward.value`."""
    return summary.reward >= SOLVED


def tool_error_share_correct(summaries: Sequence[TrajectorySummary]) -> float | None:
    """Failed calls over calls, inside correct trajectories (arXiv:2508.20722 Fig. 4); None without such a call."""
    correct = [summary for summary in summaries if is_correct(summary)]
    num_calls = sum(summary.num_calls for summary in correct)
    return sum(summary.num_failed for summary in correct) / num_calls if num_calls else None


def share_rollout_time(rollout_s: float, summaries: Sequence[TrajectorySummary]) -> tuple[float, float, float]:
    """Share the wall seconds of the rollout phase among (generate, tools, verify).

    Rollouts overlap, so no phase has wall seconds of its own; each gets the share that the
    rollouts, summed, spent in it. The three add up to `rollout_s`.
    """
    generate_s = sum(summary.generate_s for summary in summaries)
    tools_s = sum(summary.tool_s for summary in summaries)
    verify_s = sum(summary.verify_s for summary in summaries)
    total_s = generate_s + tools_s + verify_s
    if total_s <= 0:
        return rollout_s, 0.0, 0.0
    return rollout_s * generate_s / total_s, rollout_s * tools_s / total_s, rollout_s * verify_s / total_s


def progress_line(row: StepMetrics | SftMetrics, num_steps: int) -> str:
    """One plain line for a person watching."""
    at = f"{row.stage} {row.step:>{len(str(num_steps))}}/{num_steps}"
    if isinstance(row, SftMetrics):
        val_loss = "" if row.val_loss is None else f"  val loss {row.val_loss:.4f}"
        return f"{at} | loss {row.loss:.4f}{val_loss} | lr {row.lr:.1e} | {row.tokens_per_s:,.0f} tok/s"
    return " | ".join(
        [
            at,
            f"reward {row.reward_mean:.3f}  pass {row.pass_rate:4.0%}"
            f"  all right {row.share_all_right:.0%}  all wrong {row.share_all_wrong:.0%}",
            f"tool errors {_percent(row.tool_error_share_correct)}",
            f"{row.response_tokens_mean:,.0f} tok  cut {row.share_truncated:.1%}  turn limit {row.share_max_turns:.1%}",
            f"{row.tokens_per_s:,.0f} tok/s",
            f"generate {row.generate_s:.1f}  tools {row.tools_s:.1f}  verify {row.verify_s:.1f}"
            f"  learn {row.learn_s:.1f}  publish {row.publish_s:.1f} s",
        ]
    )


class MetricsLog:
    """Appends the steps of one stage to `metrics.jsonl` and to every sink, and prints a line for each.

    Opening it cuts what a stopped run wrote beyond `after_step`, the step of the checkpoint the
    stage goes on from (0 for a fresh start), so no step is ever logged twice. Rows of other
    stages stay. Each row is on disk when `write` returns. A sink that fails is a shown line, and ends nothing.
    """

    def __init__(
        self,
        run_path: Path,
        *,
        stage: str,
        after_step: int,
        num_steps: int,
        print_every: int = 1,
        wandb: str = "",
    ) -> None:
        """`wandb` names a project of Weights & Biases; TensorBoard's files are written in any case."""
        self._path = run_path / "metrics.jsonl"
        self._run_path = run_path
        self._wandb = wandb
        self._stage = stage
        self._after_step = after_step
        self._num_steps = num_steps
        self._print_every = print_every
        self._entered = False
        self._file: TextIO | None = None  # of what is left out
        self._sinks: dict[str, Sink] = {}

    def __enter__(self) -> Self:
        self._entered = True
        with best_effort(f"{self._path.name} of {self._stage}"):
            cut_rows(self._path, stage=self._stage, after_step=self._after_step)
            self._file = self._path.open("a", encoding="utf-8")
        with best_effort("TensorBoard's file"):
            folder = self._run_path / "tensorboard" / self._stage
            self._sinks["TensorBoard's file"] = TensorBoard(folder, first_step=self._after_step + 1)
        if self._wandb:
            with best_effort("Weights & Biases"):
                sink = WeightsAndBiases(self._run_path, project=self._wandb, stage=self._stage)
                self._sinks["Weights & Biases"] = sink
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._file is not None:
            with best_effort(f"the end of {self._path.name}"):
                self._file.close()
        for name, sink in self._sinks.items():
            with best_effort(f"the end of {name}"):
                sink.close()

    def write(self, row: StepMetrics | SftMetrics) -> None:
        """Log one step; steps must come in order, each once."""
        assert self._entered, "MetricsLog is used inside `with`"
        assert row.stage == self._stage, f"a row of {row.stage} in the log of {self._stage}"
        assert row.step > self._after_step, f"step {row.step} of {row.stage} is already logged"
        self._after_step = row.step
        values = asdict(row)
        with best_effort(f"step {row.step} in {self._path.name}"):
            if self._file is not None:
                self._file.write(to_row(values))
                self._file.flush()  # what it could not write stays in its buffer, and comes before the next row
        sinks, self._sinks = self._sinks, {}
        for name, sink in sinks.items():
            with best_effort(f"{name} from step {row.step} on"):
                sink.write(row.step, values)
                self._sinks[name] = sink  # one that failed is asked no more
        measured = isinstance(row, SftMetrics) and row.val_loss is not None
        if measured or row.step % self._print_every == 0 or row.step in (1, self._num_steps):
            log.info(progress_line(row, self._num_steps))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _percent(share: float | None) -> str:
    return "   -" if share is None else f"{share:.1%}"
