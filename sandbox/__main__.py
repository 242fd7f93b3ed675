"""Command line of the sandbox: `python -m sandbox serve`, `run FILE`, `check CASES.json`.

A server reads its clients' token from SANDBOX_TOKEN; it is required beyond loopback and at level `process`.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from rstar_ray.config import SandboxConfig
from rstar_ray.config.machines import CALL_ROOM, MOST_PROGRAM_S, Isolation
from rstar_ray.config.options import options_of
from rstar_ray.errors import ConfigError, SandboxError
from sandbox.case_check import check_case, read_cases
from sandbox.limits import CEILINGS, MIB, program_limits, standard_limits
from sandbox.outcomes import tool_text
from sandbox.pool import SandboxPool
from sandbox.request import ExecutionRequest

if TYPE_CHECKING:
    from sandbox.http.server import ServerConfig

OPTIONS = {
    "--sandbox.slots": "--workers",
    "--sandbox.max-waiting": "--queue-size",
    "--sandbox.time-limit-s": "--cpu-s",
    "--sandbox.wall-limit-s": "--wall-s",
    "--sandbox.memory-mb": "--memory-mb",
}
"""Options here, by the name of a run's setting; other settings of server and pool keep their names."""
LONGEST_CALL_S = MOST_PROGRAM_S * CALL_ROOM


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    level: Isolation = SandboxConfig().level
    """required isolation; `landlock` uses namespaces where it can, `process` is for trusted programs only"""
    workers: int = 0
    """concurrent programs; 0 is one per core"""


@dataclass(frozen=True, kw_only=True)
class ServerOptions(PoolOptions):
    """Serve programs over HTTP, with the API of Code Judge."""

    host: str = "127.0.0.1"
    port: int = 8088
    queue_size: int = SandboxConfig().max_waiting
    """maximum waiting calls; more are refused"""
    allow_host: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """a host name of this server; may be repeated"""
    max_cpu_s: float = CEILINGS.cpu_s
    """highest limit that a client may request"""
    max_wall_s: float = CEILINGS.wall_s
    """highest limit that a client may request"""
    max_memory_mb: int = CEILINGS.memory_bytes // MIB
    """highest limit that a client may request"""


@dataclass(frozen=True, kw_only=True)
class RunOptions(PoolOptions):
    """Run one program and print its result as a model would see it."""

    file: Annotated[Path, tyro.conf.Positional]
    stdin: Path | None = None
    """a file with the program's input"""
    cpu_s: float = SandboxConfig().time_limit_s
    """CPU time limit [s]"""
    wall_s: float = SandboxConfig().wall_limit_s
    """wall time limit [s]; 0: 1.5 times the CPU time limit plus 1 s"""
    memory_mb: int = SandboxConfig().memory_mb
    """memory limit, in addition to the warm interpreter [MiB]"""


@dataclass(frozen=True, kw_only=True)
class CheckOptions(PoolOptions):
    """Run a file of cases and print one line per case."""

    file: Annotated[Path, tyro.conf.Positional]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run; returns the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    command = COMMANDS.get(words[0]) if words else None
    if command is None:
        asked = {"-h", "--help"} & set(words)
        print(f"usage: python -m sandbox {{{','.join(COMMANDS)}}} [OPTIONS]", file=None if asked else sys.stderr)
        return 0 if asked else 2
    kind, act = command
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        options = options_of(kind, words[1:], program=f"python -m sandbox {words[0]}", description=kind.__doc__)
        return asyncio.run(act(options))
    except ConfigError as refused:
        message = f"error: {_as_option(refused.field)}: {refused.problem}. Hint: {refused.hint}"
        for setting, option in OPTIONS.items():
            message = message.replace(setting, option)
        print(message, file=sys.stderr)
        return 2
    except SandboxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _as_option(field: str) -> str:
    """The option for a field of the settings."""
    named = field.startswith("-") or field == "file" or field.isupper()  # option, argument or environment variable
    return field if named else f"--{field.replace('_', '-')}"


