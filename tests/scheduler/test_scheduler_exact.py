"""Edges of the scheduler that its figures do not show: who is next, what a command is told, why a rollout ended."""

from types import SimpleNamespace
from typing import Any

import pytest

from rstar_ray.trajectory import StopReason
from scheduler import plan
from scheduler.expected_kv.order import OLDEST_EVERY, PROBES, Order
from scheduler.load import RolloutLoad
from scheduler.plan import Gpu, ModelShape, plan_pools, remedies
from scheduler.traces.record import TraceRollout, TraceTurn, cut, stop_reason
from scheduler.traces.stages import StageShape
from scheduler.twin import command_line
from scheduler.twin.paged_cache import PagedCache, Request
from tests import derived


def load(name: str, *, response: int = 0) -> RolloutLoad:
    return RolloutLoad(
        rollout_id=name, group_id=name.partition("/")[0], prompt_tokens=16, max_response_tokens=800, max_turns=4,
        context_tokens=16 + response, generated_tokens=response,
    )  # fmt: skip


# -- who is next -------------------------------------------------------------------------------------------------------


class Lengths:
    """Groups with a length that is expected of each."""

    def __init__(self, **expected: float) -> None:
        self.groups: dict[str, Any] = {}
        for index, (name, length) in enumerate(expected.items()):
            fresh = SimpleNamespace(length_G=[length] * (index + 1))
            budgets = SimpleNamespace(fresh_of=lambda group, fresh=fresh: fresh)
            self.groups[name] = SimpleNamespace(budgets=budgets, index=index, fresh={}, started=0)

    def know(self, rollout: Any) -> Any:
        return self.group_of(rollout)

    def group_of(self, rollout: Any) -> Any:
        return self.groups[rollout.load.group_id]


def waiting(name: str, *, response: int = 0, prefer: str | None = None) -> Any:
    return SimpleNamespace(load=load(name, response=response), prefer=prefer, replica=None, length_row=0)


def taken(order: Order, count: int) -> str:
    names: list[str] = []
    for _ in range(count):
        rollout = order.next()
        assert rollout is not None
        order.take(rollout)
        rollout.replica = "r0"  # type: ignore[assignment]
        names.append(rollout.load.rollout_id)
    return " ".join(names)


def test_probes_of_every_group_come_first_then_the_longest_expected():
    assert (PROBES, OLDEST_EVERY) == (4, 32)
    order = Order(Lengths(a=100.0, b=300.0))  # type: ignore[arg-type]
    assert not order
    order.add([waiting(f"{group}/{n}") for n in range(6) for group in "ab"])
    order.rank()
    assert order and taken(order, 12) == "b/0 a/0 b/1 a/1 b/2 a/2 b/3 a/3 b/4 b/5 a/4 a/5"
    assert order.next() is None and order.taken == 12


def test_who_runs_elsewhere_has_started_and_who_was_interrupted_goes_before_all():
    order = Order(Lengths(a=100.0, b=300.0))  # type: ignore[arg-type]
    fresh = [waiting(f"{group}/{n}") for group in "ab" for n in range(3)]
    interrupted, wanted_there = waiting("a/8", response=5), waiting("a/9", prefer="r1")
    order.add([*fresh, interrupted, wanted_there])
    assert order.leftovers() == ["2 interrupted rollouts still queued"]
    for rollout in (fresh[3], fresh[4]):  # two of b
        order.remove(rollout)
    order.remove(interrupted)
    order.rank()
    assert order.leftovers() == ["1 interrupted rollouts still queued"]
    assert taken(order, 5) == "a/9 a/0 a/1 b/2 a/2"
    assert order.leftovers() == [] and not [group for group in order._lengths.groups.values() if group.fresh]


def test_now_and_then_the_oldest_goes_first():
    order = Order(Lengths(a=100.0, b=300.0))  # type: ignore[arg-type]
    order.add([waiting(f"a/{n}") for n in range(40)] + [waiting(f"b/{n}") for n in range(60)])
    order.rank()
    names = taken(order, 70).split()
    assert names[:8] == ["b/0", "a/0", "b/1", "a/1", "b/2", "a/2", "b/3", "a/3"]
    assert [at for at, name in enumerate(names) if name.startswith("a")] == [1, 3, 5, 7, 31, 63, 66, 67, 68, 69]
    assert names[31] == "a/4" and names[63] == "a/5"


# -- traces ------------------------------------------------------------------------------------------------------------


def rollout(*turns: tuple[int, int]) -> TraceRollout:
    return TraceRollout("g", 10, tuple(TraceTurn(sampled, tool, 0.0) for sampled, tool in turns))


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([(100, 0)], StopReason.TRUNCATED), ([(99, 0)], StopReason.ANSWERED), ([(99, 1)], StopReason.TRUNCATED),
        ([(60, 39)], StopReason.ANSWERED), ([(60, 40)], StopReason.TRUNCATED),
        ([(10, 1), (10, 0)], StopReason.ANSWERED), ([(10, 1), (10, 1), (10, 0)], StopReason.MAX_TURNS),
    ],
)  # fmt: skip
def test_why_a_rollout_ended(turns: list[tuple[int, int]], reason: StopReason):
    one = rollout(*turns)
    if turns[-1][1]:  # what a tool said last was not read
        assert one.response_tokens == sum(sampled + tool for sampled, tool in turns) - turns[-1][1]
    assert stop_reason(one, 100, 3) is reason


