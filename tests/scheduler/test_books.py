"""What the balancer is told and keeps: records, books, tally, pictures, to the number."""

from dataclasses import replace
from typing import Any

import pytest

from rstar_ray.run_dir.metrics import PlacementFigures
from scheduler.balancer import RULES, Balancer
from scheduler.fleet import Fleet, Replica, Rollout
from scheduler.load import (
    Finished,
    NeverFits,
    Registration,
    ReplicaLoad,
    ReplicaSnapshot,
    RolloutLoad,
    TurnReport,
    in_flight_limit,
)
from scheduler.rules import _mixed
from scheduler.tally import Tally
from tests.fakes import registration


def load(name: str, *, group: str = "g", prompt: int = 16, most: int = 84, context: int = 0, made: int = 0):
    return RolloutLoad(
        rollout_id=name, group_id=group, prompt_tokens=prompt, max_response_tokens=most, max_turns=4,
        context_tokens=context, generated_tokens=made,
    )  # fmt: skip


def fleet(rule: str, *capacities: int, max_running: int = 64, blocks: int = 16) -> Balancer:
    balancer = Balancer(rule)
    for index, capacity in enumerate(capacities):
        balancer.add_replica(registration(f"r{index}", capacity, max_running=max_running, block_tokens=blocks))
    return balancer


def homes(balancer: Balancer, limit: int | None = None) -> dict[str, str]:
    return {one.rollout_id: one.replica_id for one in balancer.decide(limit).admissions}


def report(name: str, context: int, made: int, turn: int = 1) -> TurnReport:
    return TurnReport(rollout_id=name, context_tokens=context, generated_tokens=made, turn=turn)


def end(name: str, context: int, made: int) -> Finished:
    return Finished(rollout_id=name, context_tokens=context, generated_tokens=made, turn=1)


@pytest.mark.parametrize(("running", "limit"), [(1, 2), (8, 9), (9, 11), (64, 72), (1_024, 1_152)])
def test_one_more_than_an_eighth_may_wait_in_an_engine(running: int, limit: int):
    assert in_flight_limit(running) == limit


def test_a_load_knows_its_response_and_its_longest_life_and_refuses_what_cannot_be():
    known = load("a", context=40, made=20)
    assert (known.response_tokens, known.worst_case_tokens, load("b").context_tokens) == (24, 100, 16)
    assert load("c", context=16).response_tokens == 0
    for wrong in ({"prompt": 0}, {"most": 0}, {"context": 15}, {"made": -1}):
        with pytest.raises(ValueError, match="rollout 'x'"):
            load("x", **wrong)
    for field in ("max_turns", "turn"):
        with pytest.raises(ValueError, match="rollout 'a'"):
            replace(known, **{field: -1})
    assert replace(known, max_turns=1, prompt_tokens=1, max_response_tokens=1, turn=0)


def test_a_rollouts_age_grows_with_its_replicas_steps_up_to_its_budget():
    rollout = Rollout(replace(load("a", context=40), generated_tokens=20), 0, step_seen=100.0)
    assert [rollout.response_at(step) for step in (100.0, 110.0, 158.0, 159.0, 500.0)] == [24, 34, 82, 83, 83]
    assert [rollout.sampled_at(step) for step in (100.0, 110.0, 162.0, 163.0, 500.0)] == [20, 30, 82, 83, 83]


def test_a_new_replica_has_done_nothing():
    replica = Fleet().add(registration("r0", 1_000, max_running=2, block_tokens=16, policy_version=7))
    assert replica.snapshot(5) == ReplicaSnapshot(
        replica_id="r0", kv_capacity_tokens=1_000, kv_used_tokens=0, kv_reserved_tokens=5, in_flight=0, running=0,
        preemptions=0, admissions=0, policy_version=7, serving=True, set_aside=None,
    )  # fmt: skip
    assert replica.decode_step == 0.0 and replica.has_seat and replica.open
    assert [replica.whole_blocks(tokens) for tokens in (0, 1, 16, 17)] == [0, 16, 16, 32]
    rollout = Rollout(load("a"), 0)
    assert (rollout.step_seen, rollout.reserved_tokens, rollout.profile_row, rollout.length_row) == (0.0, 0, -1, -1)


