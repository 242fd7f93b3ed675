"""A learner's checkpoint: master weights, moments, position and every rank's generators.

Each rank writes what it holds, where its node is, and says what it wrote. A file names of each value which elements of
the flattened tensor it has, so any number of ranks, under any ZeRO setting, reads what it needs and no more.
DeepSpeed's universal checkpoint does the same for its own folders, but only after a separate program has read all of
a checkpoint and written it again, tensor by tensor; these few facts make that step needless.
"""

import contextlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rstar_ray.errors import ConfigError

if TYPE_CHECKING:
    from actors.learner.state import LearnerState, Part

FACTS = "learner.json"
STARTS = "starts"
"""In a file's metadata: by key, the first of the elements that it has."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a learner stands, weights and moments apart."""

    step: int  # optimizer steps applied
    calls: int  # of train_rl
    bad_updates: int  # the latest ones that were not applied, in a row
    extra: dict[str, Any]  # what the caller wants back
    base: str = ""  # folder of the weights that adapters are trained beside


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What one rank writes, in host memory: training may continue while it is written."""

    rank: int
    tensors: dict[str, Tensor]  # flat, float32
    starts: dict[str, int]
    generators: dict[str, Any]
    facts: dict[str, Any]  # of the whole checkpoint; rank 0 writes them

    def write(self, folder: Path) -> list[Path]:
        """The files of this rank."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / state_file(self.rank), folder / generators_file(self.rank)]
        save_file(self.tensors, paths[0], {STARTS: json.dumps(self.starts)})
        torch.save(self.generators, paths[1])
        if self.rank == 0:
            paths.append(folder / FACTS)
            paths[-1].write_text(json.dumps(self.facts, indent=1))
        return paths


def snapshot(state: "LearnerState", position: Position, *, architecture: str) -> Snapshot:
    """Of this rank; every rank takes its own, between the same two updates."""
    state.prepare_moments()
    tensors: dict[str, Tensor] = {}
    starts: dict[str, int] = {}
    for name, part, own, value in state.snapshot():
        tensors[_key(name, part)], starts[_key(name, part)] = value, own.start
    facts = {
        "architecture": architecture,
        "step": position.step,
        "calls": position.calls,
        "bad_updates": position.bad_updates,
        "base": position.base,
        "world_size": dist.get_world_size(),
        "shapes": {name: list(shape) for name, shape in state.shapes.items()},
        "extra": position.extra,
    }
    return Snapshot(rank=dist.get_rank(), tensors=tensors, starts=starts, generators=_generators(), facts=facts)


def load(folder: Path, state: "LearnerState", *, architecture: str) -> Position:
    """Take over a checkpoint, from any number of ranks; a rank that it did not have keeps its own generators.

    A collective. Raises `ConfigError`, on all ranks, for one that cannot be read or has holes, and for another
    architecture.
    """
    facts = _read_facts(folder)
    theirs = {name: tuple(shape) for name, shape in facts["shapes"].items()}
    refuse_other_shapes(
        theirs,
        state.shapes,
        option="--run-dir",
        name=f"checkpoint {folder} of {facts['architecture']}",
        ours=architecture,
    )
    state.prepare_moments()
    rank = dist.get_rank()
    with contextlib.ExitStack() as stack:
        files, generators, problem = None, None, ""
        try:
            files = stack.enter_context(contextlib.closing(RankFiles(folder, facts["world_size"])))
            files.refuse_holes({_key(name, part): state.numel(name) for name in theirs for part in state.parts(name)})
            if rank < facts["world_size"]:
                generators = torch.load(folder / generators_file(rank), weights_only=True)
        except (OSError, ValueError) as unreadable:
            problem = f"cannot read {folder}: {unreadable}"
        _refuse_together(problem)
        assert files is not None
        state.restore(lambda name, part, held: files.read(_key(name, part), held))
    if generators is not None:
        _set_generators(generators)
    return Position(
        step=facts["step"],
        calls=facts["calls"],
        bad_updates=facts.get("bad_updates", 0),  # a checkpoint without it is valid
        extra=facts["extra"],
        base=facts.get("base", ""),
    )


