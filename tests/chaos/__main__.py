"""`make chaos`: faults put into one real run at scale tiny, one after the other; a line for each, JSON at the end.

A fault is put in at a random moment of a step. It is over when the run has logged two steps more; one that is not over
in time is a hang. Signals go to processes that the run recorded in its directory, by id and beginning, and to no other.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rstar_ray.run_dir.durable import read_rows
from rstar_ray.run_dir.folder import RunDir

REPOSITORY = Path(__file__).resolve().parents[2]
OPTIONS = (
    "--scale tiny --sft.steps 120 --checkpoint.every-steps 1 --steps 4000 --prompts-per-step 8 --max-empty-steps 4000"
    " --evaluate.num-problems 8 --evaluate.samples 2 --learner.ranks 2 --engine.replicas 2"
    " --engine.cpus-per-replica 0.4 --rollout.max-response-tokens 160"
)
OVER_AFTER_STEPS = 2
HANG_S = 300.0
STOPPED_S = 3.0
ALL_STOPPED_S = 10.0


@dataclass
class Run:
    """The command, started again after the driver's own death."""

    path: Path
    log: Path
    offset: int = 0  # of the log, where the latest fault was put in
    driver: "subprocess.Popen[bytes] | None" = None
    children: list[psutil.Process] = field(default_factory=list)

    def start(self) -> None:
        command = [sys.executable, "recipes/stage1.py", "--run-dir", str(self.path), *OPTIONS.split()]
        with self.log.open("ab") as output:
            self.driver = subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT)

    @property
    def alive(self) -> bool:
        return self.driver is not None and self.driver.poll() is None

    @property
    def steps(self) -> int:
        """Steps of the RL stage that are logged."""
        path = self.path / "metrics.jsonl"
        return sum(row["stage"] == "stage1" for row in read_rows(path)) if path.exists() else 0

    def said(self) -> str:
        """The lines since the latest fault."""
        return self.log.read_bytes()[self.offset :].decode(errors="replace")

    def process(self, name: str) -> psutil.Process:
        """A process that the run recorded; `name/engine` is the first child of an actor. Waits for it to be there."""
        deadline = time.monotonic() + HANG_S
        actor, _, child = name.partition(" ")
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError, KeyError, IndexError, psutil.NoSuchProcess):
                recorded = json.loads(RunDir(self.path).processes_path.read_text())[actor]
                process = psutil.Process(recorded["pid"])
                if abs(process.create_time() - recorded["created_s"]) < 1:
                    return psutil.Process(recorded["children"][0]) if child else process
            time.sleep(0.2)
        raise TimeoutError(f"{name} is not among the run's processes")

    def all_processes(self) -> list[psutil.Process]:
        """The driver and everything below it."""
        assert self.driver is not None
        top = psutil.Process(self.driver.pid)
        return [top, *top.children(recursive=True)]

    def wait_steps(self, more: int, seconds: float) -> bool:
        """Whether so many more steps are logged in time; a driver that ended is started again."""
        wanted, deadline = self.steps + more, time.monotonic() + seconds
        while self.steps < wanted:
            if time.monotonic() > deadline:
                return False
            if not self.alive:
                self.start()
            time.sleep(0.2)
        return True

    def end(self) -> None:
        if self.driver is not None:
            family = self.all_processes() if self.alive else []
            self.driver.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.driver.wait(60)
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.driver.wait(10)


Fault = Callable[[Run], None]


def send(number: signal.Signals, *names: str) -> Fault:
    def fault(run: Run) -> None:
        for process in [run.process(name) for name in names]:
            process.send_signal(number)

    return fault


def stop_for(seconds: float, *names: str) -> Fault:
    """Stopped, and going on before its limit: nothing may be killed."""

    def fault(run: Run) -> None:
        processes = [run.process(name) for name in names]
        with stopped(processes):
            time.sleep(seconds)

    return fault


def all_stopped(run: Run) -> None:
    with stopped(run.all_processes()):
        time.sleep(ALL_STOPPED_S)


@contextlib.contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in reversed(processes):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


def to_driver(number: signal.Signals) -> Fault:
    def fault(run: Run) -> None:
        assert run.driver is not None
        run.driver.send_signal(number)
        run.driver.wait(180)

    return fault


def damaged(pattern: str, change: Callable[[bytes], bytes]) -> Fault:
    """The driver dies, and then a file of the run directory is damaged."""

    def fault(run: Run) -> None:
        to_driver(signal.SIGKILL)(run)
        found = sorted(run.path.glob(pattern), key=lambda path: path.stat().st_mtime)
        if found:
            found[-1].write_bytes(change(found[-1].read_bytes()))

    return fault


