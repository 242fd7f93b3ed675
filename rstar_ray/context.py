"""The services that the stages of a run use. Actors implement the Protocols; tests have fakes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rstar_ray.algorithm.update import SftExample, UpdateResult
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.rollouts import Rollouts, TrainingRow, TrajectoryRef
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.run_dir.manifest import WrittenFile
from rstar_ray.run_dir.metrics import BalancerStats
from rstar_ray.telemetry.meter import NO_METER, Meter


class Learner(Protocol):
    """Owns the policy: trains it, saves it and loads it."""

    async def train_sft(self, examples: Sequence[SftExample], lr: float) -> UpdateResult: ...
    async def evaluate_sft(self, examples: Sequence[SftExample]) -> float: ...
    async def train_rl(self, rows: Sequence[TrainingRow], lr: float) -> UpdateResult:
        """Run the optimizer steps of one training step on the rows of all prompt groups."""
        ...

    async def reset_optimizer(self) -> None: ...
    async def load_checkpoint(self, folder: Path) -> object: ...
    async def set_policy(self, folder: Path) -> None: ...
    async def save_checkpoint(self, folder: Path) -> None:
        """Return when the state is copied; the files are written while training continues."""
        ...

    async def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder; returns like `save_checkpoint`."""
        ...

    async def written(self) -> Mapping[Path, WrittenFile]:
        """Wait for all files of earlier calls; raise the error of a write that failed."""
        ...


class Services(Protocol):
    """The run's other actors, as a stage uses them."""

    async def publish(self, policy_version: int) -> int:
        """Send the learner's weights to every replica and return their checksum when all serve them.

        A version identifies weights in the whole run: the number of steps that made them, including SFT. A version that
        is already served is not sent again.
        """
        ...

    async def record(
        self, refs: Sequence[TrajectoryRef], path: Path, *, stage: str, step: int, trained: bool = False
    ) -> None:
        """Write trajectories in readable form, on a node that has their tokens.

        `trained`: they belong to the newest update, whose values for their tokens are written too.
        """
        ...

    async def balancer_stats(self) -> BalancerStats | None:
        """The balancer's statistics since the last call."""
        ...

    def publish_metrics(self) -> Mapping[str, float]:
        """Metrics of the newest publish."""
        ...

    async def balancer_state(self) -> Mapping[str, object] | None:
        """The balancer's learned state as JSON; None for a rule without state."""
        ...

    async def load_balancer_state(self, saved: Mapping[str, object]) -> None:
        """Load the result of `balancer_state`. Raises `ValueError` for a malformed one."""
        ...

    def memory_bytes(self) -> Mapping[str, int]:
        """Memory of the run's processes now, by kind."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The run directory and the services of one run."""

    run_dir: RunDir
    learner: Learner
    rollouts: Rollouts
    services: Services
    chat: TokenizerChat | None = None  # written into exported model folders; None in tests without a tokenizer
    plugin_digest: Mapping[str, object] = field(default_factory=dict[str, object])  # custom code, tools, chat template
    stop_requested: Callable[[], bool] = lambda: False  # polled after every step
    meter: Meter = NO_METER