def test_a_rollout_is_cut_by_both_limits():
    one = rollout((40, 10), (30, 20), (30, 0))
    assert cut(one, 1_000, 3) == one and cut(one, 1_000, 2).turns == one.turns[:2]
    assert cut(one, 101, 3).turns == (*one.turns[:2], TraceTurn(1))
    assert cut(one, 100, 3).turns == one.turns[:2]
    assert cut(one, 81, 3).turns == one.turns[:2] and cut(one, 80, 3).turns == (one.turns[0], TraceTurn(30))
    assert cut(one, 50, 3).turns == one.turns[:1] and cut(one, 40, 3).turns == (TraceTurn(40),)


# -- the engine's cache ------------------------------------------------------------------------------------------------


def test_what_is_forgotten_makes_room_and_the_unknown_none():
    cache = PagedCache(capacity=10, block_tokens=4)
    request = Request("a", "g", prompt=8, context=8, new_tokens=5, seen=0)
    assert cache.needs(request) == 3 and cache.hold(request) == 0
    request.computed = True
    cache.grow(1)
    cache.release(request, 13)
    assert (cache.used, cache._cached, cache._cached_blocks) == (0, {"/g": 2, "a": 1}, 3)
    cache.forget("never seen")
    assert cache._cached_blocks == 3
    cache.forget("a")
    assert (cache._cached, cache._cached_blocks) == ({"/g": 2}, 2)
    again = Request("b", "g", prompt=8, context=9, new_tokens=5, seen=0)
    assert cache.hold(again) == 8 and (cache.used, cache._cached_blocks) == (3, 0)


# -- the command -------------------------------------------------------------------------------------------------------


def test_what_the_twin_assumes_where_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.argv", ["scheduler.twin", "--trace", "a.jsonl"])
    given = vars(command_line._arguments())
    assert given.pop("trace").name == "a.jsonl"
    assert given == {
        "history": None, "replicas": 64, "kv_tokens": 650_000, "rule": "expected_kv", "stage": None,
        "max_running": 256, "block_tokens": 32, "risk": 0.0, "preemption_steps": 0.0,
        "idle_share": 0.0, "cost": None, "picture": None, "json": False,
    }  # fmt: skip
    monkeypatch.setattr("sys.argv", ["scheduler.twin", "--json"])
    with pytest.raises(SystemExit):
        command_line._arguments()
    assert "required: --trace" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["scheduler.twin", "--trace", "a.jsonl", "--rule", "static", "--risk", "0.1"])
    with pytest.raises(SystemExit):
        command_line._arguments()
    assert "mean nothing to --rule static" in capsys.readouterr().err


# -- the plan ----------------------------------------------------------------------------------------------------------

MODEL = ModelShape(
    name="round", parameters=1e9, layers=10, hidden=1_000, intermediate=3_000, heads=10, kv_heads=5, head_dim=100,
    vocabulary=20_000,
)  # fmt: skip
STAGE = StageShape(max_response_tokens=2_000, max_turns=5, mean_response_tokens=900)


def test_a_pass_for_the_old_logprobs_is_counted_where_there_is_one(monkeypatch: pytest.MonkeyPatch):
    def learn_s() -> float:
        pools = derived.pools(engine_gpus=4, learner_gpus=4, micro_batch_tokens=4_096)
        return plan_pools(MODEL, Gpu(), pools, stage=STAGE, rollouts=64).learn_s

    plain = learn_s()
    monkeypatch.setattr(plan, "ANCHOR_PASSES", 1)
    assert (plan.PASSES, learn_s() / plain) == (4, pytest.approx(5 / 4))


def test_engines_are_split_over_eight_gpus_at_most_and_over_those_there_are():
    def offered(engine_gpus: int, parallel: int) -> list[str]:
        pools = derived.pools(
            engine_gpus=engine_gpus, learner_gpus=engine_gpus, tensor_parallel=parallel, micro_batch_tokens=1_024
        )
        changes = plan._changes(Gpu(), pools)
        return [words.split()[1] for kind, words, *_ in changes if kind == "parallel"]

    assert offered(64, 1) == ["2", "4", "8"] and offered(64, 2) == ["4", "8"] and offered(64, 8) == []
    assert offered(12, 2) == ["4"] and offered(6, 1) == ["2"]
    alone = derived.pools(colocated=False, micro_batch_tokens=1_024, offload=True)
    assert remedies(MODEL, Gpu(memory_gb=1.0), STAGE, alone) == ["GPUs of 80 GB"]