def test_a_fleet_keeps_places_and_reckons_with_the_largest_block():
    fleet = Fleet()
    assert fleet.largest_capacity_tokens == 0 and fleet.whole_blocks(1) == 32
    for name, capacity, block in (("a", 100, 32), ("b", 300, 16), ("c", 200, 16)):
        fleet.add(registration(name, capacity, block_tokens=block))
    assert (len(fleet), fleet.largest_capacity_tokens, fleet.whole_blocks(33)) == (3, 300, 64)
    fleet.remove("b")
    assert fleet.add(registration("d", 50)).index == 1
    assert [replica.replica_id for replica in fleet.open()] == ["a", "d", "c"]
    fleet.by_id["d"].serving = False
    fleet.by_id["c"].set_aside = "why"
    assert [replica.replica_id for replica in fleet.open()] == ["a"]


def test_a_seat_is_one_of_max_running():
    balancer = fleet("worst_case", 10_000, max_running=3)
    balancer.submit([load(f"x{n}") for n in range(5)])
    assert len(homes(balancer)) == 3


def test_what_a_replica_reports_is_counted():
    balancer = fleet("least_sessions", 1_000)
    balancer.submit([load("a"), load("b", group="h", prompt=33)])
    assert len(homes(balancer)) == 2
    balancer.turn_finished("r0", report("a", 60, 40))
    assert balancer.replica_report("r0", ReplicaLoad(kv_used_tokens=1_000, preemptions=3, steps=50, running=2)) is None
    snapshot = balancer.snapshot()
    assert (snapshot.preemptions, snapshot.recomputed_tokens) == (3, 3 * (60 + 33) // 2)
    (replica,) = snapshot.replicas
    assert (replica.kv_used_tokens, replica.running, replica.admissions, replica.in_flight) == (1_000, 2, 2, 2)
    balancer.replica_report("r0", ReplicaLoad(preemptions=3, steps=50))
    assert balancer.snapshot().preemptions == 3
    assert balancer.replica_report("r0", ReplicaLoad(preemptions=2, steps=50)) == "reports 2 preemptions after 3"
    assert balancer.replica_report("r0", ReplicaLoad(preemptions=1, steps=50)) is None  # said once


def test_the_decode_clock_follows_turns_and_the_engines_own_steps():
    balancer = fleet("expected_kv", 10_000)
    balancer.submit([load("a", most=900), load("b", group="h", most=900)])
    homes(balancer)
    replica = balancer.books.replica("r0")
    balancer.turn_finished("r0", report("a", 116, 90))  # ten of them are a tool's
    assert replica.decode_step == 90
    balancer.replica_report("r0", ReplicaLoad(steps=1_000))
    assert (replica.decode_step, replica.clock_offset) == (90, -910)
    balancer.replica_report("r0", ReplicaLoad(steps=1_040))
    assert replica.decode_step == 130
    balancer.turn_finished("r0", report("b", 316, 300))
    assert replica.decode_step == 300
    balancer.replica_report("r0", ReplicaLoad(steps=1_050))
    assert (replica.decode_step, replica.clock_offset) == (300, -750)
    balancer.turn_finished("r0", report("a", 150, 100))
    assert replica.decode_step == 300  # it had been seen at 90, and is behind the others
    assert balancer.books.fleet.generated_tokens == 400
    balancer.turn_finished("r0", report("a", 140, 90))  # what goes back does not count
    assert balancer.books.fleet.generated_tokens == 400
    known = balancer.load_of("a")
    assert known is not None and (known.context_tokens, known.generated_tokens, known.turn) == (150, 100, 1)


def test_what_is_handed_back_counts_as_sampled_and_as_computed_again():
    balancer = fleet("round_robin", 1_000, 1_000)
    balancer.submit([load("a")])
    assert homes(balancer) == {"a": "r0"}
    balancer.turn_finished("r0", report("a", 46, 30))
    assert balancer.returned("r0", [load("a", context=70, made=50)]) == ["a"]
    snapshot = balancer.snapshot()
    assert balancer.books.fleet.generated_tokens == 50
    assert (snapshot.requeued, snapshot.recomputed_tokens, snapshot.moves, snapshot.waiting) == (1, 70, 0, 1)
    assert balancer.returned("r0", [load("a", context=70)]) == []
    assert balancer.snapshot().stale_reports == 1
    balancer.replica_report("r0", ReplicaLoad(preemptions=2))
    assert balancer.snapshot().recomputed_tokens == 70  # nobody was there to be preempted


def test_no_more_is_decided_than_asked_for():
    balancer = fleet("round_robin", 1_000, 1_000)
    balancer.submit([load(f"x{n}") for n in range(7)])
    assert [len(homes(balancer, limit)) for limit in (0, 2, 3, None, None)] == [0, 2, 3, 2, 0]


def test_what_runs_already_is_taken_over_once():
    balancer = fleet("worst_case", 1_000, 1_000)
    balancer.submit([load("waiting")])
    assert balancer.adopt("r0", [load("new", context=30), load("waiting", context=40)]) == []
    assert balancer.residents("r0") == ["new", "waiting"] and balancer.reserved_tokens("r0") == 224
    assert balancer.adopt("r0", [load("new", context=35)]) == []  # known there: left as it is
    assert balancer.load_of("new") == load("new", context=30)
    assert balancer.adopt("r1", [load("new"), load("other")]) == ["new"]
    assert homes(balancer) == {}
    snapshot = balancer.snapshot()
    assert (snapshot.submitted, snapshot.in_flight, snapshot.admitted) == (3, 3, 0)


def test_a_cancelled_rollout_is_gone_wherever_it_was():
    balancer = fleet("expected_kv", 400)
    balancer.submit([load("runs"), load("waits", group="h")])
    assert homes(balancer, 1) == {"runs": "r0"}
    assert (balancer.cancel("runs"), balancer.cancel("waits"), balancer.cancel("unknown")) == ("r0", None, None)
    snapshot = balancer.snapshot()
    assert (snapshot.cancelled, snapshot.stale_reports, snapshot.waiting, snapshot.in_flight) == (2, 1, 0, 0)
    assert balancer.faults() == []
    assert homes(balancer) == {}


@pytest.mark.parametrize("rule", RULES)
def test_when_all_have_ended_every_counter_is_back_at_zero(rule: str):
    balancer = fleet(rule, 1_000, 1_000)
    balancer.submit([load(f"x{n}", group=f"g{n % 3}") for n in range(6)])
    placed = homes(balancer)
    assert balancer.faults() == []  # nothing is said while one is left
    for name, home in placed.items():
        assert balancer.finished(home, end(name, 66, 50))
    assert balancer.faults() == []
    balancer.books.replica("r1").reserved_tokens = 3
    balancer.books.finished -= 1
    assert balancer.faults() == ["6 submitted, but 5 finished or cancelled", "r1 is left with 3 reserved tokens"]


def test_a_replica_below_one_is_refused():
    for wrong in ({"kv_capacity_tokens": 0}, {"max_running": 0}, {"block_tokens": 0}):
        given = {"kv_capacity_tokens": 1, "max_running": 1, "block_tokens": 1} | wrong
        with pytest.raises(ValueError, match="must be at least 1"):
            Registration(replica_id="r0", **given)


def test_needs_are_whole_blocks_in_the_worst_case_and_one_token_more_otherwise():
    for rule, needed in (("worst_case", 112), ("static", 17), ("expected_kv", 17)):
        with pytest.raises(NeverFits) as refused:
            fleet(rule, needed - 1).submit([load("a")])
        assert (refused.value.needed_tokens, refused.value.largest_capacity_tokens) == (needed, needed - 1)
        balancer = fleet(rule, needed)
        balancer.submit([load("a")])
        assert homes(balancer) == {"a": "r0"}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("round_robin", "r0 r1 r2 r0 r1 r2 r0"), ("least_sessions", "r0 r1 r2 r0 r1 r2 r0"),
        ("least_requests", "r1 r2 r1 r2 r1 r2 r0"), ("static", "r0 r0 r0 r1 r1 r2 r2"),
    ],
)  # fmt: skip
def test_plain_rules_place_as_they_are_named(rule: str, expected: str):
    balancer = fleet(rule, 1_000, 1_000, 1_000)
    balancer.replica_report("r0", ReplicaLoad(running=2, waiting=1))
    balancer.submit([load(f"x{n}") for n in range(7)])
    assert list(homes(balancer).values()) == expected.split()


