"""The cost of records, metrics and traces: CPU seconds over the step's seconds, in one JSON line.

python -m benchmarks.recording runs/tiny

Repeats all monitoring work of the newest recorded step of a run: its trajectories as text, its rows, its metrics in a
real Ray, probes of its processes, and a trace of each rollout. Measures the CPU time of this process with its threads.
In a run it is divided among several processes, and no step waits for most of it.
"""

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import ray
import tyro

from actors.balancer_service import BalancerService
from actors.cluster.auth import require_token_auth
from actors.cluster.ray_metrics import ray_meter
from actors.generation.replica_metrics import ReplicaMetrics
from actors.generation.rollout_traces import Activity, RolloutTraces, Span
from actors.health.heartbeat import own_memory_bytes
from rstar_ray.algorithm.update import SeenTokens
from rstar_ray.chat.load_chat import load_chat
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.config import RunConfig
from rstar_ray.config.options import run_command
from rstar_ray.errors import ConfigError
from rstar_ray.replay_update import config_of
from rstar_ray.run_dir.durable import append_row, read_rows
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.run_dir.ledger import LEDGER, RolloutStatus
from rstar_ray.run_dir.metrics import MetricsLog, StepMetrics, current_row
from rstar_ray.run_dir.recorded_trajectories import recorded_trajectories
from rstar_ray.run_dir.trajectory_log import write_trajectories
from rstar_ray.telemetry.meter import Meter
from rstar_ray.telemetry.registry import is_step_metric
from rstar_ray.telemetry.steps import export_ledger, export_step
from rstar_ray.telemetry.traces import TraceFile
from rstar_ray.trajectory import Completion, EngineTimes, Trajectory
from scheduler.records import Grant, ReplicaLoad, RolloutLoad

REPEATS = 7
Row = dict[str, Any]


@dataclass(frozen=True)
class RecordingOptions:
    run: Annotated[Path, tyro.conf.Positional]
    """run directory"""


def cpu_s(work: Callable[[], object]) -> float:
    """Median of several runs, after one warm-up."""
    taken: list[float] = []
    for _ in range(REPEATS + 1):
        began_s = time.process_time()
        work()
        taken.append(time.process_time() - began_s)
    return median(taken[1:])


@dataclass(frozen=True)
class Recorded:
    """A step of a run, read from its directory."""

    config: RunConfig
    chat: TokenizerChat
    metrics: Row
    ledger: Row
    rows: list[Row]
    trajectories: list[Trajectory]
    step_s: float  # median of the stage


def newest_step(run: Path) -> Recorded:
    """Read the newest step. Raises `ConfigError` if the run has recorded no training step."""
    paths = sorted((run / "trajectories").glob("*-step-*.jsonl"), key=lambda path: path.stat().st_mtime)
    models = sorted((run / "checkpoints").glob("*/model"))
    if not paths or not models:
        raise ConfigError("RUN", f"{run} has no recorded training step, or no checkpoint", "name one that has")
    stage, _, step = paths[-1].stem.partition("-step-")
    of_stage = [row for row in read_rows(run / "metrics.jsonl") if row["stage"] == stage]
    of_step = {"stage": stage, "step": int(step)}
    (ledger,) = (row for row in read_rows(run / LEDGER) if of_step.items() <= row.items())
    config = config_of(RunDir(run), stage)
    return Recorded(
        config=config,
        chat=load_chat(models[-1], config.chat, instruct=config.rollout.instruct),
        metrics=next(row for row in of_stage if row["step"] == int(step)),
        ledger=ledger,
        rows=read_rows(paths[-1]),
        trajectories=recorded_trajectories(paths[-1]),
        step_s=median(row["step_s"] for row in of_stage),
    )


def write_records(step: Recorded, folder: Path) -> None:
    """Write the trajectories as text; trained ones have the learner's figures."""
    trained = {
        f"{step.ledger['stage']}/{step.ledger['step']}/{name}" for name in step.ledger["ids"][RolloutStatus.TRAINED]
    }
    seen: dict[str, SeenTokens] = {}
    for one in step.trajectories:
        logprobs = one.rollout_logprobs[one.loss_mask]
        if one.summary.rollout_id in trained:
            seen[one.summary.rollout_id] = SeenTokens(entropies=np.abs(logprobs), logprob_diffs=1e-3 * logprobs)
    write_trajectories(folder / "step.jsonl", step.trajectories, step.chat.decode, seen=seen, stage="bench", step=1)


