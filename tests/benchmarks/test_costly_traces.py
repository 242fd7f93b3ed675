"""What the benchmark of costly preemptions replays, and which options of benchmarks go together."""

from typing import Any

import pytest

from benchmarks.balancer import BenchSettings
from benchmarks.costly import CostlySize, rollouts, simulated
from rstar_ray.errors import ConfigError
from scheduler.cost import EngineCost


def test_the_simulator_runs_the_same_trace_with_the_same_caches():
    cost = EngineCost(fixed_s=0.01, per_sequence_s=3e-4, per_context_s=5e-7, per_prefill_s=5e-4)
    size = CostlySize(tokens=12_000, kv_tokens=4_096, response_tokens=1_000)
    trace = rollouts("bimodal", size, seed=0)
    ours, theirs = (simulated("bimodal", trace, rule, size, cost) for rule in ("expected_kv", "least_requests"))
    assert ours.generated_tokens == theirs.generated_tokens == sum(rollout.generated_tokens for rollout in trace)
    assert ours.preemptions < theirs.preemptions
    roomy = CostlySize(tokens=12_000, kv_tokens=400_000, response_tokens=1_000)
    assert simulated("bimodal", trace, "least_requests", roomy, cost).preemptions == 0


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"costly": True, "calibrate": True}, "--calibrate: --costly measures something else. Hint: give one of them"),
        ({"out": "cost.json"}, "--out: nothing is fitted. Hint: give --calibrate too"),
        ({"size": CostlySize(tokens=1)}, "--size: it is of the costly comparison. Hint: give --costly too"),
        ({"repeats": 0}, "--repeats: must be at least 1"),
    ],
)
def test_what_no_measurement_would_read_is_refused(settings: dict[str, Any], line: str):
    with pytest.raises(ConfigError, match=line):
        BenchSettings(**settings)
