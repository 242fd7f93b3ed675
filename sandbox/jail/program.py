"""Runs one program in a child process, from the fork of a warm interpreter to its exit.

Everything used here is bound before the fork, because a program may change any module.
"""

import __future__

import _io
import _random
import _signal  # pyright: ignore[reportMissingImports]
import _thread
import ast
import atexit
import contextlib
import ctypes
import io
import linecache
import mmap
import os
import random
import re
import struct
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

from sandbox.jail import cut, display, kernel, wire
from sandbox.jail.seccomp import Filter

NAME = "<tool>"
# A line that is one call of print, with parentheses up to three deep; it may miss some.
_STRING = r"""'(?:[^'\\\n]|\\.)*+'|"(?:[^"\\\n]|\\.)*+\""""
_INNER = rf"""(?:[^()'"#\\\n]|{_STRING}"""
_PRINT = re.compile(rf"print\({_INNER}|\({_INNER}|\({_INNER})*+\))*+\))*+\);?")
SHARED_BYTES = 256 * 1024
MAX_VALUE_CHARS = SHARED_BYTES // 4 - 256  # of up to four bytes; the rest is for the header and the mark of a cut
SHARED_HEADER = struct.Struct("<II")  # bytes of the value's text, flags
MAX_DESCRIPTORS = 64  # 32 socket pairs of 416 KiB are the most memory that the memory limit does not count
BROKEN = 70  # exit status where our own code failed in the child
_exit = os._exit
_write = os.write
_File: Any = _io._IOBase  # pyright: ignore[reportPrivateUsage]
_generator: Any = random._inst  # type: ignore[attr-defined]
_seed: Any = _random.Random.seed
_num_threads: Callable[[], int] = _thread._count  # pyright: ignore[reportPrivateUsage]
_num_exit_functions: Callable[[], int] = atexit._ncallbacks  # pyright: ignore[reportPrivateUsage]
_shutdown_threads: Callable[[], None] = threading._shutdown  # type: ignore[attr-defined]  # joins all but daemons
_run_exit_functions = atexit._run_exitfuncs  # pyright: ignore[reportPrivateUsage]


class _Lines(list[str]):
    """The program's lines for tracebacks, split only when one is read."""

    source = ""
    last = 0  # line on which the last expression begins
    showing = False  # whether its value is being displayed

    def _split(self) -> None:
        if self.source:
            whole = self.source if self.source.endswith("\n") else self.source + "\n"  # tracebacks place carets by it
            self[:] = whole.splitlines(True)
            self.source = ""

    def __len__(self) -> int:
        self._split()
        return super().__len__()

    def __getitem__(self, index: Any) -> Any:
        self._split()
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[str]:
        self._split()
        return super().__iter__()


LINES = _Lines()


class Warmth:
    """What a warm server prepares once for all programs forked from it."""

    def __init__(self, reseed: list[Callable[[int | None], None]]) -> None:
        self.reseed = reseed
        # Exit functions that libraries registered must not run at the end of each program.
        atexit._clear()  # pyright: ignore[reportPrivateUsage]
        weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
        linecache.cache[NAME] = (0, None, LINES, NAME)
        self.main = types.ModuleType("__main__")
        self.main.__dict__.update(__builtins__=__builtins__, __annotations__={})
        # A stream asks only once whether it can seek, so it is made on a descriptor of the program's kind.
        self.file_input = _reader()  # descriptor 0 is /dev/null here
        with _pipes():
            self.pipe_input = _reader()
            # Unbuffered, so that no output is lost when a limit ends the program.
            sys.stdout = sys.__stdout__ = _writer(1)  # type: ignore[misc]
            sys.stderr = sys.__stderr__ = _writer(2)  # type: ignore[misc]


@contextlib.contextmanager
def _pipes() -> Generator[None]:
    """Replace the standard descriptors with pipes for a while."""
    before = [os.dup(descriptor) for descriptor in range(3)]
    reading, writing = os.pipe()
    try:
        for descriptor, end in enumerate((reading, writing, writing)):
            os.dup2(end, descriptor)
        yield
    finally:
        for descriptor, saved in enumerate(before):
            os.dup2(saved, descriptor)
        for each in (*before, reading, writing):
            os.close(each)


def _reader() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", "surrogateescape")


def _writer(descriptor: int) -> io.TextIOWrapper:
    raw: Any = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", newline="\n", write_through=True)


