"""A reward of your own: right answers count, and among them those with few tokens and no failed call count more.

rstar stage 1 --reward.name own_reward:brief --own-folder examples --run-dir runs/reward

A reward is a function of the model's text and the problem's row. With a third argument it reads the whole rollout, and
is called for rollouts that ran out of tokens or turns too.
"""

from rstar_ray.reward.find import boxed_answer
from rstar_ray.trajectory import Problem, Transcript


def brief(completion: str, problem: Problem, rollout: Transcript) -> float:
    """1 to 0.7 for a right answer, 0 for any other.

    A right answer loses up to 0.2 by its share of the token budget, and 0.1 where a tool call failed. Rewards below 1
    train the policy but do not count as solved (docs/rewards.md).
    """
    if rollout.truncated or (boxed_answer(completion) or "").strip() != problem.answer.strip():
        return 0.0
    used = rollout.num_response_tokens / rollout.max_response_tokens
    return 1.0 - 0.2 * used - 0.1 * (rollout.num_failed > 0)
