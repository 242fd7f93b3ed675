"""Synthetic rollouts of the paper's three stages.

Lengths are log-normal with a part shared by the siblings of a prompt, and cut at the stage's budget as in the agent
loop.
"""

from dataclasses import dataclass

import numpy as np

from scheduler.traces.trace import TraceRollout, TraceTurn, cut


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """The shape of a stage's rollouts (arXiv:2508.20722, Table 2 and section 3.1)."""

    max_response_tokens: int
    max_turns: int
    mean_response_tokens: float  # before the cut
    calls_mean: float = 2.75  # 45K tool calls per step over 16,384 rollouts
    tool_seconds_mean: float = 0.3
    tool_tokens_mean: float = 120.0
    prompt_tokens_mean: float = 300.0
    spread_group: float = 0.5  # standard deviation of log length between groups
    spread_sibling: float = 0.5  # and within a group
    recorded: tuple[TraceRollout, ...] = ()  # rollouts that the planner takes lengths from, instead of synthetic ones


STAGES = {
    "stage1": StageShape(max_response_tokens=8_192, max_turns=10, mean_response_tokens=4_000),
    "stage2": StageShape(max_response_tokens=12_288, max_turns=10, mean_response_tokens=6_000),
    "stage3": StageShape(max_response_tokens=12_288, max_turns=15, mean_response_tokens=7_500),
}


def synthetic(stage: StageShape, *, groups: int = 512, siblings: int = 32, seed: int = 0) -> list[TraceRollout]:
    """`groups` x `siblings` rollouts of a stage; the same arguments give the same trace.

    Raises `ValueError` for no group or sibling, or a negative seed.
    """
    if groups < 1 or siblings < 1 or seed < 0:
        raise ValueError(f"groups {groups} and siblings {siblings} must be at least 1, and seed {seed} at least 0")
    rng = np.random.default_rng(seed)
    spread = stage.spread_group**2 + stage.spread_sibling**2
    rollouts: list[TraceRollout] = []
    for group in range(groups):
        prompt = int(np.clip(rng.lognormal(np.log(stage.prompt_tokens_mean), 0.4), 64, 2_048))
        shared = rng.normal(0.0, stage.spread_group)
        for _ in range(siblings):
            own = rng.normal(0.0, stage.spread_sibling)
            length = stage.mean_response_tokens * float(np.exp(shared + own - spread / 2))
            rollout = _rollout(f"g{group}", prompt, max(16, int(length)), stage, rng)
            rollouts.append(cut(rollout, stage.max_response_tokens, stage.max_turns))
    return rollouts


def _rollout(group: str, prompt: int, length: int, stage: StageShape, rng: np.random.Generator) -> TraceRollout:
    """Split a response of `length` tokens into turns; longer responses have more calls."""
    rate = stage.calls_mean * min(2.0, length / stage.mean_response_tokens)
    calls = min(int(rng.poisson(rate)), stage.max_turns - 1, length // 32)
    tool_tokens = np.clip(rng.lognormal(np.log(stage.tool_tokens_mean) - 0.32, 0.8, calls), 8, 512).astype(int)
    tool_seconds = 0.05 + rng.exponential(stage.tool_seconds_mean - 0.05, calls)
    sampled = max(calls + 1, length - int(tool_tokens.sum()))
    shares = rng.dirichlet(np.full(calls + 1, 2.0))
    tokens = np.maximum(1, np.round(shares * sampled)).astype(int)
    turns = [
        TraceTurn(int(tokens[turn]), int(tool_tokens[turn]), round(float(tool_seconds[turn]), 3))
        for turn in range(calls)
    ]
    return TraceRollout(group, prompt, (*turns, TraceTurn(int(tokens[calls]))))
