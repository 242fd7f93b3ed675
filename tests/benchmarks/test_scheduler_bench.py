"""The table of the scheduler's benchmark, on a fleet of one."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.scheduler import BenchSettings, Row, simulate
from rstar_ray.errors import ConfigError

ROW = Row(
    kind="bimodal",
    kv_demand=1.5,
    kv_tokens=1_600,
    step="later",
    makespan_s=100.0,
    best_other_s=110.0,
    best_other="static",
    oracle_s=80.0,
    lower_bound_s=50.0,
    recomputed_share=0.004,
    preemption_steps=12.0,
    preemptions=2,
    kv_utilisation=0.5,
    cpu_s=1.0,
)


def test_a_step_has_a_row_for_a_first_and_a_later_one_and_who_knows_all_is_never_beaten():
    rows = simulate("bimodal", 1.5, replicas=1, groups=1, rules=["least_requests"])
    assert [row.step for row in rows] == ["first", "later"]
    for row in rows:
        assert row.best_other == "least_requests" and row.kv_tokens % 16 == 0
        assert row.lower_bound_s <= row.oracle_s <= min(row.makespan_s, row.best_other_s)


def test_what_is_computed_again_is_limited_where_a_preemption_costs_more_than_ten_steps():
    much = replace(ROW, recomputed_share=0.3)
    assert [len(replace(much, preemption_steps=steps).missed()) for steps in (10.0, 10.1)] == [0, 1]


@pytest.mark.parametrize("settings", [{"replicas": -1}, {"kinds": ("bimodal:7",)}, {"kinds": ("family:many",)}])
def test_what_cannot_be_simulated_is_refused(settings: dict[str, Any]):
    with pytest.raises(ConfigError, match=f"--{next(iter(settings))}: "):
        BenchSettings(**settings)
