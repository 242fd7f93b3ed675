"""The sandbox for people: `python -m sandbox serve`, `run FILE`, `check CASES.json`."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from rstar_ray.config import SandboxConfig
from rstar_ray.errors import ConfigError, SandboxError
from sandbox.case_check import check_case, read_cases
from sandbox.isolation import IsolationLevel
from sandbox.limits import CEILINGS, MIB, standard_limits
from sandbox.pool import SandboxPool
from sandbox.pool_config import PoolConfig, pool_config
from sandbox.request import ExecutionRequest
from sandbox.tool_text import tool_text

TOKEN_VARIABLE = "SANDBOX_TOKEN"


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run; returns the exit status."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return asyncio.run(options.command(options))
    except (ConfigError, SandboxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sandbox", description=__doc__)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--level", default=str(IsolationLevel.NAMESPACES), choices=[str(each) for each in IsolationLevel]
    )
    common.add_argument("--allow-landlock", action="store_true", help="accept `landlock` where namespaces are refused")
    common.add_argument("--workers", type=int, default=0, help="programs at once (default: one per core)")
    commands = parser.add_subparsers(required=True)

    serve = commands.add_parser("serve", parents=[common], help="answer over HTTP as Code Judge does")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8088)
    serve.add_argument(
        "--token", default="", help=f"needed beyond loopback, and at `process` (or set {TOKEN_VARIABLE})"
    )
    serve.add_argument("--queue-size", type=int, default=SandboxConfig().max_waiting)
    serve.add_argument("--allow-host", action="append", default=[], help="a host name of this server; may be repeated")
    serve.add_argument("--max-cpu-s", type=float, default=CEILINGS.cpu_s, help="what a client may ask for at most")
    serve.add_argument("--max-wall-s", type=float, default=CEILINGS.wall_s, help="likewise")
    serve.add_argument("--max-memory-mb", type=int, default=CEILINGS.memory_bytes // MIB, help="likewise")
    serve.set_defaults(command=_serve)

    run = commands.add_parser("run", parents=[common], help="run one program and show what a model would see")
    run.add_argument("file", type=Path)
    run.add_argument("--stdin", type=Path, help="a file with the program's input")
    run.add_argument("--cpu-s", type=float, default=standard_limits().cpu_s)
    run.add_argument("--wall-s", type=float, default=standard_limits().wall_s)
    run.add_argument("--memory-mb", type=int, default=standard_limits().memory_bytes // MIB)
    run.set_defaults(command=_run)

    check = commands.add_parser("check", parents=[common], help="run a file of cases, one line each")
    check.add_argument("file", type=Path)
    check.set_defaults(command=_check)
    return parser


def _pool_config(options: argparse.Namespace) -> PoolConfig:
    config = pool_config(SandboxConfig(slots=options.workers))
    return replace(config, level=options.level, allow_landlock=options.allow_landlock)


async def _serve(options: argparse.Namespace) -> int:
    from sandbox.http.server import ServerConfig, start_server

    token = options.token or os.environ.get(TOKEN_VARIABLE, "")
    most = replace(
        CEILINGS, cpu_s=options.max_cpu_s, wall_s=options.max_wall_s, memory_bytes=options.max_memory_mb * MIB
    )
    hosts = tuple(options.allow_host)
    config = ServerConfig(host=options.host, port=options.port, token=token, allow_hosts=hosts, ceilings=most)
    async with SandboxPool(replace(_pool_config(options), queue_size=options.queue_size)) as pool:
        runner, port = await start_server(pool, config)
        print(f"sandbox: http://{config.host}:{port} level {pool.report.level}", flush=True)
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await stop.wait()
        await pool.close(drain_s=10.0)
        await runner.cleanup()
    return 0


async def _run(options: argparse.Namespace) -> int:
    named = {"cpu_s": options.cpu_s, "wall_s": options.wall_s, "memory_bytes": options.memory_mb * MIB}
    limits = replace(standard_limits(), **named)
    stdin = options.stdin.read_bytes() if options.stdin else b""
    request = ExecutionRequest(code=options.file.read_text("utf-8", "surrogateescape"), stdin=stdin, limits=limits)
    async with SandboxPool(_pool_config(options)) as pool:
        result = await pool.run(request)
    print(tool_text(result))
    print(
        f"-- {result.outcome} {result.reason} | exit {result.exit_status} signal {result.signal} "
        f"| wall {result.wall_s:.3f} s cpu {result.cpu_s:.3f} s peak {result.peak_memory_bytes / MIB:.0f} MiB "
        f"| {pool.report.level}",
        file=sys.stderr,
    )
    return 1 if result.outcome.failed else 0


async def _check(options: argparse.Namespace) -> int:
    cases = read_cases(options.file)
    contained = 0
    async with SandboxPool(_pool_config(options)) as pool:
        for case in cases:
            result, wrong = await check_case(pool, case)
            contained += not wrong
            verdict = "contained" if not wrong else f"NOT contained: {'; '.join(wrong)}"
            print(f"{case.name:28} {result.outcome:14} {result.wall_s:6.2f} s  {verdict}", flush=True)
    print(f"contained {contained} of {len(cases)}")
    return 0 if contained == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
