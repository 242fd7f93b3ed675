"""The balancer's rules, one at a time."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from scheduler.balancer import RULES, Balancer
from scheduler.load import Finished, NeverFits, ReplicaLoad, RolloutLoad, TurnReport, UnknownReplica
from scheduler.waits import Held, Waits
from tests.fakes import registration


def load(name: str, *, group: str = "g", prompt: int = 16, most: int = 84, context: int = 0) -> RolloutLoad:
    return RolloutLoad(
        rollout_id=name, group_id=group, prompt_tokens=prompt, max_response_tokens=most, max_turns=4,
        context_tokens=context,
    )  # fmt: skip


def end(name: str, tokens: int, *, truncated: bool = False) -> Finished:
    return Finished(rollout_id=name, context_tokens=16 + tokens, generated_tokens=tokens, turn=1, truncated=truncated)


def fleet(rule: str, replicas: int = 2, capacity: int = 1_000, max_running: int = 64) -> Balancer:
    balancer = Balancer(rule)
    for index in range(replicas):
        balancer.add_replica(registration(f"r{index}", capacity, max_running=max_running, block_tokens=16))
    return balancer


def homes(balancer: Balancer) -> dict[str, str]:
    return {admission.rollout_id: admission.replica_id for admission in balancer.decide().admissions}


def test_an_unknown_rule_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="one of static, round_robin"):
        Balancer("fastest")


@pytest.mark.parametrize("rule", RULES)
def test_a_rollout_that_can_never_fit_is_refused_with_the_numbers(rule: str):
    balancer = fleet(rule, capacity=100)
    with pytest.raises(NeverFits, match="holds 100") as refusal:
        balancer.submit([load("fits"), load("huge", prompt=100)])
    assert refusal.value.largest_capacity_tokens == 100
    assert balancer.snapshot().submitted == 0


@pytest.mark.parametrize("rule", RULES)
def test_what_no_replica_holds_after_a_death_is_named_and_keeps_nobody_waiting(rule: str):
    balancer = fleet(rule, replicas=1, capacity=600)
    balancer.add_replica(registration("large", 2_000, max_running=64, block_tokens=16))
    balancer.submit([load("big", group="big", prompt=900)])
    assert homes(balancer) == {"big": "large"}
    grown = TurnReport(rollout_id="big", context_tokens=950, generated_tokens=50, turn=1)
    balancer.turn_finished("large", grown)
    assert balancer.remove_replica("large") == ["big"]
    balancer.submit([load(f"x{i}") for i in range(5)])
    assert homes(balancer) == {f"x{i}": "r0" for i in range(5)}
    assert (balancer.snapshot().too_large, balancer.snapshot().waiting) == (("big",), 1)
    balancer.add_replica(registration("large", 2_000, max_running=64, block_tokens=16))
    assert balancer.snapshot().too_large == ()
    assert homes(balancer) == {"big": "large"}
    assert balancer.load_of("big") == replace(load("big", group="big", prompt=900), context_tokens=950,
                                              generated_tokens=50, turn=1)  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_what_came_before_the_first_replica_and_is_too_large_for_it_keeps_nobody_waiting(rule: str):
    balancer = Balancer(rule)
    balancer.submit([load("big", prompt=5_000)])
    balancer.submit([load("x", group="x")])
    balancer.add_replica(registration("r0", 1_000, max_running=8, block_tokens=16))
    assert homes(balancer) == {"x": "r0"}
    assert balancer.snapshot().too_large == ("big",)
    assert balancer.cancel("big") is None
    assert balancer.snapshot().too_large == ()


def test_what_is_parked_and_turns_up_on_a_replica_runs_there():
    balancer = Balancer()
    balancer.submit([load("big", prompt=900)])
    balancer.add_replica(registration("r0", 600, max_running=8, block_tokens=16))
    balancer.set_serving("r0", False)
    balancer.add_replica(registration("r1", 2_000, max_running=8, block_tokens=16))
    balancer.set_serving("r1", False)
    balancer.set_serving("r0", True)
    assert balancer.snapshot().too_large == ("big",)
    assert balancer.adopt("r1", [load("big", prompt=900, context=950)]) == []
    assert (balancer.snapshot().too_large, balancer.replica_of("big")) == ((), "r1")
    assert balancer.finished("r1", end("big", 940))


def test_after_versions_are_withdrawn_a_lower_one_is_no_lie():
    for withdrawn in (False, True):
        balancer = fleet("expected_kv", replicas=1)
        balancer.replica_report("r0", ReplicaLoad(kv_used_tokens=0, policy_version=15))
        if withdrawn:
            balancer.withdraw_versions()
        balancer.replica_report("r0", ReplicaLoad(kv_used_tokens=0, policy_version=10))
        assert (balancer.set_aside("r0") is None) == withdrawn


def test_a_report_that_was_under_way_while_versions_were_withdrawn_makes_no_lie_of_the_next():
    balancer = fleet("expected_kv", replicas=1)
    balancer.set_policy_version(15)
    balancer.withdraw_versions()
    balancer.replica_report("r0", ReplicaLoad(kv_used_tokens=0, policy_version=15))  # of a turn that ended before
    balancer.set_policy_version(10)
    assert balancer.snapshot().replicas[0].policy_version == 10
    balancer.replica_report("r0", ReplicaLoad(kv_used_tokens=0, policy_version=10))
    assert balancer.set_aside("r0") is None
    balancer.replica_report("r0", ReplicaLoad(kv_used_tokens=0, policy_version=9))
    assert balancer.set_aside("r0") is not None


def test_a_moved_rollout_does_not_follow_its_move_to_a_replica_that_came_back_smaller():
    balancer = fleet("expected_kv", replicas=2, capacity=2_000_000, max_running=1_000)
    balancer.remember(8_000, 4, [(f"old{i}", 7_000.0, False) for i in range(300)])
    balancer.submit([load(f"x{i}", group=f"g{i}", most=8_000) for i in range(300)])
    placed = homes(balancer)
    for name in [name for name, home in placed.items() if home == "r1"]:
        balancer.finished("r1", end(name, 7_000))
    stayed = next(name for name, home in placed.items() if home == "r0")
    balancer.turn_finished("r0", TurnReport(rollout_id=stayed, context_tokens=316, generated_tokens=300, turn=1))
    assert [move.to_replica for move in balancer.decide().moves] == ["r1"]
    balancer.add_replica(registration("r1", 300, max_running=8, block_tokens=16))
    balancer.returned("r0", [load(stayed, group="g0", most=8_000, context=316)])
    assert homes(balancer) == {stayed: "r0"}


def test_a_large_rollout_goes_to_the_large_replica_though_a_small_one_seems_roomier():
    balancer = fleet("expected_kv", replicas=1, capacity=600)
    balancer.add_replica(registration("large", 2_000, max_running=8, block_tokens=16))
    balancer.replica_report("large", ReplicaLoad(kv_used_tokens=1_500))  # nobody's: it is empty
    balancer.submit([load("big", prompt=900)])
    assert homes(balancer) == {"big": "large"}


@pytest.mark.parametrize("rule", RULES)
def test_a_replica_that_is_set_aside_or_pauses_gets_nothing_new(rule: str):
    balancer = fleet(rule, replicas=3)
    balancer.set_serving("r0", False)
    assert "policy version 0 after 1" in str(
        balancer.replica_report("r1", ReplicaLoad(policy_version=1))
        or balancer.replica_report("r1", ReplicaLoad(policy_version=0))
    )
    balancer.submit([load(f"x{i}", group=f"g{i}") for i in range(9)])
    assert set(homes(balancer).values()) == {"r2"}


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        (ReplicaLoad(policy_version=3), "policy version 3 after 5"),
        (ReplicaLoad(policy_version=5, steps=-1), "-1 steps after 0"),
        (ReplicaLoad(policy_version=5, kv_used_tokens=-1), "-1 KV tokens in use of 1000"),
        (ReplicaLoad(policy_version=5, kv_used_tokens=float("nan")), "nan KV tokens"),  # pyright: ignore
        (ReplicaLoad(policy_version=5, running=-1), "a negative count"),
    ],
)
def test_a_report_that_cannot_be_true_sets_the_replica_aside(report: ReplicaLoad, problem: str):
    balancer = Balancer()
    balancer.add_replica(registration("r0", 1_000, max_running=8, block_tokens=16, policy_version=5))
    assert problem in str(balancer.replica_report("r0", report))
    balancer.submit([load("x")])
    assert homes(balancer) == {}


def test_steps_that_go_back_set_the_replica_aside():
    balancer = fleet("expected_kv", replicas=1)
    assert balancer.replica_report("r0", ReplicaLoad(steps=100)) is None
    assert "50 steps after 100" in str(balancer.replica_report("r0", ReplicaLoad(steps=50)))


def test_a_replica_may_lag_behind_what_is_published_but_not_behind_itself():
    balancer = fleet("expected_kv", replicas=1)
    balancer.replica_report("r0", ReplicaLoad(policy_version=3))
    balancer.set_policy_version(4)
    assert balancer.replica_report("r0", ReplicaLoad(policy_version=3)) is None
    assert balancer.replica_report("r0", ReplicaLoad(policy_version=4)) is None
    assert "3 after 4" in str(balancer.replica_report("r0", ReplicaLoad(policy_version=3)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("context", "generated"), [(10**7, 10**7), (101, 20), (100, 85), (-5, -9)])
@pytest.mark.parametrize("ended", [True, False])
def test_a_rollout_longer_than_it_may_be_sets_its_replica_aside(rule: str, context: int, generated: int, ended: bool):
    balancer = fleet(rule, replicas=1)
    balancer.submit([load("a")])
    assert homes(balancer) == {"a": "r0"}
    if ended:
        lengths = Finished(rollout_id="a", context_tokens=context, generated_tokens=generated, turn=1)
        assert balancer.finished("r0", lengths)
    else:
        report = TurnReport(rollout_id="a", context_tokens=context, generated_tokens=generated, turn=1)
        assert balancer.turn_finished("r0", report)
        known = balancer.load_of("a")
        assert known is not None and known.context_tokens <= 100 and known.generated_tokens <= 84
    (replica,) = balancer.snapshot().replicas
    assert replica.set_aside is not None and ("'a'" in replica.set_aside)
    balancer.submit([load("b")])
    assert homes(balancer) == {}


def test_worst_case_reserves_whole_lives_and_waits():
    balancer = fleet("worst_case", replicas=1, capacity=250)
    balancer.submit([load("a"), load("b"), load("c")])
    assert set(homes(balancer)) == {"a", "b"}
    assert balancer.finished("r0", end("a", 3))
    assert set(homes(balancer)) == {"c"}


def test_expected_kv_admits_more_than_the_worst_case_once_it_has_seen_short_ones():
    cautious, learned = fleet("expected_kv", replicas=1), fleet("expected_kv", replicas=1)
    learned.remember(84, 4, [(f"old{i}", 10.0 + i % 5, False) for i in range(200)])
    batch = [load(f"x{i}", group=f"g{i}") for i in range(60)]
    cautious.submit(batch)
    learned.submit(batch)
    assert len(homes(learned)) > 1.3 * len(homes(cautious))


def test_expected_kv_starts_the_longest_expected_group_first_after_its_probes():
    balancer = fleet("expected_kv", replicas=1, capacity=100_000, max_running=12)
    rollouts = [load(f"{group}{i}", group=group, most=8_000) for group in ("short", "long") for i in range(16)]
    balancer.submit(rollouts)
    started = homes(balancer)
    assert sum(name.startswith("short") for name in started) >= 4, "every group is probed"
    for name in started:
        if name.startswith("short"):
            balancer.finished("r0", end(name, 50))
        else:
            report = TurnReport(rollout_id=name, context_tokens=4_016, generated_tokens=4_000, turn=1)
            balancer.turn_finished("r0", report)
    assert {name[:4] for name in homes(balancer)} == {"long"}


def test_expected_kv_puts_siblings_together_only_while_that_saves_prefill():
    balancer = fleet("expected_kv", replicas=2, capacity=100_000)
    balancer.submit([load(f"p{i}", group="p", prompt=30_000, most=200) for i in range(2)])
    assert len(set(homes(balancer).values())) == 1
    balancer = fleet("expected_kv", replicas=2, capacity=100_000)
    balancer.submit([load(f"p{i}", group="p", prompt=16, most=8_000) for i in range(2)])
    assert len(set(homes(balancer).values())) == 2


def test_expected_kv_takes_equal_replicas_in_turn():
    balancer = fleet("expected_kv", replicas=3)
    places: list[str] = []
    for number in range(6):
        balancer.submit([load(f"{number}", group=f"{number}")])
        places += homes(balancer).values()
        balancer.finished(places[-1], end(f"{number}", 10))
    assert sorted(places[:3]) == sorted(places[3:]) == ["r0", "r1", "r2"]


def test_expected_kv_spreads_siblings_that_are_long_or_short_together():
    balancer = fleet("expected_kv", replicas=8, capacity=250_000, max_running=1_024)
    rng = np.random.default_rng(0)
    lengths = 2_000 * np.exp(rng.normal(0.0, 0.5, (64, 1)) + rng.normal(0.0, 0.5, (64, 16)))
    balancer.remember(
        8_192, 4, [(f"past{g}", min(n, 8_192.0), n >= 8_192) for g, row in enumerate(lengths.tolist()) for n in row]
    )
    balancer.submit([load(f"{i % 48}/{i}", group=f"{i % 48}", prompt=300, most=8_192) for i in range(48 * 16)])
    together = Counter((name.split("/")[0], place) for name, place in homes(balancer).items())
    assert sum(together.values()) > 300
    assert max(together.values()) <= 5


def test_an_empty_replica_takes_whatever_its_cache_can_hold():
    balancer = fleet("expected_kv", replicas=1, capacity=120)
    balancer.submit([load("a", most=500)])
    assert homes(balancer) == {"a": "r0"}


def test_a_preemption_is_counted_and_makes_admission_more_careful():
    calm, shaken = fleet("expected_kv", replicas=1), fleet("expected_kv", replicas=1)
    for preemptions in range(1, 15):
        shaken.replica_report("r0", ReplicaLoad(preemptions=preemptions))
    for balancer in (calm, shaken):
        balancer.submit([load(f"x{i}", group=f"g{i}") for i in range(60)])
    assert shaken.snapshot().preemptions == 14
    assert len(homes(shaken)) < len(homes(calm))


def test_the_tail_is_moved_from_a_full_replica_to_an_idle_one():
    balancer = fleet("expected_kv", replicas=2, capacity=2_000_000, max_running=1_000)
    balancer.remember(8_000, 4, [(f"old{i}", 7_000.0, False) for i in range(300)])
    balancer.submit([load(f"x{i}", group=f"g{i}", most=8_000) for i in range(300)])
    placed = homes(balancer)
    assert set(placed.values()) == {"r0", "r1"}
    for name in [name for name, home in placed.items() if home == "r1"]:
        balancer.finished("r1", end(name, 7_000))
    stayed = next(name for name, home in placed.items() if home == "r0")
    balancer.turn_finished("r0", TurnReport(rollout_id=stayed, context_tokens=316, generated_tokens=300, turn=1))
    (move,) = balancer.decide().moves
    assert (move.rollout_id, move.from_replica, move.to_replica) == (stayed, "r0", "r1")
    assert balancer.returned("r0", [load(stayed, group="g0", most=8_000, context=316)]) == [stayed]
    assert homes(balancer) == {stayed: "r1"}
    assert balancer.snapshot().moves == 1


def test_prefix_aware_follows_the_prompt_until_its_replica_is_well_ahead():
    balancer = fleet("prefix_aware")
    balancer.submit([load(f"x{i}") for i in range(40)])
    placed = list(homes(balancer).values())
    assert placed[:33] == ["r0"] * 33
    assert "r1" in placed


def test_static_cuts_a_batch_into_equal_runs():
    balancer = fleet("static")
    balancer.submit([load(f"x{i}") for i in range(4)])
    assert homes(balancer) == {"x0": "r0", "x1": "r0", "x2": "r1", "x3": "r1"}


def test_most_hashes_stay_where_they_were_when_a_replica_joins():
    few, more = fleet("consistent_hash", replicas=4), fleet("consistent_hash", replicas=5)
    for balancer in (few, more):
        balancer.submit([load(f"x{i}") for i in range(200)])
    before, after = homes(few), homes(more)
    assert 20 <= sum(before[name] != after[name] for name in before) <= 60


def test_least_requests_counts_what_was_sent_since_the_engines_report():
    balancer = fleet("least_requests")
    balancer.replica_report("r0", ReplicaLoad(running=3))
    balancer.submit([load(f"x{i}") for i in range(5)])
    assert sorted(homes(balancer).values()) == ["r0", "r1", "r1", "r1", "r1"]


def test_known_rollouts_are_left_alone_when_submitted_again():
    balancer = fleet("expected_kv")
    balancer.submit([load("a")])
    assert set(homes(balancer)) == {"a"}
    balancer.submit([load("a")])
    assert homes(balancer) == {}
    assert balancer.snapshot().submitted == 1


@pytest.mark.parametrize("rule", RULES)
def test_a_rollout_named_twice_in_one_submission_is_one_rollout(rule: str):
    balancer = fleet(rule)
    balancer.submit([load("x"), load("x", prompt=32), load("y")])
    assert homes(balancer).keys() == {"x", "y"}
    assert balancer.load_of("x") == load("x")
    for name in ("x", "y"):
        assert balancer.finished(str(balancer.replica_of(name)), end(name, 5))
    snapshot = balancer.snapshot()
    assert (snapshot.submitted, snapshot.finished, snapshot.in_flight) == (2, 2, 0)
    assert not balancer.residents("r0") and balancer.reserved_tokens("r0") == 0


def test_a_call_about_an_unknown_replica_says_so():
    with pytest.raises(UnknownReplica, match="'r9' is not registered"):
        fleet("static").remove_replica("r9")


def test_lengths_may_be_remembered_while_rollouts_live():
    balancer = fleet("expected_kv", replicas=1)
    names = [*(f"short{i}" for i in range(8)), "long"]
    balancer.submit([load(name, group=name) for name in names])
    assert homes(balancer).keys() == set(names)
    balancer.replica_report("r0", ReplicaLoad(running=9, steps=1))
    for name in names[:-1]:
        balancer.finished("r0", end(name, 10))
    balancer.remember(84, 4, [("past", 20.0, False)])  # the finished groups are counted into the past
    balancer.turn_finished("r0", TurnReport(rollout_id="long", context_tokens=56, generated_tokens=40, turn=1))
    balancer.replica_report("r0", ReplicaLoad(running=1, steps=200))
    balancer.submit([load("new")])
    assert homes(balancer) == {"new": "r0"}


def test_a_new_policy_version_keeps_live_rollouts_and_lets_old_lengths_fade():
    balancer = fleet("expected_kv", replicas=1, capacity=10_000)
    balancer.submit([load(f"{g}{i}", group=g) for g in ("a", "b") for i in range(4)])
    assert len(homes(balancer)) == 8
    for i in range(4):
        balancer.finished("r0", end(f"a{i}", 20))
    balancer.set_policy_version(1)
    balancer.submit([load("late", group="c")])
    assert set(homes(balancer)) == {"late"}
    for i in range(4):
        assert balancer.finished("r0", end(f"b{i}", 20))
    assert balancer.finished("r0", end("late", 20))


def reasons(balancer: Balancer) -> dict[str, str]:
    placed = [admission.rollout_id for admission in balancer.decide().admissions]
    return {name: balancer.books.placement(name, 0).why for name in placed}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_says_why_a_rollout_goes_where_it_does(rule: str):
    balancer = fleet(rule)
    balancer.submit([load(f"x{i}", group=f"g{i}") for i in range(3)])
    told = reasons(balancer)
    assert told.keys() == {"x0", "x1", "x2"} and all(told.values())


def test_a_cached_prompt_and_a_move_are_reasons_of_their_own():
    balancer = fleet("prefix_aware")
    balancer.submit([load("a"), load("b")])
    assert list(reasons(balancer).values())[1] == "the prompt is cached there"
    balancer = fleet("expected_kv", replicas=1)
    balancer.submit([load("a"), load("b"), load("c", group="other")])
    told = reasons(balancer)
    assert told["b"] == "most room by expected KV, its siblings' prompt being cached there"
    assert told["c"] == "most room by expected KV"


def test_what_holds_the_queue_up_is_told():
    balancer = fleet("worst_case", replicas=1, capacity=128, max_running=1)
    assert balancer.books.held_up() is None
    balancer.submit([load("a"), load("b")])
    assert homes(balancer) == {"a": "r0"}
    assert balancer.books.held_up() is Held.SEAT
    balancer.set_serving("r0", False)
    assert balancer.books.held_up() is Held.REPLICA
    roomy = fleet("worst_case", replicas=1, capacity=128)
    roomy.submit([load("a"), load("b")])
    assert homes(roomy) == {"a": "r0"}
    assert roomy.books.held_up() is Held.ROOM


def test_waits_share_what_held_the_queue_up_while_they_lasted():
    waits = Waits()
    waits.begin(["a"], 1.0)
    waits.note(Held.SEAT, 1.0)
    waits.begin(["b", "a"], 3.0)
    waits.note(Held.ROOM, 4.0)
    assert waits.end("b", 6.0) == (3.0, {Held.SEAT: 1.0, Held.ROOM: 2.0})
    waits.note(None, 6.0)
    assert waits.end("a", 9.0) == (8.0, {Held.SEAT: 3.0, Held.ROOM: 2.0})
    assert waits.end("never queued", 9.0) == (0.0, {})
    assert waits.take(9.0) == {Held.SEAT: 3.0, Held.ROOM: 2.0}
    assert waits.take(10.0) == {}
