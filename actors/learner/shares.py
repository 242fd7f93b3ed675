"""Assigns rows to updates and ranks; needs only token counts, not the tokens."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rstar_ray.algorithm.batch_plan import ABOVE_CONTEXT, NO_SAMPLED_TOKEN, plan_ranks, updates_of_groups
from rstar_ray.algorithm.normalisation import token_weights
from rstar_ray.algorithm.update import LeftOut, SftExample, UpdateResult
from rstar_ray.config import LearnerConfig, RunConfig
from rstar_ray.rollouts import TrainingRow


@dataclass(frozen=True, slots=True)
class RlShare:
    """One row for one rank."""

    row: TrainingRow
    token_weight: float  # weight of each sampled token in the loss of the update


@dataclass(frozen=True, slots=True)
class SftShare:
    """One conversation for one rank."""

    example: SftExample
    token_weight: float


RlWork = list[list[list[RlShare]]]  # of one rank, by update and micro batch
SftWork = list[list[SftShare]]  # of one rank, by micro batch


def usable_rows(rows: Sequence[TrainingRow], max_context_tokens: int) -> tuple[list[TrainingRow], tuple[LeftOut, ...]]:
    """The rows to train on, and the excluded ones: longer than the model's context, or no sampled token."""
    usable: list[TrainingRow] = []
    left_out: list[LeftOut] = []
    for row in rows:
        if row.num_tokens > max_context_tokens:
            reason = f"{row.num_tokens} tokens, {ABOVE_CONTEXT} {max_context_tokens}"
            left_out.append(LeftOut(row.rollout_id, reason))
        elif row.num_sampled_tokens == 0:
            left_out.append(LeftOut(row.rollout_id, NO_SAMPLED_TOKEN))
        else:
            usable.append(row)
    return usable, tuple(left_out)


def _by_update(rows: Sequence[TrainingRow], num_updates: int) -> list[list[TrainingRow]]:
    parts = updates_of_groups([row.num_tokens for row in rows], [row.group_id for row in rows], num_updates)
    return [[rows[index] for index in part] for part in parts]


def rows_refused(rows: Sequence[TrainingRow], num_updates: int, result: UpdateResult) -> tuple[LeftOut, ...]:
    """The rows whose update was not applied, although other updates of the same call were."""
    updates = _by_update(rows, num_updates)
    return tuple(LeftOut(row.rollout_id, result.reason) for number in result.refused for row in updates[number])


def rl_shares(rows: Sequence[TrainingRow], config: RunConfig, *, attention_tokens: float) -> list[RlWork]:
    """Each rank's work: prompt groups split into at most `--optimizer.updates-per-step` updates.

    Token weights are normalised within each update. `attention_tokens`: row length at which attention costs as much as
    the rest of the model.
    """
    by_rank: list[RlWork] = [[] for _ in range(config.learner.ranks)]
    constant = config.engine.max_context_tokens  # the same for all stages
    for part in _by_update(rows, config.optimizer.updates_per_step):
        sampled: Counter[str] = Counter()  # by rollout: all rows of one rollout form one sample
        for row in part:
            sampled[row.rollout_id] += row.num_sampled_tokens
        groups = {row.rollout_id: row.group_id for row in part}
        mode = config.algorithm.normalisation
        found = token_weights([*sampled.values()], [*groups.values()], mode, constant_tokens=constant)
        weights = dict(zip(sampled, found, strict=True))
        plan = plan_ranks([row.num_tokens for row in part], config.learner, attention_tokens=attention_tokens)
        for work, batches in zip(by_rank, plan, strict=True):
            work.append([[RlShare(part[i], weights[part[i].rollout_id]) for i in batch] for batch in batches])
    return by_rank


def sft_shares(examples: Sequence[SftExample], learner: LearnerConfig, *, attention_tokens: float) -> list[SftWork]:
    """Each rank's conversations; all tokens with a loss have equal weight. Empty if no token has a loss."""
    trained = [int(example.loss_mask[1:].sum()) for example in examples]
    if not sum(trained):
        return []
    weights = token_weights(trained, [example.name for example in examples], "token")
    lengths = [len(example.token_ids) for example in examples]
    plan = plan_ranks(lengths, learner, attention_tokens=attention_tokens)
    return [[[SftShare(examples[i], weights[i]) for i in batch] for batch in batches] for batches in plan]
