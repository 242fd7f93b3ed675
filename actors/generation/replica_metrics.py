"""What people watch of one replica, by the declared names."""

from actors.generation.rollout_traces import RolloutTraces
from actors.generation.spans import Activity, Span
from rstar_ray.rollouts import DroppedRollout
from rstar_ray.telemetry.meter import Meter
from rstar_ray.trajectory import Trajectory
from scheduler.records import Grant, ReplicaLoad

SECONDS_OF = {Activity.GENERATE: "rstar_completion_seconds", Activity.TOOL: "rstar_tool_call_seconds"}


class ReplicaMetrics:
    """Sets them under the replica's name."""

    def __init__(self, replica_id: str, meter: Meter, traces: RolloutTraces | None = None) -> None:
        """`traces` hear of the same spans and ends."""
        self._replica = replica_id
        self._meter = meter
        self._traces = traces

    def load(self, load: ReplicaLoad, kv_capacity_tokens: int) -> None:
        """How its engine stands now."""
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
        """A rollout comes from the balancer."""
        if self._traces is not None:
            self._traces.granted(grant)

    def took(self, span: Span, result: object) -> None:
        """A completion or a tool call that ended."""
        self._meter.observe(SECONDS_OF[span.activity], max(0.0, span.end_s - span.start_s), replica=self._replica)
        if self._traces is not None:
            self._traces.took(span, result)

    def ended(self, rollout: Trajectory | DroppedRollout) -> None:
        """A rollout ended; a dropped one by a failure of ours."""
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
