"""A learner's checkpoint: master weights, moments, step counts and the random generators of every rank.

Each rank writes its own shard from its node and reports the files. A file records, for each value, which elements of
the flattened tensor it contains. Any number of ranks, under any ZeRO setting, can therefore read exactly the elements
they need. DeepSpeed's universal checkpoint offers the same, but needs a separate conversion that reads and rewrites the
whole checkpoint.
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
"""Key of a file's metadata: by value, the index of the first element in this file."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A learner's state besides weights, moments and generators."""

    step: int  # optimizer steps applied
    calls: int  # of train_rl
    bad_updates: int  # consecutive updates not applied, up to now
    extra: dict[str, Any]  # returned to the caller at load
    base: str = ""  # folder of the base weights under LoRA


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One rank's shard of a checkpoint in host memory; training may continue while it is written."""

    rank: int
    tensors: dict[str, Tensor]  # flat, float32
    starts: dict[str, int]
    generators: dict[str, Any]
    facts: dict[str, Any]  # of the whole checkpoint; rank 0 writes them

    def write(self, folder: Path) -> list[Path]:
        """Write this rank's files; returns their paths."""
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
    """Copy this rank's shard; all ranks must call it between the same two updates."""
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
    """Load a checkpoint written by any number of ranks; a rank beyond those keeps its current generators.

    A collective. Raises `ConfigError` on all ranks if the checkpoint cannot be read, is incomplete, or has another
    architecture.
    """
    facts = _read_facts(folder)
    saved_shapes = {name: tuple(shape) for name, shape in facts["shapes"].items()}
    refuse_other_shapes(
        saved_shapes,
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
            files.refuse_holes(
                {_key(name, part): state.numel(name) for name in saved_shapes for part in state.parts(name)}
            )
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
    """Reads any range of any value from the files of all ranks of a checkpoint."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        """Raises `OSError` for a file that is missing, `ValueError` for an invalid one."""
        from safetensors import SafetensorError, safe_open

        self._stack = contextlib.ExitStack()
        self._places: dict[str, list[tuple[range, Any]]] = {}  # by key: elements, and the file slice that has them
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
            raise ValueError(f"a file of a rank is not part of a checkpoint: {broken}") from broken
        except BaseException:
            self.close()
            raise

    def refuse_holes(self, expected: Mapping[str, int]) -> None:
        """Raises `ValueError` if an element of a value is in no file; `expected`: number of elements by key."""
        for key, numel in expected.items():
            reached = 0
            for elements, _ in sorted(self._places.get(key, ()), key=lambda place: place[0].start):
                if elements.start > reached:
                    break
                reached = max(reached, elements.stop)
            if reached < numel:
                raise ValueError(f"no rank's file has element {reached} of {numel} of {key}")

    def read(self, key: str, wanted: range) -> Tensor:
        """The elements `wanted` of a value, float32."""
        values_read = torch.empty(len(wanted), dtype=torch.float32)
        for elements, values in self._places[key]:
            first, last = max(elements.start, wanted.start), min(elements.stop, wanted.stop)
            if first < last:
                found = values[first - elements.start : last - elements.start]
                values_read[first - wanted.start : last - wanted.start] = found
        return values_read

    def close(self) -> None:
        self._stack.close()


def refuse_other_shapes(found: Shapes, expected: Shapes, *, option: str, name: str, ours: str) -> None:
    """Raises `ConfigError` on all ranks if the shapes differ. Rank 0 compares and broadcasts the result."""
    differing = sorted(set(found.items()) ^ set(expected.items()))
    different: list[Any] = [differing[0][0] if differing else None]
    dist.broadcast_object_list(different, 0)
    if different[0] is not None:
        raise ConfigError(
            option, f"{name} does not fit {ours} (they differ in {different[0]})", "name one of the same architecture"
        )


def state_file(rank: int) -> str:
    return f"state-{rank:05d}.safetensors"


def generators_file(rank: int) -> str:
    return f"generators-{rank:05d}.pt"


def _read_facts(folder: Path) -> dict[str, Any]:
    """Rank 0 reads them and broadcasts them. Raises `ConfigError` on all ranks."""
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            shared = [json.loads((folder / FACTS).read_text())]
        except (OSError, ValueError) as error:
            shared = [f"cannot read {folder}: {error}"]
    dist.broadcast_object_list(shared, 0)
    if isinstance(shared[0], str):
        raise _unreadable(shared[0])
    return shared[0]


def _refuse_together(problem: str) -> None:
    """Raises `ConfigError` on all ranks if any rank has a problem; else the others would wait for it."""
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if first := next(filter(None, problems), ""):
        raise _unreadable(first)


def _unreadable(problem: str) -> ConfigError:
    return ConfigError("--run-dir", problem, "name a run directory with complete checkpoints")


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
