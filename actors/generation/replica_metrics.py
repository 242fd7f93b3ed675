"""Metrics of one replica and its rollouts: engine load, durations of completions and tool calls."""

import time
from collections import Counter
from collections.abc import Awaitable
from typing import TypeVar

from actors.generation.rollout_traces import Activity, RolloutTraces, Span
from rstar_ray.rollouts import DroppedRollout
from rstar_ray.telemetry.meter import Meter
from rstar_ray.trajectory import Trajectory
from scheduler.records import Grant, ReplicaLoad

T = TypeVar("T")

SECONDS_OF = {Activity.GENERATE: "rstar_completion_seconds", Activity.TOOL: "rstar_tool_call_seconds"}


class ReplicaMetrics:
    """Sets declared metrics, labelled with the replica's name."""

    def __init__(self, replica_id: str, meter: Meter, traces: RolloutTraces | None = None) -> None:
        """`traces` receive the same spans and ends."""
        self._replica = replica_id
        self._meter = meter
        self._traces = traces
        self._at_tools: Counter[str] = Counter()  # open tool calls by rollout

    def load(self, load: ReplicaLoad, kv_capacity_tokens: int) -> None:
        """Record the engine's current load."""
        meter, replica = self._meter, self._replica
        meter.set("rstar_engine_kv_used_tokens", load.kv_used_tokens, replica=replica)
        meter.set("rstar_engine_kv_capacity_tokens", kv_capacity_tokens, replica=replica)
        meter.set("rstar_engine_running", load.running, replica=replica)
        meter.set("rstar_engine_waiting", load.waiting, replica=replica)
        meter.set("rstar_engine_policy_version", load.policy_version, replica=replica)
        meter.set("rstar_engine_rollouts_at_tools", len(load.at_tools), replica=replica)
        meter.reached("rstar_engine_steps_total", load.steps, replica=replica)
        meter.reached("rstar_engine_preemptions_total", load.preemptions, replica=replica)

    def granted(self, grant: Grant) -> None:
        """Record a rollout received from the balancer."""
        if self._traces is not None:
            self._traces.granted(grant)

    async def timed(self, activity: Activity, rollout_id: str, work: Awaitable[T]) -> T:
        """Run a rollout's work, and record its duration, however it ends."""
        start_s = time.time()  # time of day, so that spans of several machines can be combined
        self._at_tools[rollout_id] += activity is Activity.TOOL
        result: T | None = None
        try:
            result = await work
            return result
        finally:
            self._at_tools[rollout_id] -= activity is Activity.TOOL
            if not self._at_tools[rollout_id]:
                del self._at_tools[rollout_id]
            self.took(Span(self._replica, rollout_id, activity, start_s, time.time()), result)

    def at_tools(self) -> tuple[str, ...]:
        """Rollouts that currently wait for a tool."""
        return tuple(rollout_id for rollout_id, calls in self._at_tools.items() if calls)

    def took(self, span: Span, result: object) -> None:
        """Record the end of a completion or a tool call; `result` is None if it failed."""
        self._meter.observe(SECONDS_OF[span.activity], max(0.0, span.end_s - span.start_s), replica=self._replica)
        if self._traces is not None:
            self._traces.took(span, result)

    def ended(self, rollout: Trajectory | DroppedRollout) -> None:
        """Record the end of a rollout; a dropped one ended by a failure of ours."""
        meter, replica = self._meter, self._replica
        if self._traces is not None:
            self._traces.ended(rollout)
        if isinstance(rollout, DroppedRollout):
            meter.add("rstar_rollouts_ended_total", 1, replica=replica, reason="dropped")
            return
        summary = rollout.summary
        meter.add("rstar_rollouts_ended_total", 1, replica=replica, reason=str(summary.stop_reason))
        meter.observe("rstar_rollout_response_tokens", summary.num_response_tokens, replica=replica)
        for outcome in summary.outcomes:
            meter.add("rstar_tool_calls_total", 1, replica=replica, outcome=str(outcome))
