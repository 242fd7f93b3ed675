"""Runs many calls, 5 % of them hostile: `python -m benchmarks.sandbox_soak` prints one JSON line.

Every call must have an outcome that its kind allows, memory must not grow, and there must be no
more processes, descriptors, temporary files or mounts than before.
"""

import asyncio
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.sandbox import MIX, PROGRAMS
from rstar_ray.config import SandboxConfig
from rstar_ray.config.options import run_command
from sandbox.isolation import FIRST_UID, IsolationLevel
from sandbox.limits import standard_limits
from sandbox.pool import SandboxPool
from sandbox.request import ExecutionRequest

HOSTILE_SHARE = 0.05
IN_FLIGHT = 64
BRIEF = replace(standard_limits(), cpu_s=0.3, wall_s=1.0)
# Programs and their allowed outcomes.
HOSTILE: list[tuple[str, set[str]]] = [
    ("while True: pass", {"timeout"}),
    ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", {"timeout"}),
    ("a = []\nwhile True: a.append(bytearray(10**7))", {"out_of_memory", "timeout"}),
    ("import ctypes\nctypes.string_at(0)", {"killed"}),
    ("while True: print('A' * 1000)", {"output_limit"}),
    ("import os\nos.kill(os.getpid(), 9)", {"killed"}),
    ("import os\nfor i in range(300): open(f'f{i}', 'w').write('x' * 1000)", {"ok"}),
    ("import os\nfor i in range(50):\n  os.mkdir('d')\n  os.chdir('d')\nopen('f', 'w').close()", {"ok"}),
    ("import os\nos.mkdir('a')\nos.chmod('a', 0)\nos.symlink('/', 'root')", {"ok"}),
    ("import threading, time\nfor _ in range(20): threading.Thread(target=time.sleep, args=(9,)).start()", {"timeout"}),
    ("import os\nos.closerange(0, 256)", {"ok"}),
    ("import sys\nsys.modules.clear()\nimport builtins\nbuiltins.print = None", {"ok", "error"}),
    ("def f(: pass", {"error"}),
    ("raise SystemExit(3)", {"error"}),
]


@dataclass(frozen=True, kw_only=True)
class SoakOptions:
    calls: int = 200_000
    level: Literal["namespaces", "landlock", "process"] = "namespaces"
    workers: int = 0
    seed: int = 1


def footprint() -> dict[str, int]:
    """Current counts of resources that could leak, of this machine and this process."""
    processes = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "temporary": len([p for p in Path(tempfile.gettempdir()).iterdir() if p.name.startswith("sandbox-")]),
        "processes": sum(_ours(entry) for entry in processes),
        "resident_kb": _resident_kb(),
    }


def _ours(entry: Path) -> bool:
    """True for children of this process, and for live processes with a worker's uid.

    A zombie of another parent only waits to be reaped by the machine's init.
    """
    try:
        fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        uid = entry.stat().st_uid
    except OSError:
        return False
    state, parent = fields[0], int(fields[1])
    return parent == os.getpid() or (state != "Z" and FIRST_UID <= uid < FIRST_UID + 1_000_000)


def _resident_kb() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


async def soak(options: SoakOptions) -> dict[str, Any]:
    """Run the calls; the result has all errors."""
    chooser = random.Random(options.seed)
    before = footprint()
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    memory: list[int] = []
    started = time.monotonic()
    level = IsolationLevel(options.level)
    async with SandboxPool(SandboxConfig(slots=options.workers), levels=(level,)) as pool:
        left = options.calls

        async def caller() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                if chooser.random() < HOSTILE_SHARE:
                    code, allowed = chooser.choice(HOSTILE)
                    request = ExecutionRequest(code=code, limits=BRIEF)
                else:
                    code, allowed = PROGRAMS[chooser.choice(MIX)], {"ok"}
                    request = ExecutionRequest(code=code)
                result = await pool.run(request)
                outcomes[result.outcome] += 1
                if result.outcome not in allowed and len(wrong) < 20:
                    wrong.append(f"{code[:60]!r}: {result.outcome} {result.reason} {result.stderr[-100:]}")
                if sum(outcomes.values()) % max(options.calls // 20, 1) == 0:
                    memory.append(_resident_kb())
                    print(
                        f"{options.calls - left} calls, {memory[-1]} kB, {pool.stats().workers_lost} lost",
                        file=sys.stderr,
                    )

        await asyncio.gather(*[caller() for _ in range(IN_FLIGHT)])
        stats = pool.stats()
    await asyncio.sleep(1.0)
    took = time.monotonic() - started
    after = footprint()
    return {
        "soak": "sandbox",
        "level": options.level,
        "calls": options.calls,
        "answered": sum(outcomes.values()),
        "calls_per_s": round(options.calls / took, 1),
        "outcomes": {str(outcome): count for outcome, count in sorted(outcomes.items())},
        "wrong": wrong,
        "retried": stats.retried,
        "workers_lost": stats.workers_lost,
        "workers_replaced": stats.workers_replaced,
        "timed_out_share": round(stats.timed_out_s / max(stats.running_s, 1e-9), 3),
        "memory_kb": memory,
        "leaked": {name: after[name] - before[name] for name in before if name != "resident_kb"},
    }


def main(options: SoakOptions) -> int:
    """Exit status 1 if there was an error."""
    found = asyncio.run(soak(options))
    print(json.dumps(found))
    leaked = any(count > 0 for count in found["leaked"].values())
    return 1 if found["wrong"] or leaked or found["answered"] != found["calls"] else 0


if __name__ == "__main__":
    sys.exit(run_command(SoakOptions, main, None, description=__doc__))
