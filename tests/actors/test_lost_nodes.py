"""What is said of nodes that come and go, and the wait for a place, with plain futures in place of Ray."""

import asyncio
from typing import Any

import pytest

from actors.health import lost_nodes
from actors.health.lost_nodes import NodesSeen, until_placed
from rstar_ray.errors import RStarError


def node(name: str, *, alive: bool = True) -> dict[str, Any]:
    return {"NodeID": name, "NodeManagerAddress": f"10.0.0.{name}", "Alive": alive}


def test_a_node_is_said_to_be_lost_with_what_was_on_it_and_another_to_have_joined(logged: list[str]):
    seen = NodesSeen()
    at = {"learner/rank-1": "2", "generation/1": "2", "balancer": "1"}
    seen.see([node("1"), node("2")], at)
    seen.see([node("1"), node("2")], at)
    assert logged == []
    seen.see([node("1"), node("2", alive=False)], at)
    assert logged.pop() == "node 10.0.0.2 was lost, with generation/1, learner/rank-1; the cluster has 1 now"
    seen.see([node("1"), node("2", alive=False), node("3")], at)
    assert logged.pop() == "node 10.0.0.3 has joined; the cluster has 2 now"
    seen.see([node("1"), node("3", alive=False)], at)
    assert logged == ["node 10.0.0.3 was lost, with nothing of the run; the cluster has 1 now"]


class StandIn:
    """Ray's view of a function: one future for each bundle."""

    def __init__(self, bundles: int) -> None:
        self.places = [asyncio.get_running_loop().create_future() for _ in range(bundles)]

    def options(self, *, bundle: int, **_: Any) -> Any:
        place = self.places[bundle]

        class There:
            @staticmethod
            def remote() -> Any:
                return place

        return There


@pytest.fixture
async def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    standing = StandIn(2)
    monkeypatch.setattr(lost_nodes.ray, "remote", lambda **_: lambda function: standing)
    monkeypatch.setattr(lost_nodes, "in_bundle", lambda group, bundle: {"bundle": bundle})
    return standing


async def placed(away_s: float) -> None:
    names = {0: "learner/rank-0", 1: "learner/rank-1"}
    await until_placed(None, names, away_s=away_s, say_after_s=0.05)


async def test_a_bundle_without_a_node_is_waited_for_and_named(stand_in: StandIn, logged: list[str]):
    stand_in.places[0].set_result(None)
    waiting = asyncio.ensure_future(placed(60.0))
    while not logged:
        await asyncio.sleep(0.01)
    assert logged == [
        "no node for learner/rank-1: the run waits for a node with room, 60 s at most (--detector.node-away-s)"
    ]
    stand_in.places[1].set_result(None)
    await waiting
    assert logged[1:] == ["every part has a node again"]


async def test_a_wait_without_end_for_a_node_ends_the_run_and_names_the_fix(stand_in: StandIn):
    stand_in.places[0].set_result(None)
    with pytest.raises(
        RStarError, match=r"learner/rank-1 had no node for 0\.1 s .*--on-insufficient-resources scale-down"
    ):
        await placed(0.1)
