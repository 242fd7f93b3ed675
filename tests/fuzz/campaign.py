"""Runs rounds of generated programs in one pool, as one user: `python -m tests.fuzz.campaign` (see tests/fuzz)."""

import argparse
import asyncio
import itertools
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rstar_ray.errors import SandboxError
from sandbox.pool import SandboxPool
from sandbox.request import ExecutionRequest
from tests import derived
from tests.fuzz.oracle import BYSTANDER, PATIENT, Canaries, Oracle, used_bytes
from tests.fuzz.programs import Made, made

AT_ONCE = 3  # generated programs per round; a benign one runs beside them
SEARCH_EVERY = 8  # rounds between two searches of memory ...
SETTLE_EVERY = 16  # ... and between two checks of the machine
MAX_FINDINGS = 5
SAMPLE_S = 0.02


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, print one JSON line; exit status 1 if there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", required=True)
    parser.add_argument("--user", required=True, help="only for the words of what is printed")
    parser.add_argument("--folder", type=Path, required=True, help="a separate file system, for the pool and canaries")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the first round")
    parser.add_argument("--rounds", type=int, default=0, help="0: until the time is over")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--show", action="store_true", help="print the programs")
    options = parser.parse_args(arguments)
    tempfile.tempdir = str(options.folder)
    logging.basicConfig(stream=sys.stderr)  # shows why a worker or a server was lost
    found = asyncio.run(campaign(options))
    print(json.dumps(found), flush=True)
    return 1 if found["findings"] else 0


def repeat(options: argparse.Namespace, number: int) -> str:
    """The command that runs one round again."""
    return (
        f'make fuzz-sandbox ARGS="--seed {options.seed} --first {number} --rounds 1'
        f' --levels {options.level} --users {options.user}"'
    )


async def campaign(options: argparse.Namespace) -> dict[str, object]:
    """Run rounds until a limit of time, rounds or findings; returns the result to print."""
    started = time.monotonic()
    outcomes: Counter[str] = Counter()
    findings: list[dict[str, object]] = []
    rounds = 0
    sandbox = derived.pool(only=options.level, slots=AT_ONCE + 1, spare_workers=0, warm=("lean",))
    with Canaries(options.folder) as canaries:
        async with sandbox as pool:
            oracle = Oracle(pool, canaries, options.folder)
            await oracle.begin()
            sampler = asyncio.create_task(_sample_disk(oracle, options.folder))
            for number in itertools.count(options.first):
                wrong = await one_round(pool, oracle, canaries, options, number, outcomes)
                rounds += 1
                over = rounds == options.rounds or (not options.rounds and time.monotonic() - started > options.seconds)
                if over or rounds % SETTLE_EVERY == 0:
                    wrong += await oracle.settled()
                if wrong:
                    findings.append({"round": number, "wrong": wrong, "repeat": repeat(options, number)})
                    print(json.dumps(findings[-1]), file=sys.stderr, flush=True)
                if over or len(findings) >= MAX_FINDINGS:
                    break
                if wrong:
                    await oracle.begin()
            sampler.cancel()
            stats = pool.stats()
    return {
        "fuzz": "sandbox",
        "level": options.level,
        "user": options.user,
        "uid": os.geteuid(),
        "seed": options.seed,
        "rounds": rounds,
        "programs": sum(outcomes.values()),
        "seconds": round(time.monotonic() - started, 1),
        "outcomes": dict(sorted(outcomes.items())),
        "workers_replaced": stats.workers_replaced,
        "disk_peak_mib": oracle.disk_peak >> 20,
        "findings": findings,
    }


async def one_round(
    pool: SandboxPool,
    oracle: Oracle,
    canaries: Canaries,
    options: argparse.Namespace,
    number: int,
    outcomes: "Counter[str]",
) -> list[str]:
    """Run generated programs beside a benign one, then a census; returns the findings."""
    programs = [
        made(options.seed, AT_ONCE * number + each, options.level, canaries.places()) for each in range(AT_ONCE)
    ]
    if options.show:
        for program in programs:
            print(f"# {program.name}\n{program.request.code}\n", file=sys.stderr)
    bystander = asyncio.ensure_future(_bystander(pool))
    wrong: list[str] = []
    for found in await asyncio.gather(*[_attacker(pool, oracle, program, outcomes) for program in programs]):
        wrong += found
    wrong += await bystander
    return wrong + await oracle.after(search=number % SEARCH_EVERY == 0)


async def _attacker(pool: SandboxPool, oracle: Oracle, program: Made, outcomes: "Counter[str]") -> list[str]:
    try:
        result = await pool.run(program.request, program.name, deadline_s=120.0)
    except SandboxError as error:
        return [f"{program.name}: {type(error).__name__} {error}"]
    outcomes[result.outcome] += 1
    return [f"{program.name}: {wrong}" for wrong in oracle.of_result(result, program.request)]


async def _bystander(pool: SandboxPool) -> list[str]:
    try:
        result = await pool.run(ExecutionRequest(code=BYSTANDER, limits=PATIENT), "bystander")
    except SandboxError as error:
        return [f"bystander: {type(error).__name__} {error}"]
    return [] if result.stdout == "fine 499500\n" else [f"bystander: {result}"]


async def _sample_disk(oracle: Oracle, folder: Path) -> None:
    while True:
        oracle.disk_peak = max(oracle.disk_peak, used_bytes(folder))
        await asyncio.sleep(SAMPLE_S)


if __name__ == "__main__":
    sys.exit(main())
