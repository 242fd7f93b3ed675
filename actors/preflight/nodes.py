"""The facts of every node of the Ray cluster that this process belongs to."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from actors.door import shut_door
from actors.preflight.facts import Asked, NodeFacts
from actors.preflight.read import read_facts
from rstar_ray.errors import DeadlineExceeded

START_DEADLINE_S = 120.0
READ_DEADLINE_S = 300.0


class NodeReader:
    """Ray's view of `read_facts`, on one node."""

    def now(self) -> float:
        return time.time()

    def read(self, asked: Asked, node: str) -> NodeFacts:
        return read_facts(asked, node)


def every_node(asked: Asked) -> list[NodeFacts]:
    """Head first. Raises `DeadlineExceeded` naming the first node that does not answer."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    shut_door(lambda line: print(line, flush=True))
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    nodes = named([node for node in ray.nodes() if node["Alive"]])
    reader: Any = ray.remote(NodeReader)
    readers = {
        name: reader.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for name, node in nodes.items()
    }
    try:
        offsets = {name: _offset(reader, name) for name, reader in readers.items()}
        reading = {name: reader.read.remote(asked, name) for name, reader in readers.items()}
        facts = {name: _got(ref, name, READ_DEADLINE_S) for name, ref in reading.items()}
    finally:
        for reader in readers.values():
            ray.kill(reader)
    return [replace(facts[name], clock_offset_s=offsets[name]) for name in nodes]


def named(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """By host name, and by Ray's id too where two share one; the head, which Ray marks, comes first."""
    ordered = sorted(nodes, key=lambda node: ("node:__internal_head__" not in node["Resources"], node["NodeID"]))
    hosts = Counter(node["NodeManagerHostname"] for node in ordered)
    return {
        host if hosts[host := node["NodeManagerHostname"]] == 1 else f"{host}/{node['NodeID'][:4]}": node
        for node in ordered
    }


def _offset(reader: Any, name: str) -> float:
    """The node's clock against ours; the second answer, when its process is up."""
    _got(reader.now.remote(), name, START_DEADLINE_S)
    asked_s = time.time()
    there_s = _got(reader.now.remote(), name, START_DEADLINE_S)
    return there_s - (asked_s + time.time()) / 2


def _got(ref: Any, name: str, seconds: float) -> Any:
    try:
        return ray.get(ref, timeout=seconds)
    except GetTimeoutError as late:
        raise DeadlineExceeded("preflight", name, "what its machine is like", seconds) from late
