"""Sinks of a step's metrics beside `metrics.jsonl`: TensorBoard's event files, and Weights & Biases."""

import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from rstar_ray.errors import ConfigError
from rstar_ray.run_dir.durable import read_json, write_json


class TensorBoard:
    """An event file of one stage, one scalar per metric. It needs the package `tensorboard`, not torch."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._writer: Any = EventFileWriter(str(folder))
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        # TensorBoard drops the points that an earlier launch wrote from this step on.
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=first_step, session_log=start))
        self._writer.flush()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        shown = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = self._summaries.Summary(value=shown)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of W&B for the whole run directory; each stage has its own step counter, so that a stage can resume.

    Steps that are repeated from a checkpoint appear twice there. Account and address are configured with W&B itself
    (`wandb login`, `WANDB_MODE=offline`).
    """

    def __init__(self, run_path: Path, *, project: str, stage: str) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        known = run_path / "wandb.json"
        name = read_json(known)["id"] if known.exists() else uuid4().hex[:12]
        config = run_path / "config.json"
        self._stage = stage
        self._run: Any = wandb.init(  # pyright: ignore[reportUnknownMemberType]
            project=project,
            id=name,
            name=run_path.name,
            dir=str(run_path),
            resume="allow",
            config=read_json(config) if config.exists() else {},
        )
        write_json(known, {"id": name, "project": project})
        self._run.define_metric(f"{stage}/step")
        self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        shown = {f"{self._stage}/{name}": value for name, value in values.items()}
        self._run.log({**shown, f"{self._stage}/step": step})

    def close(self) -> None:
        self._run.finish()


Sink = TensorBoard | WeightsAndBiases
"""Takes the metrics of one stage, each step once and in order. The caller handles its failures."""


def refuse_missing_sink(project: str) -> None:
    """Raise `ConfigError` if W&B is requested and not installed, before the first step."""
    if project and find_spec("wandb") is None:
        raise ConfigError("--telemetry.wandb", "wandb is not installed", "pip install wandb, or omit the option")
