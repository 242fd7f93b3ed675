"""The balancer's rules, one at a time."""

from dataclasses import replace
from typing import Any

import pytest

from scheduler.balancer import RULES, Balancer
from scheduler.records import Grant, Quarantined, ReplicaLoad, TurnReport
from scheduler.state import QueueBlock, Rollout
from scheduler.statistics import StepStatistics
from tests.fakes import end, fleet, load, placements, registration


@pytest.mark.parametrize("rule", RULES)
def test_what_came_before_the_first_replica_and_is_too_large_for_it_keeps_nobody_waiting(rule: str):
    balancer = Balancer(rule)
    balancer.submit([load("big", prompt=5_000)])
    balancer.submit([load("x", group="x")])
    balancer.register(registration("r0", 1_000))
    assert placements(balancer) == {"x": "r0"}
    assert balancer.snapshot().too_large == ("big",)
    balancer.cancel(["big"])
    assert balancer.snapshot().too_large == ()


def test_a_large_rollout_goes_to_the_large_replica_though_a_small_one_seems_roomier():
    balancer = fleet("expected_kv", 600)
    balancer.register(registration("large", 2_000))
    balancer.report("large", load=ReplicaLoad(kv_used_tokens=1_500))  # nobody's: it is empty
    balancer.submit([load("big", prompt=900)])
    assert placements(balancer) == {"big": "large"}


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        (ReplicaLoad(steps=-1), "-1 steps after 0"),
        (ReplicaLoad(kv_used_tokens=-1), "-1 KV tokens in use of 1000"),
        (ReplicaLoad(kv_used_tokens=float("nan")), "nan KV tokens"),  # pyright: ignore
        (ReplicaLoad(running=-1), "a negative count"),
    ],
)
def test_a_replica_whose_report_cannot_be_true_gets_no_more_work(
    report: ReplicaLoad, problem: str, caplog: pytest.LogCaptureFixture
):
    balancer = Balancer()
    balancer.register(registration("r0", 1_000))
    for _ in range(2):
        with pytest.raises(Quarantined, match=f"r0 is in quarantine: it reports .*{problem}"):
            balancer.report("r0", load=report)
    (line,) = caplog.messages
    assert problem in line
    balancer.submit([load("x")])
    assert placements(balancer) == {}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("context", "generated"), [(10**7, 10**7), (101, 20), (100, 85), (-5, -9)])
@pytest.mark.parametrize("ended", [True, False])
def test_a_replica_whose_rollout_is_too_long_gets_no_more_work(rule: str, context: int, generated: int, ended: bool):
    balancer = fleet(rule, 1_000)
    balancer.submit([load("a")])
    assert placements(balancer) == {"a": "r0"}
    lengths = TurnReport(rollout_id="a", context_tokens=context, generated_tokens=generated, turn=1, ended=ended)
    with pytest.raises(Quarantined, match=r"rollout 'a'|a negative count"):
        balancer.report("r0", [lengths])
    if ended:
        assert balancer.snapshot().finished == 1
    else:
        known = balancer.state.rollouts["a"].load
        assert known.context_tokens <= 100 and known.generated_tokens <= 84
    (replica,) = balancer.snapshot().replicas
    assert replica.quarantine is not None and "'a'" in replica.quarantine
    balancer.submit([load("b")])
    assert placements(balancer) == {}


def test_a_rollout_that_ended_is_missing_only_once_the_replica_that_judges_it_is_gone():
    balancer = fleet("least_sessions", 1_000, 1_000)
    balancer.submit([load("a"), load("b", group="h")])
    for name, replica in placements(balancer).items():
        balancer.report(replica, [end(name)])
    assert balancer.missing(["a", "b", "unknown"]) == ["unknown"]
    balancer.replica_lost("r0")
    assert balancer.missing(["a", "b"]) == ["a"]
    balancer.submit([load("a")])
    assert balancer.missing(["a", "b"]) == []
    balancer.register(registration("r1", 1_000))  # another process
    assert balancer.missing(["a", "b"]) == ["b"]


