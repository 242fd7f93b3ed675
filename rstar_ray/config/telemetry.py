"""Further destinations of a run's metrics and traces, in addition to its directory and Ray's metrics."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from rstar_ray.config.checks import require
from rstar_ray.config.tree import MayChange


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Further destinations of a run's metrics and traces (docs/metrics.md)."""

    wandb: MayChange[str] = ""
    """Weights & Biases project that receives every step's metrics; needs the package wandb; empty: none"""
    trackio: MayChange[str] = ""
    """Trackio project that receives every step's metrics; needs the package trackio; empty: none"""
    mlflow: MayChange[str] = ""
    """MLflow experiment that receives every step's metrics; needs the package mlflow; empty: none"""
    traces: MayChange[str] = ""
    """destination of one OpenTelemetry trace per rollout: a folder that every node sees (OTLP JSON), or a collector's
    address such as http://127.0.0.1:4318; empty: no traces"""

    def __post_init__(self) -> None:
        try:
            named = "://" not in self.traces or bool(urlsplit(self.traces).hostname and urlsplit(self.traces).port != 0)
        except ValueError:  # not a port, or not an IPv6 address
            named = False
        require(
            named,
            "--telemetry.traces",
            f"has no valid host and port (got {self.traces})",
            "use a form such as http://127.0.0.1:4318",
        )