def reseed_random(seed: int | None) -> None:
    """Reseed the module's generator; without a seed only its C part, which touches fewer pages."""
    if seed is None:
        _seed(_generator)
    else:
        random.seed(seed)


def run(
    code: bytes, call: wire.CallHeader, shared: mmap.mmap, warmth: Warmth, jail_filter: Filter | None, space: int
) -> None:
    """Run one program in this process and end the process; never returns.

    Descriptors 0 to 2 are already the program's. `space` is the address space in use before it runs.
    """
    status = BROKEN
    try:
        _bind(call, warmth, jail_filter, space)
        status = _run_program(code, call, shared, warmth)
    except BaseException:
        status = BROKEN
    finally:
        _exit(status)


class _RLimit(ctypes.Structure):
    _fields_ = (("soft", ctypes.c_ulong), ("hard", ctypes.c_ulong))


_rlimit = _RLimit()
_rlimit_pointer = ctypes.byref(_rlimit)
_interrupt: Any = _signal.default_int_handler


def limit_memory(size: int) -> None:
    """Limit the address space of this process permanently."""
    _set_limit(9, size)


def limit_cpu(seconds: int) -> None:
    """Limit the CPU time of this process permanently."""
    _set_limit(0, seconds)


def limit_descriptors() -> None:
    """Limit the open files of this process permanently: pipes and sockets hold memory that no other limit counts."""
    _set_limit(7, MAX_DESCRIPTORS)


def _set_limit(which: int, bound: int) -> None:
    _rlimit.soft = _rlimit.hard = bound
    if kernel.setrlimit(which, _rlimit_pointer) < 0:
        raise OSError("setrlimit")


def _bind(call: wire.CallHeader, warmth: Warmth, jail_filter: Filter | None, space: int) -> None:
    limit_memory(space + call.memory_bytes)
    limit_cpu(int(call.cpu_s) + 2)  # the worker ends it earlier; this applies if the worker cannot
    limit_descriptors()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, 9)
    _signal.signal(2, _interrupt)  # not through `signal`, whose enums cost as much as a fork
    seed = None if call.seed < 0 else call.seed
    for reseed in warmth.reseed:
        reseed(seed)
    if jail_filter is not None:
        jail_filter.install()


def _run_program(code: bytes, call: wire.CallHeader, shared: mmap.mmap, warmth: Warmth) -> int:
    main = warmth.main
    names = main.__dict__
    sys.modules["__main__"] = main
    is_pipe = call.stdin_bytes > 0 and not call.flags & wire.STDIN_IN_FD
    sys.stdin = sys.__stdin__ = warmth.pipe_input if is_pipe else warmth.file_input  # type: ignore[misc]
    sys.excepthook = report
    status = 0
    try:
        source = code.decode("utf-8", "surrogatepass").removeprefix("\ufeff")  # a byte order mark, as in a file
        LINES.source = source
        body, last = _compile(source)
        if body is not None:
            exec(body, names)
        if last is not None:
            value = eval(last, names)
            if value is not None:
                LINES.showing = True
                _offer(value, call, shared)
                LINES.showing = False
    except SystemExit as request:
        status = _exit_status(request)
    except BaseException as error:
        status = _fail(error, shared)
    status = _finish(status, shared)
    _flush_files(names)
    return status


def _compile(source: str) -> tuple[types.CodeType | None, types.CodeType | None]:
    """Split off the last expression, unless a semicolon silences it (as in IPython).

    If the last line is a print, there is nothing to show and no syntax tree is needed. Raises SyntaxError.
    """
    try:
        if _PRINT.fullmatch(source[source.rstrip().rfind("\n") + 1 :].strip()):
            return compile(source, NAME, "exec", dont_inherit=True), None
        return _compile_in_parts(source, ast.parse(source, NAME))
    except MemoryError:  # from the parser, which has a separate stack
        trouble, line = "the source is too large or nested too deeply", 1
    except UnicodeEncodeError as error:
        trouble, line = str(error), _line_of(source, error.start)
    except (ValueError, SyntaxError) as error:
        if "\0" not in source:
            raise
        trouble, line = str(error), _line_of(source, source.index("\0"))
    raise SyntaxError(trouble, (NAME, line, None, None))


def _line_of(source: str, index: int) -> int:
    return source.count("\n", 0, index) + 1


