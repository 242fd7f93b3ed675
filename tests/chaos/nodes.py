"""`python -m tests.chaos.nodes`: a run on two Ray nodes of this machine, one of which fails.

With a rank and a replica on each node, the lost node's parts move to another node, or it returns, or neither, and then
the run ends with a message. If a node can have a separate network here (`has_far`), it is also disconnected, or paused
with all its processes, until Ray declares it dead, and returns when the run continues without it. With one rank, the
node without the rank is lost, with a replica and the trajectories stored there. With `--smaller` the command has
`--on-insufficient-resources scale-down`, and continues with the remaining resources.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from actors.cluster.auth import require_token_auth
from actors.cluster.process_start import start_time
from tests.chaos.__main__ import verified
from tests.chaos.campaign import Campaign, Case, summary
from tests.chaos.faults import STOPPED_S, Kind, NotPutIn, held
from tests.chaos.run import REPOSITORY, Run, make_policy
from tests.chaos.seams import VARIABLE

AWAY_S = 120.0
ENDS_S = 210.0
LEFT_S = 30.0
GIVEN_UP_S = 180.0
JOINED_S = 60.0

OVER_S = 240.0
OBJECT_STORE_BYTES = 100 * 2**20


class Far:
    """A node in a separate network, whose only link to the head can be cut. The link ends with its processes.

    Ray is started on it with `ray start`, as by a user; after Ray has ended, `start` starts it again.
    """

    def __init__(self, number: int, head: str, interface: str) -> None:
        """`head`: the address of Ray's head. `interface`: the name of the link on the node."""
        self._head = head
        self._link, near, self.address = f"chaos-{number}", f"10.77.{number}.1", f"10.77.{number}.2"
        self._network = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self._ray: subprocess.Popen[bytes] | None = None
        self._paused: list[psutil.Process] = []
        ours = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{self._network.pid}/ns/net").readlink() == ours:
            time.sleep(0.01)
        there = ("netns", str(self._network.pid))
        _ip("link", "add", self._link, "type", "veth", "peer", "name", interface, *there)
        _ip("address", "add", f"{near}/30", "dev", self._link)
        _ip("link", "set", self._link, "up")
        for line in (f"address add {self.address}/30 dev {interface}", "link set lo up", f"link set {interface} up",
                     f"route add default via {near}"):  # fmt: skip
            _ip(*line.split(), inside=self._inside)

    @property
    def _inside(self) -> list[str]:
        return ["nsenter", f"--target={self._network.pid}", "--net"]

    @property
    def network(self) -> int:
        """The process that keeps the network alive."""
        return self._network.pid

    def start(self) -> None:
        ray = str(Path(sys.executable).parent / "ray")
        command = [ray, "start", "--block", f"--address={self._head}", f"--node-ip-address={self.address}"]
        command += ["--num-cpus=1", f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats"]
        self._ray = subprocess.Popen([*self._inside, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def processes(self) -> list[psutil.Process]:
        """Ray's processes on it whose parents are alive."""
        assert self._ray is not None, "not started"
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self._ray.pid)
            return [top, *top.children(recursive=True)]
        return []

    def has_ended(self) -> bool:
        return self._ray is None or self._ray.poll() is not None

    def lose(self) -> None:
        """Kill Ray's own processes; their workers end with them."""
        for process in self.processes()[:1]:
            for own in [process, *process.children()]:
                _send(own, signal.SIGKILL)

    def cut(self) -> None:
        _ip("link", "set", self._link, "down")

    def hint(self) -> None:
        _ip("link", "set", self._link, "up")

    def pause(self) -> None:
        """Stop all its processes, as on a halted machine; they continue at `wake`."""
        self._paused = self.processes()
        for process in self._paused:
            _send(process, signal.SIGSTOP)

    def wake(self) -> None:
        """Continue the workers first: for a moment they run without the raylet that must end them."""
        for process in reversed(self._paused):
            _send(process, signal.SIGCONT)
        self._paused = []

    def end(self) -> None:
        """End the network, after Ray has ended."""
        self._network.kill()
        self._network.wait()


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _ip(*words: str, inside: Sequence[str] = ()) -> None:
    subprocess.run([*inside, "ip", *words], check=True)


class Nodes:
    """A separate Ray cluster: a head, and nodes for one bundle each. Ends only processes that it started."""

    def __init__(self, control: Path, head_cpus: int, *, far: bool) -> None:
        """`control`: the folder that `tests.chaos.seams` reads, in every process of a node. `far`: nodes that join have
        separate networks."""
        self._environment = dict(os.environ)
        os.environ |= {VARIABLE: str(control), "PYTHONPATH": str(REPOSITORY)}
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        require_token_auth()
        from ray.cluster_utils import Cluster
        from ray.util import get_node_ip_address

        # On many machines gloo resolves the host name to the loopback. The variable applies to all nodes.
        self._interface = interface_of(get_node_ip_address())
        os.environ["GLOO_SOCKET_IFNAME"] = self._interface
        shared = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
        head = {**shared, "num_cpus": head_cpus, "include_dashboard": False}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self._shared = shared
        self.far = far
        self._fars: list[Far] = []
        self._other: Any = None  # the node that joined last
        self._seen: dict[int, str] = {}  # id and start time of every process seen below this one
        self._given_up: dict[int, str] = {}  # of these, processes of nodes that Ray declared dead before they returned

    @property
    def address(self) -> str:
        return self._cluster.address

    def join(self) -> Any:
        """Add a node; returns the previous one."""
        before = self._other
        if self.far:
            self._other = Far(len(self._fars), self.address, self._interface)
            self._fars.append(self._other)
            self._start(self._other)
        else:
            self._other = self._cluster.add_node(**self._shared)
        return before

    def lose(self, other: Any = None) -> None:
        """Kill a node's raylet and Ray's other processes; its workers end with it."""
        self._note()
        lost = other or self._other
        if isinstance(lost, Far):
            lost.lose()
        else:
            self._cluster.remove_node(lost, allow_graceful=False)

    def cut(self, seconds: float) -> None:
        """Disconnect the node that joined last for this time: its link is down, or its raylet is stopped, while its
        workers continue."""
        if isinstance(self._other, Far):
            self._other.cut()
            time.sleep(seconds)
            return self._other.hint()
        raylet = psutil.Process(_raylet(self._other))
        raylet.send_signal(signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            raylet.send_signal(signal.SIGCONT)

    def given_up(self, run: Run, cut: Callable[[Far], None], hint: Callable[[Far], None]) -> Far:
        """Disconnect the node that joined last until Ray declares it dead, when the measured time begins."""
        far = self._other
        assert isinstance(far, Far)
        self._note()
        self._given_up |= {process.pid: start_time(process.pid) for process in far.processes()}
        began_s = time.monotonic()
        cut(far)
        if not run.wait(lambda: not self._is_there(far), GIVEN_UP_S):
            hint(far)
            raise NotPutIn(f"Ray did not give the node up in {GIVEN_UP_S:g} s")
        run.came_to_phase_s = time.monotonic()
        print(f"Ray gave the node up {run.came_to_phase_s - began_s:.0f} s after the cut", flush=True)
        return far

    def start_again(self, far: Far, run: Run) -> None:
        """Start a node again, as a supervisor does, when its processes have ended."""
        if run.wait(far.has_ended, LEFT_S):  # otherwise `end` returns the remaining processes
            self._start(far)

    def _start(self, far: Far) -> None:
        far.start()
        until_s = time.monotonic() + JOINED_S
        while not self._is_there(far):
            if time.monotonic() > until_s:
                raise TimeoutError(f"the node did not join in {JOINED_S:g} s")
            time.sleep(0.2)

    def _is_there(self, far: Far) -> bool:
        table = self._cluster.global_state.node_table()
        return any(node["NodeManagerAddress"] == far.address and node["Alive"] for node in table)

    def without(self, process: psutil.Process) -> Any:
        """A node, other than the head, on which this process does not run."""
        joined = [node for node in self._cluster.worker_nodes if _raylet(node) != process.ppid()]
        assert joined, "it is on every node"
        return joined[0]

    def end(self) -> list[str]:
        """End the cluster; kills processes that did not end with their node, and returns their names."""
        self._note()
        names = [f"{name}, of a node that Ray had given up" for name in _not_gone(self._given_up)]
        for far in self._fars:
            far.hint()
            far.lose()
        self._cluster.shutdown()
        os.environ.clear()
        os.environ.update(self._environment)
        names += _not_gone(self._seen)
        for far in self._fars:
            far.end()
        return names

    def _note(self) -> None:
        networks = {far.network for far in self._fars}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.pid not in networks:
                    self._seen[process.pid] = start_time(process.pid)


def _not_gone(seen: Mapping[int, str]) -> list[str]:
    """Kill processes that do not end in time; returns their names."""
    gone_by_s, names = time.monotonic() + LEFT_S, list[str]()
    for pid, started in seen.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            while start_time(pid) == started and process.status() != psutil.STATUS_ZOMBIE:
                if time.monotonic() > gone_by_s:
                    names.append(process.name())
                    process.kill()
                    break
                time.sleep(0.2)
    return names


def has_far() -> bool:
    """True if nodes can have separate networks here: as root, on a machine with a network."""
    from ray.util import get_node_ip_address

    there = all(map(shutil.which, ("ip", "nsenter", "unshare"))) and interface_of(get_node_ip_address()) != "lo"
    return there and subprocess.run(["unshare", "--net", "true"], stderr=subprocess.DEVNULL).returncode == 0


def interface_of(address: str) -> str:
    """The interface with this address; the loopback on a machine without a network."""
    named = [name for name, has in psutil.net_if_addrs().items() if address in [one.address for one in has]]
    return named[0] if named else "lo"


def _raylet(node: Any) -> int:
    (raylet,) = node.all_processes["raylet"]
    return raylet.process.pid


def kinds(nodes: Nodes, ranks: int, *, smaller: bool) -> list[Kind]:
    """The faults of a node for a run with `ranks` ranks."""

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
            nodes.join()  # and the same command resumes

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

    ended = (*said, "no node for", "had no node for", "resuming after step")
    if smaller:
        fewer = (*ended, "smaller plan: 1 replicas and 1 ranks fit, instead of 2 and 2")
        name, without = "node lost for good, and a smaller plan", ("generation/1", "learner/rank-1")
        return [Kind(name=name, fault=for_good, says=fewer, ends=True, without=without)]
    return [
        Kind(name="node lost, another has room", fault=elsewhere, says=said),
        Kind(name="node lost, and comes back", fault=returns, says=said),
        Kind(name="node cut off for a moment", fault=lambda run: nodes.cut(STOPPED_S), harmless=True),
        *(_given_up(nodes, said) if nodes.far else ()),
        Kind(name="node lost for good", fault=for_good, says=ended, ends=True),
    ]


def _given_up(nodes: Nodes, said: tuple[str, ...]) -> list[Kind]:
    """Faults of a node that is unreachable for longer than Ray waits; it returns when the run has continued."""

    def given_up_and_another(run: Run) -> Any:
        far = nodes.given_up(run, Far.cut, Far.hint)
        nodes.join()
        return far.hint

    def given_up_and_back(run: Run) -> Any:
        far = nodes.given_up(run, Far.pause, Far.wake)

        def undo() -> None:
            far.wake()
            nodes.start_again(far, run)

        return undo

    return [
        Kind(name="node cut off until Ray gives it up, another has room", fault=given_up_and_another, says=said),
        Kind(name="node paused until Ray gives it up, and comes back", fault=given_up_and_back, says=said),
    ]


def play(
    folder: Path, policy: Path, *, ranks: int, seeds: int, smaller: bool = False, over_s: float = OVER_S
) -> tuple[list[Case], list[str]]:
    """Returns the cases, and the errors found at the end. A `smaller` plan has one case, as its node stays lost."""
    options = ("--detector.node-away-s", f"{AWAY_S:g}", "--learner.ranks", str(ranks))
    options += ("--on-insufficient-resources", "scale-down") if smaller else ()
    control = folder / "control"
    control.mkdir(parents=True, exist_ok=True)
    nodes = Nodes(control, head_cpus=int(ranks == 2), far=ranks == 2 and has_far())
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
        "--smaller",
        action="store_true",
        help="two ranks, of which one continues with --on-insufficient-resources scale-down",
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
    return 0 if all(case.passed for case in cases) and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
