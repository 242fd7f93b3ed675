"""The warm server: a fresh interpreter with libraries imported, which forks workers on request.

Started by the pool with an empty environment and one descriptor, a channel to the pool. It runs
no program itself, so it never changes; when the channel closes, it ends.
"""

import functools
import gc
import inspect
import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

from sandbox.jail import build, kernel, preload, program, seccomp, wire, worker

OOM_SCORE = b"500"
# `warnings` skips frames with this file name, as it belongs to the import system.
HIDDEN_FILE = "<importlib._bootstrap>"


def main(channel: socket.socket, config: dict[str, Any]) -> None:
    """Warm up, report to the pool, and fork workers until the pool closes the channel."""
    try:
        warmth = _warm_up(config["preload_set"], config["sys_path"])
    except BaseException as error:
        channel.sendall(wire.reply(wire.FAILED, f"{type(error).__name__}: {error}".encode()))
        os._exit(1)
    channel.sendall(wire.reply(wire.HELLO, _memory().encode()))
    spec = build.JailSpec(**config["jail"])
    space = worker.address_space_bytes()
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    while True:
        _reap()
        if not poll.poll(200):
            continue
        message, files, _, _ = socket.recv_fds(channel, 4096, 1, socket.MSG_CMSG_CLOEXEC)
        if not message:
            os._exit(0)
        order = message.lstrip(wire.SERVER_PING)  # the channel is a stream: a ping and an order may arrive together
        if len(order) < len(message):
            channel.sendall(wire.reply(wire.PONG, _memory().encode()))
        if not files:
            continue
        wanted = json.loads(order)
        if os.fork() == 0:
            channel.close()
            _become_worker(socket.socket(fileno=files[0]), spec, wanted, warmth, space)
        os.close(files[0])


def forget_paths() -> None:
    """Remove the sandbox's paths from its functions: a program that prints its whole stack would show them."""
    ours = os.path.dirname(__file__)  # noqa: PTH120
    for function in gc.get_objects():
        if type(function) is types.FunctionType and function.__code__.co_filename.startswith(ours):
            function.__code__ = _without_path(function.__code__)


def _without_path(code: types.CodeType) -> types.CodeType:
    inner = [_without_path(part) if isinstance(part, types.CodeType) else part for part in code.co_consts]
    return code.replace(co_filename=HIDDEN_FILE, co_consts=tuple(inner))


def _end_stacks_at_the_program() -> None:
    """Make the functions that walk a stack stop before the sandbox's frames."""
    outer_frames = inspect.getouterframes

    def walk_stack(f: types.FrameType | None) -> Iterator[tuple[types.FrameType, int]]:
        if f is None:  # the caller's frame, found as traceback.walk_stack does, from within a generator
            f = sys._getframe().f_back.f_back.f_back.f_back  # type: ignore[union-attr]
        while f is not None and f.f_code.co_filename != HIDDEN_FILE:
            yield f, f.f_lineno
            f = f.f_back

    @functools.wraps(outer_frames)
    def getouterframes(frame: Any, context: int = 1) -> Any:
        return [found for found, _ in zip(outer_frames(frame, context), walk_stack(frame), strict=False)]

    traceback.walk_stack = walk_stack
    inspect.getouterframes = getouterframes


def _warm_up(preload_set: str, sys_path: list[str]) -> program.Warmth:
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
    reseed = preload.warm(preload_set)
    _end_stacks_at_the_program()
    warmth = program.Warmth(reseed)
    # Programs must not find the sandbox's modules. Functions that run keep them alive.
    for name in [name for name in sys.modules if name == "sandbox" or name.startswith("sandbox.")]:
        del sys.modules[name]
    sys.path_importer_cache.clear()
    gc.collect()
    gc.freeze()
    kernel.use_huge_pages()
    return warmth


def _become_worker(
    channel: socket.socket, spec: build.JailSpec, wanted: dict[str, Any], warmth: program.Warmth, space: int
) -> None:
    """Build the jail, install the base filter and serve; never returns."""
    try:
        built = build.enter(spec, wanted["number"], wanted["home"], wanted["group"], channel)
        isolated = spec.level != "process"
        if isolated:
            seccomp.base_filter().install()
        channel.sendall(wire.reply(wire.HELLO, json.dumps(built.facts).encode()))
    except BaseException as error:
        channel.sendall(wire.reply(wire.FAILED, f"{type(error).__name__}: {error}".encode()))
        os._exit(1)
    worker.main(channel, built, warmth, space, isolated=isolated)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _memory() -> str:
    return str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
