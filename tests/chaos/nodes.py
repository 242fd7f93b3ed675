"""`python -m tests.chaos.nodes`: a run on two Ray nodes of this machine, one of which is lost.

With a rank and a replica on each, the node's parts find room on another node, or it comes back, or neither, and then
the run ends and says so. With one rank the node without it is lost, and with it a replica alone and the trajectories
that lie there. With `--smaller` the command is given with `--when-short smaller`, and goes on with what is left.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from actors.birth import birth
from actors.door import shut_door
from tests.chaos.__main__ import verified
from tests.chaos.campaign import Campaign, Case, summary
from tests.chaos.faults import STOPPED_S, Kind, held
from tests.chaos.run import REPOSITORY, Run, make_policy
from tests.chaos.seams import VARIABLE

AWAY_S = 60.0
ENDS_S = 150.0
LEFT_S = 30.0
OVER_S = 240.0
OBJECT_STORE_BYTES = 100 * 2**20


class Nodes:
    """A Ray of our own: a head, and nodes with room for one bundle that come and go. Ends what it started alone."""

    def __init__(self, control: Path, head_cpus: int) -> None:
        """`control`: what `tests.chaos.seams` asks, in every process that a node starts."""
        self._environment = dict(os.environ)
        os.environ |= {VARIABLE: str(control), "PYTHONPATH": str(REPOSITORY)}
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        shut_door(print)
        from ray.cluster_utils import Cluster

        shared = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
        head = {**shared, "num_cpus": head_cpus, "include_dashboard": False}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self._shared = shared
        self._other: Any = None  # the one that joined last
        self._seen: dict[int, str] = {}  # every process seen below this one: its id and beginning

    @property
    def address(self) -> str:
        return self._cluster.address

    def join(self) -> Any:
        """Another; returns the one that was there."""
        before, self._other = self._other, self._cluster.add_node(**self._shared)
        return before

    def lose(self, other: Any = None) -> None:
        """SIGKILL to the raylet and all beside it; its workers end with it."""
        self._note()
        self._cluster.remove_node(other or self._other, allow_graceful=False)

    def cut(self, seconds: float) -> None:
        """The raylet of the node that joined last neither hears nor is heard for so long; its workers go on."""
        raylet = psutil.Process(_raylet(self._other))
        raylet.send_signal(signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            raylet.send_signal(signal.SIGCONT)

    def without(self, process: psutil.Process) -> Any:
        """A node that joined and on which this process does not run."""
        joined = [node for node in self._cluster.worker_nodes if _raylet(node) != process.ppid()]
        assert joined, "it is on every node"
        return joined[0]

    def end(self) -> list[str]:
        """The names of processes that did not end with their node, which are killed."""
        self._note()
        self._cluster.shutdown()
        os.environ.clear()
        os.environ.update(self._environment)
        gone_by_s, names = time.monotonic() + LEFT_S, list[str]()
        for pid, born in self._seen.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                while birth(pid) == born and process.status() != psutil.STATUS_ZOMBIE:
                    if time.monotonic() > gone_by_s:
                        names.append(process.name())
                        process.kill()
                        break
                    time.sleep(0.2)
        return names

    def _note(self) -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._seen[process.pid] = birth(process.pid)


def _raylet(node: Any) -> int:
    (raylet,) = node.all_processes["raylet"]
    return raylet.process.pid


def kinds(nodes: Nodes, ranks: int, *, smaller: bool) -> list[Kind]:
    """What becomes of a node under a run with so many ranks."""

    def elsewhere(run: Run) -> None:
        lost = nodes.join()
        run.came_to_phase_s = time.monotonic()
        nodes.lose(lost)

    def returns(run: Run) -> Any:
        nodes.lose()
        return nodes.join

    def lose_a_replica(run: Run) -> Any:
        rank = run.process("learner/rank-0")
        assert rank is not None
        nodes.lose(nodes.without(rank))
        return nodes.join

    def for_good(run: Run) -> None:
        nodes.lose()
        assert run.driver is not None
        run.driver.wait(ENDS_S)
        if not smaller:
            nodes.join()  # and the same command goes on

    said = ("was lost, with",)
    if ranks == 1:
        gone = (*said, "found no trajectories")
        return [
            Kind(
                name="node lost with a step's trajectories, and comes back",
                fault=held("update", lose_a_replica),
                says=gone,
            ),
            Kind(name="node of a replica lost, and comes back", fault=lose_a_replica, says=said),
        ]
    ended = (*said, "no node for", "had no node for", "going on after step")
    if smaller:
        fewer = (*ended, "smaller plan: 1 replicas and 1 ranks fit, instead of 2 and 2")
        name, without = "node lost for good, and a smaller plan", ("generation/1", "learner/rank-1")
        return [Kind(name=name, fault=for_good, says=fewer, ends=True, without=without)]
    return [
        Kind(name="node lost, another has room", fault=elsewhere, says=said),
        Kind(name="node lost, and comes back", fault=returns, says=said),
        Kind(name="node cut off for a moment", fault=lambda run: nodes.cut(STOPPED_S), harmless=True),
        Kind(name="node lost for good", fault=for_good, says=ended, ends=True),
    ]


def play(
    folder: Path, policy: Path, *, ranks: int, seeds: int, smaller: bool = False, over_s: float = OVER_S
) -> tuple[list[Case], list[str]]:
    """The cases, and what was wrong at the end of them. With a `smaller` plan there is one: what is lost is."""
    options = ("--detector.node-away-s", f"{AWAY_S:g}", "--learner.ranks", str(ranks))
    options += ("--when-short", "smaller") if smaller else ()
    control = folder / "control"
    control.mkdir(parents=True, exist_ok=True)
    nodes = Nodes(control, head_cpus=int(ranks == 2))
    try:
        for _ in range(3 - ranks):
            nodes.join()
        run = Run(folder, policy, options=options, ray=nodes.address)
        campaign = Campaign(run, over_s)
        cases: list[Case] = []
        try:
            campaign.begin()
            for seed in range(1 if smaller else seeds):
                for kind in kinds(nodes, ranks, smaller=smaller):
                    cases.append(campaign.play(kind, seed))
                    print(json.dumps(asdict(cases[-1])), flush=True)
        finally:
            left = run.end()
        wrong = verified(run)
    finally:
        left_by_nodes = nodes.end()
    return cases, [*wrong, *(f"left behind: {name}" for name in (*left, *left_by_nodes))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2))
    parser.add_argument(
        "--smaller", action="store_true", help="two ranks, of which one goes on with --when-short smaller"
    )
    parser.add_argument("--over-s", type=float, default=OVER_S, help="a fault that is not over then is a hang [s]")
    parser.add_argument("--folder", default="", help="where the run and its log go; a temporary folder")
    parser.add_argument("--policy", default=str(REPOSITORY / "runs" / "chaos"), help="where the policy is kept")
    options = parser.parse_args()
    folder = Path(options.folder or tempfile.mkdtemp(prefix="chaos-")).absolute()
    policy = make_policy(Path(options.policy))
    ranks = 2 if options.smaller else options.ranks
    cases, wrong = play(
        folder, policy, ranks=ranks, seeds=options.seeds, smaller=options.smaller, over_s=options.over_s
    )
    print("\n".join(wrong))
    print(json.dumps(summary(cases)), flush=True)
    return 0 if all(case.well for case in cases) and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
