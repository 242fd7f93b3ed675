"""`python -m tests.chaos.healthy`: checks that the detector does not kill parts that are only slow.

Runs the command of `make train` several times in parallel, beside two busy loops. At random times it stops all
processes of a run for 10 s, as when a laptop sleeps. No actor and no sandbox worker may be killed or lost. All runs
have the same seed; figures may differ if a program's time limit passes while it is stopped.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from rstar_ray.run_dir.durable import read_rows
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.run_dir.ledger import LEDGER
from tests.chaos.campaign import LOST_WORDS
from tests.chaos.faults import all_stopped
from tests.chaos.identity import deterministic
from tests.chaos.run import Run

BUSY = "import time\nwhile True: sum(range(100_000))"
OVER_S = 7_200.0
POOL_LOST = "were lost, and others started"


class Training(Run):
    """A run of the whole recipe."""

    def _command(self) -> list[str]:
        return [sys.executable, "recipes/train.py", "--run-dir", str(self.path), *self._options]


def play(run: Run, rng: random.Random, every_s: float) -> int:
    """Stop all processes of the run at random times until it ends; returns how many times."""
    assert run.driver is not None
    stops, until = 0, time.monotonic() + OVER_S
    while time.monotonic() < until:
        if run.wait(lambda: run.driver is None or run.driver.poll() is not None, rng.uniform(0.5, 1.5) * every_s):
            break
        all_stopped(run)
        stops += 1
    return stops


def found(run: Run, stops: int, seconds: float) -> dict[str, object]:
    rows = list(read_rows(run.path / "metrics.jsonl"))
    statuses = list(read_rows(run.path / LEDGER))
    return {
        "run": run.folder.name,
        "status": run.driver.poll() if run.driver else None,
        "seconds": round(seconds),
        "stops": stops,
        "rows": len(rows),
        "killed_or_lost": [line.line for line in run.said if LOST_WORDS.search(line.line) or POOL_LOST in line.line],
        "dropped": sum(row["dropped"] for row in statuses),
        "rollouts": sum(row["rollouts"] for row in statuses),
        "evaluations": [round(row["avg_at_k"], 4) for row in read_rows(RunDir(run.path).evaluations_path)],
    }


def figures(run: Run) -> list[dict[str, object]]:
    rows = list(read_rows(run.path / "metrics.jsonl"))
    return [deterministic(row) for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="at once")
    parser.add_argument("--every-s", type=float, default=120.0, help="about so long from one stop to the next")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("options", nargs="*", help="of the recipe, behind --")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="healthy-"))
    runs = [Training(folder / str(number), folder, options=asked.options) for number in range(asked.runs)]
    busy = [subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True) for _ in range(2)]
    rows: dict[str, dict[str, object]] = {}

    def one(run: Run, number: int) -> None:
        began_s = time.monotonic()
        run.start()
        stops = play(run, random.Random(f"{asked.seed} {number}"), asked.every_s)
        rows[run.folder.name] = found(run, stops, time.monotonic() - began_s)
        print(json.dumps(rows[run.folder.name]), flush=True)

    threads = [threading.Thread(target=one, args=(run, number)) for number, run in enumerate(runs)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for run in runs:
            run.end()
        for process in busy:
            process.kill()
    differ = sum(len({json.dumps(row) for row in same}) > 1 for same in zip(*map(figures, runs), strict=False))
    killed = sum(len(row["killed_or_lost"]) for row in rows.values())  # type: ignore[arg-type]
    ended_clean = len(rows) == len(runs) and all(row["status"] == 0 for row in rows.values())
    print(
        json.dumps(
            {"runs": len(rows), "killed_or_lost": killed, "ended_clean": ended_clean, "rows_that_differ": differ}
        )
    )
    return 0 if ended_clean and not killed else 1


if __name__ == "__main__":
    sys.exit(main())
