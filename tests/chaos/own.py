"""The run's reward: groups differ whatever the policy has learned, and the harness can have it fail."""

import asyncio
import os
import sys
import zlib
from pathlib import Path

from rstar_ray.trajectory import Problem


async def reward(completion: str, problem: Problem) -> float:
    """1 for about half of all completions; as `reward` in the folder of faults says for those it names."""
    fault = Path(os.environ["CHAOS_CONTROL"], "reward")
    half = zlib.crc32(completion.encode()) % 2
    if not fault.exists():
        return float(half)
    what, _, share = fault.read_text().partition(" of ")
    if (share == "half" and half) or (share == "one problem" and zlib.crc32(problem.id.encode()) % 4):
        return float(half)
    if what == "raises":
        raise ZeroDivisionError("a reward check that raises")
    if what == "hangs":
        await asyncio.sleep(3_600)
    if what == "ends":
        sys.stdout.flush()
        os._exit(3)
    return float("nan")
