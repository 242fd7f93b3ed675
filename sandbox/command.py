"""Runs a command of the user, such as an agent, in a separate jail whose network has only one address.

The command sees its folder and its interpreter, both read-only, and a small private folder in memory (HOME). Its only
address is 127.0.0.1, where a process outside answers: the listening socket is created in the jail and passed outside.
"""

import asyncio
import contextlib
import errno
import functools
import itertools
import json
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rstar_ray.errors import ConfigError, SandboxError
from sandbox.cgroups import Groups, find_groups
from sandbox.isolation import POOL_UIDS, IsolationLevel, choose_first_uid, fix_for, read_host
from sandbox.jail.build import HOME, JailSpec, outermost
from sandbox.limits import MIB
from sandbox.processes import ENVIRONMENT, ROOT, sealed_file

OPTION = "--agent.command"
"""Named by the errors."""
SCRATCH_BYTES = 256 * MIB
SCRATCH_FILES = 16_384
MAX_PROCESSES = 128
START_S = 60.0
GONE_S = 20.0
KEPT_BYTES = 64 * 1024
"""Bytes kept of the end of each stream."""
MAX_CONNECTIONS = 256
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables of our process that are not passed to an unconfined command."""
_NUMBERS = itertools.cycle(range(POOL_UIDS))
_first_uid = functools.cache(choose_first_uid)  # of this process's commands
_BOOT = (
    "import sys,socket,json;c=socket.socket(fileno=int(sys.argv[1]));o=json.load(open(int(sys.argv[2])));"
    "sys.path.insert(0,o['root']);from sandbox.jail import command;command.main(c,o)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command, and the folders that it may read."""

    argv: tuple[str, ...]  # the first is an absolute path
    folder: str  # working folder
    trees: tuple[str, ...]  # read-only: the folder, the interpreter
    memory_bytes: int  # limit of each process, and of all together if control groups are delegated
    confined: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEnd:
    """How a command ended."""

    exit_status: int  # negative: number of the signal that ended it
    left: int  # remaining processes, which were ended
    stdout: str  # the last part of it
    stderr: str


class CommandLost(SandboxError):
    """The first process of the jail ended without a report, for which the command is not to blame."""


def read_command(text: str, folder: str, *, memory_mb: int, confined: bool) -> Command:
    """A command as a shell would split it, relative to a folder. Raises `ConfigError`."""
    try:
        words = shlex.split(text)
    except ValueError as wrong:
        raise ConfigError(OPTION, f"cannot be read ({wrong})", "close its quotes") from wrong
    where = os.path.realpath(folder)
    path = ENVIRONMENT["PATH"] if confined else os.environ.get("PATH", os.defpath)
    first = words[0] if words else ""
    program = str(Path(where, first)) if "/" in first else shutil.which(first, path=path) or ""
    if not program or not os.access(program, os.X_OK) or not Path(program).is_file():
        raise ConfigError(OPTION, f"no program {first!r} in {where}", "give its path from --own-folder")
    if confined and where == "/":
        raise ConfigError("--own-folder", "the command would see every file", "give a folder with only the agent")
    trees = outermost([where, *_interpreter(Path(program))])
    return Command(
        argv=(program, *words[1:]),
        folder=where,
        trees=tuple(trees),
        memory_bytes=memory_mb * MIB,
        confined=confined,
    )


def _interpreter(program: Path) -> list[str]:
    """Folders that a program needs: itself or its virtual environment, and the base Python of that."""
    found, real = [str(program)], Path(os.path.realpath(program))
    settings = program.parent.parent / "pyvenv.cfg"
    if settings.is_file():
        lines = [line.partition("=") for line in settings.read_text("utf-8", "replace").splitlines()]
        pythons = [value.strip() for name, _, value in lines if name.strip() == "home"]
        found = [str(settings.parent), *(str(Path(home).parent) for home in pythons)]
    if real.name.startswith("python") and (real.parent.parent / "lib").is_dir():
        found.append(str(real.parent.parent))
    return [path for path in found if path != "/"]


class RunningCommand:
    """One command from its start to its end."""

    def __init__(
        self, channel: socket.socket, listener: socket.socket | None, streams: Sequence[asyncio.Task[str]]
    ) -> None:
        self.listener = listener  # at the command's address; None if it is not confined
        self._channel = channel
        self._streams = streams

    async def end(self) -> CommandEnd:
        """Wait for the command's end. Raises `CommandLost`."""
        said = await asyncio.get_running_loop().sock_recv(self._channel, 4096)
        await asyncio.wait(self._streams)  # unlike gather, leaves them running if this task is cancelled
        stdout, stderr = (stream.result() for stream in self._streams)
        end: dict[str, Any] = json.loads(said) if said else {}
        if end.get("status") is None:
            raise CommandLost(str(end.get("failed", "the command's first process was killed")))
        return CommandEnd(
            exit_status=os.waitstatus_to_exitcode(end["status"]), left=end["left"], stdout=stdout, stderr=stderr
        )


