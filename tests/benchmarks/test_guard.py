"""Where everything would fit at once, and where it would not: what holding back costs, and what it saves."""

from functools import cache

import pytest

from benchmarks.scheduler import demand_tokens
from benchmarks.trace_kinds import KINDS, draw
from scheduler.simulator.engine_model import EngineShape
from scheduler.simulator.simulate import MI300X_14B, Simulator, SimulatorResult, SimulatorSettings

REPLICAS, GROUPS, SIBLINGS = 4, 32, 16


@cache
def step(name: str, demand: float, rule: str, *, later: bool = False) -> SimulatorResult:
    """One whose peak, all rollouts started at once, would be this multiple of all caches."""
    kind = KINDS[name]
    now, before = (draw(kind, groups=GROUPS, siblings=SIBLINGS, earlier=earlier) for earlier in (False, True))
    kv_tokens = max(int(demand_tokens(now) / demand / REPLICAS), 3 * kind.max_response_tokens)
    settings = SimulatorSettings(
        replicas=REPLICAS,
        shape=EngineShape(kv_tokens=kv_tokens, max_running=1_024),
        cost=MI300X_14B,
        max_response_tokens=kind.max_response_tokens,
        max_turns=kind.max_turns,
    )
    return Simulator(now, rule, settings, history=before if later else ()).run()


def seconds(name: str, demand: float, *, later: bool = False) -> float:
    """Of ours, over those of a rule that starts everything at once."""
    others = step(name, demand, "least_requests").makespan_s
    return step(name, demand, "expected_kv", later=later).makespan_s / others


def recomputed(name: str, demand: float, *, later: bool = False) -> float:
    ours = step(name, demand, "expected_kv", later=later)
    return ours.recomputed_tokens / ours.generated_tokens


@pytest.mark.long
def test_where_everything_fits_at_once_next_to_nothing_is_held_back():
    """On so few groups the step before tells of another demand. One preemption is half a percent."""
    assert seconds("hard_last", 0.95, later=True) < 1.08
    assert recomputed("hard_last", 0.95, later=True) < 0.015


@pytest.mark.long
def test_where_kv_is_scarce_little_is_computed_again():
    """Few share each of these caches, so some risk is taken; the other rule recomputes more than it samples."""
    assert seconds("log_normal", 1.5, later=True) < 1.0
    others = step("log_normal", 1.5, "least_requests")
    assert recomputed("log_normal", 1.5, later=True) < 0.25 * others.recomputed_tokens / others.generated_tokens
