"""Where else a run tells of itself, beside its directory and Ray's metrics."""

from dataclasses import dataclass

from rstar_ray.config.tree import MayChange


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Where else a run tells of itself (docs/metrics.md)."""

    wandb: MayChange[str] = ""
    """project of Weights & Biases that gets every step's numbers; needs the package wandb; empty: none"""
