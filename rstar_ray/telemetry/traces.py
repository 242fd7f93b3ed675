"""A rollout as an OpenTelemetry trace: its waits, prefill, decode, tool calls and reward computation.

Traces are OTLP JSON: written to a file, one export request per line, for a collector's `otlpjsonfile` receiver; or sent
to a collector's `/v1/traces`. The format is that of opentelemetry-proto 1: ids in hex, times in nanoseconds as text.
"""

import json
import logging
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rstar_ray.run_dir.best_effort import best_effort

log = logging.getLogger(__name__)

ROOT = "rollout"
SEND_DEADLINE_S = 10.0
MOST_WAITING = 64
"""Largest number of queued export requests to a collector; further requests are dropped."""
Attribute = str | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """One part of a rollout, or the whole rollout (`name` is `ROOT`); times in seconds since the epoch."""

    rollout_id: str  # names the trace
    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict[str, Attribute])


def otlp_request(spans: Sequence[TraceSpan], *, service: str, run: str) -> dict[str, Any]:
    """The spans of one process as an OTLP export request.

    Ids derive from the rollout's id, so that spans of different replicas form one trace.
    """
    resource = {"attributes": _attributes({"service.name": "rstar_ray", "service.instance.id": service, "run": run})}
    scope = {"scope": {"name": "rstar_ray"}, "spans": [_span(span) for span in spans]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}


def _span(span: TraceSpan) -> dict[str, Any]:
    start_ns, end_ns = round(span.start_s * 1e9), round(max(span.start_s, span.end_s) * 1e9)
    root = span.name == ROOT
    written = {
        "traceId": _hex(span.rollout_id, 16),
        "spanId": _hex(span.rollout_id if root else f"{span.rollout_id} {span.name} {start_ns}", 8),
        "name": span.name,
        "kind": 1,  # internal
        "startTimeUnixNano": str(start_ns),
        "endTimeUnixNano": str(end_ns),
        "attributes": _attributes({"rollout_id": span.rollout_id, **span.attributes}),
    }
    return written if root else written | {"parentSpanId": _hex(span.rollout_id, 8)}


def _hex(text: str, num_bytes: int) -> str:
    return blake2b(text.encode(), digest_size=num_bytes).hexdigest()


def _attributes(values: Mapping[str, Attribute]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Attribute) -> dict[str, Any]:
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}


class TraceFile:
    """Appends export requests to a file, one per line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, request: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(request) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TraceCollector:
    """Sends export requests to a collector from a separate thread. After the first failure it logs once and stops."""

    def __init__(self, address: str) -> None:
        self._url = f"{address.rstrip('/')}/v1/traces"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="traces")
        self._waiting: set[Future[None]] = set()
        self._gone = False

    def write(self, request: Mapping[str, Any]) -> None:
        if not self._gone and len(self._waiting) < MOST_WAITING:
            sent = self._thread.submit(self._send, json.dumps(request).encode())
            self._waiting.add(sent)
            sent.add_done_callback(self._waiting.discard)

    def _send(self, body: bytes) -> None:
        if self._gone:
            return
        answered = False
        with best_effort(f"the export of traces to {self._url}"):
            request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=SEND_DEADLINE_S):
                answered = True
        self._gone = not answered

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=False)


TraceSink = TraceFile | TraceCollector


def is_address(where: str) -> bool:
    """Whether this is the address of a collector, not a folder."""
    return where.startswith(("http://", "https://"))


def open_sink(where: str, service: str) -> TraceSink:
    """The sink of one process: a file named after `service` in the folder `where`, or the collector at `where`."""
    if is_address(where):
        return TraceCollector(where)
    return TraceFile(Path(where) / f"{service.replace('/', '-')}.jsonl")
