"""The sandbox for people, and what happens where a library is missing."""

import json
from pathlib import Path

import pytest

from rstar_ray.config import SandboxConfig
from rstar_ray.outcome import Outcome
from sandbox.__main__ import main
from sandbox.isolation import IsolationLevel, IsolationReport
from sandbox.jail import preload
from sandbox.limits import Limits
from sandbox.request import ExecutionRequest, ExecutionResult
from tests import derived


def test_run_shows_what_a_model_would_see(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    program = tmp_path / "program.py"
    program.write_text("x = 6\nx * 7")
    assert main(["run", str(program), "--workers", "1"]) == 0
    assert capsys.readouterr().out == "42\n"


def test_check_counts_what_was_contained(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    good = {"name": "good", "code": "print(1)", "stdin": None, "expect": {"status": ["ok"], "max_seconds": 60}}
    bad = {"name": "bad", "code": "print(1)", "stdin": None, "expect": {"status": ["killed"], "max_seconds": 60}}
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps([good, bad]))
    assert main(["check", str(cases), "--workers", "1"]) == 1
    assert capsys.readouterr().out.endswith("contained 1 of 2\n")


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("run gone.py", "error: file: gone.py: FileNotFoundError: "),
        ("run . --workers 1", "error: file: .: IsADirectoryError: "),
        ("check here.json", "error: file: here.json: JSONDecodeError: "),
        ("run here.json --cpu-s 0", "error: --cpu-s: must be at least 0.05 (got 0.0). Hint: use a larger value"),
        (
            "run here.json --wall-s 1",
            "error: --wall-s: must be at least --cpu-s 4.0, or programs end with CPU time left",
        ),
        ("run here.json --memory-mb 0", "error: --memory-mb: must be at least 64 (got 0). Hint: use a larger value"),
        ("run here.json --stdin gone.txt", "error: --stdin: gone.txt: FileNotFoundError: "),
        ("run here.json --workers -1", "error: --workers: must be at least 0 (got -1). Hint: use a larger value"),
        ("serve --queue-size 0", "error: --queue-size: must be at least 1 (got 0). Hint: use a larger value"),
        (
            "serve --max-memory-mb 100",
            "error: --max-memory-mb: a call that names none gets more. Hint: give at least 384",
        ),
        ("serve --allow-host a:80", "error: --allow-host: 'a:80' is not a host name. Hint: give a name alone"),
        ("serve --host 0.0.0.0", "error: SANDBOX_TOKEN: 0.0.0.0 can be reached from elsewhere. Hint: set it"),
        (
            "serve --max-wall-s 9999",
            "error: --max-wall-s: 9999.0 is outside 0.01 to 3600.0. Hint: give one between the two",
        ),
    ],
)
def test_what_cannot_be_read_or_is_out_of_bounds_or_means_nothing_is_one_line(
    said: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def starts(config: object) -> None:
        raise AssertionError("a pool was started")

    monkeypatch.setattr("sandbox.__main__.SandboxPool", starts)
    monkeypatch.chdir(tmp_path)
    Path("here.json").write_text("print(1)")
    assert main(said.split()) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(line) and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("said", "cpu_s", "wall_s"),
    [("", 4.0, 7.0), ("--cpu-s 60", 60.0, 91.0), ("--cpu-s 300 --wall-s 300", 300.0, 300.0)],
)
def test_run_has_the_limits_and_the_level_of_a_run(
    said: str, cpu_s: float, wall_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pools: list[FakePool] = []
    monkeypatch.setattr("sandbox.__main__.SandboxPool", lambda config: pools.append(FakePool(config)) or pools[0])
    (tmp_path / "program.py").write_text("1")
    assert main(["run", str(tmp_path / "program.py"), "--level", "landlock", *said.split()]) == 0
    (limits,) = pools[0].limits
    assert (limits.cpu_s, limits.wall_s, pools[0].config.level) == (cpu_s, wall_s, "landlock")


class FakePool:
    """Records the limits of its calls."""

    report = IsolationReport(level=IsolationLevel.NAMESPACES)

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.limits: list[Limits] = []

    async def __aenter__(self) -> "FakePool":
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def run(self, request: ExecutionRequest, *, deadline_s: float) -> ExecutionResult:
        self.limits.append(request.limits)
        return ExecutionResult(outcome=Outcome.OK)


@pytest.mark.asyncio(loop_scope="session")
async def test_without_its_server_a_program_runs_on_the_lean_one():
    async with derived.pool(slots=1, warm=(preload.LEAN,)) as pool:
        result = await pool.run(ExecutionRequest(code="import numpy\nprint(numpy.arange(3).sum())"))
    assert (result.outcome, result.stdout) == (Outcome.OK, "3\n")
