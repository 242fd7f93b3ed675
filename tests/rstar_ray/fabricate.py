"""Plausible trajectories and run directories, made up for tests."""

from collections.abc import Sequence

import numpy as np

from rstar_ray.outcome import Outcome
from rstar_ray.trajectory import Problem, StopReason, ToolResult, Trajectory, TrajectorySummary, Turn


def encode(text: str) -> list[int]:
    """One token per character."""
    return [ord(character) for character in text]


def decode(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def trajectory(
    problem: Problem, turns: Sequence[tuple[str, str, Outcome | None]], *, reward: float, sibling: int = 0
) -> Trajectory:
    """From (completion, tool text, outcome of its one call) per turn; the last turn has neither of the two."""
    prompt_ids = encode(f"<|im_start|>user\n{problem.problem}<|im_end|>\n<|im_start|>assistant\n")
    response_ids: list[int] = []
    loss_mask: list[bool] = []
    for completion, tool_text, outcome in turns:
        after = ""
        if outcome is not None:
            after = (
                f"\n<|im_start|>user\n<tool_response>\n{tool_text}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
            )
        response_ids += encode(completion) + encode(after)
        loss_mask += [True] * len(completion) + [False] * len(after)
    outcomes = tuple(outcome for _, _, outcome in turns if outcome is not None)
    return Trajectory(
        summary=TrajectorySummary(
            rollout_id=f"{problem.id}/{sibling}",
            group_id=problem.id,
            problem_id=problem.id,
            reward=reward,
            num_calls=len(outcomes),
            num_failed=sum(outcome.failed for outcome in outcomes),
            num_answers=1,
            num_turns=len(turns),
            num_prompt_tokens=len(prompt_ids),
            num_response_tokens=len(response_ids),
            num_sampled_tokens=sum(loss_mask),
            stop_reason=StopReason.ANSWERED,
            outcomes=outcomes,
        ),
        problem=problem,
        prompt_ids=np.array(prompt_ids, dtype=np.int32),
        response_ids=np.array(response_ids, dtype=np.int32),
        loss_mask=np.array(loss_mask, dtype=np.bool_),
        rollout_logprobs=np.where(loss_mask, -0.5, 0.0).astype(np.float32),
        policy_versions=np.where(loss_mask, 3, -1).astype(np.int32),
        turns=tuple(
            Turn(
                num_tokens=len(completion),
                policy_version=3,
                tool_results=() if outcome is None else (ToolResult(outcome=outcome, text=tool_text, wall_s=0.01),),
                generate_s=0.2,
                tool_s=0.01,
            )
            for completion, tool_text, outcome in turns
        ),
    )


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
