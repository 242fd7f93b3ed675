"""The loop of GRPO-RoC (arXiv:2508.20722 section 2), over Protocols: the same code drives 64 GPUs and a test's fakes.

It holds refs and summaries, never tokens. Legend: G trajectories kept per prompt, N rolled out.
"""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from rstar_ray.algorithm.advantage import group_advantages, rewards_differ
from rstar_ray.algorithm.lr_schedule import LrSchedule
from rstar_ray.algorithm.resample import resample_on_correct
from rstar_ray.algorithm.update import UpdateResult
from rstar_ray.config import AlgorithmConfig, RunConfig
from rstar_ray.data.order import DataPosition, draw
from rstar_ray.deadline import within
from rstar_ray.errors import RStarError
from rstar_ray.run_dir.metrics import StepMetrics, StepTimings, step_metrics
from rstar_ray.seeds import derive_seed, named_generator
from rstar_ray.trajectory import Problem, RolloutLimits, RolloutRequest, Sampling, TrajectorySummary

MOST_DROPPED = 0.5
"""Share of a step's rollouts that our own failures may end before the run does."""


@dataclass(frozen=True, slots=True)
class TrajectoryRef:
    """Where a trajectory lies: position `index` in the list behind `batch` (a Ray ObjectRef, or a fake's list)."""

    batch: Any
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout:
    """What the driver is told of a finished rollout."""

    summary: TrajectorySummary
    ref: TrajectoryRef


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedRollout:
    """A rollout that our own failures ended: recorded with its reason, never scored."""

    rollout_id: str
    group_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """One kept trajectory as the learner's ranks receive it."""

    rollout_id: str
    ref: TrajectoryRef
    advantage: float
    num_tokens: int  # prompt and response
    num_sampled_tokens: int  # those trained on


