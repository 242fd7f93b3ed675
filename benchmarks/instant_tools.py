"""The cost of the tool in a step at scale `tiny`: seconds with the sandbox over seconds with recorded answers.

python -m benchmarks.instant_tools --model runs/tiny/checkpoints/CHECKPOINT/model --steps 12 --repeats 3

Runs stage 1 from that model with every trajectory recorded, then again with a tool that returns each program's recorded
answer instead of the sandbox. Both runs sample the same tokens, except after programs without a recorded answer, whose
rollouts had reached their budget: these calls fail. The runs alternate `--repeats` times; prints one JSON line.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.small import spread
from rstar_ray.chat.tool_calls import parse_tool_calls
from rstar_ray.config.options import run_command
from rstar_ray.outcome import Outcome
from rstar_ray.run_dir.durable import read_rows
from rstar_ray.tools.spec import PYTHON_TOOL
from rstar_ray.tools.tool import Tool, ToolFailed

REPOSITORY = Path(__file__).resolve().parents[1]
ANSWER = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
Answers = dict[str, tuple[str, bool]]
"""By program: the text that the model read, and whether the call failed."""


def answers_of(rows: Sequence[Mapping[str, Any]]) -> Answers:
    """Programs and answers in rows of recorded trajectories, in the template of scale tiny."""
    found: Answers = {}
    for turn in (turn for row in rows for turn in row["turns"] if turn["tool_response"] is not None):
        programs = [call.code for call in parse_tool_calls(turn["completion"])]
        texts = ANSWER.findall(turn["tool_response"])
        for code, text, outcome in zip(programs, texts, turn["outcomes"], strict=False):
            found[code] = (text, outcome != Outcome.OK)
    return found


def remembering(run: str) -> Tool:
    """The Python tool with the answers recorded in that run; other calls fail."""
    files = sorted(Path(run, "trajectories").glob("stage1-step-*.jsonl"))
    answers = answers_of([row for file in files for row in read_rows(file)])

    async def answer(code: str, input: str = "") -> str:
        text, failed = answers.get(code, ("", True))
        if failed:
            raise ToolFailed(text)
        return text

    return Tool(
        name=PYTHON_TOOL.name, description=PYTHON_TOOL.description, parameters=PYTHON_TOOL.parameters, function=answer
    )


def seconds(run: Path) -> list[float]:
    """Seconds of each step but the first, which fills caches."""
    return [row["step_s"] for row in read_rows(run / "metrics.jsonl") if row["step"] > 1]


def sampled(run: Path) -> int:
    return sum(row["tokens_generated"] for row in read_rows(run / "metrics.jsonl"))


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    model: Path
    """folder of a policy of scale tiny"""
    steps: int = 12
    repeats: int = 3


def main(bench: BenchSettings) -> None:
    folder = Path(tempfile.mkdtemp(prefix="instant-tools-"))
    (folder / "own").mkdir()
    remembered = (
        f"from benchmarks.instant_tools import remembering\n\npython = remembering({str(folder / 'sandbox-0')!r})\n"
    )
    (folder / "own" / "instant.py").write_text(remembered)
    options = f"--scale tiny --steps {bench.steps} --checkpoint.trajectories-every-steps 1 --evaluate.num-problems 1"
    command = [sys.executable, "recipes/stage1.py", *options.split(), "--checkpoint.every-steps", str(bench.steps)]

    def run(name: str, *others: str) -> Path:
        path = folder / name
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        full = [*command, "--model", str(bench.model), "--run-dir", str(path), *others]
        subprocess.run(full, cwd=REPOSITORY, env=environment, check=True, stdout=subprocess.DEVNULL)
        return path

    instant = ("--tools.use", "instant:python", "--own-folder", str(folder / "own"))
    pairs = [(run(f"sandbox-{turn}"), run(f"instant-{turn}", *instant)) for turn in range(bench.repeats)]
    ratios = [statistics.median(seconds(real)) / statistics.median(seconds(quick)) for real, quick in pairs]
    print(json.dumps({
        "step_s": [round(statistics.median(seconds(real)), 3) for real, _ in pairs],
        "instant_step_s": [round(statistics.median(seconds(quick)), 3) for _, quick in pairs],
        "ratio": spread(ratios),
        "tokens": [round(sampled(quick) / sampled(real), 4) for real, quick in pairs],
    }))  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_command(BenchSettings, main, None, description=__doc__))
