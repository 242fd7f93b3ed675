"""All that a run acts through, as Protocols: `actors/` has the real ones, the tests have fakes."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rstar_ray.algorithm.update import SftExample, UpdateResult
from rstar_ray.rollouts import Rollouts, TrajectoryRef
from rstar_ray.run_dir.manifest import WrittenFile
from rstar_ray.run_dir.metrics import PlacementFigures, PublishFigures
from rstar_ray.telemetry.meter import NO_METER, Meter
from rstar_ray.train_loop import Publish, TrainingRow


class Learner(Protocol):
    """The policy's owner: trains it, saves it, brings it back."""

    async def train_sft(self, examples: Sequence[SftExample], lr: float) -> UpdateResult: ...
    async def evaluate_sft(self, examples: Sequence[SftExample]) -> float: ...
    async def train_rl(self, rows: Sequence[TrainingRow], lr: float) -> UpdateResult: ...
    async def reset_optimizer(self) -> None: ...
    async def load_checkpoint(self, folder: Path) -> None: ...
    async def set_policy(self, folder: Path) -> None: ...
    async def save_checkpoint(self, folder: Path) -> None:
        """Returns once a copy is taken; it is written beside what comes next."""
        ...

    async def export(self, folder: Path) -> None:
        """The policy as a Hugging Face folder; returns once a copy is taken."""
        ...

    async def written(self) -> Mapping[Path, WrittenFile]:
        """Waits for all that was to be written since this was asked last; raises what kept it from that."""
        ...


class RecordTrajectories(Protocol):
    """Writes trajectories in readable form, where their tokens are."""

    async def __call__(
        self, refs: Sequence[TrajectoryRef], path: Path, *, stage: str, step: int, trained: bool = False
    ) -> None:
        """`trained`: they are of the newest update, and what the learner saw of their tokens is written with them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """All that a stage acts through."""

    learner: Learner
    rollouts: Rollouts
    publish: Publish
    record: RecordTrajectories
    brought: Mapping[str, object] = field(default_factory=dict[str, object])  # own code, tools, template: by contents
    placed: Callable[[], Awaitable[PlacementFigures]] | None = None  # since it was asked last
    learned: Callable[[], Awaitable[Mapping[str, object] | None]] | None = None  # by the balancer, as JSON has it
    teach: Callable[[Mapping[str, object]], Awaitable[None]] | None = None  # it that again; `ValueError` for nonsense
    published: Callable[[], PublishFigures | None] = lambda: None  # the newest publish
    memory_bytes: Callable[[], Mapping[str, int]] = dict  # of the run's processes now, by what they are
    exported: Callable[[Path], Sequence[Path]] = lambda folder: ()  # told of a model folder; which files it changed
    stopping: Callable[[], bool] = lambda: False  # asked after every step: end with a checkpoint now?
    meter: Meter = NO_METER  # what people watch of the stage
