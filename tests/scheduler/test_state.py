"""The balancer's records, state and statistics."""

from dataclasses import replace
from typing import Any

import pytest

from scheduler.records import ReplicaLoad, TurnReport
from scheduler.state import QueueBlock, Rollout
from scheduler.statistics import StepStatistics
from tests.fakes import fleet, load, placements


def test_what_a_replica_reports_is_counted(caplog: pytest.LogCaptureFixture):
    balancer = fleet("least_sessions", 1_000)
    balancer.submit([load("a"), load("b", group="h", prompt=33)])
    assert len(placements(balancer)) == 2
    engine = ReplicaLoad(kv_used_tokens=1_000, preemptions=3, steps=50, running=2)
    turn = TurnReport(rollout_id="a", context_tokens=60, generated_tokens=40, turn=1)
    balancer.report("r0", [turn], load=engine)
    snapshot = balancer.snapshot()
    assert (snapshot.preemptions, snapshot.recomputed_tokens) == (3, 3 * (60 + 33) // 2)
    (replica,) = snapshot.replicas
    assert (replica.kv_used_tokens, replica.running, replica.admissions, replica.in_flight) == (1_000, 2, 2, 2)
    balancer.report("r0", load=ReplicaLoad(preemptions=3, steps=50))
    assert balancer.snapshot().preemptions == 3
    for _ in range(2):
        balancer.report("r0", load=ReplicaLoad(preemptions=2, steps=50))
    (line,) = caplog.messages
    assert line.endswith("reports 2 preemptions after 3")


def shown(rule: str, *replicas: tuple[int, int, int], **counters: Any):
    """A snapshot with (capacity, used, reserved) of each replica."""
    balancer = fleet(rule, *[capacity for capacity, _, _ in replicas])
    snapshot = balancer.snapshot()
    filled = tuple(
        replace(replica, kv_used_tokens=used, kv_reserved_tokens=reserved)
        for replica, (_, used, reserved) in zip(snapshot.replicas, replicas, strict=True)
    )
    return replace(snapshot, replicas=filled, **counters)


def test_the_statistics_of_a_step():
    start = shown("static", (100, 0, 0), (300, 0, 0), preemptions=5, moves=2, recomputed_tokens=70)
    statistics = StepStatistics(start)
    statistics.sample(start)  # no rollout is live: ignored
    statistics.sample(shown("static", (100, 40, 80), (300, 60, 120), waiting=9))
    statistics.sample(shown("static", (100, 60, 90), (300, 240, 290), in_flight=4))
    statistics.sample(shown("static", (100, 0, 0), (300, 40, 80), in_flight=1, waiting=2))
    statistics.queue_blocked(QueueBlock.ROOM, 198.5)
    for number in range(200):
        waits = Rollout(load("a"), known_since_s=float(number))
        statistics.wait_begins(waits, 199.0)
        assert statistics.wait_ends(waits, 199.0) == {}
    statistics.queue_blocked(None, 200.0)
    now = shown("static", (100, 0, 0), (300, 0, 0), preemptions=6, moves=5, recomputed_tokens=100)
    quarantined = replace(now.replicas[1], quarantine="reports 5 of 4")
    figures = statistics.take(replace(now, replicas=(now.replicas[0], quarantined)), ["a fault"], 200.0)
    assert figures.values == {
        "balancer/queue_len_max": 9, "balancer/in_flight_max": 4,
        "balancer/kv_util_mean": pytest.approx((0.25 + 0.75 + 0.1) / 3), "balancer/kv_util_max": 0.75,
        "balancer/kv_reserved_mean": pytest.approx((0.5 + 0.95 + 0.2) / 3), "balancer/kv_reserved_max": 0.95,
        "balancer/num_preemptions": 1, "balancer/num_moves": 3, "balancer/num_recomputed_tokens": 30,
        "balancer/wait_p50_s": 100.0, "balancer/wait_p99_s": 198.0, "balancer/preemption_risk": 0.0,
    }  # fmt: skip
    assert figures.details == {
        "rule": "static", "quarantined": ("r1: reports 5 of 4",), "faults": ("a fault",),
        "held_s": {QueueBlock.ROOM: 1.5},
    }  # fmt: skip
    assert set(statistics.take(now, [], 200.0).values.values()) == {0}
    statistics.sample(replace(now, replicas=(), waiting=3))
    assert not statistics.take(now, [], 200.0).values["balancer/queue_len_max"]  # without a replica there is no cache
