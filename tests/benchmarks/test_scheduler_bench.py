"""The table of the scheduler's benchmark, on a fleet of one."""

from benchmarks.scheduler import simulate


def test_a_step_has_a_row_for_a_first_and_a_later_one_and_who_knows_all_is_never_beaten():
    rows = simulate("bimodal", 1.5, replicas=1, groups=1, rules=["least_requests"])
    assert [row.step for row in rows] == ["first", "later"]
    for row in rows:
        assert row.best_other == "least_requests" and row.kv_tokens % 16 == 0
        assert row.lower_bound_s <= row.oracle_s <= min(row.makespan_s, row.best_other_s)
