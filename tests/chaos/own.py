"""The run's reward, which differs within groups for any policy and can be made to fail, and a tool that no policy
calls, so that a tool host can be lost."""

import asyncio
import os
import sys
import zlib
from pathlib import Path

from rstar_ray.tools.tool import Tool
from rstar_ray.trajectory import Problem


async def _echo(text: str) -> str:
    return text


TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
echo = Tool(name="echo", description="Says it again.", parameters=TEXT, function=_echo, deadline_s=2.0)


async def reward(completion: str, problem: Problem) -> float:
    """1 for about half of all completions; the file `reward` in the folder of faults makes it fail for some."""
    control = Path(os.environ["CHAOS_CONTROL"])
    number = zlib.crc32(completion.encode())
    if not (control / "reward").exists():
        return float(number % 2)
    what, _, whom = (control / "reward").read_text().partition(" of ")
    if not (number % 6 == 0 if whom == "a few" else problem.id == first_asked_for(control / "group", problem.id)):
        return float(number % 2)
    if what == "raises":
        raise ZeroDivisionError("a reward check that raises")
    if what == "hangs":
        await asyncio.sleep(3_600)
    if what == "ends":
        sys.stdout.flush()
        os._exit(3)
    return float("nan")


def first_asked_for(path: Path, problem_id: str) -> str:
    """The problem that was judged first since the fault was injected, in any process."""
    try:
        with path.open("x") as file:
            file.write(problem_id)
    except FileExistsError:
        return path.read_text()
    return problem_id