def test_a_version_that_is_set_twice_lets_old_lengths_fade_once():
    balancers = [fleet("expected_kv", 10_000) for _ in range(2)]
    for times, balancer in enumerate(balancers, 1):
        balancer.submit([load(f"a{i}") for i in range(8)])
        placements(balancer)
        balancer.report("r0", [end(f"a{i}", 20) for i in range(8)])
        for _ in range(times):
            balancer.set_policy_version(1)
    assert balancers[0].learned() == balancers[1].learned()


def test_worst_case_reserves_whole_lives_and_waits():
    balancer = fleet("worst_case", 250)
    balancer.submit([load("a"), load("b"), load("c")])
    assert set(placements(balancer)) == {"a", "b"}
    balancer.report("r0", [end("a", 3)])
    assert set(placements(balancer)) == {"c"}


def test_prefix_aware_follows_the_prompt_until_its_replica_is_well_ahead():
    balancer = fleet("prefix_aware", 1_000, 1_000)
    balancer.submit([load(f"x{i}") for i in range(40)])
    placed = list(placements(balancer).values())
    assert placed[:33] == ["r0"] * 33
    assert "r1" in placed


def test_static_cuts_a_batch_into_equal_runs():
    balancer = fleet("static", 1_000, 1_000)
    balancer.submit([load(f"x{i}") for i in range(4)])
    assert placements(balancer) == {"x0": "r0", "x1": "r0", "x2": "r1", "x3": "r1"}


def test_most_hashes_stay_where_they_were_when_a_replica_joins():
    few, more = fleet("consistent_hash", *[1_000] * 4), fleet("consistent_hash", *[1_000] * 5)
    for balancer in (few, more):
        balancer.submit([load(f"x{i}") for i in range(200)])
    before, after = placements(few), placements(more)
    assert 20 <= sum(before[name] != after[name] for name in before) <= 60


def test_least_requests_counts_what_was_sent_since_the_engines_report():
    balancer = fleet("least_requests", 1_000, 1_000)
    balancer.report("r0", load=ReplicaLoad(running=3))
    balancer.submit([load(f"x{i}") for i in range(5)])
    assert sorted(placements(balancer).values()) == ["r0", "r1", "r1", "r1", "r1"]


def test_a_new_policy_version_keeps_live_rollouts_and_lets_old_lengths_fade():
    balancer = fleet("expected_kv", 10_000)
    balancer.submit([load(f"{g}{i}", group=g) for g in ("a", "b") for i in range(4)])
    assert len(placements(balancer)) == 8
    for i in range(4):
        balancer.report("r0", [end(f"a{i}", 20)])
    balancer.set_policy_version(1)
    balancer.submit([load("late", group="c")])
    assert set(placements(balancer)) == {"late"}
    for i in range(4):
        balancer.report("r0", [end(f"b{i}", 20)])
    balancer.report("r0", [end("late", 20)])
    assert balancer.snapshot().finished == 9


def reasons(balancer: Balancer) -> dict[str, str]:
    balancer.issue_orders(100)
    grants = [order for _, order in balancer.orders if isinstance(order, Grant) and order.placement]
    return {grant.load.rollout_id: grant.placement.why for grant in grants if grant.placement}


