"""The adapter of `verifiers` calls the Python of another environment, here a script in its place."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples.verifiers_environment import solve
from rstar_ray.errors import ToolError
from rstar_ray.trajectory import Problem

PROBLEM = Problem(id="1", problem="?", answer="-", metadata={"taskset": "numbers", "index": 2})
ENDPOINT: Any = SimpleNamespace(base_url="http://127.0.0.1:1/v1", api_key="key of the rollout", model="policy")


def other_python(folder: Path, body: str) -> str:
    """An executable that is called as the other environment's Python."""
    script = folder / "python"
    script.write_text(f"#!{sys.executable}\nimport os, sys\n{body}\n")
    script.chmod(0o755)
    return str(script)


async def test_the_task_runs_in_the_other_environment_with_the_key_of_its_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    body = """
assert sys.argv[2:] == ["run", "numbers", "2", "http://127.0.0.1:1/v1", "policy"], sys.argv
assert os.environ["OPENAI_API_KEY"] == "key of the rollout"
print("a line of some library")
print('{"reward": 0.25}')"""
    monkeypatch.setenv("RSTAR_VERIFIERS", other_python(tmp_path, body))
    assert await solve(PROBLEM, ENDPOINT) == 0.25


async def test_a_failure_of_the_other_environment_is_not_the_policys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RSTAR_VERIFIERS", other_python(tmp_path, "sys.exit(3)"))
    with pytest.raises(ToolError, match="status 3"):
        await solve(PROBLEM, ENDPOINT)
