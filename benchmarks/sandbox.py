"""The sandbox's calls per second, latency and memory: `python -m benchmarks.sandbox` prints one JSON line.

With REFERENCE=URL, a running Code Judge (0xWJ/code-judge), every measurement alternates between
the two, round by round, and ratios are printed. Ratios are comparable, as machines differ and vary.
"""

import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp

from benchmarks.small import process_tree, spread
from rstar_ray.config import SandboxConfig
from rstar_ray.config.options import run_command
from rstar_ray.outcome import Outcome
from sandbox.isolation import IsolationLevel
from sandbox.pool import SandboxPool
from sandbox.request import ExecutionRequest

PROGRAMS = {
    "print": "print(1 + 1)",
    "numpy": "import numpy as np\na = np.arange(16.0).reshape(4, 4)\nprint((a @ a).sum())",
    "sympy": "import sympy as s\nx = s.symbols('x')\nprint(s.solve(x**2 - 5*x + 6, x))",
    "scipy": "from scipy.optimize import minimize\nprint(round(minimize(lambda v: (v[0] - 1)**2, [0.0]).x[0], 3))",
}
MIX = ["print"] * 7 + ["numpy"] * 2 + ["sympy"]
BATCH = 64
WORKLOADS = [*PROGRAMS, "mix"]

Call = Callable[[str], Awaitable[bool]]


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    level: Literal["namespaces", "landlock"] = "namespaces"
    """`process` is measured beside it"""
    workers: int = 0
    """programs at once (default: one per core)"""
    rounds: int = 5
    seconds: float = 2.0
    """per workload, round and side"""
    burst: int = 45_000
    """calls sent at once; 0 for none"""


def code_of(workload: str, number: int) -> str:
    """The program of call `number`; the mix is 70 % print, 20 % numpy, 10 % sympy."""
    return PROGRAMS[MIX[number * 3 % 10] if workload == "mix" else workload]


async def load(call: Call, workload: str, callers: int, seconds: float, most: int = 10**9) -> dict[str, float]:
    """Keep `callers` calls in flight for `seconds` or `most` calls; returns rates and latencies."""
    latencies: list[float] = []
    failed = started = 0
    begin = time.perf_counter()

    async def caller() -> None:
        nonlocal failed, started
        while time.perf_counter() - begin < seconds and started < most:
            number, started = started, started + 1
            sent = time.perf_counter()
            good = await call(code_of(workload, number))
            latencies.append(time.perf_counter() - sent)
            failed += not good

    await asyncio.gather(*[caller() for _ in range(callers)])
    took = time.perf_counter() - begin
    latencies.sort()
    return {
        "calls_per_s": (len(latencies) - failed) / took,
        "p50_ms": 1e3 * latencies[len(latencies) // 2],
        "p99_ms": 1e3 * latencies[int(len(latencies) * 0.99)],
        "answered": len(latencies),
        "failed": failed,
    }


def over_http(session: aiohttp.ClientSession, url: str) -> Call:
    """A call through Code Judge's `/run`."""

    async def call(code: str) -> bool:
        try:
            async with session.post(f"{url}/run", json={"type": "python", "solution": code}) as answer:
                return bool((await answer.json()).get("success"))
        except (aiohttp.ClientError, TimeoutError):
            return False

    return call


async def burst(session: aiohttp.ClientSession, url: str, calls: int) -> dict[str, Any]:
    """Send all calls at once, in batches of 64 as a training step does; counts their outcomes."""
    begin = time.perf_counter()

    async def batch(first: int) -> list[dict[str, Any]]:
        numbers = range(first, min(first + BATCH, calls))
        entries = [{"type": "python", "solution": f"print({n})", "sub_id": str(n)} for n in numbers]
        async with session.post(f"{url}/run/long-batch", json={"submissions": entries}) as answer:
            return (await answer.json())["results"]

    batches = await asyncio.gather(*[batch(first) for first in range(0, calls, BATCH)])
    answers = [answer for answered in batches for answer in answered]
    right = sum(answer["stdout"] == f"{answer['sub_id']}\n" for answer in answers)
    return {
        "calls": calls,
        "answered_once": len({answer["sub_id"] for answer in answers}),
        "right": right,
        "reasons": dict(Counter(answer["reason"] for answer in answers)),
        "calls_per_s": round(calls / (time.perf_counter() - begin), 1),
    }


def through(pool: SandboxPool) -> Call:
    """A call through the pool's own interface."""

    async def call(code: str) -> bool:
        return (await pool.run(ExecutionRequest(code=code))).outcome is Outcome.OK

    return call


class OwnServer:
    """`python -m sandbox serve` as a separate process, on any port."""

    def __init__(self, level: str, workers: int) -> None:
        self._level = level
        self._command = [sys.executable, "-m", "sandbox", "serve", "--port", "0", "--level", level]
        self._command += ["--workers", str(workers)]

    def __enter__(self) -> "OwnServer":
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().split()
        if len(line) < 2:
            raise SystemExit("the sandbox server did not start; try `python -m sandbox serve`")
        if line[-1] != self._level:
            self.__exit__()
            raise SystemExit(f"--level {self._level}: the server reached {line[-1]}, which it prefers")
        self.url = line[1]
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)

    def resident_bytes(self) -> int:
        """Proportional memory (PSS) of the server and all its child processes; shared pages count once."""
        return sum(_pss(pid) for pid in process_tree(self.process.pid))


