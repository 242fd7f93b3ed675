"""The rule `expected_kv` against sums over residents made one by one, and its order and moves to the digit."""

from collections import Counter
from dataclasses import replace
from math import inf, sqrt
from statistics import NormalDist

import numpy as np
import pytest

from rstar_ray.config import BalancerConfig
from scheduler.balancer import PLACEMENT, Balancer
from scheduler.cost import EngineCost, PlacementCost
from scheduler.expected_kv.caution import ROOMY_Z, Caution
from scheduler.expected_kv.lengths import Lengths
from scheduler.expected_kv.rule import ExpectedKV
from scheduler.fleet import Fleet, Replica, Rollout
from scheduler.load import Finished, ReplicaLoad, RolloutLoad, TurnReport
from tests.fakes import registration

MOST = 8_000
HORIZONS = [MOST * (k / 19) ** 1.5 for k in range(20)]


def load(name: str, *, prompt: int = 16, response: int = 0, most: int = MOST) -> RolloutLoad:
    """`group/sibling`."""
    return RolloutLoad(
        rollout_id=name,
        group_id=name.partition("/")[0],
        prompt_tokens=prompt,
        max_response_tokens=most,
        max_turns=4,
        context_tokens=prompt + response,
        generated_tokens=response,
    )


class World:
    """A balancer under the rule, with a view of what it keeps."""

    def __init__(
        self, *capacities: int, max_running: int = 1_000, blocks: int = 16, placement: BalancerConfig = PLACEMENT
    ) -> None:
        self.balancer = Balancer("expected_kv", placement)
        rule = self.balancer._rule
        assert isinstance(rule, ExpectedKV)
        self.rule: ExpectedKV = rule
        for number, capacity in enumerate(capacities):
            self.balancer.add_replica(
                registration(f"r{number}", capacity, max_running=max_running, block_tokens=blocks)
            )

    def replica(self, name: str) -> Replica:
        return self.balancer.books.replica(name)

    def rollout(self, name: str) -> Rollout:
        return self.balancer.books.rollouts[name]

    def remember(self, *lengths: float, growth: float = 1.0) -> None:
        past = [(f"past{n}", length, length >= MOST) for n, length in enumerate(lengths)]
        self.balancer.remember(MOST, 4, past, growth=growth)

    def decide(self) -> list[tuple[str, str]]:
        return [(one.rollout_id, one.replica_id) for one in self.balancer.decide().admissions]

    def turn(self, name: str, context: int, generated: int) -> None:
        report = TurnReport(rollout_id=name, context_tokens=context, generated_tokens=generated, turn=1)
        assert self.balancer.turn_finished(str(self.balancer.replica_of(name)), report)

    def end(self, name: str, tokens: int) -> None:
        end = Finished(rollout_id=name, context_tokens=16 + tokens, generated_tokens=tokens, turn=1)
        assert self.balancer.finished(str(self.balancer.replica_of(name)), end)

    def refresh(self) -> None:
        for profile in self.rule._room._profiles.values():
            profile.settle()
            profile.refresh()

    def alive(self, rollout: Rollout, age: float) -> list[tuple[float, float]]:
        """At every horizon: the chance that it lives so much longer, and the covariance with a sibling of that."""
        group = self.rule._lengths.group_of(rollout)
        of_group, at = np.array([group.index]), np.array([age])
        alive, shared = group.budgets.estimate.survivals(of_group, at, np.array(HORIZONS))
        return list(zip(alive[0].tolist(), shared[0].tolist(), strict=True))

    def peak(self, replica: Replica, z: float, newcomer: Rollout | None = None, block: int = 16) -> float:
        """The most KV that residents and a newcomer need at any horizon, mean and deviations, summed one by one."""
        there = list(replica.residents.values())
        now = replica.decode_step
        aged = [(one, one.response_at(now), self.alive(one, one.sampled_at(now))) for one in there]
        new = [] if newcomer is None else self.alive(newcomer, float(newcomer.load.generated_tokens))
        ((_, budgets),) = self.rule._lengths._budgets.items()
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
    world = World(60_000, 60_000, blocks=blocks)
    rng = np.random.default_rng(0)
    world.remember(*np.minimum(rng.lognormal(7.3, 0.8, 150), MOST).tolist(), growth=1.25)
    world.balancer.set_serving("r1", False)
    world.balancer.submit([load(f"g{n % 5}/{n}", prompt=33 + 100 * (n % 5)) for n in range(14)])
    assert len(world.decide()) == 14
    for number in (0, 3, 5, 6, 10, 11):
        world.turn(f"g{number % 5}/{number}", 33 + 100 * (number % 5) + 60 * (number + 1), 40 * (number + 1))
    world.end("g4/4", 50)
    return world