def _compile_in_parts(source: str, tree: ast.Module) -> tuple[types.CodeType | None, types.CodeType | None]:
    body = tree.body
    if not body or not isinstance(body[-1], ast.Expr) or _silenced(source, body[-1]):
        return compile(tree, NAME, "exec", dont_inherit=True), None
    LINES.last = body[-1].lineno
    last = ast.Expression(body[-1].value)
    del body[-1]
    flags = _future_flags(body)
    rest = compile(tree, NAME, "exec", flags, dont_inherit=True) if body else None
    return rest, compile(last, NAME, "eval", flags, dont_inherit=True)


def _silenced(source: str, last: ast.Expr) -> bool:
    """True if a semicolon follows the last statement; one in a comment does not count."""
    if ";" not in source:
        return False
    lines = io.StringIO(source, newline=None).read().split("\n")[(last.end_lineno or 1) - 1 :]
    after = lines[0].encode()[last.end_col_offset :].decode() + "\n".join(lines[1:])
    return after.lstrip(" \t\f\n\\").startswith(";")


def _future_flags(body: list[ast.stmt]) -> int:
    flags = 0
    for statement in body:
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            for alias in statement.names:
                feature = getattr(__future__, alias.name, None)  # the compiler reports an invalid name
                flags |= getattr(feature, "compiler_flag", 0)
    return flags


def _offer(value: Any, call: wire.CallHeader, shared: mmap.mmap) -> None:
    """Write the value's text to shared memory; the pool shows it if nothing was printed."""
    if _printed_something():
        return
    text = display.show(value)
    limit = min((call.out_head + call.out_tail) // 4, MAX_VALUE_CHARS)
    kept, missing = cut.cut_text(text, limit, cut.STDOUT_HEAD_SHARE)
    data = kept.encode("utf-8", "backslashreplace")[: SHARED_BYTES - 64]
    shared[SHARED_HEADER.size : SHARED_HEADER.size + len(data)] = data
    SHARED_HEADER.pack_into(shared, 0, len(data), missing << 1)


def _printed_something() -> bool:
    """True if bytes wait in the pipe; the worker knows which bytes it has already read."""
    import fcntl

    waiting = bytearray(4)
    try:
        sys.stdout.flush()
        fcntl.ioctl(1, 0x541B, waiting)
    except (OSError, ValueError, AttributeError):
        return False
    return any(waiting)


def report(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Print a traceback of the program's own frames to descriptor 2 (as `sys.excepthook`)."""
    while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
        trace = trace.tb_next
    try:
        shown = traceback.TracebackException(kind, error, trace, compact=True)
        if LINES.showing:  # the expression's frame has already ended
            shown.stack.insert(0, traceback.FrameSummary(NAME, LINES.last, "<module>"))
        text = "".join(shown.format())
    except BaseException:
        text = f"{kind.__name__}\n"
    _tell(text)


def _tell(text: str) -> None:
    """Write to descriptor 2, which the program may have closed."""
    data = text.encode("utf-8", "backslashreplace")
    try:
        while data:
            data = data[_write(2, data) :]
    except OSError:
        pass


def _fail(error: BaseException, shared: mmap.mmap) -> int:
    if isinstance(error, MemoryError):
        # Only a hint that makes an error more precise: the exit status decides the outcome.
        shared[4:8] = wire.MEMORY_ERROR.to_bytes(4, "little")
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:
        report(type(error), error, error.__traceback__)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _exit_status(request: SystemExit) -> int:
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF
    try:
        line = f"{request.code!s}\n"
    except BaseException:
        line = "\n"  # as CPython, which ignores the error
    _tell(line)
    return 1


def _finish(status: int, shared: mmap.mmap) -> int:
    """What the interpreter does at its end: join threads, run exit functions, flush."""
    try:
        if _num_threads():
            _shutdown_threads()
        if _num_exit_functions():
            _run_exit_functions()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except SystemExit as request:
        return _exit_status(request)
    except (OSError, ValueError, AttributeError):
        return status  # the program closed or replaced its streams
    except BaseException as error:
        return _fail(error, shared)
    return status


def _flush_files(names: dict[str, Any]) -> None:
    """Flush the files among the program's global names; like the interpreter at its end, ignore every error."""
    try:
        for value in [*names.values()]:
            try:
                if issubclass(type(value), _File):
                    value.flush()
            except BaseException:
                continue
    except BaseException:  # no memory for the list, or a signal's handler raised it
        pass
