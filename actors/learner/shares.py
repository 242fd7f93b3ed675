"""Which rows an update takes, and which rank takes which: decided from counts alone, no token in sight."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from rstar_ray.algorithm.batch_plan import balance, plan_ranks
from rstar_ray.algorithm.normalisation import token_weights
from rstar_ray.algorithm.update import LeftOut, SftExample, UpdateResult
from rstar_ray.config import LearnerConfig, RunConfig
from rstar_ray.rollouts import TrainingRow


@dataclass(frozen=True, slots=True)
class RlShare:
    """One row for one rank."""

    row: TrainingRow
    token_weight: float  # what the loss of each of its sampled tokens counts in the update


@dataclass(frozen=True, slots=True)
class SftShare:
    """One conversation for one rank."""

    example: SftExample
    token_weight: float


RlWork = list[list[list[RlShare]]]  # of one rank, by update and micro batch
SftWork = list[list[SftShare]]  # of one rank, by micro batch


def usable_rows(rows: Sequence[TrainingRow], max_context_tokens: int) -> tuple[list[TrainingRow], tuple[LeftOut, ...]]:
    """The rows to train on, and those longer than the model's context or without a sampled token."""
    usable: list[TrainingRow] = []
    left_out: list[LeftOut] = []
    for row in rows:
        if row.num_tokens > max_context_tokens:
            reason = f"{row.num_tokens} tokens, above the model's context of {max_context_tokens}"
            left_out.append(LeftOut(row.rollout_id, reason))
        elif row.num_sampled_tokens == 0:
            left_out.append(LeftOut(row.rollout_id, "no sampled token"))
        else:
            usable.append(row)
    return usable, tuple(left_out)


def dealt(rows: Sequence[TrainingRow], num_updates: int) -> list[Sequence[TrainingRow]]:
    """The rows of each of at most `num_updates` updates: whole prompt groups, with tokens as even as these allow.

    Siblings stay together, because advantages are relative to their group: they sum to 0 over a whole group only, and
    `--algorithm.normalisation group` divides by the tokens of a whole group. Within an update the rows keep their
    order.
    """
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group_id, []).append(index)
    members = list(groups.values())
    tokens = [sum(rows[index].num_tokens for index in group) for group in members]
    parts = balance(tokens, range(len(members)), min(num_updates, len(members)), attention_tokens=inf)
    return [[rows[index] for index in sorted(i for group in part for i in members[group])] for part in parts]


def rows_refused(rows: Sequence[TrainingRow], num_updates: int, result: UpdateResult) -> tuple[LeftOut, ...]:
    """Of rows so dealt out those whose update was not applied, though others of the call were."""
    updates = dealt(rows, num_updates)
    return tuple(LeftOut(row.rollout_id, result.reason) for number in result.refused for row in updates[number])


def rl_shares(rows: Sequence[TrainingRow], config: RunConfig, *, attention_tokens: float) -> list[RlWork]:
    """Each rank's work: prompt groups dealt to at most `--optimizer.updates-per-step` updates, each normalised by
    itself. At a length of `attention_tokens` attention costs as much as the rest of the model."""
    by_rank: list[RlWork] = [[] for _ in range(config.learner.ranks)]
    constant = config.engine.max_context_tokens  # one for all stages
    for part in dealt(rows, config.optimizer.updates_per_step):
        sampled: Counter[str] = Counter()  # by rollout: the rows of its lines are one sample together
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
    """Each rank's conversations; every token with a loss weighs the same. Empty where no token has one."""
    trained = [int(example.loss_mask[1:].sum()) for example in examples]
    if not sum(trained):
        return []
    weights = token_weights(trained, [example.name for example in examples], "token")
    lengths = [len(example.token_ids) for example in examples]
    plan = plan_ranks(lengths, learner, attention_tokens=attention_tokens)
    return [[[SftShare(examples[i], weights[i]) for i in batch] for batch in batches] for batches in plan]