def flipped(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


PARTS = (
    "generation/0", "generation/1 engine", "sandbox/0", "balancer", "learner/rank-0", "learner/rank-1",
)  # fmt: skip
PAIRS = (
    ("generation/0", "generation/1"), ("generation/0", "learner/rank-1"), ("balancer", "sandbox/0"),
    ("generation/1 engine", "balancer"), ("learner/rank-0", "learner/rank-1"), ("sandbox/0", "generation/0 engine"),
)  # fmt: skip
NEWEST = "checkpoints/stage1-step-*"
KINDS: dict[str, Fault] = {
    **{f"SIGKILL {part}": send(signal.SIGKILL, part) for part in PARTS},
    **{f"SIGSTOP {part}": send(signal.SIGSTOP, part) for part in PARTS},
    **{f"SIGSTOP, SIGCONT {part}": stop_for(STOPPED_S, part) for part in PARTS},
    **{f"SIGKILL {' and '.join(pair)}": send(signal.SIGKILL, *pair) for pair in PAIRS},
    "SIGSTOP generation/0 and balancer": send(signal.SIGSTOP, "generation/0", "balancer"),
    "all processes stopped for 10 s": all_stopped,
    "SIGKILL driver": to_driver(signal.SIGKILL),
    "SIGTERM driver": to_driver(signal.SIGTERM),
    "SIGKILL driver, a flipped byte": damaged(f"{NEWEST}/state-*.safetensors", flipped),
    "SIGKILL driver, a torn manifest": damaged(f"{NEWEST}/manifest.json", lambda data: data[: len(data) // 2]),
    "SIGKILL driver, a torn journal": damaged("journal/*/*.turns", lambda data: data[:-3]),
}
NAMING = ("lost", "killed", "died", "going on after", "answers again", "not whole")
HARMLESS = tuple(kind for kind in KINDS if kind.startswith(("SIGSTOP, SIGCONT", "all processes")))


def play(run: Run, kind: str, seed: int) -> dict[str, Any]:
    """Put one fault in, and wait until the run goes on."""
    random.seed(f"{kind} {seed}")
    run.offset, before = run.log.stat().st_size, run.steps
    time.sleep(random.uniform(0.0, 2.0))
    began = time.monotonic()
    KINDS[kind](run)
    put_in = time.monotonic()
    goes_on = run.wait_steps(OVER_AFTER_STEPS, HANG_S)
    said = run.said()
    named = kind in HARMLESS or any(word in said for word in NAMING)
    killed_healthy = kind in HARMLESS and " is killed" in said
    row = {
        "fault": kind,
        "seed": seed,
        "outcome": "goes on" if goes_on else "hang",
        "put_in_s": round(put_in - began, 1),
        "over_s": round(time.monotonic() - put_in, 1),
        "steps": run.steps - before,
        "named": named and not killed_healthy,
    }
    print(json.dumps(row), flush=True)
    return row


def count_rollouts(path: Path) -> tuple[int, int]:
    """(lost, twice): rollouts that our failures dropped, of all the logged steps, and steps that the log has twice."""
    rows = [row for row in read_rows(path / "metrics.jsonl") if row["stage"] == "stage1"]
    steps = [row["step"] for row in rows]
    most = max(row["rollouts"] for row in rows)  # of a step that lost none
    return sum(most - row["rollouts"] for row in rows), len(steps) - len(set(steps))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="", help="only those whose name has this in it")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--run-dir", default="")
    options = parser.parse_args()
    path = Path(options.run_dir or tempfile.mkdtemp(prefix="chaos-")).absolute()
    path.mkdir(parents=True, exist_ok=True)
    run = Run(path / "run", path / "log")
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    run.start()
    rows: list[dict[str, Any]] = []
    try:
        if not run.wait_steps(1, 1_800):
            print(f"the run did not start: {run.log}", file=sys.stderr)
            return 1
        for seed in range(options.seeds):
            for kind in (kind for kind in KINDS if options.kinds in kind):
                rows.append(play(run, kind, seed))
                if rows[-1]["outcome"] == "hang":
                    run.end()
                    run.start()
    finally:
        run.end()
    lost, twice = count_rollouts(run.path)
    hangs = sum(row["outcome"] == "hang" for row in rows)
    unnamed = sum(not row["named"] for row in rows)
    print(json.dumps({"cases": len(rows), "hangs": hangs, "lost": lost, "twice": twice, "unnamed": unnamed}))
    return 1 if hangs or lost or twice or unnamed else 0


if __name__ == "__main__":
    sys.exit(main())
