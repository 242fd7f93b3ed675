"""A run directory with a file that is cut off, garbage, something else or a folder: every command says so in a line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.launch.exit_status import status_of
from examples.entropy.__main__ import main as analyse
from recipes import replay
from rstar_ray.report.__main__ import main as report
from rstar_ray.report.live import LiveRun
from rstar_ray.run_dir.__main__ import main as run_dir
from rstar_ray.run_dir.durable import append_row
from rstar_ray.run_dir.folder import RUN_FORMAT
from rstar_ray.run_dir.ledger import RolloutStatus, append_ledger
from tests.rstar_ray.fabricate import run_directory

pytestmark = pytest.mark.usefixtures("without_fsync")


def watch(path: Path) -> int:
    return status_of(lambda: LiveRun(path).data() and 0)


COMMANDS: dict[str, Callable[[Path], int]] = {
    "report": lambda path: report([str(path)]),
    "watch": watch,
    "steps to replay": lambda path: replay.main([str(path)]),
    "replay": lambda path: replay.main([str(path), "--step", "1"]),
    "verify": lambda path: run_dir(["verify", str(path)]),
}
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[: -len(data) // 3],
    "a line of garbage": lambda data: b"\xff{\n" + data,
    "something else": lambda data: b'{"a": 1}\n' + (data if b"}\n{" in data else b""),
}
FILES = (
    "config.json", "metrics.jsonl", "evaluations.jsonl", "launches.jsonl", "ledger.jsonl", "finished/stage1.json",
    "trajectories/stage1-step-000001.jsonl",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = run_directory(tmp_path_factory.mktemp("whole") / "run", stages={"stage1": 3})
    rollouts = {f"stage1/1/{name}": RolloutStatus.TRAINED for name in ("gcd-17/0", "gcd-17/1")}
    append_ledger(path, rollouts, stage="stage1", step=1, reasons={}, advantages={})
    (path / "finished").mkdir(exist_ok=True)
    (path / "finished/stage1.json").write_text(
        '{"stage": "stage1", "step": 3, "finished_at": "2026-01-05T11:00:00+00:00"}'
    )
    assert all((path / name).is_file() for name in FILES)
    return path


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.mark.parametrize("damage", [*DAMAGES, "a folder"])
@pytest.mark.parametrize("name", FILES)
def test_each_command_continues_without_it_or_ends_with_a_line(
    name: str, damage: str, run: Path, capsys: pytest.CaptureFixture[str]
):
    data = (run / name).read_bytes()
    (run / name).unlink()
    if damage == "a folder":
        (run / name).mkdir()
    else:
        (run / name).write_bytes(DAMAGES[damage](data))
    for command, act in COMMANDS.items():
        status = act(run)
        said = capsys.readouterr()
        assert len(said.err.splitlines()) <= 1, f"{command}: {said.err}"
        assert status == 0 or said.err or "fault: " in said.out, command
        assert "Error" not in said.out, f"{command}: {said.out}"  # a part that was left out for a reason of ours


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("config.json", "config.json is ignored: not JSON"),
        ("metrics.jsonl", "metrics.jsonl, line 1 is not a row of JSON and is ignored"),
        ("ledger.jsonl", "ledger.jsonl, line 1 is not a row of JSON and is ignored"),
        ("finished/stage1.json", "finished/stage1.json is ignored: not JSON"),
        (
            "trajectories/stage1-step-000001.jsonl",
            "stage1-step-000001.jsonl is ignored: its first line is not a trajectory",
        ),
    ],
)
def test_the_page_names_what_it_could_not_read(name: str, said: str, run: Path):
    (run / name).write_bytes(DAMAGES["a line of garbage"]((run / name).read_bytes()))
    assert any(said in fault for fault in LiveRun(run).data()["faults"])


def test_a_row_without_what_it_must_have_is_named_with_that(run: Path):
    append_row(run / "metrics.jsonl", {"stage": "stage1"})
    (fault,) = LiveRun(run).data()["faults"]
    assert "is not a row of JSON with stage, step, step_s and is ignored" in fault


@pytest.mark.parametrize("command", [*COMMANDS, "analysis"])
def test_a_run_of_a_newer_version_is_refused(command: str, run: Path, capsys: pytest.CaptureFixture[str]):
    append_row(run / "launches.jsonl", {"format": RUN_FORMAT + 1})
    assert (COMMANDS | {"analysis": lambda path: analyse([str(path)])})[command](run) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "was written by a newer rstar_ray (format 2; this one knows 1). Hint: use that version" in line


@pytest.mark.parametrize("command", [*COMMANDS, "analysis"])
@pytest.mark.parametrize("kind", ["not there", "a file", "empty", "something else"])
def test_what_is_not_a_run_is_refused(kind: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "place"
    if kind == "a file":
        path.write_text(json.dumps({}))
    elif kind != "not there":
        path.mkdir()
    if kind == "something else":
        (path / "notes.txt").write_text("?")
    assert (COMMANDS | {"analysis": lambda path: analyse([str(path)])})[command](path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "config.json" in line or "name the directory of a run" in line
