"""Traces of one replica's rollouts; a failure is logged once and ends the tracing."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from rstar_ray.rollouts import DroppedRollout
from rstar_ray.run_dir.best_effort import best_effort
from rstar_ray.telemetry.traces import ROOT, TraceSink, TraceSpan, otlp_request
from rstar_ray.trajectory import Completion, Trajectory
from scheduler.records import Grant


class Activity(StrEnum):
    """Activity of a rollout in a span."""

    QUEUED = "queued"  # admitted, but waiting inside the engine
    GENERATE = "generate"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Span:
    """One rollout, one activity, on one replica."""

    replica_id: str
    rollout_id: str
    activity: Activity
    start_s: float
    end_s: float


class RolloutTraces:
    """Collects the worker's events and writes a trace when a rollout ends; does nothing without a sink."""

    def __init__(self, replica_id: str, *, run: str, open_sink: Callable[[], TraceSink] | None) -> None:
        self._replica_id = replica_id
        self._run = run
        self._spans: list[TraceSpan] = []
        self._begun_s: dict[str, float] = {}
        self._sink: TraceSink | None = None
        if open_sink is not None:
            with best_effort("tracing"):
                self._sink = open_sink()

    def granted(self, grant: Grant) -> None:
        """Record a rollout from the balancer, and its wait there."""
        rollout_id, now_s = grant.load.rollout_id, time.time()
        if self._sink is not None and rollout_id not in self._begun_s:  # a grant may be delivered twice
            self._begun_s[rollout_id] = now_s - grant.waited_s
            queued_s = grant.waited_s if grant.placement is None else grant.placement.waited_s
            self._add(rollout_id, "queue", now_s - queued_s, now_s)

    def took(self, span: Span, result: object) -> None:
        """Record a completion or a tool call; a completion is split into parts if the engine reported times."""
        if self._sink is None:
            return
        self._begun_s.setdefault(span.rollout_id, span.start_s)
        if span.activity is Activity.TOOL:
            self._add(span.rollout_id, "tool", span.start_s, span.end_s)
        elif isinstance(result, Completion) and result.times is not None:
            decode_s = span.end_s - result.times.decode_s
            prefill_s = decode_s - result.times.prefill_s
            self._add(span.rollout_id, "engine queue", min(span.start_s, prefill_s), prefill_s)
            self._add(span.rollout_id, "prefill", prefill_s, decode_s)
            self._add(span.rollout_id, "decode", decode_s, span.end_s, tokens=len(result.token_ids))
        else:
            self._add(span.rollout_id, "completion", span.start_s, span.end_s)

    def ended(self, rollout: Trajectory | DroppedRollout) -> None:
        """Record that the rollout was judged or dropped, and write all spans since the last write."""
        sink, now_s = self._sink, time.time()
        if sink is None:
            return
        if isinstance(rollout, Trajectory):
            summary = rollout.summary
            rollout_id = summary.rollout_id
            self._add(rollout_id, "verify", now_s - summary.verify_s, now_s, reward=summary.reward)
            attributes = {"reward": summary.reward, "tokens": summary.num_response_tokens, "turns": summary.num_turns}
            self._add(
                rollout_id, ROOT, self._begun_s.pop(rollout_id, now_s), now_s, end=summary.stop_reason, **attributes
            )
        else:
            begun_s = self._begun_s.pop(rollout.rollout_id, now_s)
            self._add(rollout.rollout_id, ROOT, begun_s, now_s, end="dropped", reason=rollout.reason)
        spans, self._spans, self._sink = self._spans, [], None
        with best_effort("further tracing"):
            sink.write(otlp_request(spans, service=self._replica_id, run=self._run))
            self._sink = sink

    def close(self) -> None:
        """Write the remaining spans."""
        if self._sink is not None:
            with best_effort("the end of the traces"):
                self._sink.close()

    def _add(self, rollout_id: str, name: str, start_s: float, end_s: float, **attributes: str | int | float) -> None:
        self._spans.append(
            TraceSpan(rollout_id=rollout_id, name=name, start_s=start_s, end_s=end_s, attributes=attributes)
        )
