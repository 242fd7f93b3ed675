"""Plausible trajectories and run directories, made up for tests."""

from rstar_ray.outcome import Outcome
from rstar_ray.trajectory import StopReason, TrajectorySummary


def summary(
    group: str = "g0",
    sibling: int = 0,
    *,
    reward: float = 1.0,
    calls: int = 1,
    failed: int = 0,
    sampled: int = 60,
    response: int = 80,
    stop: StopReason = StopReason.ANSWERED,
    generate_s: float = 1.0,
    tool_s: float = 0.0,
    verify_s: float = 0.0,
) -> TrajectorySummary:
    return TrajectorySummary(
        rollout_id=f"{group}/{sibling}",
        group_id=group,
        problem_id=group,
        reward=reward,
        num_calls=calls,
        num_failed=failed,
        num_answers=1,
        num_turns=calls + 1,
        num_prompt_tokens=20,
        num_response_tokens=response,
        num_sampled_tokens=sampled,
        stop_reason=stop,
        outcomes=(Outcome.ERROR,) * failed + (Outcome.OK,) * (calls - failed),
        generate_s=generate_s,
        tool_s=tool_s,
        verify_s=verify_s,
    )