class Rollouts(Protocol):
    """Runs rollouts; yields every request exactly once, as it finishes."""

    def run(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[FinishedRollout | DroppedRollout]: ...


class RlLearner(Protocol):
    """Takes one optimizer step per call, on the rows of all prompt groups."""

    async def train_rl(self, rows: Sequence[TrainingRow], lr: float) -> UpdateResult: ...


class Publish(Protocol):
    """Hands the learner's weights to every replica under a version; returns when all serve them."""

    async def __call__(self, policy_version: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSystem:
    """Everything a stage acts through."""

    rollouts: Rollouts
    learner: RlLearner
    publish: Publish


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where every rollout of a step went. Nothing lost, nothing twice."""

    requested: int
    dropped: int  # our failures, each with a reason
    resampled_away: int
    in_equal_groups: int  # kept siblings whose rewards do not differ carry no signal
    trained: int

    def __post_init__(self) -> None:
        if self.requested != self.dropped + self.resampled_away + self.in_equal_groups + self.trained:
            raise RStarError(f"the step's ledger does not add up: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What a step leaves behind for the log."""

    metrics: StepMetrics
    ledger: Ledger
    refs: tuple[TrajectoryRef, ...]  # of all finished rollouts, while the caller holds them
    dropped: tuple[DroppedRollout, ...]


Group = list[FinishedRollout]


async def train_step(
    problems: Sequence[Problem], system: TrainingSystem, config: RunConfig, *, step: int, policy_version: int
) -> StepRecord:
    """One GRPO-RoC step: roll out 2G per prompt, resample on correct, update once, publish."""
    started_s = time.monotonic()
    requests = rollout_requests(problems, config, name=step, siblings=config.algorithm.num_rollouts)
    groups, dropped = await roll_out(requests, system.rollouts, deadline_s=config.rollout.deadline_s)
    rolled_out_s = time.monotonic()
    if len(dropped) > MOST_DROPPED * len(requests):
        raise RStarError(f"step {step}: {len(dropped)} of {len(requests)} rollouts were dropped: {dropped[0].reason}")

    kept = [resample(group, config.algorithm, seed=config.seed, stage=config.stage, step=step) for group in groups]
    telling = [group for group in kept if rewards_differ([rollout.summary.reward for rollout in group])]
    rows = training_rows(telling, config.algorithm)
    update = await system.learner.train_rl(rows, learning_rate(step, config)) if rows else None
    learned_s = time.monotonic()
    if update is not None and update.applied:
        policy_version += 1
        await system.publish(policy_version)
    published_s = time.monotonic()

    finished = [rollout for group in groups for rollout in group]
    num_kept = sum(len(group) for group in kept)
    return StepRecord(
        metrics=step_metrics(
            [rollout.summary for rollout in finished],
            stage=config.stage,
            step=step,
            policy_version=policy_version,
            kept_ids=[row.rollout_id for row in rows],
            timings=StepTimings(
                rollout_s=rolled_out_s - started_s,
                learn_s=learned_s - rolled_out_s,
                publish_s=published_s - learned_s,
                step_s=published_s - started_s,
            ),
            update=update,
        ),
        ledger=Ledger(
            requested=len(requests),
            dropped=len(dropped),
            resampled_away=len(finished) - num_kept,
            in_equal_groups=num_kept - len(rows),
            trained=len(rows),
        ),
        refs=tuple(rollout.ref for rollout in finished),
        dropped=tuple(dropped),
    )


def learning_rate(step: int, config: RunConfig) -> float:
    """Constant after a warm-up, which only fresh optimizer state needs."""
    warmup_steps = config.optimizer.warmup_steps if config.reset_optimizer else 0
    return LrSchedule(learning_rate=config.optimizer.learning_rate, warmup_steps=warmup_steps).at(step - 1)


def rollout_requests(
    problems: Sequence[Problem], config: RunConfig, *, name: str | int, siblings: int
) -> list[RolloutRequest]:
    """`siblings` rollouts for each problem under the stage's budgets, named by the step or purpose."""
    limits = RolloutLimits(
        max_response_tokens=config.rollout.max_response_tokens,
        max_turns=config.rollout.max_turns,
        max_context_tokens=config.engine.max_context_tokens,
    )
    sampling = Sampling(temperature=config.rollout.temperature, top_p=config.rollout.top_p)
    return sibling_requests(problems, siblings, limits, sampling, seed=config.seed, name=f"{config.stage}/{name}")


def sibling_requests(
    problems: Sequence[Problem], siblings: int, limits: RolloutLimits, sampling: Sampling, *, seed: int, name: str
) -> list[RolloutRequest]:
    """`siblings` requests for each problem, under ids that begin with `name`, each with a sampling seed of its own."""
    return [
        RolloutRequest(
            rollout_id=f"{name}/{position}-{problem.id}/{sibling}",
            group_id=f"{name}/{position}-{problem.id}",
            problem=problem,
            seed=derive_seed(seed, name, position, problem.id, sibling),
            limits=limits,
            sampling=sampling,
        )
        for position, problem in enumerate(problems)
        for sibling in range(siblings)
    ]


async def roll_out(
    requests: Sequence[RolloutRequest], rollouts: Rollouts, *, deadline_s: float
) -> tuple[list[Group], list[DroppedRollout]]:
    """Run all requests; groups in the order of the requests, siblings too, whatever order they finished in.

    Raises `DeadlineExceeded` when none finishes for `deadline_s`.
    """
    finished: dict[str, FinishedRollout] = {}
    dropped: list[DroppedRollout] = []
    stream = rollouts.run(requests)
    while len(finished) + len(dropped) < len(requests):
        waiting = len(requests) - len(finished) - len(dropped)
        reason = f"{waiting} of {len(requests)} rollouts unfinished, such as {_unfinished(requests, finished, dropped)}"
        rollout = await within(anext(stream), deadline_s, waiter="train loop", owner="generation", reason=reason)
        if isinstance(rollout, DroppedRollout):
            dropped.append(rollout)
            continue
        assert rollout.summary.rollout_id not in finished, f"{rollout.summary.rollout_id} finished twice"
        finished[rollout.summary.rollout_id] = rollout
    groups: dict[str, Group] = {}
    for request in requests:
        if request.rollout_id in finished:
            groups.setdefault(request.group_id, []).append(finished[request.rollout_id])
    return list(groups.values()), dropped


def _unfinished(
    requests: Sequence[RolloutRequest], finished: dict[str, FinishedRollout], dropped: list[DroppedRollout]
) -> str:
    gone = {rollout.rollout_id for rollout in dropped}
    return next(r.rollout_id for r in requests if r.rollout_id not in finished and r.rollout_id not in gone)


def resample(group: Group, algorithm: AlgorithmConfig, *, seed: int, stage: str, step: int) -> Group:
    """The G siblings to train on; its draw is named by the group, so the order of groups does not matter."""
    if algorithm.resample == "none":
        return group
    rng = named_generator(seed, stage, "resample", step, group[0].summary.group_id)
    summaries = [rollout.summary for rollout in group]
    return [group[i] for i in resample_on_correct(summaries, algorithm.keep, rng, algorithm.resample)]


def training_rows(groups: Sequence[Group], algorithm: AlgorithmConfig) -> list[TrainingRow]:
    """Each kept trajectory with its advantage in the kept group (Eq. 7)."""
    rows: list[TrainingRow] = []
    for group in groups:
        rewards = [rollout.summary.reward for rollout in group]
        advantages = group_advantages(rewards, deviation=algorithm.advantage_std)
        for rollout, advantage in zip(group, advantages, strict=True):
            summary = rollout.summary
            rows.append(
                TrainingRow(
                    rollout_id=summary.rollout_id,
                    ref=rollout.ref,
                    advantage=float(advantage),
                    num_tokens=summary.num_prompt_tokens + summary.num_response_tokens,
                    num_sampled_tokens=summary.num_sampled_tokens,
                )
            )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgress:
    """Where a stage stands between two steps: with the learner's checkpoint, all that resuming needs.

    Every other generator is derived from (seed, stage, purpose, step) when it is needed.
    """

    step: int = 0  # steps done
    policy_version: int = 0
    position: DataPosition = field(default_factory=DataPosition)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "StageProgress":
        return cls(
            step=saved["step"], policy_version=saved["policy_version"], position=DataPosition(**saved["position"])
        )


async def train_steps(
    problems: Sequence[Problem], system: TrainingSystem, config: RunConfig, progress: StageProgress
) -> AsyncIterator[tuple[StepRecord, StageProgress]]:
    """The stage's remaining steps; what logs and saves wraps them from outside."""
    while progress.step < config.steps:
        step = progress.step + 1
        drawn, position = draw(
            problems, config.prompts_per_step, progress.position, seed=config.seed, stage=config.stage
        )
        record = await train_step(drawn, system, config, step=step, policy_version=progress.policy_version)
        progress = StageProgress(step=step, policy_version=record.metrics.policy_version, position=position)
        yield record, progress


async def unsolved(
    problems: Sequence[Problem], system: TrainingSystem, config: RunConfig, *, siblings: int = 8
) -> list[Problem]:
    """Problems the latest policy does not solve in all of 8 rollouts (arXiv:2508.20722 section 4.3)."""
    requests = rollout_requests(problems, config, name="filter", siblings=siblings)
    groups, _ = await roll_out(requests, system.rollouts, deadline_s=config.rollout.deadline_s)
    solved = {
        group[0].summary.problem_id for group in groups if all(rollout.summary.reward == 1.0 for rollout in group)
    }
    return [problem for problem in problems if problem.id not in solved]