def _server_config(options: ServerOptions) -> "ServerConfig":
    from sandbox.http.server import TOKEN_VARIABLE, ServerConfig

    token = os.environ.get(TOKEN_VARIABLE, "")
    try:
        most = replace(
            CEILINGS, cpu_s=options.max_cpu_s, wall_s=options.max_wall_s, memory_bytes=options.max_memory_mb * MIB
        )
    except ValueError as refused:
        name, _, problem = str(refused).removeprefix("limits.").partition(": ")
        raise ConfigError(_ceiling_option(name), problem, "give one between the two") from None
    if above := standard_limits().above(most):
        least = getattr(standard_limits(), above) / (MIB if above == "memory_bytes" else 1)
        raise ConfigError(_ceiling_option(above), "a call that names none gets more", f"give at least {least:g}")
    return ServerConfig(
        host=options.host, port=options.port, token=token, allow_hosts=options.allow_host, ceilings=most
    )


def _config(options: PoolOptions, **settings: Any) -> SandboxConfig:
    return SandboxConfig(level=options.level, slots=options.workers, **settings)


def _ceiling_option(name: str) -> str:
    return f"--max-{name.replace('_', '-').replace('memory-bytes', 'memory-mb')}"


@contextlib.contextmanager
def _reading(path: Path, named: str = "file") -> Generator[None, None, None]:
    """Raise ConfigError if reading the file fails, or if its content is invalid."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError) as refused:
        reason = f"{type(refused).__name__}: {refused}"
        raise ConfigError(named, f"{path}: {reason}", "give a file that can be read") from None


async def _serve(options: ServerOptions) -> int:
    from sandbox.http.server import start_server

    config = _server_config(options)
    async with SandboxPool(_config(options, max_waiting=options.queue_size)) as pool:
        runner, port = await start_server(pool, config)
        print(f"sandbox: http://{config.host}:{port} level {pool.report.level}", flush=True)
        await _stop_signal()
        await pool.close(drain_s=10.0)
        await runner.cleanup()
    return 0


async def _stop_signal() -> None:
    """Wait for SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()


async def _run(options: RunOptions) -> int:
    config = _config(
        options,
        time_limit_s=options.cpu_s,
        wall_limit_s=options.wall_s,
        memory_mb=options.memory_mb,
        deadline_s=LONGEST_CALL_S,
    )
    limits = program_limits(config)
    stdin = b""
    if options.stdin:
        with _reading(options.stdin, "--stdin"):
            stdin = options.stdin.read_bytes()
    with _reading(options.file):
        request = ExecutionRequest(code=options.file.read_text("utf-8", "surrogateescape"), stdin=stdin, limits=limits)
    async with SandboxPool(config) as pool:
        result = await pool.run(request, deadline_s=SandboxConfig().deadline_s)
    print(tool_text(result))
    print(
        f"-- {result.outcome} {result.reason} | exit {result.exit_status} signal {result.signal} "
        f"| wall {result.wall_s:.3f} s cpu {result.cpu_s:.3f} s peak {result.peak_memory_bytes / MIB:.0f} MiB "
        f"| {pool.report.level}",
        file=sys.stderr,
    )
    return 1 if result.outcome.failed else 0


async def _check(options: CheckOptions) -> int:
    with _reading(options.file):
        cases = read_cases(options.file)
    contained = 0
    async with SandboxPool(_config(options)) as pool:
        for case in cases:
            result, wrong = await check_case(pool, case)
            contained += not wrong
            verdict = "contained" if not wrong else f"NOT contained: {'; '.join(wrong)}"
            print(f"{case.name:28} {result.outcome:14} {result.wall_s:6.2f} s  {verdict}", flush=True)
    print(f"contained {contained} of {len(cases)}")
    return 0 if contained == len(cases) else 1


COMMANDS: dict[str, tuple[Any, Callable[[Any], Coroutine[Any, Any, int]]]] = {
    "serve": (ServerOptions, _serve),
    "run": (RunOptions, _run),
    "check": (CheckOptions, _check),
}


if __name__ == "__main__":
    sys.exit(main())