def test_a_cached_prompt_and_a_move_are_separate_reasons():
    balancer = fleet("prefix_aware", 1_000, 1_000)
    balancer.submit([load("a"), load("b")])
    assert list(reasons(balancer).values())[1] == "the prompt is cached there"
    balancer = fleet("expected_kv", 1_000)
    balancer.submit([load("a"), load("b"), load("c", group="other")])
    given = reasons(balancer)
    assert given["b"] == "most room by expected KV, its siblings' prompt being cached there"
    assert given["c"] == "most room by expected KV"


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "static"])
def test_rollouts_of_earlier_draws_start_first_whenever_they_came(rule: str):
    """An evaluation, which no step numbers, before all of them."""
    balancer = fleet(rule, 100_000, max_running=1)
    for draw in (3, 1, 0, 2):
        names = [f"{draw}/{number}" for number in range(6)]
        balancer.submit([replace(load(name, group=f"{draw}"), draw=draw) for name in names])
    balancer.submit([replace(load("2/interrupted", group="2", context=50), draw=2)])
    order: list[int] = []
    while started := placements(balancer):
        order += [int(name.partition("/")[0]) for name in started]
        balancer.report("r0", [end(name, 60) for name in started])
    assert order == sorted(order) and len(order) == 25


@pytest.mark.parametrize("rule", RULES)
def test_many_groups_that_come_in_batches_all_start_and_an_earlier_draw_before_those_that_wait(rule: str):
    balancer, names = fleet(rule, 10_000, max_running=8), [f"{number}/0" for number in range(1_400)]
    for first in range(0, len(names), 50):
        batch = [replace(load(name, group=name.partition("/")[0]), draw=1) for name in names[first : first + 50]]
        balancer.submit(batch)
        placements(balancer)
    started = [*balancer.state.replicas["r0"].residents]
    balancer.submit([replace(load("early/0", group="early"), draw=0)])
    balancer.report("r0", [end(started[0])])
    assert [*placements(balancer)] == ["early/0"]
    started.append("early/0")
    for number, name in enumerate(started):
        if number:
            balancer.report("r0", [end(name)])
            started += placements(balancer)
    assert sorted(started) == sorted([*names, "early/0"]) and balancer.snapshot().waiting == 0


def test_an_earlier_draw_starts_before_an_interrupted_rollout_also_among_many_groups():
    balancer = fleet("expected_kv", 1_000_000, max_running=1_000)
    balancer.submit([replace(load(f"{number}/0", group=f"{number}"), draw=1) for number in range(600)])
    assert len(placements(balancer)) == 600
    interrupted = replace(load("0/0", group="0", context=40, made=24), draw=1)
    balancer.return_rollouts("r0", [(interrupted, None)])
    balancer.submit([replace(load("early/0", group="early"), draw=0)])
    assert [*placements(balancer)] == ["early/0", "0/0"]


def test_counters_hold_while_draws_overlap():
    """There is never a moment without a rollout."""
    balancer = fleet("expected_kv", 100_000)
    for draw in range(1, 30):
        balancer.submit([replace(load(f"{draw}/{n}", group=f"{draw}"), draw=draw) for n in range(8)])
        balancer.decide()
        if draw > 1:
            balancer.report("r0", [end(f"{draw - 1}/{n}", 40) for n in range(8)])
            balancer.set_policy_version(draw)
    assert balancer.snapshot().finished == 28 * 8 and balancer.leaks() == []


# ---------------------------------------------------------------- state and statistics


