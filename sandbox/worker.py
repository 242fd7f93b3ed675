"""The warm server: a fresh interpreter with libraries imported, which forks cells on request.

Started by the pool with an empty environment and one descriptor, a channel to the pool. It runs
no program itself, so it never changes; when the channel closes, it ends.
"""

import gc
import json
import os
import resource
import select
import signal
import socket
import sys
from typing import Any

from sandbox import cage, cell, flavors, kernel, program, seccomp, wire

OOM_SCORE = b"500"


def main(channel: socket.socket, config: dict[str, Any]) -> None:
    """Warm up, say so, and fork cells until the pool is gone."""
    try:
        warmth = _warm_up(config["flavor"], config["sys_path"])
    except BaseException as error:
        channel.sendall(wire.reply(wire.FAILED, f"{type(error).__name__}: {error}".encode()))
        os._exit(1)
    channel.sendall(wire.reply(wire.HELLO, _memory().encode()))
    spec = cage.CageSpec(**config["cage"])
    space = cell.address_space_bytes()
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    while True:
        _reap()
        if not poll.poll(200):
            continue
        message, files, _, _ = socket.recv_fds(channel, 4096, 1, socket.MSG_CMSG_CLOEXEC)
        if not message:
            os._exit(0)
        if not files:
            channel.sendall(wire.reply(wire.PONG, _memory().encode()))
            continue
        order = json.loads(message)
        if os.fork() == 0:
            channel.close()
            _become_cell(socket.socket(fileno=files[0]), spec, order["number"], order["home"], warmth, space)
        os.close(files[0])


def _warm_up(flavor: str, sys_path: list[str]) -> program.Warmth:
    sys.path[:] = sys_path
    sys.argv[:] = [program.NAME]
    sys.orig_argv[:] = ["python"]
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    try:
        with open("/proc/self/oom_score_adj", "wb") as score:  # noqa: PTH123
            score.write(OOM_SCORE)
    except OSError:
        pass
    import site

    site.setquit()
    site.setcopyright()
    site.sethelper()
    reseed = flavors.warm(flavor)
    warmth = program.Warmth(reseed)
    # The sandbox's own modules stay alive through the functions that run, out of programs' sight.
    for name in [name for name in sys.modules if name == "sandbox" or name.startswith("sandbox.")]:
        del sys.modules[name]
    sys.path_importer_cache.clear()
    gc.collect()
    gc.freeze()
    kernel.use_huge_pages()
    return warmth


def _become_cell(
    channel: socket.socket, spec: cage.CageSpec, number: int, home: str, warmth: program.Warmth, space: int
) -> None:
    """Build the cage, install the base filter and serve; never returns."""
    try:
        built = cage.enter(spec, number, home, channel)
        caged = spec.level != "process"
        if caged:
            seccomp.base_filter().install()
        channel.sendall(wire.reply(wire.HELLO, json.dumps(built.facts).encode()))
    except BaseException as error:
        channel.sendall(wire.reply(wire.FAILED, f"{type(error).__name__}: {error}".encode()))
        os._exit(1)
    cell.main(channel, built, warmth, space, caged=caged)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _memory() -> str:
    return str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
