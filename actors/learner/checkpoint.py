"""A learner's checkpoint: master weights, moments, position and every rank's generators, whole.

It is written by rank 0, one parameter at a time, and loads on any number of ranks and under any ZeRO setting.
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
    from actors.learner.state import LearnerState

FACTS = "learner.json"
GENERATORS = "generators.pt"
SHARD_BYTES = 2 * 2**30

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a learner stands, weights and moments apart."""

    step: int  # optimizer steps applied
    calls: int  # of train_rl
    extra: dict[str, Any]  # what the caller wants back


def save(folder: Path, state: "LearnerState", position: Position, *, architecture: str) -> None:
    """A collective; only rank 0 writes, into a new or existing folder."""
    generators: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(generators, _generators())
    state.prepare_moments()
    folder.mkdir(parents=True, exist_ok=True)
    shards = _save_shards(folder, state)
    if dist.get_rank() != 0:
        return
    torch.save(generators, folder / GENERATORS)
    facts = {
        "architecture": architecture,
        "step": position.step,
        "calls": position.calls,
        "shards": shards,
        "world_size": dist.get_world_size(),
        "shapes": {name: list(shape) for name, shape in state.shapes.items()},
        "extra": position.extra,
    }
    (folder / FACTS).write_text(json.dumps(facts, indent=1))


def load(folder: Path, state: "LearnerState", *, architecture: str) -> Position:
    """Take over a checkpoint, from any number of ranks; a rank that it did not have keeps its own generators.

    Raises `ConfigError`, on all ranks, for one that cannot be read and for another architecture.
    """
    facts, generators = _read_facts(folder)
    theirs = {name: tuple(shape) for name, shape in facts["shapes"].items()}
    refuse_other_shapes(
        theirs,
        state.shapes,
        option="--run-dir",
        name=f"checkpoint {folder} of {facts['architecture']}",
        ours=architecture,
    )
    state.prepare_moments()
    _load_shards(folder, state, facts["shards"])
    if dist.get_rank() < len(generators):
        _set_generators(generators[dist.get_rank()])
    return Position(step=facts["step"], calls=facts["calls"], extra=facts["extra"])


def refuse_other_shapes(theirs: Shapes, expected: Shapes, *, option: str, name: str, ours: str) -> None:
    """Rank 0 compares, all ranks hear the answer, and raise `ConfigError` where the shapes differ."""
    differing = sorted(set(theirs.items()) ^ set(expected.items()))
    answer: list[Any] = [differing[0][0] if differing else None]
    dist.broadcast_object_list(answer, 0)
    if answer[0] is not None:
        raise ConfigError(
            option, f"{name} does not fit {ours} (they differ in {answer[0]})", "name one of the same architecture"
        )


def _read_facts(folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """Read by rank 0, handed to all."""
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            facts = json.loads((folder / FACTS).read_text())
            shared = [(facts, torch.load(folder / GENERATORS, weights_only=True))]
        except (OSError, ValueError) as error:
            shared = [f"cannot read {folder}: {error}"]
    dist.broadcast_object_list(shared, 0)
    if isinstance(shared[0], str):
        raise ConfigError("--run-dir", shared[0], "name one whose checkpoints are whole")
    return shared[0]


def _save_shards(folder: Path, state: "LearnerState") -> int:
    """Files of about SHARD_BYTES; returns how many."""
    from safetensors.torch import save_file

    writes = dist.get_rank() == 0
    shard: dict[str, Tensor] = {}
    shards = size = 0
    last = list(state.shapes)[-1]
    for name in state.shapes:
        for part in state.parts(name):
            tensor = state.get(name, part)
            if writes:
                shard[_key(name, part)] = tensor.detach().cpu().clone()
                size += tensor.numel() * 4
        if writes and (size >= SHARD_BYTES or name == last):
            save_file(shard, folder / _shard_name(shards))
            shard, shards, size = {}, shards + 1, 0
    return shards


def _load_shards(folder: Path, state: "LearnerState", shards: int) -> None:
    from safetensors import safe_open

    reads = dist.get_rank() == 0
    with contextlib.ExitStack() as stack:
        places: dict[str, Any] = {}
        for index in range(shards if reads else 0):
            opened = stack.enter_context(safe_open(folder / _shard_name(index), framework="pt"))
            places.update(dict.fromkeys(opened.keys(), opened))
        for name in state.shapes:
            for part in state.parts(name):
                key = _key(name, part)
                state.set(name, places[key].get_tensor(key) if reads else None, part)


def _shard_name(number: int) -> str:
    return f"state-{number:05d}.safetensors"


def _key(name: str, part: str | None) -> str:
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