def _pss(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over rounds, and the spread of the rate."""
    rates = [row["calls_per_s"] for row in rows]
    return {
        "calls_per_s": round(statistics.median(rates), 1),
        "spread": [round(min(rates), 1), round(max(rates), 1)],
        "p50_ms": round(statistics.median(row["p50_ms"] for row in rows), 2),
        "p99_ms": round(statistics.median(row["p99_ms"] for row in rows), 2),
        "failed": int(sum(row["failed"] for row in rows)),
    }


async def measure(options: BenchSettings) -> dict[str, Any]:
    """All measurements, in the order of the output."""
    out: dict[str, Any] = {
        "bench": "sandbox",
        "level": options.level,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "rounds": options.rounds,
        "seconds": options.seconds,
        "load_average": round(os.getloadavg()[0], 2),
    }
    reference = os.environ.get("REFERENCE", "").rstrip("/")
    timeout = aiohttp.ClientTimeout(total=3600)
    with OwnServer(options.level, options.workers) as server:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            ours = over_http(session, server.url)
            theirs = over_http(session, reference) if reference else None
            for workload in WORKLOADS:  # warm up every server before measuring
                await load(ours, workload, 4, 60.0, most=8)
            out["http"] = {}
            for workload in WORKLOADS:
                out["http"][workload] = await _alternate(ours, theirs, workload, 16, options)
            out["one_caller"] = await _alternate(ours, theirs, "print", 1, options)
            out["callers_1024"] = await _many_callers(ours, options)
            if options.burst:
                out["burst"] = await burst(session, server.url, options.burst)
            out["memory_mb"] = round(server.resident_bytes() / 2**20)
            out["pool"] = await _levels(ours, options)
    return out


async def _alternate(
    ours: Call, theirs: Call | None, workload: str, callers: int, options: BenchSettings
) -> dict[str, Any]:
    mine: list[dict[str, float]] = []
    other: list[dict[str, float]] = []
    for _ in range(options.rounds):
        mine.append(await load(ours, workload, callers, options.seconds))
        if theirs is not None:
            other.append(await load(theirs, workload, callers, options.seconds))
    row = summary(mine)
    if other:
        row |= {"reference": summary(other), "ratio": _ratio(mine, other)}
    return row


async def _many_callers(ours: Call, options: BenchSettings) -> dict[str, Any]:
    """1,024 and 16 callers, alternating."""
    many: list[dict[str, float]] = []
    few: list[dict[str, float]] = []
    for _ in range(options.rounds):
        many.append(await load(ours, "print", 1024, options.seconds * 2))
        few.append(await load(ours, "print", 16, options.seconds))
    return {**summary(many), "over_16_callers": _ratio(many, few)}


def _ratio(one: list[dict[str, float]], other: list[dict[str, float]]) -> dict[str, float]:
    return spread(_ratios(one, other), digits=2)


def _ratios(one: list[dict[str, float]], other: list[dict[str, float]]) -> list[float]:
    """Ratios of calls/s, round by round."""
    return [a["calls_per_s"] / max(b["calls_per_s"], 1e-9) for a, b in zip(one, other, strict=True)]


async def _levels(ours: Call, options: BenchSettings) -> dict[str, Any]:
    """The pool without HTTP, at the requested level and at `process`, and the server, alternating."""
    levels = dict.fromkeys([options.level, "process"])
    rows: dict[str, list[dict[str, float]]] = {level: [] for level in levels}
    over: list[dict[str, float]] = []
    for _ in range(options.rounds):
        over.append(await load(ours, "print", 16, options.seconds))
        for level in levels:
            config = SandboxConfig(slots=options.workers, warm=("lean",))
            async with SandboxPool(config, levels=(IsolationLevel(level),)) as pool:
                await load(through(pool), "print", 4, 60.0, most=20)
                rows[level].append(await load(through(pool), "print", 16, options.seconds))
    out: dict[str, Any] = {level: summary(found) for level, found in rows.items()}
    out["over_http"] = _ratio(rows[options.level], over)
    kept = statistics.median(_ratios(rows[options.level], rows["process"]))
    out["isolation_costs_percent"] = round(100 * (1 - kept), 1)
    return out


def _end(signum: int, frame: object) -> None:
    sys.exit(128 + signum)


def main(options: BenchSettings) -> None:
    signal.signal(signal.SIGTERM, _end)  # so that the server ends with this process
    print(json.dumps(asyncio.run(measure(options))))


if __name__ == "__main__":
    sys.exit(run_command(BenchSettings, main, None, description=__doc__))
