"""Random orders of events: every rollout ends exactly once, nothing is lost, nothing starves, nothing leaks."""

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.balancer import RULES, Balancer
from scheduler.records import Cancel, NeverFits, Quarantined, ReplicaLoad, RolloutLoad, TurnReport
from tests.fakes import registration

REPLICAS = ("r0", "r1", "r2")
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            (
                "submit",
                "submit",
                "turn",
                "turn",
                "finish",
                "finish",
                "die",
                "leave",
                "return",
                "resize",
                "cancel",
                "pause",
                "nonsense",
            )
        ),
        st.integers(0, 10_000),
    ),
    min_size=1,
    max_size=80,
)


class World:
    """A balancer and what its workers hold, driven by drawn numbers."""

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self.balancer = Balancer(rule)
        self.capacity: dict[str, int] = dict.fromkeys(REPLICAS, 1_000)
        self.live: dict[str, RolloutLoad] = {}
        self.home: dict[str, str] = {}
        self.ended: list[str] = []
        self.granted = 0
        self.count = 0
        for replica in REPLICAS:
            self.balancer.register(registration(replica, 1_000, max_running=8, block_tokens=16))

    def needed(self, load: RolloutLoad) -> int:
        if self.rule == "worst_case":
            return -(-load.worst_case_tokens // 16) * 16
        return load.context_tokens + 1

    def could_hold(self, replica: str, load: RolloutLoad) -> bool:
        return replica in self.balancer.state.replicas and self.capacity[replica] >= self.needed(load)

    def decide(self) -> None:
        admissions, _ = self.balancer.decide()
        for rollout, replica in admissions:
            name, home = rollout.load.rollout_id, replica.replica_id
            assert name in self.live, "granted after its end"
            assert name not in self.home, "granted twice"
            assert self.could_hold(home, self.live[name]), "granted where it never fits"
            self.home[name] = home
            self.granted += 1
        if self.rule == "worst_case":
            for _, replica in admissions:
                assert replica.reserved_tokens <= self.capacity[replica.replica_id]

    def pick(self, number: int) -> str | None:
        names = sorted(self.home)
        return names[number % len(names)] if names else None

    def grown(self, name: str, tokens: int) -> RolloutLoad:
        load = self.live[name]
        tokens = min(tokens, load.worst_case_tokens - load.context_tokens)
        self.live[name] = RolloutLoad(
            rollout_id=name,
            group_id=load.group_id,
            prompt_tokens=load.prompt_tokens,
            max_response_tokens=load.max_response_tokens,
            max_turns=load.max_turns,
            context_tokens=load.context_tokens + tokens,
            generated_tokens=load.generated_tokens + tokens,
            turn=load.turn + 1,
        )
        return self.live[name]

    def event(self, kind: str, number: int) -> None:
        replica = REPLICAS[number % len(REPLICAS)]
        name = self.pick(number)
        if kind == "submit":
            loads = []
            for _ in range(1 + number % 7):
                self.count += 1
                load = RolloutLoad(
                    rollout_id=f"x{self.count}",
                    group_id=f"g{self.count // 4}",
                    prompt_tokens=1 + number % 60,
                    max_response_tokens=200,
                    max_turns=4,
                )
                loads.append(load)
            try:
                self.balancer.submit(loads)
            except NeverFits:
                self.count -= len(loads)
            else:
                self.live |= {load.rollout_id: load for load in loads}
        elif kind == "turn" and name:
            load = self.grown(name, number % 90)
            report = TurnReport(
                rollout_id=name,
                context_tokens=load.context_tokens,
                generated_tokens=load.generated_tokens,
                turn=load.turn,
            )
            self.report(self.home[name], report)
        elif kind == "finish" and name:
            self.finish(name, number)
        elif kind in ("die", "leave") and replica in self.balancer.state.replicas:
            for orphan in self.balancer.replica_lost(replica):
                assert self.home.pop(orphan) == replica
            if kind == "die":
                self.balancer.register(registration(replica, self.capacity[replica], max_running=8, block_tokens=16))
        elif kind == "return" and name:
            self.balancer.return_rollouts(self.home.pop(name), [(self.grown(name, number % 30), None)])
        elif kind == "resize":
            self.capacity[replica] = 40 + number % 1_400
            self.balancer.register(registration(replica, self.capacity[replica], max_running=8, block_tokens=16))
            self.home = {name: home for name, home in self.home.items() if home != replica}
        elif kind == "cancel" and name:
            self.balancer.cancel([name])
            assert self.balancer.orders.pop() == (self.home.pop(name), Cancel(name))
            del self.live[name]
            self.ended.append(name)
        elif kind == "pause" and replica in self.balancer.state.replicas:
            self.balancer.set_serving(replica, number % 2 == 0)
        elif kind == "nonsense" and replica in self.balancer.state.replicas:
            with pytest.raises(Quarantined):
                self.balancer.report(replica, load=ReplicaLoad(kv_used_tokens=10_000))
        self.decide()

    def report(self, replica: str, turn: TurnReport) -> None:
        with suppress(Quarantined):  # by an earlier report
            self.balancer.report(replica, [turn])

    def finish(self, name: str, number: int) -> None:
        load = self.grown(name, number % 90)
        end = TurnReport(
            rollout_id=name,
            context_tokens=load.context_tokens,
            generated_tokens=load.generated_tokens,
            turn=load.turn,
            truncated=load.response_tokens >= load.max_response_tokens,
            ended=True,
        )
        holder = self.home.pop(name)
        other = next(replica for replica in REPLICAS if replica != holder)
        before = self.balancer.snapshot().finished
        if other in self.balancer.state.replicas:
            self.report(other, end)
        assert self.balancer.snapshot().finished == before, "accepted from a replica that does not hold it"
        self.report(holder, end)
        self.report(holder, end)
        assert self.balancer.snapshot().finished == before + 1, "ended twice, or not at all"
        del self.live[name]
        self.ended.append(name)

    def settle(self) -> None:
        """Rollouts end one by one: what still waits then is too large for every replica that takes work, and named."""
        number = 0
        while (name := self.pick(number)) is not None:
            self.finish(name, number)
            self.decide()
            number += 1
        snapshot = self.balancer.snapshot()
        if working := [replica.replica_id for replica in self.balancer.state.open()]:
            assert set(snapshot.too_large) == self.live.keys(), "they wait for ever while every replica is empty"
            assert not any(self.could_hold(replica, load) for replica in working for load in self.live.values())

    def restore(self) -> None:
        """All replicas serve again, and are as large as they were."""
        for replica in REPLICAS:
            self.capacity[replica] = 1_000
            self.balancer.register(registration(replica, 1_000, max_running=8, block_tokens=16))
        self.decide()


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(events=EVENTS)
def test_whatever_happens_every_rollout_ends_exactly_once_and_nothing_leaks(rule: str, events: list[tuple[str, int]]):
    world = World(rule)
    for kind, number in events:
        world.event(kind, number)
        snapshot = world.balancer.snapshot()
        assert snapshot.submitted == snapshot.finished + snapshot.cancelled + snapshot.waiting + snapshot.in_flight
        assert snapshot.in_flight == len(world.home)
        assert snapshot.waiting == len(world.live) - len(world.home)
    world.settle()
    world.restore()
    world.settle()
    snapshot = world.balancer.snapshot()
    assert not world.live
    assert len(world.ended) == len(set(world.ended)) == world.count
    assert snapshot.waiting == snapshot.in_flight == 0
    assert world.balancer.leaks() == []
    assert all(replica.kv_reserved_tokens == replica.in_flight == 0 for replica in snapshot.replicas)