class Rows:
    """Writes a step's rows of `metrics.jsonl`, TensorBoard and the ledger, and its metrics; one step after another."""

    def __init__(self, step: Recorded, meter: Meter, folder: Path) -> None:
        row = current_row(step.metrics)
        values = {name: row[name] for name in row if is_step_metric(name) and row[name] is not None}
        self._row = StepMetrics(stage="bench", step=1, values=values)
        self._step, self._meter, self._folder = step, meter, folder
        self._log = MetricsLog(folder, stage="bench", after_step=0, num_steps=10**6)
        self._log.__enter__()
        self._number = 0

    def write(self) -> None:
        self._number += 1
        self._log.write(replace(self._row, step=self._number))
        export_step(self._meter, self._row, self._folder)
        statuses = [RolloutStatus(status) for status, ids in self._step.ledger["ids"].items() for _ in ids]
        export_ledger(self._meter, statuses, "bench")
        append_row(self._folder / LEDGER, self._step.ledger)


def watch_rollouts(step: Recorded, meter: Meter, folder: Path) -> None:
    """Metrics and traces of every turn and end of the step's rollouts, as in a worker."""
    sink = TraceFile(folder / "traces.jsonl")
    traces = RolloutTraces("generation/0", run="bench", open_sink=lambda: sink)
    metrics = ReplicaMetrics("generation/0", meter, traces)
    for one, row in zip(step.trajectories, step.rows, strict=True):
        name, at_s = one.summary.rollout_id, time.time()
        load = RolloutLoad(rollout_id=name, group_id="g", prompt_tokens=1, max_response_tokens=1, max_turns=1)
        traces.granted(Grant(load=load, payload=None))
        for turn in row["turns"]:
            said = Completion(
                token_ids=[],
                logprobs=[],
                policy_versions=[],
                ended=True,
                times=EngineTimes(prefill_s=0.0, decode_s=0.0),
            )
            metrics.took(Span("generation/0", name, Activity.GENERATE, at_s, at_s), said)
            for _ in turn["outcomes"]:
                metrics.took(Span("generation/0", name, Activity.TOOL, at_s, at_s), None)
        metrics.ended(one)
    sink.close()


def probe(balancer: BalancerService, meter: Meter, processes: int) -> None:
    """All exports when the run's processes are probed once, including the reading of their memory."""
    balancer.export()
    ReplicaMetrics("generation/0", meter).load(ReplicaLoad(), 1)
    for number in range(processes):
        meter.set("rstar_process_memory_bytes", own_memory_bytes(os.getpid()), process=str(number))
        meter.set("rstar_detector_silence_seconds", 0.0, process=str(number))


def measured(run: Path, folder: Path) -> Row:
    """Seconds of the run's step, and CPU seconds of its monitoring."""
    step, meter = newest_step(run), ray_meter("bench")
    config = step.config
    processes = config.engine.replicas * 2 + config.learner.ranks + config.sandbox.executors * 3 + 2
    every = config.checkpoint.trajectories_every_steps or 1
    rows, balancer = Rows(step, meter, folder), BalancerService(meter=meter)
    parts = {
        "records": cpu_s(lambda: write_records(step, folder)) / every,
        "rows": cpu_s(rows.write),
        "rollouts": cpu_s(lambda: watch_rollouts(step, meter, folder)),
        "probes": cpu_s(lambda: probe(balancer, meter, processes)) * step.step_s / config.detector.probe_every_s,
    }
    return {
        "rollouts": len(step.trajectories),
        "tokens": sum(one.summary.num_sampled_tokens for one in step.trajectories),
        "step_s": round(step.step_s, 3),
        "cpu_s": {name: round(seconds, 5) for name, seconds in parts.items()},
        "share_of_step": round(sum(parts.values()) / step.step_s, 5),
    }


def main(options: RecordingOptions) -> None:
    require_token_auth()
    address = os.environ.get("RAY_ADDRESS", "local")
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measured(options.run, Path(folder))))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(run_command(RecordingOptions, main, None, description=__doc__))
