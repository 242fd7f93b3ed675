"""Attacks: every case is contained, and the next honest program runs."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rstar_ray.outcome import Outcome
from sandbox.case_check import check_case, read_cases
from sandbox.jail import limit_watch, wire
from sandbox.jail.scratch import MAX_BYTES, clear_away, first_stamp, stamp, too_much_in
from sandbox.jail.stream import Stream, open_pipe
from sandbox.pool import SandboxPool
from sandbox.request import ExecutionRequest
from tests import derived

pytestmark = [pytest.mark.isolated, pytest.mark.asyncio(loop_scope="session")]
CASES = Path(__file__).parent / "data" / "sandbox_cases.json"
BRIEF = derived.program(cpu_s=0.8, wall_s=2.5)


async def test_every_case_is_contained_at_both_levels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SANDBOX_TEST_SECRET", "hunter2")
    assert await asyncio.gather(uncontained("namespaces"), uncontained("landlock")) == [{}, {}]


async def uncontained(level: str) -> dict[str, list[str]]:
    cases = [replace(case, request=replace(case.request, limits=BRIEF)) for case in read_cases(CASES)]
    async with derived.pool(only=level, slots=12, warm=("lean", "numpy")) as pool:
        checked = await asyncio.gather(*[check_case(pool, case, case.name, patience=20.0) for case in cases])
        suspects = [case for case, (_, trouble) in zip(cases, checked, strict=True) if trouble]
        wrong: dict[str, list[str]] = {}
        for case in suspects:  # a busy machine starves some: a second look, alone and with time
            alone = replace(case, request=replace(case.request, limits=derived.program(cpu_s=1.5, wall_s=40.0)))
            _, trouble = await check_case(pool, alone, patience=40.0)
            if trouble:
                wrong[case.name] = trouble
        stats = pool.stats()
    assert stats.workers_lost == stats.failed == 0
    return wrong


async def test_the_secrets_of_the_server_are_out_of_reach(pool: SandboxPool, tmp_path: Path):
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2")
    beside = Path(__file__).parent / "data" / "sandbox_cases.json"
    sources = f"{Path(__file__).parents[2]}/*.md"
    code = f"""
import os, glob
def look(path):
    try: return open(path, errors="replace").read()
    except OSError as error: return type(error).__name__
print([look(p) for p in ({str(secret)!r}, {str(beside)!r}, "/proc/self/environ", "/proc/1/environ", "/etc/passwd")])
print("SECRET" in str(os.environ), glob.glob({sources!r}), os.listdir("/root") if os.path.isdir("/root") else [])
"""
    result = await pool.run(ExecutionRequest(code=code))
    assert result.outcome is Outcome.OK
    assert "hunter2" not in result.stdout and "False" in result.stdout
    assert "README.md" not in result.stdout


# The pattern matches what earlier programs left, and not its own source.
SEARCH = r"""
import ctypes, re
own = "LEFT-BEHI" + "ND-self"
left = []
for line in open("/proc/self/maps"):
    place, mode, *rest = line.split()
    if mode.startswith("rw") and "[v" not in line:
        low, high = (int(end, 16) for end in place.split("-"))
        left += re.findall(rb"LEFT[-]BEHIND[-][a-z]+", ctypes.string_at(low, high - low))
print("found", sorted(set(left)))
"""


async def test_a_programs_memory_holds_nothing_of_the_programs_before_it():
    mark = "LEFT-BEHIND"
    async with derived.pool(slots=1, spare_workers=0, warm=("lean",)) as pool:
        for _ in range(3):
            await pool.run(ExecutionRequest(code=f"# {mark}-code\nprint('{mark}-print' * 9000)"))
            await pool.run(ExecutionRequest(code=f"x = '{mark}-value'\nx", stdin=f"{mark}-stdin"))
            await pool.run(ExecutionRequest(code=f"raise ValueError('{mark}-error')"))
        result = await pool.run(ExecutionRequest(code=SEARCH, limits=derived.program(memory_bytes=1 << 30)))
    assert result.stdout == "found [b'LEFT-BEHIND-self']\n", result


async def test_open_files_and_modules_of_the_server_are_not_inherited(pool: SandboxPool):
    code = (
        "import os, sys\nprint(os.listdir('/proc/self/fd')[:9], [m for m in sys.modules if 'sandbox' in m], sys.argv)"
    )
    result = await pool.run(ExecutionRequest(code=code))
    assert result.stdout == "['0', '1', '2', '3'] [] ['<tool>']\n"  # 3 is the listing itself


async def test_a_program_cannot_lift_its_own_bounds(pool: SandboxPool):
    code = """