@asynccontextmanager
async def running(command: Command, env: Mapping[str, str]) -> AsyncGenerator[RunningCommand]:
    """Start a command; on exit, the command and all its processes are ended.

    `env`: its environment in addition to PATH, HOME, TMPDIR and LANG; an unconfined command has ours too. Raises
    `SandboxError` if it does not start.
    """
    groups = find_groups(f"command-{os.getpid()}") if command.confined else None
    number = next(_NUMBERS)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    launcher: asyncio.subprocess.Process | None = None
    pidfd, listener = -1, None
    streams: list[asyncio.Task[str]] = []
    try:
        with theirs:
            order = sealed_file(json.dumps(_order(command, env, number, groups)).encode())
            try:
                launcher = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _BOOT),
                    *(str(theirs.fileno()), str(order)),
                    env=ENVIRONMENT,
                    cwd="/",
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    pass_fds=(theirs.fileno(), order),
                )
            finally:
                os.close(order)
        assert launcher.stdout is not None and launcher.stderr is not None
        streams = [asyncio.create_task(_end_of(stream)) for stream in (launcher.stdout, launcher.stderr)]
        try:
            pidfd = (await _received(ours))[1][0]
            if command.confined:
                listener = socket.socket(fileno=(await _received(ours))[1][0])
            await _received(ours)
        except OSError as error:
            raise SandboxError(f"the command does not start: {error}") from error
        yield RunningCommand(ours, listener, streams)
    finally:
        ours.close()  # ends the command
        if listener is not None:
            listener.close()
        try:
            if launcher is not None:
                await _to_the_end(_ended(launcher, pidfd, streams))
        finally:
            if groups is not None:
                groups.remove(number)


async def check_command(command: Command) -> None:
    """Raise `ConfigError` if the command cannot be isolated here, or cannot be read inside its jail."""
    test = ("/bin/sh", "-c", 'test -r . && test -x "$0"', command.argv[0])
    try:
        async with running(replace(command, argv=test), {}) as probe:
            end = await probe.end()
    except SandboxError as refused:
        fix = fix_for(IsolationLevel.NAMESPACES, read_host()).partition(" Or accept")[0].removesuffix(".")
        hint = f"{fix}; or --agent.unconfined: it then has your rights"
        raise ConfigError(OPTION, f"it cannot be isolated here ({refused})", hint) from refused
    if end.exit_status:
        hint = "let every user read and enter them (chmod -R o+rX)"
        raise ConfigError(OPTION, f"its jail cannot read {command.folder} and {command.argv[0]}", hint)


def _order(command: Command, env: Mapping[str, str], number: int, groups: Groups | None) -> dict[str, Any]:
    spec = JailSpec(
        level="process" if groups is None else "namespaces",
        trees=list(command.trees),
        scratch_bytes=SCRATCH_BYTES,
        scratch_files=SCRATCH_FILES,
        first_uid=_first_uid(),
        max_threads=MAX_PROCESSES,
        loopback=True,
    )
    group = ""
    if groups is not None:
        group = groups.make(number, MAX_PROCESSES)
        groups.bound(number, command.memory_bytes)
    inside = {name: ENVIRONMENT[name] for name in ("PATH", "LANG")} | {"HOME": HOME, "TMPDIR": HOME}
    outside = {name: value for name, value in os.environ.items() if name.upper() not in FOREIGN}
    return {
        "root": ROOT,
        "jail": spec._asdict(),
        "number": number,
        "group": group,
        "argv": command.argv,
        "folder": command.folder,
        "memory_bytes": command.memory_bytes,
        "env": (outside if groups is None else inside) | dict(env),
    }


async def _received(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive one message with its descriptors. Raises OSError."""
    ready = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().add_reader(channel.fileno(), lambda: ready.done() or ready.set_result(None))
    try:
        await asyncio.wait_for(ready, START_S)
    except TimeoutError as silent:
        raise OSError(errno.ETIMEDOUT, f"no answer within {START_S:g} s") from silent
    finally:
        asyncio.get_running_loop().remove_reader(channel.fileno())
    said, files, _, _ = socket.recv_fds(channel, 64 * 1024, 1)
    if not said:
        raise OSError(errno.ECHILD, "its first process ended without a report")
    found: dict[str, Any] = {} if said == b"\0" else json.loads(said)
    if failed := found.get("failed"):
        raise OSError(errno.EPERM, failed)
    return found, list(files)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Complete `work` even if this task is cancelled meanwhile; then raises CancelledError."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


async def _ended(launcher: asyncio.subprocess.Process, pidfd: int, streams: Sequence[asyncio.Task[str]]) -> None:
    """Wait for the end of a command whose channel is closed, and close its pipes and descriptors."""
    if pidfd >= 0:
        try:
            await _gone(pidfd)
        finally:
            os.close(pidfd)
    else:
        with contextlib.suppress(ProcessLookupError):
            launcher.kill()
    await launcher.wait()
    if streams:
        await asyncio.wait(streams, timeout=GONE_S)
    for stream in streams:
        stream.cancel()


async def _gone(pidfd: int) -> None:
    """Wait until a process has ended; kill it after `GONE_S`."""
    loop = asyncio.get_running_loop()
    gone = loop.create_future()
    loop.add_reader(pidfd, lambda: gone.done() or gone.set_result(None))
    try:
        await asyncio.wait_for(asyncio.shield(gone), GONE_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        loop.remove_reader(pidfd)


async def _end_of(stream: asyncio.StreamReader) -> str:
    kept = b""
    while data := await stream.read(KEPT_BYTES):
        kept = (kept + data)[-KEPT_BYTES:]
    return kept.decode("utf-8", "replace")


async def forward(listener: socket.socket, port: int) -> asyncio.Server:
    """Forward connections from a command's address to `port` of this machine's 127.0.0.1."""
    busy = 0

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal busy
        busy += 1
        with contextlib.suppress(OSError):
            if busy <= MAX_CONNECTIONS:
                up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    ways = [_carried(reader, up_writer), _carried(up_reader, writer)]
                    await asyncio.wait([asyncio.ensure_future(way) for way in ways], return_when="FIRST_COMPLETED")
                finally:
                    up_writer.close()
        writer.close()
        busy -= 1

    return await asyncio.start_server(carry, sock=listener)


async def _carried(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(64 * 1024):
            writer.write(data)
            await writer.drain()
