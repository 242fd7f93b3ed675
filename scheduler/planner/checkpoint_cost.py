"""The cost of a checkpoint, computed and not measured: bytes per rank, seconds, and disk space.

The next step waits for each rank's copy to host memory and for rank 0's gathering of the model, not for writing.
"""

from dataclasses import dataclass

from rstar_ray.algorithm.state_bytes import BYTES, state_bytes
from rstar_ray.config import CheckpointConfig, LearnerConfig
from scheduler.planner.capacity import adapter_parameters
from scheduler.planner.model_shape import GB, ModelShape
from scheduler.planner.step_time import HOST_GATHER_GB_S

FLOAT32 = BYTES["float32"]

# Assumed speeds, GB/s.
COPY_GB_S = 5.0  # from a device to its host, pageable
RANK_WRITE_GB_S = 1.0  # by one rank, its checksum included
STORAGE_WRITE_GB_S = 10.0  # by the file system for all ranks together


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """The cost of one checkpoint, and of all that are on the disk at the same time."""

    ranks: int
    rank_gb: float  # weights in float32 and moments, per rank
    model_gb: float  # the Hugging Face folder, by rank 0
    blocking_s: float
    writing_s: float  # beside the next step
    every_steps: int
    keep: int
    best: bool  # the one with the best held-out score is retained besides these

    @property
    def total_gb(self) -> float:
        return self.rank_gb * self.ranks + self.model_gb

    @property
    def on_disk_gb(self) -> float:
        """Checkpoints of a running stage: the retained ones and the one being written."""
        return (self.keep + self.best + 1) * self.total_gb

    def left_gb(self, steps: int) -> float:
        """Left on disk by a finished stage: its last checkpoint and the others retained."""
        return max(1, min(self.keep + self.best, -(-steps // self.every_steps))) * self.total_gb

    def written_gb(self, steps: int) -> float:
        """Written by a whole stage."""
        return -(-steps // self.every_steps) * self.total_gb

    def summary(self) -> str:
        """One line for the user."""
        each = "the one rank" if self.ranks == 1 else f"each of {self.ranks} ranks"
        return (
            f"a checkpoint every {self.every_steps} steps: {_gb(self.rank_gb)} by {each} and {_gb(self.model_gb)} of "
            f"the model, {_gb(self.total_gb)} in all; a step waits about {_seconds(self.blocking_s)} for it, writing "
            f"takes {_seconds(self.writing_s)} beside the next (computed); {self.keep} kept"
            f"{', the best one' if self.best else ''} and one being written take {_gb(self.on_disk_gb)}, and what "
            f"every finished stage leaves {_gb((self.keep + self.best) * self.total_gb)} more"
        )


def plan_checkpoint(
    model: ModelShape,
    learner: LearnerConfig,
    checkpoint: CheckpointConfig,
    *,
    best: bool = False,
) -> CheckpointPlan:
    """Every parameter's float32 weight, and two moments of trained parameters, are divided among the ranks.

    `best`: the stage is evaluated between its steps and retains its best checkpoint too. With LoRA the exported
    model is merged in float32, and the adapters are beside it.
    """
    ranks, dtype, lora_rank = learner.ranks, learner.dtype, learner.lora_rank
    trained = adapter_parameters(model, lora_rank) if lora_rank else model.parameters
    frozen = model.parameters if lora_rank else 0.0
    rank_gb = (trained * (FLOAT32 + state_bytes(dtype, zero=1).moments) + frozen * FLOAT32) / ranks / GB
    exported = (model.parameters * FLOAT32 + trained * BYTES[dtype]) if lora_rank else model.parameters * BYTES[dtype]
    model_gb = exported / GB
    total_gb = rank_gb * ranks + model_gb
    return CheckpointPlan(
        ranks=ranks,
        rank_gb=rank_gb,
        model_gb=model_gb,
        blocking_s=rank_gb / COPY_GB_S + model_gb / HOST_GATHER_GB_S,
        writing_s=max((rank_gb + model_gb) / RANK_WRITE_GB_S, total_gb / STORAGE_WRITE_GB_S),
        every_steps=checkpoint.every_steps,
        keep=checkpoint.keep,
        best=best,
    )


def _gb(size: float) -> str:
    return f"{size:,.0f} GB" if size >= 10 else f"{size:.1f} GB" if size >= 0.1 else f"{size * 1e3:.0f} MB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.2g} s"