def test_what_a_replica_reports_is_counted():
    balancer = fleet("least_sessions", 1_000)
    balancer.submit([load("a"), load("b", group="h", prompt=33)])
    assert len(placements(balancer)) == 2
    engine = ReplicaLoad(kv_used_tokens=1_000, preemptions=3, steps=50, running=2)
    turn = TurnReport(rollout_id="a", context_tokens=60, generated_tokens=40, turn=1)
    balancer.report("r0", [turn], load=engine)
    snapshot = balancer.snapshot()
    assert (snapshot.preemptions, snapshot.recomputed_tokens) == (3, 3 * (60 + 33) // 2)
    (replica,) = snapshot.replicas
    assert (replica.kv_used_tokens, replica.in_flight) == (1_000, 2)
    balancer.report("r0", load=ReplicaLoad(preemptions=3, steps=50))
    assert balancer.snapshot().preemptions == 3
    with pytest.raises(Quarantined, match="reports 2 preemptions after 3"):
        balancer.report("r0", load=ReplicaLoad(preemptions=2, steps=50))


def shown(rule: str, *replicas: tuple[int, int, int], **counters: Any):
    """A snapshot with (capacity, used, reserved) of each replica."""
    balancer = fleet(rule, *[capacity for capacity, _, _ in replicas])
    snapshot = balancer.snapshot()
    filled = tuple(
        replace(replica, kv_used_tokens=used, kv_reserved_tokens=reserved)
        for replica, (_, used, reserved) in zip(snapshot.replicas, replicas, strict=True)
    )
    return replace(snapshot, replicas=filled, **counters)


def test_preemptions_of_an_engine_are_counted_once_when_its_replica_registers_again():
    balancer = fleet("expected_kv", 1_000)
    balancer.report("r0", load=ReplicaLoad(preemptions=3))
    balancer.register(registration("r0", 1_000, preemptions=4))
    balancer.report("r0", load=ReplicaLoad(preemptions=5))
    assert balancer.snapshot().preemptions == 4  # the one between the reports is not known to be new


def test_the_statistics_of_a_step():
    start = shown("static", (100, 0, 0), (300, 0, 0), preemptions=5, moves=2, recomputed_tokens=70)
    statistics = StepStatistics(start)
    statistics.sample(start)  # no rollout is live: ignored
    statistics.sample(shown("static", (100, 40, 80), (300, 60, 120), waiting=9))
    statistics.sample(shown("static", (100, 60, 90), (300, 240, 290), in_flight=4))
    statistics.sample(shown("static", (100, 0, 0), (300, 40, 80), in_flight=1, waiting=2))
    waiting = [Rollout(load("a"), known_since_s=0.0) for _ in range(198)]
    for number, one in enumerate(waiting):
        statistics.wait_begins(one, float(number))
    statistics.queue_blocked(QueueBlock.ROOM, 198.5)
    for one in waiting:
        assert statistics.wait_ends(one, 199.0) == {QueueBlock.ROOM: 0.5}
    statistics.queue_blocked(None, 200.0)
    now = shown("static", (100, 0, 0), (300, 0, 0), preemptions=6, moves=5, recomputed_tokens=100)
    statistics.quarantined("r1", "reports 5 of 4")
    figures = statistics.take(now, ["a fault"], 200.0)
    assert figures.values == {
        "balancer/queue_len_max": 9, "balancer/in_flight_max": 4,
        "balancer/kv_util_mean": pytest.approx((0.25 + 0.75 + 0.1) / 3), "balancer/kv_util_max": 0.75,
        "balancer/kv_reserved_mean": pytest.approx((0.5 + 0.95 + 0.2) / 3), "balancer/kv_reserved_max": 0.95,
        "balancer/num_preemptions": 1, "balancer/num_moves": 3, "balancer/num_recomputed_tokens": 30,
        "balancer/wait_p50_s": 101.0, "balancer/wait_p99_s": 198.0, "balancer/preemption_risk": 0.0,
    }  # fmt: skip
    assert figures.details == {
        "rule": "static", "quarantined": ("r1: reports 5 of 4",), "faults": ("a fault",),
        "held_s": {QueueBlock.ROOM: 1.5},
    }  # fmt: skip
    assert set(statistics.take(now, [], 200.0).values.values()) == {0}
    statistics.sample(replace(now, replicas=(), waiting=3))
    assert not statistics.take(now, [], 200.0).values["balancer/queue_len_max"]  # without a replica there is no cache


def test_only_the_time_in_the_queue_counts_as_a_wait():
    balancer = fleet("least_requests", 1_000)
    balancer.submit([load("a")])
    balancer.now_s = 2.0
    balancer.issue_orders(10)
    balancer.now_s = 100.0
    balancer.return_rollouts("r0", [(load("a", context=60, made=40), None)])
    balancer.now_s = 103.0
    balancer.issue_orders(10)
    values = balancer.step_figures().values
    assert (values["balancer/wait_p50_s"], values["balancer/wait_p99_s"]) == (3.0, 3.0)
