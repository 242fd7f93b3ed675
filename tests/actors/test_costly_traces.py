"""What the benchmark of costly preemptions replays."""

import pytest

from actors.bench.costly import DISTRIBUTIONS, SIBLINGS, CostlySize, rollouts
from actors.bench.replay import LEAST_COMPLETION, MOST_TOOL_TOKENS


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_trace_is_whole_groups_of_about_so_many_tokens_within_its_limits(name: str):
    size = CostlySize(tokens=20_000)
    trace = rollouts(name, size, seed=3)
    tokens = sum(rollout.generated_tokens for rollout in trace)
    assert len(trace) % SIBLINGS == 0 and 20_000 <= tokens < 20_000 + SIBLINGS * size.response_tokens
    assert trace != rollouts(name, size, seed=4) and trace == rollouts(name, size, seed=3)
    for rollout in trace:
        assert 100 <= rollout.prompt_tokens <= 1_000 and len(rollout.turns) <= size.limits.max_turns
        assert rollout.response_tokens < size.limits.max_response_tokens + SIBLINGS * LEAST_COMPLETION
        assert all(turn.tool_seconds == 0.0 and turn.tool_tokens <= MOST_TOOL_TOKENS for turn in rollout.turns)
        assert rollout.prompt_tokens + rollout.response_tokens < size.limits.max_context_tokens <= size.kv_tokens
    assert max(rollout.response_tokens for rollout in trace) > 0.8 * size.response_tokens
