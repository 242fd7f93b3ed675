"""The run into which faults are injected: its command, log lines with times, steps and processes.

Signals are sent only to processes that this harness started, or that the run recorded, by id and start time.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from actors.cluster.process_start import start_time
from rstar_ray.run_dir.durable import read_rows
from rstar_ray.run_dir.folder import RunDir
from tests.chaos.seams import PHASE, VARIABLE

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
OPTIONS = (
    "--scale tiny --prompts-per-step 2 --max-empty-steps 100000 --checkpoint.every-steps 1"
    " --checkpoint.trajectories-every-steps 20 --learner.ranks 2 --engine.replicas 2 --engine.cpus-per-replica 0.4"
    " --rollout.max-response-tokens 96 --rollout.deadline-s 90 --data.num-train 64 --reward.name own:reward"
    " --reward.deadline-s 3 --tools.use python own:echo --evaluate.every-steps 4 --evaluate.num-problems 4"
    " --evaluate.samples 2 --evaluate.max-response-tokens 96 --sandbox.deadline-s 60"
)
SFT_OPTIONS = (
    "--sft.steps 200 --checkpoint.every-steps 200 --sft.num-conversations 1000"
    " --evaluate.num-problems 4 --evaluate.samples 1 --evaluate.max-response-tokens 96"
)
END_S = 60.0


@dataclass(frozen=True, slots=True)
class Said:
    """A line of the log, and its time."""

    at_s: float
    line: str


class Run:
    """One run directory, and the command, which is started again whenever it has ended. Times are monotonic."""

    def __init__(
        self, folder: Path, policy: Path, *, steps: int = 100_000, options: Sequence[str] = (), ray: str = ""
    ) -> None:
        """`options` follow those of every run. `ray`: the address of a running Ray; by default the run starts one."""
        self._options = tuple(options)
        self._ray = {"RAY_ADDRESS": ray} if ray else {}
        self.folder = folder
        self.path = folder / "run"
        self.control = folder / "control"
        self.control.mkdir(parents=True, exist_ok=True)
        self._policy = policy
        self._steps = steps
        self.said: list[Said] = []
        self.statuses: list[tuple[float, int]] = []  # time and exit status of each driver that ended
        self.came_to_phase_s: float | None = None  # for the latest fault, if it has a phase
        self.driver: subprocess.Popen[bytes] | None = None
        self.left_behind: list[str] = []  # processes that outlived a driver that could have ended them
        self.family: dict[int, str] = {}  # id and start time of every process seen below a driver

    # -- the command ----------------------------------------------------------------------------------------------
    def start(self) -> None:
        environment = {**os.environ, VARIABLE: str(self.control), "PYTHONPATH": PYTHONPATH, **self._ray}
        (self.control / PHASE).unlink(missing_ok=True)
        self.driver = subprocess.Popen(
            self._command(), cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        threading.Thread(target=self._listen, args=(self.driver,), daemon=True).start()

    def _command(self) -> list[str]:
        command = [sys.executable, "tests/chaos/driver.py", "--run-dir", str(self.path), "--model", str(self._policy)]
        command += ["--own-folder", str(Path(__file__).parent), "--steps", str(self._steps)]
        return [*command, *OPTIONS.split(), *self._options]

    def _listen(self, driver: "subprocess.Popen[bytes]") -> None:
        assert driver.stdout is not None
        with driver.stdout, (self.folder / "log").open("a") as log:
            for line in driver.stdout:
                said = Said(time.monotonic(), line.decode(errors="replace").rstrip())
                self.said.append(said)
                log.write(f"{said.at_s:9.2f} {said.line}\n")
                log.flush()

    def keep_up(self) -> bool:
        """Start the command again if it has ended; True if it had."""
        assert self.driver is not None
        status = self.driver.poll()
        if status is None:
            return False
        self.statuses.append((time.monotonic(), status))
        left = self.end_family()
        if status != -signal.SIGKILL:  # after SIGKILL, Ray's agents detect the end with a delay
            self.left_behind += left
        self.start()
        return True

    def end(self) -> list[str]:
        """End the run by SIGTERM, twice if necessary. Kills and returns processes that outlived a driver."""
        if self.driver is None or self.driver.poll() is not None:
            return [*self.left_behind, *self.end_family()]
        self.note_family()
        for _ in range(2):
            self.driver.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.driver.wait(END_S)
                break
        left = self.end_family()
        self.driver.wait(10)
        return [*self.left_behind, *left]

    def note_family(self) -> list[psutil.Process]:
        """Record and return the driver and all processes below it."""
        assert self.driver is not None
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.driver.pid)
            for process in [top, *top.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.family[process.pid] = start_time(process.pid)
                    found.append(process)
        return found

    def end_family(self, patience_s: float = 20.0) -> list[str]:
        """Kill processes seen below drivers that do not end in time; returns their names."""
        deadline = time.monotonic() + patience_s
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        names: list[str] = []
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                names.append(process.name())
                process.kill()
        self.family.clear()
        return names

    def _left(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for pid, started in self.family.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if start_time(pid) == started and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    # -- its records ----------------------------------------------------------------------------------------------
    @property
    def phase(self) -> str:
        try:
            return (self.control / PHASE).read_text()
        except FileNotFoundError:
            return ""

    def rows(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        return [row for row in read_rows(path) if row["stage"] == "stage1"] if path.exists() else []

    def steps(self) -> int:
        """The last step in the log."""
        return max((row["step"] for row in self.rows()), default=0)

    def recorded(self) -> dict[str, dict[str, Any]]:
        with contextlib.suppress(OSError, ValueError):
            return json.loads(RunDir(self.path).processes_path.read_text())
        return {}

    def process(self, name: str) -> psutil.Process | None:
        """A live process that the run recorded; `generation/0 engine` is the first child of an actor."""
        actor, _, child = name.partition(" ")
        with contextlib.suppress(KeyError, IndexError, psutil.NoSuchProcess):
            entry = self.recorded()[actor]
            process = psutil.Process(entry["pid"])
            if start_time(process.pid) == entry["start_time"]:
                return psutil.Process(entry["children"][0]) if child else process
        return None

    def starting(self) -> psutil.Process | None:
        """The generation worker that was the last to start, by its own record, if it is alive."""
        with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
            starting = json.loads((self.control / "starting").read_text())
            process = psutil.Process(starting["pid"])
            return process if start_time(process.pid) == starting["start_time"] else None
        return None

    def missing(self, names: "set[str]") -> set[str]:
        """Recorded processes that do not exist, or are stopped."""
        found: set[str] = set()
        for name in names:
            process = self.process(name)
            with contextlib.suppress(psutil.NoSuchProcess):
                if process is not None and process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                    continue
            found.add(name)
        return found

    def wait(self, done: Callable[[], bool], seconds: float, every_s: float = 0.1) -> bool:
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                return False
            time.sleep(every_s)
        return True


def make_policy(folder: Path) -> Path:
    """A policy with enough SFT to call tools; created once."""
    model = folder / "policy"
    if not (model / "config.json").exists():
        command = [sys.executable, "recipes/sft.py", "--scale", "tiny", "--run-dir", str(folder / "sft")]
        command += SFT_OPTIONS.split()
        subprocess.run(command, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": PYTHONPATH}, check=True)
        checkpoint = RunDir(folder / "sft").finished_checkpoint("sft")
        assert checkpoint is not None
        model.symlink_to(checkpoint.path / "model")
    return model
