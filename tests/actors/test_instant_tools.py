"""The tool that knows a run's answers, in the benchmark of what the sandbox costs a step."""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.bench.instant_tools import remembering
from rstar_ray.tools.tool import ToolFailed


def turn(program: str, answer: str, outcome: str) -> dict[str, Any]:
    call = json.dumps({"name": "python", "arguments": {"code": program}})
    return {
        "completion": f"<tool_call>\n{call}\n</tool_call><|im_end|>",
        "tool_response": f"\n<|im_start|>user\n<tool_response>\n{answer}\n</tool_response><|im_end|>\n",
        "outcomes": [outcome],
    }


LAST = {"completion": "<answer>\\boxed{5}</answer>", "tool_response": None, "outcomes": []}
ROW = {"turns": [turn("print(2+3)", "5", "ok"), turn("print(1//0)", "ZeroDivisionError", "error"), LAST]}


async def test_the_tool_answers_as_the_run_had_it_and_nothing_else(tmp_path: Path):
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "stage1-step-000001.jsonl").write_text(json.dumps(ROW) + "\n")
    function = remembering(str(tmp_path)).function
    assert function is not None
    assert await function(code="print(2+3)") == "5"
    for program in ("print(1//0)", "print(never seen)"):
        with pytest.raises(ToolFailed):
            await function(code=program)
