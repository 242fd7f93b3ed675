"""Traces of rollouts: their parts, their form, and that they hold nobody up."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from actors.generation.rollout_traces import Activity, RolloutTraces, Span
from rstar_ray.telemetry.traces import ROOT, TraceFile, open_sink
from rstar_ray.trajectory import Completion, EngineTimes
from scheduler.records import Grant, RolloutLoad
from tests.rstar_ray.fabricate import STAY, example_trajectories

PLAYED = example_trajectories(1.0)[0]
ROLLOUT = PLAYED.summary.rollout_id
LOAD = RolloutLoad(rollout_id=ROLLOUT, group_id="g", prompt_tokens=9, max_response_tokens=9, max_turns=2)
TIMED = Completion(
    token_ids=[1, 2], logprobs=[0.0, 0.0], policy_versions=[0, 0], ended=True,
    times=EngineTimes(prefill_s=1.0, decode_s=2.0),
)  # fmt: skip


def traces(path: Path) -> RolloutTraces:
    return RolloutTraces("generation/0", run="mine", open_sink=lambda: TraceFile(path))


def spans(path: Path) -> list[dict[str, Any]]:
    requests = [json.loads(line) for line in path.read_text().splitlines()]
    return [span for request in requests for span in request["resourceSpans"][0]["scopeSpans"][0]["spans"]]


def seconds(span: dict[str, Any]) -> float:
    return (int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])) / 1e9


def play(recorder: RolloutTraces) -> None:
    recorder.granted(Grant(load=LOAD, payload=None, waited_s=5.0))
    recorder.took(Span("generation/0", ROLLOUT, Activity.GENERATE, 100.0, 104.0), TIMED)
    recorder.took(Span("generation/0", ROLLOUT, Activity.TOOL, 104.0, 104.5), None)
    recorder.took(Span("generation/0", ROLLOUT, Activity.GENERATE, 105.0, 106.0), replace(TIMED, times=None))
    recorder.ended(replace(PLAYED, summary=replace(PLAYED.summary, verify_s=0.25)))
    recorder.close()


def test_a_rollouts_parts_are_recorded_with_the_engines_own_times(tmp_path: Path):
    play(traces(tmp_path / "traces.jsonl"))
    found = {span["name"]: round(seconds(span), 3) for span in spans(tmp_path / "traces.jsonl")}
    assert found.pop(ROOT) >= 5
    assert found == {
        "queue": 5.0, "engine queue": 1.0, "prefill": 1.0, "decode": 2.0, "tool": 0.5, "completion": 1.0,
        "verify": 0.25,
    }  # fmt: skip


def test_the_trace_of_a_moved_rollout_does_not_show_its_time_on_another_replica_as_a_wait(tmp_path: Path):
    recorder = traces(tmp_path / "traces.jsonl")
    recorder.granted(Grant(load=LOAD, payload=None, waited_s=50.0, placement=replace(STAY, waited_s=2.0)))
    recorder.ended(PLAYED)
    recorder.close()
    found = {span["name"]: seconds(span) for span in spans(tmp_path / "traces.jsonl")}
    assert found["queue"] == pytest.approx(2.0, abs=0.01) and found[ROOT] >= 50.0


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, logged: list[str]):
    (tmp_path / "file").write_text("")
    recorder = traces(tmp_path / "file" / "traces.jsonl")
    play(recorder)
    assert len(logged) == 1 and logged[0].startswith("tracing is skipped: ")


class Collector(BaseHTTPRequestHandler):
    got: list[tuple[str, str, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.append((self.path, self.headers["Content-Type"], json.loads(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def collector() -> Iterator[str]:
    Collector.got = []
    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_collector_is_sent_the_same(collector: str):
    sink = open_sink(f"{collector}/", "generation/0")
    for number in range(3):
        sink.write({"number": number})
    sink.close()
    assert Collector.got == [("/v1/traces", "application/json", {"number": number}) for number in range(3)]
