"""Measures answer verification: agreement with labelled cases, and CPU time per answer.

`python -m benchmarks.verify PROBLEMS.jsonl ... [--cases CASES.json]` prints one JSON line. Every problem is judged
with three answers: its own, the same in another notation, and that of the next problem. CPU time covers this process
and the sandbox. CASES.json is a list of `{"gold": ..., "prediction": ..., "equal": ...}`.
"""

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks.small import process_tree
from rstar_ray.config import SandboxConfig
from rstar_ray.config.options import run_command
from rstar_ray.errors import SandboxError
from rstar_ray.reward.judge import math_reward
from sandbox.equality import equal_expressions
from sandbox.pool import SandboxPool

AT_ONCE = 16
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SUM = re.compile(r"([\w^{}\\]+) \+ ([\w^{}\\]+)")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    problems: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """JSON lines with an `answer` each"""
    cases: Path | None = None
    """labelled cases, for the agreement"""
    limit: int | None = None
    """problems read per file (default: all)"""
    slots: int = 1
    """comparisons at once"""


class Tools:
    """The sandbox's interface for the judge; counts the comparisons."""

    def __init__(self, pool: SandboxPool) -> None:
        self._pool = pool
        self.num_compared = 0

    async def compare(self, pairs: Sequence[tuple[str, str]]) -> Sequence[bool]:
        self.num_compared += 1
        return await equal_expressions(self._pool.run, pairs)


def respelled(answer: str) -> str:
    """An equal answer in another notation: other LaTeX for fractions and brackets, and a sum's terms exchanged."""
    text = _SUM.sub(r"\2 + \1", answer, count=1) if _SUM.fullmatch(answer) else answer
    return (
        text.replace("\\frac", "\\dfrac")
        .replace("(", "\\left(")
        .replace(")", "\\right)")
        .replace("\\left\\left", "\\left")
    )


def cpu_s() -> float:
    """CPU time of this process and its descendants, including children that have ended."""
    return sum(sum(map(int, fields[11:15])) for fields in process_tree(os.getpid()).values()) / _TICKS_PER_S


async def judge_all(pairs: Sequence[tuple[str, str]], tools: Tools) -> list[float | None]:
    """Rewards of (answer, truth) pairs; None where judging failed."""
    permits = asyncio.Semaphore(AT_ONCE)

    async def one(answer: str, truth: str) -> float | None:
        async with permits:
            try:
                return await math_reward(answer, truth, tools.compare)
            except SandboxError:
                return None

    return await asyncio.gather(*[one(*pair) for pair in pairs])


async def measure(options: VerifyOptions) -> dict[str, Any]:
    out: dict[str, Any] = {"bench": "verify", "sets": {}}
    async with SandboxPool(SandboxConfig(slots=options.slots, warm=("lean",))) as pool:
        await equal_expressions(pool.run, [("\\sqrt{12}", "2\\sqrt{3}")])  # starts the warm server
        for path in options.problems:
            truths = [json.loads(line)["answer"] for line in path.read_text("utf-8").splitlines()][: options.limit]
            kinds = {
                "equal": list(zip(truths, truths, strict=True)),
                "respelled": [(respelled(truth), truth) for truth in truths],
                "other": list(zip([*truths[1:], *truths[:1]], truths, strict=True)),
            }
            rows: dict[str, Any] = {}
            for kind, pairs in kinds.items():
                tools = Tools(pool)
                begin_s, wall_s = cpu_s(), time.monotonic()
                rewards = await judge_all(pairs, tools)
                spent_s = cpu_s() - begin_s
                rows[kind] = {
                    "answers": len(pairs),
                    "reward_1": sum(reward == 1.0 for reward in rewards),
                    "unjudged": rewards.count(None),
                    "compared_in_sandbox": tools.num_compared,
                    "cpu_ms_per_answer": round(1e3 * spent_s / len(pairs), 2),
                    "wall_s": round(time.monotonic() - wall_s, 1),
                }
            out["sets"][path.stem] = rows
        if options.cases:
            cases: list[dict[str, Any]] = json.loads(options.cases.read_text("utf-8"))
            begin_s = cpu_s()
            rewards = await judge_all([(case["prediction"], case["gold"]) for case in cases], Tools(pool))
            spent_s = cpu_s() - begin_s
            differ = [
                {**case, "reward": reward}
                for case, reward in zip(cases, rewards, strict=True)
                if (reward == 1.0) != case["equal"]
            ]
            out["cases"] = {
                "cases": len(cases),
                "agree": len(cases) - len(differ),
                "cpu_ms_per_answer": round(1e3 * spent_s / len(cases), 2),
                "differ": differ,
            }
    return out


def main(options: VerifyOptions) -> None:
    print(json.dumps(asyncio.run(measure(options)), ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(run_command(VerifyOptions, main, None, description=__doc__))
