"""What the parts export, over fakes in the place of Ray."""

import asyncio
from dataclasses import replace

import pytest

from actors.balancer_service import BalancerService
from actors.generation.replica_metrics import ReplicaMetrics
from actors.generation.rollout_traces import Activity, Span
from rstar_ray.outcome import Outcome
from rstar_ray.rollouts import DroppedRollout
from rstar_ray.telemetry.registry import PROCESS_METRICS
from scheduler.records import Quarantined, ReplicaLoad
from tests.fakes import KeptMetrics, load, registration
from tests.rstar_ray.fabricate import example_trajectories

LOAD = ReplicaLoad(kv_used_tokens=100, running=2, waiting=1, preemptions=3, policy_version=4, steps=50, at_tools=("a",))


def declared(part: str) -> set[str]:
    return {metric.exported_name for metric in PROCESS_METRICS if metric.group == part}


def names(kept: KeptMetrics) -> set[str]:
    return {name.partition("{")[0] for name in kept.values}


def test_a_balancer_tells_who_waits_and_what_is_full():
    kept = KeptMetrics()

    async def play() -> None:
        service = BalancerService(meter=kept.meter)
        await service.register(registration("replica", 1_000, max_running=1, block_tokens=32))
        await service.submit([(load(name), None) for name in "ab"])
        await service.next_orders("replica", 0, 5.0)
        await service.report("replica", [], LOAD)
        service.export()
        assert kept.values["rstar_balancer_in_flight"] + kept.values["rstar_balancer_waiting"] == 2
        assert kept.values["rstar_balancer_kv_used_ratio"] == 0.1
        assert kept.values["rstar_balancer_replicas"] == 1
        assert kept.values["rstar_balancer_wait_seconds"] >= 1
        with pytest.raises(Quarantined):
            await service.report("replica", [], replace(LOAD, kv_used_tokens=2_000))
        service.export()
        assert kept.values["rstar_balancer_replicas_quarantined"] == 1

    asyncio.run(play())
    counters = {name for name in declared("balancer") if name.endswith("_total")}  # of what has not happened yet
    assert names(kept) >= declared("balancer") - counters


def test_a_replica_tells_of_its_engine_and_of_what_ended():
    kept = KeptMetrics()
    metrics = ReplicaMetrics("generation/0", kept.meter)
    metrics.load(LOAD, 1_000)
    metrics.load(replace(LOAD, steps=60), 1_000)
    metrics.took(Span("generation/0", "r", Activity.GENERATE, 1.0, 2.0), None)
    metrics.took(Span("generation/0", "r", Activity.TOOL, 1.0, 0.999), None)  # a clock that was set back
    played = example_trajectories(1.0)[0]
    metrics.ended(replace(played, summary=replace(played.summary, outcomes=(Outcome.OK, Outcome.ERROR))))
    metrics.ended(DroppedRollout(rollout_id="r", group_id="g", reason="our failure"))
    assert names(kept) == declared("engines")
    assert kept.values["rstar_engine_steps_total{replica=generation/0}"] == 60
    assert kept.values["rstar_rollouts_ended_total{reason=dropped,replica=generation/0}"] == 1
    assert kept.values["rstar_tool_calls_total{outcome=error,replica=generation/0}"] == 1