import resource
for which in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC):
    soft, hard = resource.getrlimit(which)
    assert soft == hard and hard > 0, (which, soft, hard)
    try:
        resource.setrlimit(which, (hard + 1, hard + 1))
        print("LIFTED", which)
    except (ValueError, OSError):
        pass
"""
    assert (await pool.run(ExecutionRequest(code=code))).outcome is Outcome.OK


async def test_deadlines_hold_whatever_a_program_does_to_signals(pool: SandboxPool):
    code = """
import signal, threading, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
threading.Thread(target=time.sleep, args=(60,)).start()
time.sleep(60)
"""
    result = await pool.run(ExecutionRequest(code=code, limits=derived.program(wall_s=0.6)))
    assert result.outcome is Outcome.TIMEOUT
    assert 0.6 <= result.wall_s < 60.0  # the program would sleep for 60 s


DEEP = """
import os, time
for _ in range(4000):
    os.mkdir("a")
    os.chdir("a")
"""


@pytest.mark.parametrize("level", ["namespaces", "landlock"])
async def test_folders_too_deep_to_empty_at_once_are_empty_for_the_next_program(level: str):
    async with derived.pool(only=level, slots=1, warm=("lean",)) as pool:
        result = await pool.run(
            ExecutionRequest(code=f"{DEEP}print('done')", limits=derived.program(wall_s=20.0, cpu_s=20.0))
        )
        assert result.outcome is Outcome.OK or (level == "landlock" and result.outcome is Outcome.OUT_OF_MEMORY)
        after = await pool.run(ExecutionRequest(code="import os\nprint(os.listdir())"))
        assert (after.stdout, pool.stats().retried, pool.stats().workers_lost) == ("[]\n", 0, 0)


async def test_at_landlock_what_lies_deep_counts():
    async with derived.pool(only="landlock", slots=1, warm=("lean",)) as pool:
        result = await pool.run(
            ExecutionRequest(code=f"{DEEP}time.sleep(60)", limits=derived.program(wall_s=20.0, cpu_s=20.0))
        )
        assert (result.outcome, result.reason) == (Outcome.OUT_OF_MEMORY, "left too many or too large files")
        assert (pool.stats().retried, pool.stats().workers_lost) == (0, 0)


async def test_a_look_sees_what_lies_below_and_goes_no_deeper_than_it_must(tmp_path: Path):
    inner = tmp_path
    for _ in range(60):
        inner /= "d"
        inner.mkdir()
    assert not too_much_in(str(tmp_path))
    with (inner / "sparse").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, MAX_BYTES + 1)
    assert too_much_in(str(tmp_path))
    (inner / "sparse").unlink()
    (inner / "d/d/d/d/d").mkdir(parents=True)
    assert too_much_in(str(tmp_path))
    open_files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    too_much_in(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == open_files  # noqa: PTH208
    home = str(tmp_path)
    assert clear_away(home) and not tmp_path.exists()


async def test_a_folder_is_cleared_away_whatever_it_holds_or_given_up_in_time(tmp_path: Path):
    home, kept = tmp_path / "home", tmp_path / "kept"
    for number in range(600):
        (home / f"f{number}").mkdir(parents=True)
    kept.mkdir(mode=0o755)
    (kept / "file").write_text("mine")
    (home / "f0/.up-0").mkdir()
    (home / "f1/link").symlink_to(kept)
    (home / "to-folder").symlink_to(kept)
    (home / "to-file").symlink_to(kept / "file")
    (home / "f2").chmod(0)
    for name in (b"a\nb", b"\xff\xfe", b"-rf", b" ", b"\x1b[2J", b"x" * 255):
        odd = home / os.fsdecode(name)
        odd.mkdir()
        (odd / odd.name).symlink_to(kept)
    assert not clear_away(str(home), seconds=0.0)
    assert clear_away(str(home)) and not home.exists()
    assert [entry.name for entry in kept.iterdir()] == ["file"] and kept.stat().st_mode & 0o777 == 0o755


async def test_a_home_that_became_a_link_is_not_followed(tmp_path: Path):
    kept, home = tmp_path / "kept", tmp_path / "home"
    kept.mkdir(mode=0o755)
    (kept / "file").write_text("mine")
    home.symlink_to(kept)
    assert not clear_away(str(home))
    assert (kept / "file").read_text() == "mine" and kept.stat().st_mode & 0o777 == 0o755


async def test_a_folder_that_is_swapped_for_a_link_while_it_is_cleared_leads_nowhere(tmp_path: Path):
    """The race of an outlived program against the clearing, with every folder swapped in turn."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("mine")
    stop = threading.Event()

    def swap(home: Path) -> None:
        while not stop.is_set():
            for number in range(20):
                with contextlib.suppress(OSError):
                    (home / f"d{number}").rename(home / f"away{number}")
                    (home / f"d{number}").symlink_to(kept)

    for turn in range(15):
        home = tmp_path / f"home{turn}"
        for number in range(20):
            (home / f"d{number}" / "inner").mkdir(parents=True)
        stop.clear()
        racer = threading.Thread(target=swap, args=(home,))
        racer.start()
        clear_away(str(home), seconds=0.2)
        stop.set()
        racer.join()
    assert (kept / "file").read_text() == "mine" and [entry.name for entry in kept.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "change",
    [
        lambda home: (home / "file").touch(),
        lambda home: ((home / "file").touch(), (home / "file").unlink()),
        lambda home: ((home / "folder").mkdir(), (home / "folder").rmdir()),
        lambda home: (home.chmod(0o755), home.chmod(0o700)),
        lambda home: os.utime(home, ns=(0, home.stat().st_mtime_ns)),
        lambda home: ((home / "f").touch(), (home / "f").unlink(), os.utime(home, ns=(home.stat().st_mtime_ns,) * 2)),
    ],
)
async def test_whatever_is_done_to_a_folder_shows_though_it_was_put_back(
    tmp_path: Path, change: Callable[[Path], object]
):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    before = first_stamp(str(home))
    os.listdir(home)  # noqa: PTH208
    assert stamp(str(home)) == before
    change(home)
    assert stamp(str(home)) != before


