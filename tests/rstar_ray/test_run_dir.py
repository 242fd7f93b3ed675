import errno
import fcntl
import io
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rstar_ray.config import RunConfig, SandboxConfig, may_change
from rstar_ray.errors import ConfigError, RStarError
from rstar_ray.replay_update import config_of
from rstar_ray.report.run_record import RunFiles
from rstar_ray.run_dir.__main__ import main as verify
from rstar_ray.run_dir.durable import append_row
from rstar_ray.run_dir.folder import Checkpoint, RunDir
from rstar_ray.run_dir.ledger import RolloutStatus, append_ledger, cut_ledger, ledger_faults
from rstar_ray.run_dir.manifest import Unreadable, WrittenFile, damage
from rstar_ray.run_dir.verify_run import faults
from tests.rstar_ray.fabricate import write_rows

CONFIG = {"seed": 1, "rollout": {"max_turns": 4, "temperature": 1.0}, "stages": ("sft", "stage1")}


def write(run_dir: RunDir, stage: str, step: int, text: str = "weights", keep_last: int = 2) -> None:
    with run_dir.write_checkpoint(stage, step) as folder:
        (folder / "rank0").mkdir()
        (folder / "rank0" / "state.pt").write_text(text)
    run_dir.prune(stage, keep_last)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def steps(run_dir: RunDir, stage: str) -> list[int]:
    return [checkpoint.step for checkpoint in run_dir.checkpoints(stage)]


def test_a_new_directory_records_its_configuration_once(tmp_path: Path):
    with RunDir.open(tmp_path / "runs" / "a", "stage1", CONFIG) as run_dir:
        assert run_dir.path.is_absolute()
    before = run_dir.config_path.read_text()
    with RunDir.open(run_dir.path, "stage1", CONFIG):
        pass
    assert run_dir.config_path.read_text() == before
    assert json.loads(before)["stage1"]["rollout"]["max_turns"] == 4


def test_another_configuration_is_refused_by_the_names_of_its_fields(tmp_path: Path):
    with RunDir.open(tmp_path, "stage1", CONFIG) as run_dir:
        pass
    before = run_dir.config_path.read_text()
    other = CONFIG | {"seed": 2, "rollout": {"max_turns": 8, "temperature": 1.0}}
    refused = pytest.raises(
        ConfigError, match=r"rollout.max_turns: 4 there, 8 now; seed: 1 there, 2 now.*new directory"
    )
    with refused, RunDir.open(tmp_path, "stage1", other):
        pass
    assert run_dir.config_path.read_text() == before


def test_each_stage_has_a_separate_configuration_with_some_fields_shared(tmp_path: Path):
    with RunDir.open(tmp_path, "stage1", CONFIG):
        pass
    longer = CONFIG | {"rollout": {"max_turns": 8, "temperature": 1.0}}
    with RunDir.open(tmp_path, "stage2", longer) as run_dir:
        pass
    assert sorted(json.loads(run_dir.config_path.read_text())) == ["stage1", "stage2"]
    refused = pytest.raises(ConfigError, match=r"stage1 seed: 1 there, 7 now")
    with refused, RunDir.open(tmp_path, "stage3", CONFIG | {"seed": 7}):
        pass


def test_fields_that_may_differ_do_not_make_it_another_run(tmp_path: Path):
    with RunDir.open(tmp_path, "stage1", CONFIG):
        pass
    changed = CONFIG | {"rollout": {"max_turns": 5, "temperature": 0.5}}
    with RunDir.open(tmp_path, "stage1", changed, may_differ=["rollout"]):
        pass
    with (
        pytest.raises(ConfigError, match="temperature"),
        RunDir.open(tmp_path, "stage1", changed, may_differ=["rollout.max_turns"]),
    ):
        pass


def test_a_run_of_a_version_with_other_names_of_settings_is_read_and_resumes(tmp_path: Path):
    sandbox = SandboxConfig(spare_workers=3, calls_per_worker=5, workers_per_server=7)
    config = asdict(RunConfig(sandbox=sandbox))
    opened(tmp_path, config)
    text = (tmp_path / "config.json").read_text()
    for new, old in {"spare_workers": "spare_cells", "per_worker": "per_cell", "workers_per": "cells_per"}.items():
        assert new in text
        text = text.replace(new, old)
    (tmp_path / "config.json").write_text(text)
    assert config_of(RunDir(tmp_path), "stage1").sandbox == sandbox
    assert RunFiles(tmp_path).record(begun=True).config["stage1"]["sandbox"]["spare_workers"] == 3
    opened(tmp_path, config)
    assert (tmp_path / "config.json").read_text() == text
    with pytest.raises(ConfigError, match=r"sandbox.spare_workers: 3 there, 1 now"):
        opened(tmp_path, asdict(RunConfig()))
    opened(tmp_path, asdict(RunConfig()), may_differ=may_change(RunConfig()))


