"""The rule `expected_kv` against sums over residents made one by one, and its order and moves to the digit."""

# pyright: reportPrivateUsage=false

from dataclasses import replace
from math import inf, sqrt
from statistics import NormalDist

import numpy as np
import pytest

from rstar_ray.config import BalancerConfig
from scheduler.balancer import PLACEMENT, Balancer
from scheduler.cost import EngineCost, PlacementCost
from scheduler.expected_kv.caution import Caution
from scheduler.expected_kv.rule import ExpectedKV
from scheduler.records import ReplicaLoad, RolloutLoad, TurnReport
from scheduler.state import Replica, Rollout
from tests import fakes
from tests.fakes import registration

MOST = 8_000
HORIZONS = [MOST * (k / 19) ** 1.5 for k in range(20)]


def load(name: str, *, prompt: int = 16, response: int = 0, most: int = MOST) -> RolloutLoad:
    """`group/sibling`."""
    group, context = name.partition("/")[0], prompt + response
    return fakes.load(name, group=group, prompt=prompt, most=most, context=context, made=response)


class World:
    """A balancer under the rule, with a view of what it keeps."""

    def __init__(
        self, *capacities: int, max_running: int = 1_000, blocks: int = 16, placement: BalancerConfig = PLACEMENT
    ) -> None:
        self.balancer = Balancer("expected_kv", placement)
        rule = self.balancer.rule
        assert isinstance(rule, ExpectedKV)
        self.rule: ExpectedKV = rule
        for number, capacity in enumerate(capacities):
            self.balancer.register(registration(f"r{number}", capacity, max_running=max_running, block_tokens=blocks))

    def replica(self, name: str) -> Replica:
        return self.balancer.state.replica(name)

    def rollout(self, name: str) -> Rollout:
        return self.balancer.state.rollouts[name]

    def add_history(self, *lengths: float, growth: float = 1.0) -> None:
        past = [(f"past{n}", length, length >= MOST) for n, length in enumerate(lengths)]
        self.balancer.add_history(MOST, 4, past, growth=growth)

    def decide(self) -> list[tuple[str, str]]:
        admissions, _ = self.balancer.decide()
        return [(rollout.load.rollout_id, replica.replica_id) for rollout, replica in admissions]

    def turn(self, name: str, context: int, generated: int) -> None:
        report = TurnReport(rollout_id=name, context_tokens=context, generated_tokens=generated, turn=1)
        self.balancer.report(self.home(name), [report])

    def end(self, name: str, tokens: int) -> None:
        end = TurnReport(rollout_id=name, context_tokens=16 + tokens, generated_tokens=tokens, turn=1, ended=True)
        self.balancer.report(self.home(name), [end])

    def home(self, name: str) -> str:
        replica = self.rollout(name).replica
        assert replica is not None
        return replica.replica_id

    def refresh(self) -> None:
        for profile in self.rule._room._profiles.values():
            profile.settle()
            profile.refresh()

    def alive(self, rollout: Rollout, age: float) -> list[tuple[float, float]]:
        """At every horizon: the chance that it lives so much longer, and the covariance with a sibling of that."""
        group = self.rule.lengths.group_of(rollout)
        of_group, at = np.array([group.index]), np.array([age])
        alive, shared = group.budgets.estimate.survivals(of_group, at, np.array(HORIZONS))
        return list(zip(alive[0].tolist(), shared[0].tolist(), strict=True))

    def peak(self, replica: Replica, z: float, newcomer: Rollout | None = None, block: int = 16) -> float:
        """The most KV that residents and a newcomer need at any horizon, mean and deviations, summed one by one."""
        there = list(replica.residents.values())
        now = replica.decode_step
        aged = [(one, one.response_at(now), self.alive(one, one.sampled_at(now))) for one in there]
        new = [] if newcomer is None else self.alive(newcomer, float(newcomer.load.generated_tokens))
        ((_, budgets),) = self.rule.lengths._budgets.items()
        groups = {one.load.group_id: one.load.prompt_tokens for one in there}
        most = -inf
        for place, horizon in enumerate(HORIZONS):
            mean = variance = 0.0
            for one, age, lives in aged:
                alive, shared = lives[place]
                siblings = sum(other.load.group_id == one.load.group_id for other in there) - 1
                size = min(age + budgets.growth * horizon, MOST) + block / 2
                mean += size * alive
                variance += size**2 * (alive * (1 - alive) + siblings * shared)
            if newcomer is not None:
                age, (alive, shared) = newcomer.load.response_tokens, new[place]
                siblings = sum(other.load.group_id == newcomer.load.group_id for other in there)
                size = min(age + budgets.growth * horizon, MOST) + block / 2
                mean += size * alive
                variance += size**2 * (alive * (1 - alive) + 2 * siblings * shared)
            most = max(most, mean + z * sqrt(max(variance, 0.0)))
        prompts = sum(-(-prompt // block) * block for prompt in groups.values())
        held = sum(age + block / 2 for _, age, _ in aged) + prompts
        beside = max(0.0, replica.load.kv_used_tokens - held)
        if newcomer is not None and newcomer.load.group_id not in groups:
            prompts += -(-newcomer.load.prompt_tokens // block) * block
        return most + prompts + beside


def busy(blocks: int = 16) -> World:
    """One replica with siblings of several ages."""
    world = World(90_000, 90_000, blocks=blocks)
    rng = np.random.default_rng(0)
    world.add_history(*np.minimum(rng.lognormal(7.3, 0.8, 150), MOST).tolist(), growth=1.25)
    world.balancer.set_serving("r1", False)
    world.balancer.submit([load(f"g{n % 5}/{n}", prompt=33 + 100 * (n % 5)) for n in range(14)])
    assert len(world.decide()) == 14
    for number in (0, 3, 5, 6, 10, 11):
        world.turn(f"g{number % 5}/{number}", 33 + 100 * (number % 5) + 60 * (number + 1), 40 * (number + 1))
    world.end("g4/4", 50)
    return world


def test_a_fit_is_exact_to_the_token():
    world = busy()
    world.balancer.submit([load("h/new", prompt=90)])
    world.rule.lengths.learn()
    world.refresh()
    replica, newcomer, room = world.replica("r0"), world.rollout("h/new"), world.rule._room
    peak = room.peak(replica, world.rule.caution.z, newcomer)
    for capacity, fits in ((int(peak) + 1, True), (int(peak), False)):
        replica.kv_capacity_tokens = capacity
        assert room.fits(replica, newcomer) == fits
    replica.kv_capacity_tokens, replica.max_running = 10**6, 13
    assert not room.fits(replica, newcomer)  # no seat
    empty = world.replica("r1")
    for capacity, fits in ((91, True), (90, False)):
        empty.kv_capacity_tokens = capacity
        assert room.fits(empty, newcomer) == fits


def test_rollouts_of_one_budget_learn_together_though_long_prompts_leave_less_room():
    world = busy()
    known = len(world.rule.lengths.learned())
    for prompt in (40, 50, 60):
        world.balancer.submit([replace(load(f"h/{prompt}", prompt=prompt, most=100 - prompt), budget=90)])
    assert len(world.rule.lengths.learned()) == known + 1


def test_a_risk_next_to_zero_is_a_finite_caution():
    assert 6 < Caution(BalancerConfig(risk=1e-300)).z < 9


SLOW = EngineCost(fixed_s=0.01, per_sequence_s=0.0, per_context_s=0.0, per_prefill_s=1e-4)
"""Every step takes as long, and a hundred tokens of context as long as a step."""


def test_the_risk_follows_from_what_engines_have_measured_and_from_how_long_rollouts_get():
    caution, replica = Caution(BalancerConfig()), Replica("r0", 0, 100_000, 1_000, cost=SLOW)
    assert (caution.risk, caution.cost) == (0.01, None)
    caution.weigh([replica], 1_000.0, 0.0)
    steps = 1_000 * 1e-4 / 0.01
    assert caution.cost == PlacementCost(preemption_steps=steps, idle_share=1.0, running=100.0)
    assert caution.risk == pytest.approx(0.025)  # 0.01 where 0.4 of a step is the same for any number
    caution.weigh([replica], 500.0, 0.0)
    assert caution.risk == pytest.approx(0.1)  # half the steps, a quarter of the harm
    caution.weigh([replica], 50.0, 0.0)
    assert (caution.risk, caution.z) == (0.9999, pytest.approx(NormalDist().inv_cdf(0.0001 ** (1 / 8))))
    caution.weigh([replica], 10_000.0, 0.0)
    assert caution.risk == 0.01
    caution.weigh([replica], 10_000.0, 5_000.0)  # ten in a cache: 5,000 / (10 * 8 * 100) at a look
    assert caution.risk == pytest.approx(1 - (1 - 0.625) ** 8)
    unmeasured = [Replica(f"r{n}", n, 100_000, 1_000, cost=cost) for n, cost in ((1, None), (2, SLOW), (3, SLOW))]
    caution.weigh(unmeasured, 1_000.0, 0.0)
    assert caution.risk == pytest.approx(0.025)


def test_every_group_is_probed_four_times_in_turn_before_any_continues():
    world = World(2_000_000)
    world.balancer.submit([load(f"g{group}/{n}") for group in range(3) for n in range(6)])
    order = [name for name, _ in world.decide()]
    probes = [f"g{group}/{n}" for n in range(4) for group in range(3)]
    assert order == [*probes, "g0/4", "g0/5", "g1/4", "g1/5", "g2/4", "g2/5"]


def test_what_was_interrupted_goes_before_all_others():
    world = World(100_000, 100_000)
    world.balancer.submit([load("a/0"), load("b/0")])
    placed = dict(world.decide())
    world.balancer.submit([load("c/0")])
    world.balancer.return_rollouts(placed["b/0"], [(load("b/0", response=100), None)])
    assert [name for name, _ in world.decide()] == ["b/0", "c/0"]


def moves(world: World) -> list[tuple[str, str]]:
    """To another replica."""
    _, found = world.balancer.decide()
    return [(move.from_replica, move.to_replica) for move in found if move.to_replica is not None]


def pressed(generated: int = 10**8) -> World:
    """r0 holds more than it can; the others are differently full."""
    world = World(60_000, 40_000, 90_000, 30_000)
    world.add_history(*[4_000.0] * 100)
    for name, number in (("r0", 40), ("r1", 3), ("r2", 3), ("r3", 2)):
        running = tuple(load(f"{name}/{n}", prompt=64, response=600) for n in range(number))
        capacity = world.replica(name).kv_capacity_tokens
        world.balancer.register(registration(name, capacity, max_running=1_000, resident=running))
    world.rule.lengths.learn()
    world.refresh()
    world.balancer.state.generated_tokens = generated
    return world


def test_relief_stays_below_eight_thousandths():
    for generated, expected in ((700 * 1_000 // 8 + 600, 1), (700 * 1_000 // 8 - 600, 0)):
        world = pressed(generated)
        world.balancer.submit([load("waits/0", prompt=89_000)])
        world.turn("r0/7", 700, 636)
        assert len(moves(world)) == expected


def test_a_rollout_as_large_as_a_cache_goes_to_a_larger_one():
    world = World(900, 2_000)
    world.balancer.report("r1", load=ReplicaLoad(kv_used_tokens=1_500))  # nobody's: the small one seems roomier
    world.balancer.submit([load("big/0", prompt=900, most=100)])
    assert world.decide() == [("big/0", "r1")]


def test_the_roomiest_replica_is_taken_and_a_cached_prompt_is_room():
    world = World(50_000, 60_000, 55_000)
    world.balancer.submit([load("a/0")])
    assert world.decide() == [("a/0", "r1")]
    world = World(60_000, 60_000)
    world.balancer.submit([load("a/0", prompt=20_000, most=200)])
    (first,) = world.decide()
    for name, expected in (("a/1", first[1]), ("b/0", "r1" if first[1] == "r0" else "r0")):
        world.balancer.submit([load(name, prompt=20_000, most=200)])
        assert world.decide() == [(name, expected)]
