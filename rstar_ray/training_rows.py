"""From the finished groups of a step to the rows that it trains on: resampling, penalties, advantages."""

from collections.abc import Sequence

from rstar_ray.algorithm.advantage import overlong_penalty, rewards_differ
from rstar_ray.algorithm.rules import advantages, kept_indices
from rstar_ray.config import RunConfig
from rstar_ray.rollouts import Group, TrainingRow
from rstar_ray.seeds import named_generator
from rstar_ray.trajectory import TrajectorySummary


def resample(group: Group, config: RunConfig, step: int) -> Group:
    """The G siblings to train on; its draw is named by the group, so the order of groups does not matter."""
    rng = named_generator(config.seed, config.stage, "resample", step, group[0].summary.group_id)
    summaries = [rollout.summary for rollout in group]
    return [group[i] for i in kept_indices(summaries, config.algorithm, rng, config.own_folder)]


def has_signal(kept: Group, config: RunConfig) -> bool:
    """Whether the kept rewards of a group differ; otherwise its advantages are 0."""
    return rewards_differ([_shaped_reward(rollout.summary, config) for rollout in kept])


def training_rows(groups: Sequence[Group], config: RunConfig) -> list[TrainingRow]:
    """Each kept trajectory, by its lines, with its advantage in the kept group (Eq. 7), without groups of no signal."""
    rows: list[TrainingRow] = []
    for group in groups:
        if config.algorithm.reject_equal_reward and not has_signal(group, config):
            continue
        summaries = [rollout.summary for rollout in group]
        rewards = [_shaped_reward(summary, config) for summary in summaries]
        found = advantages(rewards, config.algorithm, config.own_folder, summaries)
        for rollout, advantage in zip(group, found, strict=True):
            summary = rollout.summary
            whole = (summary.num_prompt_tokens + summary.num_response_tokens, summary.num_sampled_tokens)
            rows += (
                TrainingRow(
                    rollout_id=summary.rollout_id,
                    group_id=summary.group_id,
                    ref=rollout.ref,
                    advantage=advantage,
                    num_tokens=num_tokens,
                    num_sampled_tokens=num_sampled,
                    line=line,
                )
                for line, (num_tokens, num_sampled) in enumerate(summary.lines or (whole,))
            )
    return rows


def _shaped_reward(summary: TrajectorySummary, config: RunConfig) -> float:
    """What advantages are computed from; resampling and metrics read the reward itself."""
    limit, buffer = config.rollout.max_response_tokens, config.algorithm.overlong_buffer
    return summary.reward + overlong_penalty(summary.num_response_tokens, limit=limit, buffer=buffer)