def test_a_folder_of_other_things_is_refused_and_left_alone(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("dear")
    with pytest.raises(ConfigError, match="thesis"), RunDir.open(tmp_path, "stage1", CONFIG):
        pass
    assert names(tmp_path) == ["thesis.tex"]
    with pytest.raises(ConfigError, match="is a file"), RunDir.open(tmp_path / "thesis.tex", "stage1", CONFIG):
        pass


def test_a_file_system_without_locks_is_refused_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(file: object, kind: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(ConfigError, match=r"cannot be locked .*Function not implemented.*-o flock"),
        RunDir.open(tmp_path, "stage1", {"seed": 1}),
    ):
        pass


@contextmanager
def files_end_at(num_bytes: int) -> Generator[None, None, None]:
    """As on a full disk, what is written beyond fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("name", "room"), [(".lock", 0), ("config.json", 4_096)])
def test_a_full_disk_at_the_beginning_is_refused_by_its_path_with_the_fix_and_leaves_nothing_in_the_way(
    tmp_path: Path, name: str, room: int
):
    config = CONFIG | {"model": "x" * 100_000}
    with pytest.raises(ConfigError) as refused, files_end_at(room), RunDir.open(tmp_path, "stage1", config):
        pass
    assert str(refused.value) == (
        f"--run-dir: {tmp_path / name}: File too large. Hint: free space, then run the same command"
    )
    with RunDir.open(tmp_path, "stage1", config) as run_dir:
        assert names(run_dir.path) == [".lock", "config.json"]


def test_two_runs_never_share_a_directory(tmp_path: Path):
    code = (
        "import sys; from rstar_ray.run_dir.folder import RunDir\n"
        "with RunDir.open(sys.argv[1], 'stage1', {'seed': 1}): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with (
            pytest.raises(ConfigError, match=f"in use by process {other.pid}"),
            RunDir.open(tmp_path, "stage1", {"seed": 1}),
        ):
            pass
        other.kill()
    with RunDir.open(tmp_path, "stage1", {"seed": 1}):
        pass  # a killed run leaves no lock behind


def test_the_newest_undamaged_checkpoint_is_found(tmp_path: Path):
    with RunDir.open(tmp_path, "stage1", CONFIG) as run_dir:
        assert run_dir.newest_checkpoint("stage1") is None
        write(run_dir, "stage1", 9)
        write(run_dir, "stage1", 10)
        write(run_dir, "stage2", 3)
        newest = run_dir.newest_checkpoint("stage1")
    assert newest is not None and newest.step == 10
    assert newest.path == tmp_path / "checkpoints" / "stage1-step-000010"
    assert (newest.path / "rank0" / "state.pt").read_text() == "weights"


def test_what_a_rank_of_a_killed_run_still_writes_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with RunDir.open(tmp_path, "stage1", CONFIG) as run_dir:
        late = run_dir.checkpoints_path / ".tmp-stage1-step-000010"
    late.mkdir(parents=True)
    real = shutil.rmtree

    def one_file_stays(path: Path, ignore_errors: bool = False) -> None:
        real(path, ignore_errors)
        if path == late:
            late.mkdir()
            (late / "state.pt").write_text("late")
            if not ignore_errors:
                raise OSError("directory not empty")

    monkeypatch.setattr(shutil, "rmtree", one_file_stays)
    with RunDir.open(tmp_path, "stage1", CONFIG) as run_dir:
        write(run_dir, "stage1", 10)
        assert steps(run_dir, "stage1") == [10]
        assert names(run_dir.checkpoints_path / "stage1-step-000010") == ["manifest.json", "rank0"]


@pytest.mark.parametrize(
    ("wrote", "reported", "said"),
    [
        ("state-0", "state-1", "state-1 of learner/rank-1 is not in"),
        ("state-1", "", r"state-1 is in .*, but no writer reported its checksum"),
    ],
)
def test_a_checkpoint_with_a_missing_or_an_unreported_file_is_invalid_and_takes_no_room(
    tmp_path: Path, wrote: str, reported: str, said: str
):
    with RunDir.open(tmp_path, "stage1", CONFIG) as run_dir:
        written = dict[Path, WrittenFile]()
        with pytest.raises(RStarError, match=said), run_dir.write_checkpoint("stage1", 10, written=written) as folder:
            (folder / wrote).write_text("weights")
            if reported:
                written[folder / reported] = WrittenFile(num_bytes=1, sha256="0", by="learner/rank-1")
        assert names(run_dir.checkpoints_path) == []


def test_a_crash_while_writing_leaves_the_older_checkpoint_whole(tmp_path: Path):
    with RunDir.open(tmp_path, "stage1", CONFIG) as run_dir:
        write(run_dir, "stage1", 10)
        with pytest.raises(OSError, match="disk full"), run_dir.write_checkpoint("stage1", 20) as folder:
            (folder / "state.pt").write_text("half")
            raise OSError("disk full")
        assert steps(run_dir, "stage1") == [10]
    killed = tmp_path / "checkpoints" / ".tmp-stage1-step-000030"
    killed.mkdir()
    (killed / "state.pt").write_text("half")
    recorded = tmp_path / "trajectories" / ".tmp-stage1-step-000021.jsonl-7"
    recorded.parent.mkdir(exist_ok=True)
    recorded.write_text("half")
    with RunDir.open(tmp_path, "stage1", CONFIG) as run_dir:
        assert steps(run_dir, "stage1") == [10]
        assert not killed.exists() and not recorded.exists()


@pytest.mark.parametrize("name", ["manifest.json", "rank0/state.pt"])
def test_a_checkpoint_is_written_over_a_damaged_one(tmp_path: Path, name: str):
    with RunDir.open(tmp_path, "stage1", CONFIG) as run_dir:
        write(run_dir, "stage1", 20)
        folder = run_dir.checkpoints_path / "stage1-step-000020"
        (folder / name).unlink()
        assert steps(run_dir, "stage1") == []
        write(run_dir, "stage1", 20, text="again")
        assert steps(run_dir, "stage1") == [20] and (folder / "rank0" / "state.pt").read_text() == "again"


UNREADABLE = "its manifest.json cannot be read"
NOT_WRITTEN = "its manifest.json does not match its own checksum"
OTHER_KEYS = "its manifest.json has other keys than stage, step, files and sha256"


@pytest.mark.usefixtures("without_fsync")
@pytest.mark.parametrize(
    ("name", "before", "after", "said"),
    [
        ("rank0/state.pt", b"", b"", "rank0/state.pt is missing"),
        ("rank0/state.pt", b"weights", b"wei", "rank0/state.pt has 3 bytes, not 7"),
        ("rank0/state.pt", b"weights", b"weighty", "rank0/state.pt is damaged: its checksum differs"),
        ("manifest.json", b"", b"", UNREADABLE),
        ("manifest.json", b'"files": ', b"", UNREADABLE),
        ("manifest.json", b'"step": 20', b'"step": 60', NOT_WRITTEN),
        ("manifest.json", b'"stage1"', b'"stage2"', NOT_WRITTEN),
        ("manifest.json", b'"step"', b'"stew"', OTHER_KEYS),
        ("manifest.json", b'"sha256": "', b'"sha257": "', OTHER_KEYS),
    ],
)
async def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, name: str, before: bytes, after: bytes, said: str, logged: list[str]
):
    with RunDir.open(tmp_path, "stage1", CONFIG) as run_dir:
        for step in (10, 20):
            write(run_dir, "stage1", step)
        file = run_dir.checkpoints_path / "stage1-step-000020" / name
        written = file.read_bytes()
        file.unlink()
        if before:
            assert before in written
            file.write_bytes(written.replace(before, after))
        assert steps(run_dir, "stage1") == ([10, 20] if after == b"weighty" else [10])  # which reads no weights
        assert any(fault.startswith(f"checkpoint stage1-step-000020: {said}") for fault in faults(tmp_path))
        logged.clear()
        newest = await run_dir.newest_undamaged_checkpoint("stage1", 10)
        assert newest == Checkpoint(run_dir.checkpoints_path / "stage1-step-000010", "stage1", 10)
        (line,) = logged
        quarantined = "checkpoint stage1-step-000020 is damaged and is quarantined as damaged-stage1-step-000020: "
        assert line.startswith(f"{quarantined}{said}") and steps(run_dir, "stage1") == [10]
        assert await run_dir.newest_undamaged_checkpoint("sft", 10) is None


@pytest.mark.usefixtures("without_fsync")
def test_any_one_byte_of_a_manifest_that_is_another_is_named_or_changes_nothing(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    write(run_dir, "stage1", 20)
    folder = run_dir.checkpoints_path / "stage1-step-000020"
    manifest = folder / "manifest.json"
    written, unharmed = manifest.read_bytes(), set[bytes]()
    for place, byte in enumerate(written):
        for other in {byte ^ 1, *b" \n"} - {byte}:
            manifest.write_bytes(written[:place] + bytes([other]) + written[place + 1 :])
            if damage(folder, sizes_only=True) is None:
                assert json.loads(manifest.read_bytes()) == json.loads(written)
                unharmed.add(bytes([byte]))
    assert unharmed == {b" ", b"\n"}


@pytest.mark.usefixtures("without_fsync")
def test_a_whole_checkpoint_that_a_person_quarantined_is_whole_and_one_under_another_steps_name_is_not(
    tmp_path: Path, logged: list[str]
):
    (tmp_path / "metrics.jsonl").write_text("")
    run_dir = RunDir(tmp_path)
    for step in (10, 20):
        write(run_dir, "stage1", step)
    folders = run_dir.checkpoints_path
    (folders / "stage1-step-000010").rename(folders / "damaged-stage1-step-000010")
    (folders / "stage1-step-000020").rename(folders / "stage1-step-000030")
    assert (
        "checkpoint stage1-step-000030: its manifest.json is of step 20 of stage1, which is not its folder's name"
    ) in faults(tmp_path)
    assert logged == ["checkpoint damaged-stage1-step-000010: undamaged; files: 1 of driver"]


async def test_a_copy_by_hand_is_neither_resumed_from_nor_touched(tmp_path: Path, logged: list[str]):
    run_dir = RunDir(tmp_path)
    write(run_dir, "stage1", 10)
    copy = run_dir.checkpoints_path / "stage1-step-000010.bak"
    shutil.copytree(run_dir.checkpoints_path / "stage1-step-000010", copy)
    newest = await run_dir.newest_undamaged_checkpoint("stage1", 10)
    assert newest is not None and newest.path.name == "stage1-step-000010" and not logged
    assert steps(run_dir, "stage1") == [10] and copy.exists()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("name", ["manifest.json", "state.pt"])
async def test_a_checkpoint_that_cannot_be_read_is_said_so_and_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
):
    with RunDir.open(tmp_path, "stage1", CONFIG) as run_dir:
        write(run_dir, "stage1", 10)
        write(run_dir, "stage1", 20)
        with monkeypatch.context() as broken:
            unreadable(broken, f"stage1-step-000020/{name}", f"stage1-step-000020/rank0/{name}", number=number)
            with pytest.raises(Unreadable, match=rf"{name} cannot be read \({os.strerror(number)}\).*same command"):
                await run_dir.newest_undamaged_checkpoint("stage1", 10)
            assert any(f"{name} cannot be read" in fault for fault in faults(tmp_path))
        newest = await run_dir.newest_undamaged_checkpoint("stage1", 10)
        assert newest is not None and newest.step == 20
        assert names(run_dir.checkpoints_path) == ["stage1-step-000010", "stage1-step-000020"]


def unreadable(patched: pytest.MonkeyPatch, *ends: str, number: int) -> None:
    """Files whose paths end so refuse to be opened."""
    real = io.open

    def opened(path: Any, *given: Any, **named: Any) -> Any:
        if str(path).endswith(ends):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *given, **named)

    patched.setattr(io, "open", opened)  # which pathlib calls


async def test_a_stage_whose_checkpoints_are_all_damaged_does_not_begin_again_by_itself(tmp_path: Path):
    folders = tmp_path / "checkpoints"
    refused = r"no undamaged .*000020: rank0/state.pt is missing; .*000010: .*run_dir forget"
    with RunDir.open(tmp_path, "stage1", CONFIG) as run_dir:
        for step in (10, 20):
            write(run_dir, "stage1", step)
            (folders / f"stage1-step-0000{step}" / "rank0" / "state.pt").unlink()
        for _ in range(2):
            with pytest.raises(ConfigError, match=refused):
                await run_dir.newest_undamaged_checkpoint("stage1", 10)
        shutil.rmtree(folders / "stage1-step-000010")
        (folders / "stage1-step-000020").rename(folders / "damaged-stage1-step-000020")
        with pytest.raises(ConfigError, match="damaged-stage1-step-000020"):
            await run_dir.newest_undamaged_checkpoint("stage1", 10)
        assert await run_dir.newest_undamaged_checkpoint("stage2", 10) is None
        shutil.rmtree(folders)
        (tmp_path / "config.json").write_text(json.dumps({"stage1": {"checkpoint": {"every_steps": 10}}}))
        metrics = tmp_path / "metrics.jsonl"
        for step in range(1, 21):
            append_row(metrics, {"stage": "stage1", "step": step})
        assert await run_dir.newest_undamaged_checkpoint("stage1", 5) is None  # killed while it wrote the first
        append_row(metrics, {"stage": "stage1", "step": 21})
        with pytest.raises(ConfigError, match="no checkpoint of stage1, of which 21 steps are recorded"):
            await run_dir.newest_undamaged_checkpoint("stage1", 10)
        assert await run_dir.newest_undamaged_checkpoint("stage2", 10) is None
        folders.symlink_to(tmp_path / "not mounted")
        with pytest.raises(Unreadable, match="checkpoints cannot be read"):
            await run_dir.newest_undamaged_checkpoint("stage2", 10)


def test_turns_of_steps_that_a_checkpoint_has_are_forgotten(tmp_path: Path):
    with RunDir.open(tmp_path, "stage1", CONFIG) as run_dir:
        for name in ("stage1-step-000003", "stage1-step-000004", "stage1-step-000005", "stage2-step-000001"):
            (run_dir.journal_path / name).mkdir(parents=True)
        write(run_dir, "stage1", 4)
        assert names(run_dir.journal_path) == ["stage1-step-000005", "stage2-step-000001"]


def test_a_run_directory_is_verified_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert verify(["verify", str(tmp_path)]) == 2 and verify([]) == 2 and verify(["--help"]) == 0
    with RunDir.open(tmp_path, "stage1", CONFIG) as run_dir:
        write(run_dir, "stage1", 1)
        write(run_dir, "stage1", 2)
        run_dir.finish_stage("stage1", 2)
    write_rows(tmp_path / "metrics.jsonl", *({"stage": "stage1", "step": step} for step in (1, 2)))
    for step in (1, 2):
        append_ledger(
            tmp_path, {f"stage1/{step}/a": RolloutStatus.TRAINED}, stage="stage1", step=step, reasons={}, advantages={}
        )
    assert verify(["verify", str(tmp_path)]) == 0
    assert f"{tmp_path}: no faults" in capsys.readouterr().out
    (tmp_path / "checkpoints" / "stage1-step-000001" / "rank0" / "state.pt").write_text("weighty")
    (tmp_path / "checkpoints" / "stage1-step-000002" / "rank0" / "state.pt").unlink()
    (tmp_path / "metrics.jsonl").write_text('{"stage": "stage1", "step": 1}\n' * 2)
    assert verify(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    for fault in (
        "checkpoint stage1-step-000001: rank0/state.pt is damaged: its checksum differs",
        "checkpoint stage1-step-000002: rank0/state.pt is missing",
        "stage1 finished at step 2, but that checkpoint is missing or damaged",
        "metrics.jsonl: the steps of stage1 are not 1, 2, 3, ...: 1 is out of order",
        "4 faults",
    ):
        assert fault in said


def test_a_ledger_that_does_not_add_up_is_named_by_its_step_and_rollout(tmp_path: Path, logged: list[str]):
    statuses = {
        "stage1/1/p/0": RolloutStatus.TRAINED,
        "stage1/1/p/1": RolloutStatus.DROPPED,
        "stage1/1/p/2": RolloutStatus.EQUAL_REWARDS,
    }
    append_ledger(
        tmp_path,
        statuses,
        stage="stage1",
        step=1,
        reasons={"stage1/1/p/1": "sandbox"},
        advantages={"stage1/1/p/0": 0.5},
    )
    assert ledger_faults(tmp_path) == []
    assert logged == [
        "ledger: 3 rollouts in 1 steps: 1 trained, 0 resampled_away, 1 in_equal_groups, 0 left_out, 1 dropped"
    ]
    row = json.loads((tmp_path / "ledger.jsonl").read_text())
    assert row["ids"]["dropped"] == ["p/1"] and row["reasons"] == {"p/1": "sandbox"}
    assert row["advantages"] == {"p/0": 0.5}
    row["ids"]["trained"].append("p/1")
    (tmp_path / "ledger.jsonl").write_text(json.dumps({**row, "step": 2, "reasons": {}}) + "\n")
    assert ledger_faults(tmp_path) == [
        "ledger.jsonl: stage1 step 2: p/1 has two statuses",
        "ledger.jsonl: stage1 step 2: 3 rollouts do not add up",
        "ledger.jsonl: stage1 step 2: p/1 was dropped or excluded without a reason",
        "ledger.jsonl: the steps of stage1 are not 1, 2, 3, ...",
    ]
    cut_ledger(tmp_path, stage="stage1", after_step=1)
    assert ledger_faults(tmp_path) == []


def test_rows_that_are_gone_are_missed_by_the_checkpoints_and_the_rows_beside_them(tmp_path: Path):
    with RunDir.open(tmp_path, "stage1", CONFIG) as run_dir:
        write(run_dir, "stage1", 3)
    metrics, ledger = tmp_path / "metrics.jsonl", tmp_path / "ledger.jsonl"

    def found(*, in_metrics: int, in_ledger: int) -> list[str]:
        for path in (metrics, ledger):
            path.unlink(missing_ok=True)
        for step in range(1, in_metrics + 1):
            append_row(metrics, {"stage": "stage1", "step": step})
        for step in range(1, in_ledger + 1):
            statuses = {f"stage1/{step}/a": RolloutStatus.TRAINED}
            append_ledger(tmp_path, statuses, stage="stage1", step=step, reasons={}, advantages={})
        return faults(tmp_path)

    assert found(in_metrics=3, in_ledger=3) == []
    assert found(in_metrics=4, in_ledger=3) == []  # killed between the two
    gone = "ledger.jsonl: stage1 has no row of step {}, which the run has completed"
    assert found(in_metrics=3, in_ledger=2) == [gone.format("3")]
    assert found(in_metrics=12, in_ledger=3) == [gone.format("4, 5, 6, 7, 8 and 3 more")]
    assert found(in_metrics=3, in_ledger=0) == [gone.format("1, 2, 3")]
    short = "metrics.jsonl: stage1 has {} steps, but completed 3"
    assert found(in_metrics=2, in_ledger=3) == [short.format(2)]
    assert found(in_metrics=0, in_ledger=3) == [short.format(0)]


def test_a_row_that_must_not_be_lost_is_synced_and_so_is_the_name_of_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    )
    rows = tmp_path / "rows.jsonl"
    append_row(rows, {"step": 1})
    assert synced == []
    rows.unlink()
    for step in (1, 2):
        append_row(rows, {"step": step}, sync=True)
    assert synced == [str(rows), str(tmp_path), str(rows)]


def test_old_checkpoints_go_but_the_last_ones_and_stage_ends_stay(tmp_path: Path):
    with RunDir.open(tmp_path, "stage1", CONFIG) as run_dir:
        write(run_dir, "sft", 400)
        run_dir.finish_stage("sft", 400)
        for step in range(1, 6):
            write(run_dir, "stage1", step)
        assert steps(run_dir, "sft") == [400]
        assert steps(run_dir, "stage1") == [4, 5]
        run_dir.finish_stage("stage1", 4)
        for step in range(6, 9):
            write(run_dir, "stage1", step, keep_last=1)
        assert steps(run_dir, "stage1") == [4, 8]
        assert not any(name.startswith(".") for name in names(run_dir.checkpoints_path))


def test_a_stage_is_finished_only_with_a_whole_checkpoint(tmp_path: Path):
    with RunDir.open(tmp_path, "stage1", CONFIG) as run_dir:
        with pytest.raises(RStarError, match="no such checkpoint"):
            run_dir.finish_stage("stage1", 10)
        assert run_dir.finished_checkpoint("stage1") is None
        write(run_dir, "stage1", 10)
        run_dir.finish_stage("stage1", 10)
        finished = run_dir.finished_checkpoint("stage1")
        assert finished is not None and finished.step == 10
        (finished.path / "rank0" / "state.pt").unlink()
        with pytest.raises(RStarError, match="missing or damaged"):
            run_dir.finished_checkpoint("stage1")


def opened(path: Path, config: dict[str, Any], stage: str = "stage1", **more: Any) -> RunDir:
    with RunDir.open(path, stage, config, **more) as run_dir:
        return run_dir
