"""Where else a run sends its metrics and traces, beside its directory and Ray's metrics."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from rstar_ray.config.checks import require
from rstar_ray.config.tree import MayChange


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Where else a run sends its metrics and traces (docs/metrics.md)."""

    wandb: MayChange[str] = ""
    """project of Weights & Biases that gets every step's metrics; needs the package wandb; empty: none"""
    trackio: MayChange[str] = ""
    """project of Trackio that gets every step's metrics; needs the package trackio; empty: none"""
    mlflow: MayChange[str] = ""
    """experiment of MLflow that gets every step's metrics; needs the package mlflow; empty: none"""
    traces: MayChange[str] = ""
    """where a trace of each rollout goes in OpenTelemetry's form: a folder that every node sees, which gets OTLP's
    JSON, or a collector's address such as http://127.0.0.1:4318; empty: none are made"""

    def __post_init__(self) -> None:
        try:
            named = "://" not in self.traces or bool(urlsplit(self.traces).hostname and urlsplit(self.traces).port != 0)
        except ValueError:  # not a port, or not an IPv6 address
            named = False
        require(named, "--telemetry.traces", f"{self.traces} names no host", "give one such as http://127.0.0.1:4318")