def test_prefix_aware_leaves_a_cached_prompt_that_is_well_ahead():
    balancer = fleet("prefix_aware", 100_000, 100_000, max_running=1_000)
    balancer.submit([load(f"a{n}", group="a") for n in range(33)] + [load("b", group="b")])
    placed = homes(balancer)
    assert [placed[f"a{n}"] for n in range(33)] == ["r0"] * 33 and placed["b"] == "r1"
    balancer.submit([load("a-more", group="a")])
    assert homes(balancer) == {"a-more": "r0"}  # 32 ahead of the idlest, and no more
    balancer.submit([load("a-last", group="a"), load("b2", group="b")])
    assert homes(balancer) == {"a-last": "r1", "b2": "r1"}


def test_worst_case_takes_the_freest_and_waits_in_order():
    balancer = fleet("worst_case", 300, 500)
    balancer.submit([load(f"x{n}") for n in range(7)])
    assert list(homes(balancer).values()) == ["r1", "r1", "r0", "r1", "r0", "r1"]
    assert (balancer.reserved_tokens("r0"), balancer.reserved_tokens("r1")) == (224, 448)
    assert balancer.finished("r1", end("x0", 20, 4)) and homes(balancer) == {"x6": "r1"}


def shown(rule: str, *replicas: tuple[int, int, int], **counters: Any):
    """A snapshot with (capacity, used, reserved) of each replica."""
    balancer = fleet(rule, *[capacity for capacity, _, _ in replicas])
    snapshot = balancer.snapshot()
    filled = tuple(
        replace(replica, kv_used_tokens=used, kv_reserved_tokens=reserved)
        for replica, (_, used, reserved) in zip(snapshot.replicas, replicas, strict=True)
    )
    return replace(snapshot, replicas=filled, **counters)


