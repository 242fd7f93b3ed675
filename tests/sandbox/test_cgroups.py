"""Control groups for programs with processes, on a tree of plain files that refuses as a kernel does."""

import asyncio
import errno
import os
import shutil
from pathlib import Path

import pytest

from rstar_ray.outcome import Outcome
from sandbox.cgroups import Groups, KernelTree, find_groups, own_group
from sandbox.isolation import SCRATCH_BYTES, IsolationLevel
from sandbox.jail import cpp_program
from sandbox.jail.control_group import ControlGroup
from sandbox.request import ExecutionRequest
from sandbox.workspaces import Workspaces
from tests import derived

pytestmark = pytest.mark.isolated

FILES = {
    "cgroup.procs": "",
    "cgroup.subtree_control": "",
    "cgroup.kill": "",
    "cpu.stat": "usage_usec 0\nuser_usec 0\nsystem_usec 0\n",
    "memory.max": "max",
    "memory.oom.group": "0",
    "memory.events": "low 0\nmax 0\noom 0\noom_kill 0\n",
    "pids.max": "max",
}


class FakeTree(KernelTree):
    """A folder of plain files, with the kernel's rules of who may have groups below."""

    def __init__(self, top: Path, *, delegated: tuple[str, ...], controllers: str = "cpu memory pids") -> None:
        self.top, self.delegated, self.controllers = top, delegated, controllers
        self.writes: list[tuple[str, str]] = []
        for name in ("", *delegated):
            self.fill(top / name)

    def fill(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {**FILES, "cgroup.controllers": self.controllers}.items():
            (folder / name).write_text(text)

    def is_delegated(self, path: str) -> bool:
        return str(Path(path).relative_to(self.top)) in self.delegated

    def make(self, path: str) -> None:
        super().make(path)
        self.fill(Path(path))

    def write(self, path: str, text: str) -> None:
        folder, name = Path(path).parent, Path(path).name
        if name == "cgroup.subtree_control" and (folder / "cgroup.procs").read_text():
            raise OSError(errno.EBUSY, "Device or resource busy")
        if name == "cgroup.procs":
            for other in self.top.rglob("cgroup.procs"):
                other.write_text(other.read_text().replace(f"{text}\n", ""))
            text += "\n"
        self.writes.append((str(Path(path).relative_to(self.top)), text))
        if not Path(path).exists():
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        Path(path).write_text(text.replace("+", ""))

    def remove(self, path: str) -> None:
        if (Path(path) / "cgroup.procs").read_text().strip("\0") not in ("", "0"):
            raise OSError(errno.EBUSY, "Device or resource busy")
        for file in Path(path).iterdir():
            file.unlink()
        super().remove(path)


def found(tree: FakeTree, own: str, prefix: str = "sandbox-x") -> Groups:
    return find_groups(prefix, tree, str(tree.top / own))


def test_a_group_that_was_prepared_beside_ours_is_used(tmp_path: Path):
    tree = FakeTree(tmp_path, delegated=("run", "run/main"))
    (tmp_path / "run/main/cgroup.procs").write_text("1\n2\n")
    groups = found(tree, "run/main")
    assert groups._place and groups.description.startswith("memory, processes and CPU time")
    assert ("run/cgroup.subtree_control", "+memory +pids") in tree.writes
    path = groups.make(3, max_processes=64)
    assert path == str(tmp_path / "run/sandbox-x-3")
    assert (Path(path) / "pids.max").read_text() == "64" and (Path(path) / "memory.oom.group").read_text() == "1"
    groups.bound(3, 100)
    assert (Path(path) / "memory.max").read_text() == "100"


async def test_a_group_that_cannot_be_made_costs_no_number_and_leaves_no_folder(tmp_path: Path):
    tree = FakeTree(tmp_path, delegated=("run", "run/main"))
    workspaces = Workspaces(found(tree, "run/main"))
    write, tree.write = tree.write, no_descriptors
    for _ in range(200):
        with pytest.raises(OSError, match="Too many open files"):
            workspaces.take(IsolationLevel.NAMESPACES)
    tree.write = write
    workspaces.groups.sweep()
    assert [path.name for path in (tmp_path / "run").iterdir() if path.is_dir()] == ["main"]
    assert workspaces.take(IsolationLevel.NAMESPACES)[0] < 100
    await workspaces.close()


def no_descriptors(path: str, text: str) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def test_who_is_alone_in_a_group_steps_aside(tmp_path: Path):
    tree = FakeTree(tmp_path, delegated=("scope",))
    (tmp_path / "scope/cgroup.procs").write_text(f"{os.getpid()}\n")
    assert found(tree, "scope")._place
    assert (tmp_path / "scope/pool/cgroup.procs").read_text() == f"{os.getpid()}\n"
    assert (tmp_path / "scope/cgroup.procs").read_text() == ""


def test_who_is_not_alone_moves_nobody(tmp_path: Path):
    tree = FakeTree(tmp_path, delegated=("scope",))
    (tmp_path / "scope/cgroup.procs").write_text(f"{os.getpid()}\n4711\n")
    groups = found(tree, "scope")
    assert not groups._place and "busy" in groups.description
    assert (tmp_path / "scope/cgroup.procs").read_text() == f"{os.getpid()}\n4711\n"


@pytest.mark.parametrize(
    ("delegated", "controllers", "reason"),
    [
        (("elsewhere",), "memory pids", "not delegated"),
        (("run",), "memory cpu", "no controller for pids"),
        (("run",), "", "no controller for memory and pids"),
    ],
)
def test_without_delegation_there_are_none_and_the_reason_is_given(
    tmp_path: Path, delegated: tuple[str, ...], controllers: str, reason: str
):
    groups = found(FakeTree(tmp_path, delegated=delegated, controllers=controllers), "run")
    assert not groups._place and groups.description.startswith("none: ") and reason in groups.description
    assert groups.make(1, 64) == "" and not groups.ran_out(1) and groups.sweep()
    groups.bound(1, 100)
    groups.remove(1)


def test_no_v2_is_reported():
    assert find_groups("x", own="").description == "none: no cgroup v2 is mounted here"


def test_a_group_goes_once_its_last_process_has_gone(tmp_path: Path):
    tree = FakeTree(tmp_path, delegated=("run",))
    groups = found(tree, "run")
    path = Path(groups.make(1, 64))
    (path / "cgroup.procs").write_text("4711\n")
    groups.remove(1)
    assert path.exists() and (path / "cgroup.kill").read_text() == "1" and not groups.sweep()
    (path / "cgroup.procs").write_text("")
    assert groups.sweep() and not path.exists()


def test_the_kernels_ends_for_memory_are_counted_once(tmp_path: Path):
    tree = FakeTree(tmp_path, delegated=("run",))
    groups = found(tree, "run")
    path = Path(groups.make(1, 64))
    assert not groups.ran_out(1)
    (path / "memory.events").write_text("oom 1\noom_kill 2\n")
    assert groups.ran_out(1) and not groups.ran_out(1)


def test_cpu_counts_from_the_beginning_of_a_program(tmp_path: Path):
    FakeTree(tmp_path, delegated=())
    (tmp_path / "cpu.stat").write_text("usage_usec 5000000\nuser_usec 1\n")
    group = ControlGroup(str(tmp_path))
    group.begin()
    (tmp_path / "cpu.stat").write_text("usage_usec 7500000\nuser_usec 1\n")
    assert group.cpu_s() == 2.5
    group.begin()
    assert group.cpu_s() == 0.0


CPP = '#include <unistd.h>\nint main(){ write(1, "ran\\n", 4); for(;;) pause(); }'
needs_compiler = pytest.mark.skipif(cpp_program.compiler() is None, reason="no g++ here")


@needs_compiler
async def test_a_program_with_processes_joins_and_is_held_to_the_cpu_time_of_its_group(tmp_path: Path):
    tree = FakeTree(tmp_path, delegated=("run",))
    groups = found(tree, "run")
    async with derived.pool(groups, slots=1, spare_workers=0, warm=("lean",)) as pool:
        assert pool.report.facts["cgroup"] == groups.description
        (path,) = [entry for entry in (tmp_path / "run").iterdir() if entry.is_dir()]
        (path / "cgroup.procs").write_text("")  # as if who had tried to join had gone
        assert (await pool.run(ExecutionRequest(code="print(1)"))).stdout == "1\n"
        assert (path / "cgroup.procs").read_text() == ""  # a Python program has no processes, and needs no group
        limits = derived.program(cpu_s=60.0, wall_s=100.0)
        running = pool.submit(ExecutionRequest(code=CPP, language="cpp", limits=limits))
        for _ in range(600):
            if (path / "cgroup.procs").read_text():
                break
            await asyncio.sleep(0.05)
        assert (path / "cgroup.procs").read_text().strip("\0") == "0"  # a plain file remembers how far was written
        assert (path / "memory.max").read_text() == str(limits.memory_bytes + SCRATCH_BYTES)
        (path / "cpu.stat").write_text("usage_usec 61000000\n")  # of children that nobody waits for
        result = await running
        assert (result.outcome, result.reason) == (Outcome.TIMEOUT, "used all of its CPU time")
        assert result.cpu_s == pytest.approx(61.0)
    assert [entry for entry in (tmp_path / "run").iterdir() if entry.is_dir()] == []


@needs_compiler
async def test_a_tree_that_the_kernel_ends_for_memory_ran_out_of_it(tmp_path: Path):
    tree = FakeTree(tmp_path, delegated=("run",))
    async with derived.pool(found(tree, "run"), slots=1, spare_workers=0, warm=("lean",)) as pool:
        (path,) = [entry for entry in (tmp_path / "run").iterdir() if entry.is_dir()]
        (path / "memory.events").write_text("oom_kill 1\n")
        code = "#include <signal.h>\nint main(){ raise(SIGKILL); }"
        result = await pool.run(ExecutionRequest(code=code, language="cpp", limits=derived.program(wall_s=60.0)))
        assert result.outcome is Outcome.OUT_OF_MEMORY and "all its processes" in result.reason


async def test_who_may_not_join_runs_without(tmp_path: Path):
    tree = FakeTree(tmp_path, delegated=("run",))
    groups = found(tree, "run")
    real = groups.make

    def closed(number: int, max_processes: int) -> str:
        path = Path(real(number, max_processes))
        (path / "cgroup.procs").unlink()
        (path / "cgroup.procs").mkdir()  # which nobody can open for writing
        return str(path)

    groups.make = closed
    tree.remove = shutil.rmtree
    async with derived.pool(groups, slots=1, spare_workers=0, warm=("lean",)) as pool:
        assert pool.report.facts["cgroup"] == "none: a process of a jail may not join one"
        assert (await pool.run(ExecutionRequest(code="print(1)"))).stdout == "1\n"


@needs_compiler
async def test_a_real_group_bounds_the_memory_of_a_whole_tree():
    groups = find_groups("sandbox-test")
    if not groups._place:
        pytest.skip(f"not run: {groups.description} ({own_group() or 'no group'})")
    code = """
    #include <stdlib.h>
    #include <string.h>
    #include <unistd.h>
    int main() {
        for (int i = 0; i < 8; i++)
            if (!fork()) { memset(malloc(100 << 20), 1, 100 << 20); pause(); }
        pause();
    }
    """
    async with derived.pool(groups, slots=1, warm=("lean",)) as pool:
        limits = derived.program(memory_bytes=256 << 20, wall_s=20.0)
        result = await pool.run(ExecutionRequest(code=code, language="cpp", limits=limits))
        assert result.outcome is Outcome.OUT_OF_MEMORY, result
    assert groups.sweep()
