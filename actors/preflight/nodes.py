"""Collects facts from every node of the Ray cluster that this process belongs to."""

import secrets
import time
from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from actors.cluster.bundles import HEAD, on_node
from actors.launch.ray_connection import connect
from actors.preflight.facts import Folder, NodeFacts, PreflightOptions
from actors.preflight.read_facts import look_at_needed, look_at_run_dir, read_facts
from actors.preflight.required_paths import Needed
from rstar_ray.errors import ConfigError, DeadlineExceeded, last_line

START_DEADLINE_S = 120.0
READ_DEADLINE_S = 600.0  # above the sum of the deadlines of the single probes


class NodeReader:
    """Ray's view of `read_facts`, on one node."""

    def now(self) -> float:
        return time.time()

    def read(self, options: PreflightOptions, node: str) -> NodeFacts:
        return read_facts(options, node)

    def look(self, run_dir: str, mark: str) -> Folder:
        return look_at_run_dir(Path(run_dir), mark)

    def find(self, needed: Needed) -> Folder:
        return look_at_needed(needed)


def every_node(options: PreflightOptions) -> list[NodeFacts]:
    """Facts of every node, head first.

    Raises `DeadlineExceeded` with the name of a node that does not answer, and `ConfigError` where the cluster cannot
    be reached or cannot run this code.
    """
    connect()
    try:
        return _facts(options)
    except RayError as failed:
        hint = "start its nodes with this version of the code on their PYTHONPATH"
        raise ConfigError("RAY_ADDRESS", f"a node does not answer: {last_line(failed)}", hint) from failed


def _facts(options: PreflightOptions) -> list[NodeFacts]:
    with _readers() as readers:
        offsets = {name: _offset(reader, name) for name, reader in readers.items()}
        reading = {name: reader.read.remote(options, name) for name, reader in readers.items()}
        facts = {name: _got(ref, name, READ_DEADLINE_S) for name, ref in reading.items()}
    return [replace(facts[name], clock_offset_s=offsets[name]) for name in readers]


def refuse_unseen(run_dir: Path | None, needed: Sequence[Needed] = ()) -> None:
    """Raise `ConfigError` with the nodes on which the run directory, or a path in `needed`, is missing or differs.

    A node without the shared run directory would leave its shards out of checkpoints. A cluster of one node is not
    checked.
    """
    alive = named([node for node in ray.nodes() if node["Alive"]])
    if len(alive) < 2:
        return
    with_gpus = [name for name, node in alive.items() if node["Resources"].get("GPU")]
    apart = [one for one in needed if run_dir is None or run_dir not in one.path.parents]
    with _readers() as readers:
        if run_dir is not None:
            refuse_folders(_seen_by(readers, run_dir), run_dir)
        refuse_absent(_found_by(readers, apart, with_gpus))


def _seen_by(readers: Mapping[str, Any], run_dir: Path) -> dict[str, str]:
    """The problem with the folder, by node; empty if there is none."""
    mark = run_dir / f".seen-{secrets.token_hex(8)}"
    run_dir.mkdir(parents=True, exist_ok=True)
    mark.write_text(mark.name)
    try:
        looking = {name: reader.look.remote(str(run_dir), mark.name) for name, reader in readers.items()}
        folders: dict[str, Folder] = {name: _got(ref, name, READ_DEADLINE_S) for name, ref in looking.items()}
    finally:
        mark.unlink(missing_ok=True)
    other = f"{run_dir} is a different folder there"
    return {name: folder.problem or ("" if folder.mark == mark.name else other) for name, folder in folders.items()}


def _found_by(
    readers: Mapping[str, Any], needed: Sequence[Needed], with_gpus: Collection[str]
) -> dict[Needed, dict[str, str]]:
    """The problem with each path, by node; empty if there is none. Models are checked on nodes with GPUs only."""
    looking = {
        one: {
            name: reader.find.remote(one)
            for name, reader in readers.items()
            if one.holds != "model" or not with_gpus or name in with_gpus
        }
        for one in needed
    }
    found: dict[Needed, dict[str, str]] = {}
    for one, refs in looking.items():
        ours = look_at_needed(one)
        found[one] = {name: wrong_with(_got(ref, name, READ_DEADLINE_S), ours) for name, ref in refs.items()}
    return found


def wrong_with(theirs: Folder, ours: Folder) -> str:
    """Why a node's path is unusable or differs from the driver's; empty if it is the same."""
    return theirs.problem or ("" if theirs.content == ours.content else "its content differs from the driver's")


def refuse_folders(seen: Mapping[str, str], run_dir: Path) -> None:
    """Raise one `ConfigError` for all nodes that do not see the run directory."""
    if wrong := {name: problem for name, problem in seen.items() if problem}:
        hint = "give a folder on storage that all nodes mount under one path"
        raise ConfigError("--run-dir", _unseen(wrong, run_dir), hint)


def refuse_absent(found: Mapping[Needed, Mapping[str, str]]) -> None:
    """Raise one `ConfigError` for all paths that some node lacks."""
    lacking = {one: {name: problem for name, problem in by_node.items() if problem} for one, by_node in found.items()}
    absent = [one for one, wrong in lacking.items() if wrong]
    if absent:
        first, *others = absent
        message = [_unseen(lacking[first], first.path)]
        message += [f"{other.option}: {_unseen(lacking[other], other.path)}" for other in others]
        hint = "copy it there under the same path, or give a path on storage that all nodes mount"
        raise ConfigError(first.option, "; ".join(message), hint)


def _unseen(wrong: Mapping[str, str], path: Path) -> str:
    names = ", ".join(list(wrong)[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
    return f"{names} do not see {path} ({next(iter(wrong.values()))})"


@contextmanager
def _readers() -> Generator[dict[str, Any]]:
    """A reader on every living node, the head's first; killed on exit."""
    reader: Any = ray.remote(NodeReader)
    readers = {
        name: reader.options(num_cpus=0, **on_node(node["NodeID"], or_elsewhere=False)).remote()
        for name, node in named([node for node in ray.nodes() if node["Alive"]]).items()
    }
    try:
        yield readers
    finally:
        for handle in readers.values():
            ray.kill(handle)


def named(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Nodes by host name, with Ray's node id added if two share a host name; the head comes first."""
    ordered = sorted(nodes, key=lambda node: (HEAD not in node["Resources"], node["NodeID"]))
    hosts = Counter(node["NodeManagerHostname"] for node in ordered)
    return {
        host if hosts[host := node["NodeManagerHostname"]] == 1 else f"{host}/{node['NodeID'][:4]}": node
        for node in ordered
    }


def _offset(reader: Any, name: str) -> float:
    """Seconds that the node's clock is ahead of ours. The first call waits for the process to start."""
    _got(reader.now.remote(), name, START_DEADLINE_S)
    asked_s = time.time()
    there_s = _got(reader.now.remote(), name, START_DEADLINE_S)
    return there_s - (asked_s + time.time()) / 2


def _got(ref: Any, name: str, seconds: float) -> Any:
    try:
        return ray.get(ref, timeout=seconds)
    except GetTimeoutError as late:
        raise DeadlineExceeded("preflight", name, "the facts of its machine", seconds) from late