class RankFiles:
    """The files of all ranks of a checkpoint as one: any range of any value."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        """Raises `OSError` for a file that is missing, `ValueError` for an invalid one."""
        from safetensors import SafetensorError, safe_open

        self._stack = contextlib.ExitStack()
        self._places: dict[str, list[tuple[range, Any]]] = {}  # by key: elements, and their slice of a file
        try:
            for rank in range(num_ranks):
                path = folder / state_file(rank)
                if not path.is_file():
                    raise FileNotFoundError(f"{path.name}, the part of rank {rank} of {num_ranks}, is missing")
                opened = self._stack.enter_context(safe_open(path, framework="pt"))
                for key, start in json.loads(opened.metadata()[STARTS]).items():
                    values = opened.get_slice(key)
                    (count,) = values.get_shape()
                    self._places.setdefault(key, []).append((range(start, start + count), values))
        except (SafetensorError, KeyError, TypeError) as broken:
            self.close()
            raise ValueError(f"a rank's file is not part of a checkpoint: {broken}") from broken
        except BaseException:
            self.close()
            raise

    def refuse_holes(self, expected: Mapping[str, int]) -> None:
        """Raises `ValueError` where elements of a value are in no file; `expected` has how many there are."""
        for key, numel in expected.items():
            reached = 0
            for elements, _ in sorted(self._places.get(key, ()), key=lambda place: place[0].start):
                if elements.start > reached:
                    break
                reached = max(reached, elements.stop)
            if reached < numel:
                raise ValueError(f"no rank's file has element {reached} of {numel} of {key}")

    def read(self, key: str, wanted: range) -> Tensor:
        """The wanted elements, float32."""
        whole = torch.empty(len(wanted), dtype=torch.float32)
        for elements, values in self._places[key]:
            first, last = max(elements.start, wanted.start), min(elements.stop, wanted.stop)
            if first < last:
                found = values[first - elements.start : last - elements.start]
                whole[first - wanted.start : last - wanted.start] = found
        return whole

    def close(self) -> None:
        self._stack.close()


def refuse_other_shapes(theirs: Shapes, expected: Shapes, *, option: str, name: str, ours: str) -> None:
    """Rank 0 compares, all ranks hear the answer, and raise `ConfigError` where the shapes differ."""
    differing = sorted(set(theirs.items()) ^ set(expected.items()))
    answer: list[Any] = [differing[0][0] if differing else None]
    dist.broadcast_object_list(answer, 0)
    if answer[0] is not None:
        raise ConfigError(
            option, f"{name} does not fit {ours} (they differ in {answer[0]})", "name one of the same architecture"
        )


def state_file(rank: int) -> str:
    return f"state-{rank:05d}.safetensors"


def generators_file(rank: int) -> str:
    return f"generators-{rank:05d}.pt"


def _read_facts(folder: Path) -> dict[str, Any]:
    """Read by rank 0, handed to all."""
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            shared = [json.loads((folder / FACTS).read_text())]
        except (OSError, ValueError) as error:
            shared = [f"cannot read {folder}: {error}"]
    dist.broadcast_object_list(shared, 0)
    if isinstance(shared[0], str):
        raise _not_whole(shared[0])
    return shared[0]


def _refuse_together(problem: str) -> None:
    """Raises `ConfigError` on all ranks where one of them has a problem: the others would wait for it."""
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if first := next(filter(None, problems), ""):
        raise _not_whole(first)


def _not_whole(problem: str) -> ConfigError:
    return ConfigError("--run-dir", problem, "name one whose checkpoints are whole")


def _key(name: str, part: "Part") -> str:
    return f"{name}/{part or 'weight'}"


def _generators() -> dict[str, Any]:
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), *(float(value) for value in rest)),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_generators(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), int(position), int(has_gauss), gauss))
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
