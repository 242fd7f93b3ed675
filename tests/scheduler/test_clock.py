"""The decode clock of a replica, and of those of its rollouts that sample nothing because a tool has them."""

from scheduler.balancer import Balancer
from scheduler.load import ReplicaLoad, RolloutLoad, TurnReport
from tests.fakes import registration


def running(*names: str) -> Balancer:
    balancer = Balancer("least_sessions")
    balancer.add_replica(registration("a", 10_000, max_running=8, block_tokens=16))
    balancer.submit(
        [
            RolloutLoad(rollout_id=name, group_id="g", prompt_tokens=10, max_response_tokens=5_000, max_turns=4)
            for name in names
        ]
    )
    assert len(balancer.decide().admissions) == len(names)
    return balancer


def sampled(balancer: Balancer, name: str) -> float:
    rollout = balancer.books.rollouts[name]
    assert rollout.replica is not None
    return rollout.sampled_at(rollout.replica.decode_step)


def test_a_rollout_at_a_tool_does_not_grow_older():
    balancer = running("x", "y")
    balancer.replica_report("a", ReplicaLoad(steps=100))
    balancer.replica_report("a", ReplicaLoad(steps=200, at_tools=("y",)))  # it went there at this step
    balancer.replica_report("a", ReplicaLoad(steps=500, at_tools=("y",)))
    balancer.replica_report("a", ReplicaLoad(steps=700, at_tools=("y",)))
    assert sampled(balancer, "x") - sampled(balancer, "y") == 500


def test_one_that_is_back_goes_on_from_what_it_reports():
    balancer = running("x", "y")
    balancer.replica_report("a", ReplicaLoad(steps=1))
    balancer.replica_report("a", ReplicaLoad(steps=101, at_tools=("y",)))
    balancer.replica_report("a", ReplicaLoad(steps=301, at_tools=("y",)))
    balancer.turn_finished("a", TurnReport(rollout_id="y", context_tokens=150, generated_tokens=100, turn=1))
    balancer.replica_report("a", ReplicaLoad(steps=351))
    rollout = balancer.books.rollouts["y"]
    assert sampled(balancer, "y") == 150
    assert rollout.response_at(351.0 - 1.0) == 190  # the tool's 40 tokens are held, too


def test_ids_that_the_replica_does_not_hold_are_passed_over():
    balancer = running("x")
    for steps in (10, 20):
        balancer.replica_report("a", ReplicaLoad(steps=steps, at_tools=("gone",)))
    assert sampled(balancer, "x") == 10