@pytest.mark.parametrize("blocks", [16, 40])
@pytest.mark.parametrize("used_tokens", [0, 20_000])
def test_a_replicas_peak_is_the_sum_over_its_residents(blocks: int, used_tokens: int):
    world = busy(blocks)
    world.balancer.replica_report("r0", ReplicaLoad(kv_used_tokens=used_tokens, running=13, steps=300))
    waiting = [load("g0/new", prompt=33), load("h/new", prompt=90), load("g1/back", prompt=133, response=700)]
    world.balancer.set_serving("r0", False)
    world.balancer.submit(waiting)
    world.rule._lengths.learn()
    world.refresh()
    replica, room = world.replica("r0"), world.rule._room
    assert len(replica.residents) == 13
    for z in (0.0, 2.5):
        assert room.peak(replica, z) == pytest.approx(world.peak(replica, z, block=blocks), rel=1e-9)
        for one in waiting:
            newcomer = world.rollout(one.rollout_id)
            expected = world.peak(replica, z, newcomer, block=blocks)
            assert room.peak(replica, z, newcomer) == pytest.approx(expected, rel=1e-9)
    assert room.reserved_tokens(replica) == int(room.peak(replica, world.rule.caution.z))
    assert room.reserved_tokens(world.replica("r1")) == 0
    ages = [one.response_at(replica.decode_step) + blocks / 2 for one in replica.residents.values()]
    prompts = sum(-(-prompt // blocks) * blocks for prompt in (33, 133, 233, 333, 433))
    assert room.used_tokens(replica) == pytest.approx(sum(ages) + prompts)


def test_between_two_looks_all_grow_by_a_token_a_step():
    world = busy()
    world.refresh()
    before = world.rule._room.peak(world.replica("r0"), 1.0)
    world.replica("r0").decode_step += 7
    assert world.rule._room.peak(world.replica("r0"), 1.0) == pytest.approx(before + 7 * 13)


def test_a_fit_is_exact_to_the_token():
    world = busy()
    world.balancer.submit([load("h/new", prompt=90)])
    world.rule._lengths.learn()
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


def test_caution_is_the_quantile_of_the_risk_raised_by_preemptions_and_sinking_with_ends():
    caution = Caution(BalancerConfig(risk=0.02))
    least = NormalDist().inv_cdf((1 - 0.02) ** (1 / 8))
    assert caution.z == pytest.approx(least)
    caution.ended()
    assert caution.z == pytest.approx(least)
    caution.preempted()
    caution.preempted()
    caution.ended()
    assert caution.z == pytest.approx(least + 0.2 - 0.1 * 0.02)
    for _ in range(30):
        caution.preempted()
    assert caution.z == pytest.approx(least + 1.5)


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


def test_a_risk_or_costs_that_are_given_count_whatever_is_measured():
    replica, bare = Replica("r0", 0, 100_000, 1_000, cost=SLOW), Replica("r1", 1, 100_000, 1_000)
    for caution, risk in (
        (Caution(BalancerConfig(risk=0.3)), 0.3),
        (Caution(BalancerConfig(preemption_steps=20.0)), 0.01),
        (Caution(BalancerConfig(idle_share=0.4)), 0.01),
        (Caution(BalancerConfig(preemption_steps=5.0, idle_share=0.2)), 0.02),
    ):
        caution.weigh([replica], 1_000.0, 0.0)
        assert caution.risk == pytest.approx(risk)
    for caution, risk in (
        (Caution(BalancerConfig(preemption_steps=5.0)), 0.04),
        (Caution(BalancerConfig(preemption_steps=5.0, idle_share=0.2)), 0.02),
        (Caution(BalancerConfig()), 0.01),
    ):
        caution.weigh([bare], 1_000.0, 0.0)
        assert caution.risk == pytest.approx(risk)


def test_the_risk_is_weighed_for_rollouts_as_long_as_they_are_expected_to_get():
    world = World(64_000)
    world.replica("r0").cost = SLOW
    world.remember(*np.linspace(100.0, 900.0, 400))
    world.balancer.submit([load("g/0", prompt=100)])
    world.decide()
    assert world.rule.caution.cost is not None
    assert world.rule.caution.cost.preemption_steps == pytest.approx(6.0, rel=0.1)  # 100 and 500 tokens
    assert world.balancer.snapshot().risk == world.rule.risk == world.rule.caution.risk > 0.05


def test_a_margin_that_suffices_counts_where_it_is_less_than_the_risk_asks_for():
    caution = Caution(BalancerConfig(risk=0.01))
    least = caution.z
    assert caution.ease(2.0) and caution.z == 2.0 and not caution.roomy
    assert not caution.ease(2.0) and caution.ease(ROOMY_Z) and caution.roomy
    caution.preempted()
    assert caution.z == pytest.approx(ROOMY_Z + 0.1) and caution.apart == pytest.approx(least + 0.1)
    assert caution.ease(9.0) and caution.z == pytest.approx(least + 0.1)
    assert caution.ease(None) and caution.z == pytest.approx(least + 0.1)


def test_what_a_whole_step_would_hold_at_once_is_counted_from_its_first_rollout_to_its_last():
    world = World(64_000)
    world.remember(*np.linspace(100.0, 900.0, 400))
    lengths = world.rule._lengths
    assert lengths.whole_demand_tokens() == 0.0
    world.balancer.submit([load(f"g{n}/{k}", prompt=160) for n in range(4) for k in range(5)])
    placed = dict(world.decide())
    alive = [np.mean(np.linspace(100.0, 900.0, 400) > at) for at in HORIZONS]
    expected = max(20 * s * (160 + at) for s, at in zip(alive, HORIZONS, strict=True))
    whole = lengths.whole_demand_tokens()
    assert whole == pytest.approx(expected, rel=0.1) and len(placed) == 20
    for name in list(placed)[:19]:
        world.end(name, 300)
    assert lengths.whole_demand_tokens() == pytest.approx(whole)  # those that have ended are of the step
    world.end(list(placed)[19], 300)
    world.balancer.submit([load("h/0", prompt=160)])
    world.decide()
    assert lengths.whole_demand_tokens() == pytest.approx(whole / 20, rel=0.2)


def test_where_all_fit_at_once_they_are_spread_evenly_and_siblings_apart():
    world = World(64_000, 64_000, 32_000)
    world.remember(*np.linspace(100.0, 900.0, 400))
    world.balancer.submit([load(f"g{n}/{k}") for n in range(5) for k in range(5)])
    placed = world.decide()
    assert world.rule.caution.roomy and len(placed) == 25
    assert [sum(where == f"r{n}" for _, where in placed) for n in range(3)] == [10, 10, 5]  # by the size of the cache
    together = Counter((name.partition("/")[0], where) for name, where in placed)
    assert max(together.values()) <= 3


def test_estimates_are_refreshed_after_so_many_observations():
    lengths = Lengths(Fleet())
    rollouts = [Rollout(load(f"g{n}/0"), n) for n in range(20)]
    for rollout in rollouts:
        lengths.know(rollout)
    assert lengths.learn() and not lengths.learn()

    def patience() -> int:
        number = 0
        while not lengths.learn():
            lengths.grow(rollouts[0])
            number += 1
        return number

    lengths.grow(rollouts[0])
    assert patience() == 4 + 20 // 4 - 1
    for _ in range(2_000 - 9):
        lengths.grow(rollouts[0])
    assert lengths.learn() and patience() == 20  # a hundredth of all
    lengths.stale()
    assert patience() == 0
    many = Lengths(Fleet())
    for number in range(600):
        many.know(Rollout(load(f"g{number}/0"), number))
    many.learn()
    lengths, rollouts = many, [Rollout(load("g0/1"), 0)]
    many.know(rollouts[0])
    assert patience() == 128


def test_every_group_is_probed_four_times_in_turn_before_any_goes_on():
    world = World(2_000_000)
    world.balancer.submit([load(f"g{group}/{n}") for group in range(3) for n in range(6)])
    order = [name for name, _ in world.decide()]
    probes = [f"g{group}/{n}" for n in range(4) for group in range(3)]
    assert order == [*probes, "g0/4", "g0/5", "g1/4", "g1/5", "g2/4", "g2/5"]


def test_every_32nd_start_is_that_of_the_oldest():
    world = World(20_000_000)
    world.balancer.submit([load(f"{group}/{n}") for group in ("short", "long") for n in range(4)])
    assert len(world.decide()) == 8
    for number in range(4):
        world.end(f"short/{number}", 10)
        world.turn(f"long/{number}", 7_000, 6_984)
    world.balancer.submit([load(f"{group}/{n}") for group in ("short", "long") for n in range(100, 150)])
    order = [name for name, _ in world.decide()]
    assert order[4 : 4 + 19] == [f"long/{number}" for number in range(100, 119)]
    assert [place for place, name in enumerate(order[:40], 9) if name.startswith("short")] == [9, 10, 11, 12, 32]
    assert order[32 - 9] == "short/104"


def test_what_was_interrupted_goes_before_all_others():
    world = World(100_000, 100_000)
    world.balancer.submit([load("a/0"), load("b/0")])
    placed = dict(world.decide())
    world.balancer.submit([load("c/0")])
    world.balancer.returned(placed["b/0"], [load("b/0", response=100)])
    assert [name for name, _ in world.decide()] == ["b/0", "c/0"]


def idle_and_full(running: int = 300, *, history: float = 7_000.0) -> World:
    """Half of the rollouts on r1, all of them ended there; the others live on r0."""
    world = World(2_000_000, 2_000_000)
    world.remember(*[history] * 300)
    world.balancer.submit([load(f"g{n}/0") for n in range(running)])
    placed = world.decide()
    for name in [name for name, home in placed if home == "r1"]:
        world.end(name, 7_000)
    return world


def moves(world: World) -> list[tuple[str, str]]:
    """To another replica."""
    found = world.balancer.decide().moves
    return [(move.from_replica, move.to_replica) for move in found if move.to_replica is not None]


def test_contexts_computed_again_because_of_moves_stay_below_three_thousandths():
    world = idle_and_full()
    names = world.balancer.residents("r0")[:15]
    for name in names:
        world.turn(name, 316, 300)
    world.refresh()
    generated = (300 - len(world.balancer.residents("r0"))) * 7_000 + 15 * 300
    assert world.balancer.books.fleet.generated_tokens == generated
    assert moves(world) == [("r0", "r1")] * int(0.003 * generated // 316)
    for name in names:
        world.turn(name, 316, 300)
    assert moves(world) == []  # the share is spent


@pytest.mark.parametrize("left", (43, 46, 49, 52))
def test_a_move_goes_to_a_replica_less_than_half_as_full(left: int):
    world = idle_and_full(1_000)
    world.balancer.set_serving("r0", False)
    world.balancer.submit([load(f"h{n}/0") for n in range(left)])
    world.decide()
    world.balancer.set_serving("r0", True)
    for name in world.balancer.residents("r0")[100:]:
        world.end(name, 7_000)
    for name in world.balancer.residents("r0") + world.balancer.residents("r1"):
        world.turn(name, 316, 300)
    world.decide()
    for replica in ("r0", "r1"):
        world.balancer.books.fleet.generated_tokens += 10**7
        for name in world.balancer.residents(replica):
            world.rollout(name).prefer, world.rollout(name).leaving = None, False
    world.refresh()
    world.rule._moves._turned.clear()
    name = world.balancer.residents("r0")[0]
    world.rule._moves.turn_ended(world.rollout(name))
    held = [len(world.balancer.residents(replica)) * (300 + 8 + 16) for replica in ("r0", "r1")]
    assert bool(moves(world)) == (held[1] + 316 <= 0.5 * (held[0] - 316))


@pytest.mark.parametrize("history", [305.0, 330.0, 360.0, 400.0, 500.0, 800.0])
def test_a_move_must_be_repaid_by_what_is_still_to_come(history: float):
    world = idle_and_full(history=history)
    name = world.balancer.residents("r0")[0]
    world.turn(name, 316, 300)
    moved = bool(moves(world))  # learns first
    assert moved == (4 * world.rule._lengths.remaining_tokens(world.rollout(name)) >= 316)


def told(waiting: int, *, earlier: bool = True) -> int:
    """How many of so many start at once on one replica; a step before has ended at 300 to 8,000 tokens."""
    world = World(60_000)
    if earlier:
        world.remember(*np.minimum(np.random.default_rng(0).lognormal(7.3, 0.8, 400), MOST).tolist())
    world.balancer.submit([load(f"g{n}/0") for n in range(waiting)])
    return len(world.decide())


def test_the_last_ones_start_at_once_where_all_are_expected_to_fit():
    of_many = told(200)
    assert told(of_many + 2) == of_many + 2
    assert told(2 * of_many) <= of_many + 2
    assert told(200, earlier=False) < of_many


def pressed(generated: int = 10**8) -> World:
    """r0 holds more than it can; the others are differently full."""
    world = World(60_000, 40_000, 90_000, 30_000)
    world.remember(*[4_000.0] * 100)
    for replica, number in (("r0", 40), ("r1", 3), ("r2", 3), ("r3", 2)):
        world.balancer.adopt(replica, [load(f"{replica}/{n}", prompt=64, response=600) for n in range(number)])
    world.rule._lengths.learn()
    world.refresh()
    world.balancer.books.fleet.generated_tokens = generated
    return world


def test_a_replica_about_to_overflow_is_relieved_by_the_one_with_the_lowest_peak():
    world = pressed()
    assert world.peak(world.replica("r0"), 0.5) > 60_000
    relative = {name: world.peak(world.replica(name), 0.5) / world.replica(name).kv_capacity_tokens
                for name in ("r1", "r2", "r3")}  # fmt: skip
    world.balancer.submit([load("waits/0", prompt=89_000)])  # relief does not ask whether somebody waits
    world.turn("r0/7", 700, 636)
    assert ("r0", min(relative, key=relative.__getitem__)) in moves(world)


def test_what_engines_throw_away_may_be_spent_again_on_relief():
    for preempted, expected in ((0, 0), (1, 1)):
        world = pressed(generated=0)
        load_now = world.replica("r0").load
        world.balancer.replica_report("r0", replace(load_now, preemptions=load_now.preemptions + preempted))
        for name in ("r0/7", "r0/8", "r0/9"):
            world.turn(name, 616, 552)
        assert len(moves(world)) == expected


def test_relief_stays_below_eight_thousandths():
    for generated, expected in ((700 * 1_000 // 8 + 600, 1), (700 * 1_000 // 8 - 600, 0)):
        world = pressed(generated)
        world.balancer.submit([load("waits/0", prompt=89_000)])
        world.turn("r0/7", 700, 636)
        assert len(moves(world)) == expected


def test_nobody_is_moved_to_where_it_would_overflow():
    world = pressed()
    for name in ("r1", "r2", "r3"):
        world.replica(name).kv_capacity_tokens = 10_000
    world.turn("r0/7", 700, 636)
    assert moves(world) == []


def test_a_target_that_all_choose_is_filled_once_though_none_has_arrived_yet():
    """Rollouts leave at the ends of their turns; meanwhile others are asked to leave, for the same replica."""
    world = pressed()
    asked: list[str] = []
    for number in range(40):
        world.turn(f"r0/{number}", 700, 636)
        asked += [move.to_replica for move in world.balancer.decide().moves if move.to_replica is not None]
    there = {"r1": 3, "r2": 3, "r3": 2}
    for name, residents in there.items():
        assert (residents + asked.count(name)) * 4_000 <= world.replica(name).kv_capacity_tokens + 4_000
    assert {*asked} == {*there} and (40 - len(asked)) * 4_000 <= 60_000 + 2 * 4_000
    at_once = pressed()
    for number in range(40):
        at_once.turn(f"r0/{number}", 700, 636)
    assert abs(len(moves(at_once)) - len(asked)) <= 2  # however many looks there are


def test_whoever_was_on_its_way_and_ends_before_it_left_is_expected_nowhere_any_more():
    world = pressed()

    def peak(name: str) -> float:
        return world.rule._room.peak(world.replica(name), 0.5)

    before = {name: peak(name) for name in ("r0", "r1", "r2", "r3")}
    world.turn("r0/7", 700, 636)
    ((_, target),) = moves(world)
    assert peak(target) > before[target] + 1_000 and peak("r0") == pytest.approx(before["r0"], rel=0.01)
    assert world.rule._room.peak(world.replica("r0"), 0.5, staying=True) < peak("r0") - 1_000
    world.end("r0/7", 700)
    assert peak(target) == pytest.approx(before[target], rel=0.02)


def overfull(generated: int = 10**8, *, risk: float = 0.01, earlier: bool = False) -> World:
    """r0 holds more than it can, contexts of 616 tokens and more; nobody can relieve it."""
    world = World(60_000, 10_000, placement=BalancerConfig(risk=risk))
    if earlier:
        world.remember(*[4_000.0] * 100)
    world.balancer.adopt("r0", [load(f"r0/{n}", response=600 + 32 * n) for n in range(40)])
    world.balancer.adopt("r1", [load("r1/0", response=600), load("r1/1", response=600)])
    world.rule._lengths.learn()
    world.refresh()
    world.balancer.books.fleet.generated_tokens = generated
    world.turn("r0/7", 16 + 840, 840)
    return world


def sent_to_wait(world: World) -> list[str]:
    """In order."""
    found = world.balancer.decide().moves
    assert all((move.from_replica, move.to_replica) == ("r0", None) for move in found)
    return [move.rollout_id for move in found]


def test_where_nobody_can_relieve_a_replica_its_shortest_contexts_wait_until_there_is_room():
    world = overfull()
    waits = sent_to_wait(world)
    assert waits == [f"r0/{n}" for n in range(len(waits))] and 1 < len(waits) < 39
    profile = world.rule._room._profiles["r0"]
    assert profile.peak(0.0, staying=True) <= 60_000 < profile.peak(0.0)
    assert profile.peak(0.0, world.rule._lengths.rows_of(world.rollout(waits[-1]))[0], staying=True) > 60_000
    world.turn("r0/8", 16 + 872, 872)
    assert sent_to_wait(world) == []  # those that were asked count as gone

    back = [load(name, response=700 + n) for n, name in enumerate(waits)]
    assert world.balancer.returned("r0", back) == waits
    assert (world.balancer.books.moves, world.balancer.snapshot().waiting) == (len(waits), len(waits))
    assert world.decide() == []  # no room yet
    for name in world.balancer.residents("r0")[:30]:
        world.end(name, 4_000)
    world.balancer.submit([load("new/0")])
    went = [name for name, _ in world.decide()]
    assert went == waits[: len(went)] and len(went) > 1  # before whatever is new
    assert not any(world.rollout(name).leaving for name in went)


def test_an_overflow_that_is_turns_away_sends_nobody_to_wait():
    assert sent_to_wait(overfull(generated=200)) == []


def test_nobody_waits_where_computing_a_context_again_costs_less_than_an_empty_seat():
    assert sent_to_wait(overfull(risk=0.2)) == []


def test_once_an_earlier_step_is_known_no_more_is_sent_to_wait_than_engines_have_thrown_away():
    world = overfull(earlier=True)
    assert sent_to_wait(world) == []
    mean = sum(world.rollout(name).load.context_tokens for name in world.balancer.residents("r0")) / 40
    world.balancer.replica_report("r0", ReplicaLoad(preemptions=3))
    world.turn("r0/8", 16 + 872, 872)
    waits = sent_to_wait(world)
    assert len(waits) == int(3 * mean // (616 + 32)) == 5


def test_somebody_always_stays():
    world = overfull()
    world.replica("r0").kv_capacity_tokens = 500
    assert sent_to_wait(world) == [f"r0/{n}" for n in range(39)]


def test_one_short_rollout_full_of_tool_text_does_not_tell_what_all_will_hold():
    world = World(100_000)
    world.balancer.submit([load(f"g{n}/0") for n in range(2)])
    world.decide()
    end = Finished(rollout_id="g0/0", context_tokens=16 + 2_016, generated_tokens=16, turn=1)
    assert world.balancer.finished("r0", end)
    ((_, budgets),) = world.rule._lengths._budgets.items()
    assert 1.0 < budgets.growth == (MOST + 2_016) / (MOST + 16) < 1.3


@pytest.mark.parametrize(("foretold", "now", "roomy"), [(0.9, 0.9, True), (2.0, 0.9, False), (0.9, 2.0, False)])
def test_a_step_has_room_for_all_where_it_was_expected_to_when_it_began_and_still_is(
    monkeypatch: pytest.MonkeyPatch, foretold: float, now: float, roomy: bool
):
    """Early ends make a step look short for a while; whoever is let in then stays."""
    world = World(100_000)
    world.remember(*[4_000.0] * 100)
    for whole in (foretold, now):
        monkeypatch.setattr(world.rule._lengths, "whole_demand_tokens", lambda whole=whole: whole * 100_000)
        world.balancer.submit([load(f"{whole}-{n}/0") for n in range(60)])
        assert world.decide() or whole == now
    assert world.rule.caution.roomy == roomy


def test_nothing_is_left_when_all_have_ended():
    world = busy()
    for name in world.balancer.residents("r0"):
        world.end(name, 2_000)
    assert world.balancer.faults() == []
    assert world.rule._room.peak(world.replica("r0"), 2.0) == 0.0


def test_what_is_left_behind_is_named():
    world = busy()
    world.balancer.submit([load("late/0")])
    world.balancer.books.rollouts.clear()
    faults = world.balancer.faults()
    assert "15 submitted, but 1 finished or cancelled" in faults
    assert "r0 is left with 13 residents" in faults and "r0 is left with 5 prompt groups" in faults
    assert "r0 still counts 13 rollouts, 1216 of prompts, 0 on their way" in faults
    assert "group 'late' still has 1 live" in faults


def test_what_was_taken_over_before_anything_was_learned_closes_no_replica():
    world = World(60_000)
    world.balancer.adopt("r0", [load("a/0", response=100)])
    world.balancer.submit([load("b/0")])
    assert world.decide() == [("b/0", "r0")]


def test_a_rollout_as_large_as_a_cache_goes_to_a_larger_one():
    world = World(900, 2_000)
    world.balancer.replica_report("r1", ReplicaLoad(kv_used_tokens=1_500))  # nobody's: the small one seems roomier
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


def test_seats_are_kept_though_there_is_room():
    world = World(2_000_000, 2_000_000, max_running=3)
    world.balancer.submit([load(f"g{n}/0") for n in range(9)])
    placed = world.decide()
    assert sorted(home for _, home in placed) == ["r0"] * 3 + ["r1"] * 3
    world.end(placed[0][0], 100)
    assert [home for _, home in world.decide()] == [placed[0][1]]


def test_a_replica_that_leaves_and_comes_back_is_empty_and_what_it_held_goes_first():
    world = World(2_000_000, 2_000_000)
    world.balancer.submit([load(f"g{n}/0") for n in range(6)])
    placed = world.decide()
    lost = [name for name, home in placed if home == "r0"]
    for name in lost:
        world.turn(name, 116, 100)
    world.decide()
    assert world.balancer.remove_replica("r0") == lost
    world.balancer.submit([load("new/0")])
    world.balancer.add_replica(registration("r2", 2_000_000, max_running=1_000, block_tokens=16))
    again = world.decide()
    assert [name for name, _ in again] == [*lost, "new/0"]
    assert world.replica("r2").index == 0 and world.rule._room.reserved_tokens(world.replica("r2")) > 0
    for name in world.balancer.residents("r1") + world.balancer.residents("r2"):
        world.end(name, 50)
    assert world.balancer.faults() == []


def test_a_published_version_halves_what_is_known_and_keeps_who_runs():
    world = World(2_000_000)
    world.remember(*[500.0] * 40)
    known = world.rule._lengths._budgets[MOST, 4].estimate
    before = float(known._past_tokens_B.sum())
    world.balancer.submit([load("a/0")])
    world.decide()
    world.balancer.set_policy_version(3)
    assert float(known._past_tokens_B.sum()) == pytest.approx(before / 2)
    assert known.num_groups == 1 and world.replica("r0").policy_version == 3
    world.balancer.set_policy_version(2)  # of a learner that has gone on from an earlier state
    assert world.replica("r0").policy_version == 2
    world.end("a/0", 80)
    assert world.balancer.faults() == []
