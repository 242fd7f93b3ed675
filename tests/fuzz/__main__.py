"""`make fuzz-sandbox`: runs generated programs in the jail, at each level, as each user; prints a JSON line for each.

Every combination runs in a separate pid namespace. Between rounds an oracle checks canary files and a process, the
environment of the next program, mounts, processes, disk, memory, and the pool's statistics. A finding is printed with
the command that repeats its round. `--http` sends requests to the HTTP server instead
(tests/fuzz/http_requests.py).
"""

import argparse
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz import http_requests
from tests.fuzz.enclosure import enclosed
from tests.sandbox.as_user import USERS, start

LEVELS = ("namespaces", "landlock")


def main() -> int:
    """Parse the command line and run; exit status 1 if there is a finding."""
    parser = argparse.ArgumentParser(prog="make fuzz-sandbox ARGS=...", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each combination; they run one after another")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--first", type=int, default=0, help="the first round")
    parser.add_argument("--rounds", type=int, default=0, help="so many rounds instead of a time")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS)
    parser.add_argument("--users", nargs="+", choices=USERS, default=USERS)
    parser.add_argument("--show", action="store_true", help="print the programs")
    parser.add_argument("--http", action="store_true", help="requests to the HTTP server in place of programs")
    options = parser.parse_args()
    if options.http and (options.show or (options.levels, options.users) != (LEVELS, USERS)):
        parser.error("--http has no programs, levels or users to choose")
    print(f"seed {options.seed}", flush=True)
    if options.http:
        return http_requests.fuzz(options)
    combinations = [(level, user) for level in options.levels for user in options.users]
    return max([campaign_of(options, level, user) for level, user in combinations])


def campaign_of(options: argparse.Namespace, level: str, user: str) -> int:
    """Run one combination in separate namespaces; returns its exit status."""
    asked = {"level": level, "user": user} | {
        name: getattr(options, name) for name in ("seed", "first", "rounds", "seconds")
    }
    arguments = [part for name, value in asked.items() for part in (f"--{name}", str(value))]

    def work(place: Path) -> int:
        shown = ["--show"] if options.show else []
        process = start(user, "tests.fuzz.campaign", *arguments, "--folder", str(place), *shown)
        assert process.stdout is not None and process.stderr is not None
        with ThreadPoolExecutor(1) as readers:
            readers.submit(_copy, process.stderr, sys.stderr)
            _copy(process.stdout, sys.stdout)
        return process.wait()

    return enclosed(work)


def _copy(lines: object, out: object) -> None:
    for line in lines:  # type: ignore[attr-defined]
        print(line, end="", file=out, flush=True)  # type: ignore[call-overload]


if __name__ == "__main__":
    sys.exit(main())