async def test_a_stolen_byte_is_nothing_yet_and_not_the_end():
    reading, writing = open_pipe()
    stream = Stream()
    try:
        os.write(writing, b"x")
        os.read(reading, 1)  # by the program, after the worker was notified that there is something
        assert stream.read(reading) is None
        os.write(writing, b"y")
        assert (stream.read(reading), stream.read(reading)) == (1, None)
        os.close(writing)
        assert stream.read(reading) == 0
    finally:
        os.close(reading)


async def test_a_program_that_reads_its_own_pipe_keeps_nobody_waiting():
    code = """
import os, time
own = os.open("/proc/self/fd/1", os.O_RDONLY | os.O_NONBLOCK)
end = time.monotonic() + 0.1
while time.monotonic() < end:
    os.write(1, b"x")
    try: os.read(own, 1 << 16)
    except BlockingIOError: pass
time.sleep(60)
"""
    async with derived.pool(slots=1, warm=("lean",)) as pool:
        for _ in range(3):
            result = await pool.run(ExecutionRequest(code=code, limits=derived.program(wall_s=0.3)))
            assert result.outcome is Outcome.TIMEOUT, result
        assert (pool.stats().retried, pool.stats().workers_lost) == (0, 0)


async def test_a_worker_says_that_it_lives_while_a_killed_program_waits_for_a_core_to_end_on(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(limit_watch, "GONE_S", 0.8)
    ours, theirs = socket.socketpair()
    slow = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])  # killed, it would go at once
    handle = os.pidfd_open(slow.pid)
    watching = limit_watch.Watch(theirs, "")
    try:
        started = time.monotonic()
        watching.wait_until_gone(handle)
        assert time.monotonic() - started >= 0.8
        beats = ours.recv(1000)  # as many as there was time for
        assert beats and beats.replace(wire.reply(wire.BEAT), b"") == b""
        slow.kill()
        watching.wait_until_gone(handle)
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            ours.recv(1)
    finally:
        slow.kill()
        slow.wait()
        os.close(handle)
        ours.close()
        theirs.close()
