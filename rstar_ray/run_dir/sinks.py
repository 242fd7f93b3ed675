"""Further sinks of a step's metrics: TensorBoard's event files, Weights & Biases, Trackio and MLflow."""

import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from rstar_ray.config.telemetry import TelemetryConfig
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
        self._stage = stage
        self._run: Any = wandb.init(  # pyright: ignore[reportUnknownMemberType]
            project=project,
            id=name,
            name=run_path.name,
            dir=str(run_path),
            resume="allow",
            config=_settings(run_path),
        )
        write_json(known, {"id": name, "project": project})
        self._run.define_metric(f"{stage}/step")
        self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        shown = {f"{self._stage}/{name}": value for name, value in values.items()}
        self._run.log({**shown, f"{self._stage}/step": step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of Trackio for each stage, in a group per run directory.

    Trackio stores runs on this machine (`trackio show`), or on the server of TRACKIO_SPACE_ID or TRACKIO_SERVER_URL.
    """

    def __init__(self, run_path: Path, *, project: str, stage: str) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._run: Any = trackio.init(  # pyright: ignore[reportUnknownMemberType]
            project=project,
            name=f"{run_path.name}-{stage}",
            group=run_path.name,
            resume="allow",
            config=_settings(run_path).get(stage, {}),
            embed=False,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow for the whole run directory; the stage is part of a metric's name, and the step is the stage's.

    The tracking server is configured with MLflow itself (`MLFLOW_TRACKING_URI`).
    """

    def __init__(self, run_path: Path, *, project: str, stage: str) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]

        known = run_path / "mlflow.json"
        self._mlflow: Any = mlflow
        self._stage = stage
        self._mlflow.set_experiment(project)
        name = read_json(known)["id"] if known.exists() else None
        run = self._mlflow.start_run(run_id=name, run_name=run_path.name)
        write_json(known, {"id": run.info.run_id, "project": project})
        self._mlflow.log_dict(_settings(run_path), "config.json")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({f"{self._stage}/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


Sink = TensorBoard | WeightsAndBiases | Trackio | MLflow
"""Receives the metrics of one stage, each step once and in order. The caller handles its failures."""
EXTERNAL = {"wandb": WeightsAndBiases, "trackio": Trackio, "mlflow": MLflow}
"""By option of `TelemetryConfig` and Python package, which have the same name. The option's value is the project."""


def projects(telemetry: TelemetryConfig) -> dict[str, str]:
    """The project of each external sink that a run uses, by the sink's option."""
    named = {option: str(getattr(telemetry, option)) for option in EXTERNAL}
    return {option: project for option, project in named.items() if project}


def refuse_missing_sink(telemetry: TelemetryConfig) -> None:
    """Raise `ConfigError` if a sink is requested whose package is not installed, before the first step."""
    for option in projects(telemetry):
        if find_spec(option) is None:
            raise ConfigError(
                f"--telemetry.{option}", f"{option} is not installed", f"pip install {option}, or omit the option"
            )


def _settings(run_path: Path) -> dict[str, Any]:
    """The settings of each stage."""
    config = run_path / "config.json"
    return dict(read_json(config)) if config.exists() else {}