def test_the_tally_of_a_step():
    start = shown("static", (100, 0, 0), (300, 0, 0), preemptions=5, moves=2, recomputed_tokens=70)
    tally = Tally(start)
    tally.sample(start)  # nothing waits or runs: nothing to see
    tally.sample(shown("static", (100, 40, 80), (300, 60, 120), waiting=9))
    tally.sample(shown("static", (100, 60, 90), (300, 240, 290), in_flight=4))
    tally.sample(shown("static", (100, 0, 0), (300, 40, 80), in_flight=1, waiting=2))
    for seconds in range(200):
        tally.waited(float(199 - seconds))
    now = shown("static", (100, 0, 0), (300, 0, 0), preemptions=6, moves=5, recomputed_tokens=100)
    set_aside = replace(now.replicas[1], set_aside="reports 5 of 4")
    figures = tally.take(replace(now, replicas=(now.replicas[0], set_aside)), ["a fault"], {"no room": 1.5})
    assert figures == PlacementFigures(
        rule="static", waiting_most=9, in_flight_most=4, kv_used_share=pytest.approx((0.25 + 0.75 + 0.1) / 3),
        kv_used_share_most=0.75, kv_reserved_share=pytest.approx((0.5 + 0.95 + 0.2) / 3), kv_reserved_share_most=0.95,
        preemptions=1, moves=3, recomputed_tokens=30, wait_p50_s=100.0, wait_p99_s=198.0,
        set_aside=("r1: reports 5 of 4",), faults=("a fault",), held_s={"no room": 1.5},
    )  # fmt: skip
    empty = tally.take(now, [], {})
    assert (empty.kv_used_share, empty.waiting_most, empty.wait_p99_s, empty.preemptions) == (0.0, 0, 0.0, 0)
    tally.sample(replace(now, replicas=(), waiting=3))
    assert tally.take(now, [], {}).waiting_most == 0  # without a replica there is no cache to speak of


def test_a_replica_says_what_cannot_be_true():
    from scheduler.books import nonsense

    replica = Replica("r0", 0, 100, 8)
    assert nonsense(replica, ReplicaLoad(kv_used_tokens=100)) is None
    assert nonsense(replica, ReplicaLoad(kv_used_tokens=101)) == "reports 101 KV tokens in use of 100"
    assert "negative" in str(nonsense(replica, ReplicaLoad(waiting=-1)))
    replica.load = ReplicaLoad(steps=5, preemptions=2)
    assert nonsense(replica, ReplicaLoad(steps=5, preemptions=2)) is None
    assert nonsense(replica, ReplicaLoad(steps=4, preemptions=2)) == "reports 4 steps after 5"


def test_the_hash_of_a_replica_is_murmurs():
    """Its finaliser is the hash of nothing with that seed, whose values are published with it."""
    known = {0: 0, 1: 0x514E28B7, 0xFFFFFFFF: 0x81F16F39}
    assert {value: _mixed(value) for value in known} == known


@pytest.mark.parametrize(("cached", "idlest", "home"), [(400, 365, "r0"), (100, 60, "r1"), (44, 40, "r0")])
def test_a_lead_counts_from_a_tenth_on(cached: int, idlest: int, home: str):
    balancer = fleet("prefix_aware", 100_000, 100_000, max_running=1_000)
    balancer.adopt("r0", [load(f"a{n}", group="a") for n in range(cached)])
    balancer.adopt("r1", [load(f"b{n}", group="b") for n in range(idlest)])
    balancer.submit([load("more", group="a")])
    assert homes(balancer) == {"more": home}
