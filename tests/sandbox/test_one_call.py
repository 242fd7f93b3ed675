"""One program in, one result out."""

from pathlib import Path

import pytest

import sandbox
from rstar_ray.outcome import Outcome
from sandbox.outcomes import tool_text
from sandbox.pool import SandboxPool
from sandbox.request import ExecutionRequest, ExecutionResult
from tests import derived

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def run(pool: SandboxPool, code: str, stdin: str = "", **limits: float) -> ExecutionResult:
    return await pool.run(ExecutionRequest(code=code, stdin=stdin, limits=derived.program(**limits)))  # type: ignore[arg-type]


async def test_a_byte_order_mark_before_a_program_is_not_part_of_it(pool: SandboxPool):
    assert tool_text(await run(pool, "\ufeffprint(1 + 1)")) == "2"
    assert tool_text(await run(pool, "\ufeffx = 6\nx * 7")) == "42"
    failed = await run(pool, "\ufeff1 / 0")
    assert "\n    1 / 0\n    ~~^~~\n" in failed.stderr
    assert (await run(pool, "x = '\ufeff'\nprint(len(x))")).stdout == "1\n"


@pytest.mark.parametrize(
    "code, shown",
    [
        ("x = 6\nx * 7", "42"),
        ("'a' + 'b'", "'ab'"),
        ("None", ""),
        ("1 + 1;", ""),
        ("print('p')\n5", "p"),
        ("5; # quiet", ""),
        ("(5) ;", ""),
        ("'é'  \\\n  ;\n", ""),
        ("x = 1; 5", "5"),
        ("5 # a;", "5"),
        ("5\n# a;", "5"),
        ("'a;'", "'a;'"),
        ("print('x') if 0 else 7", "7"),
        ("None and print(1) or 7", "7"),
        ("print(')') if 0 else (7)", "7"),
        ("print((('x')), end=';')", "x;"),
        ("print('x'); 7", "x"),
        ("1 if 1 else print('a') # print(2)", "1"),
    ],
)
async def test_a_program_that_prints_nothing_shows_its_last_value_as_ipython_would(
    pool: SandboxPool, code: str, shown: str
):
    assert tool_text(await run(pool, code)) == shown


@pytest.mark.parametrize(("num_bytes", "is_pipe"), [(1, True), (4_096, True), (4_097, False), (1 << 20, False)])
async def test_input_is_piped_where_it_fits_into_a_pipe_of_one_page(pool: SandboxPool, num_bytes: int, is_pipe: bool):
    code = "import os, stat, sys\nprint(stat.S_ISFIFO(os.fstat(0).st_mode), len(sys.stdin.read()))"
    assert (await run(pool, code, stdin="x" * num_bytes)).stdout == f"{is_pipe} {num_bytes}\n"


@pytest.mark.parametrize(("length", "cut"), [(40_000, 0), (65_278, 0), (70_000, 4_722)])
async def test_a_value_is_kept_up_to_its_limit_in_characters(pool: SandboxPool, length: int, cut: int):
    shown = await run(pool, f"'\U0001f600' * {length}", stdout_chars=100_000)
    assert (shown.value_cut_chars, shown.value.count("\U0001f600")) == (cut, length - cut)


@pytest.mark.parametrize(
    "code, end",
    [
        ("from __future__ import braces\n5", '  File "<tool>", line 1\nSyntaxError: not a chance\n'),
        ("x = 1\n'\0'", '  File "<tool>", line 2\nSyntaxError: source code string cannot contain null bytes\n'),
        ("x = 1\n'\ud800'", "surrogates not allowed\n"),
        ("-" * 100_000 + "1", '  File "<tool>", line 1\nSyntaxError: the source is too large or nested too deeply\n'),
        (
            "class A:\n  def __repr__(self): return 1 / 0\nA()",
            'File "<tool>", line 3, in <module>\n    A()\n  File "<tool>", line 2, in __repr__\n'
            "    def __repr__(self): return 1 / 0\n                               ~~^~~\n"
            "ZeroDivisionError: division by zero\n",
        ),
        ("x = 10**5000\nx", "  x\n"),
    ],
)
async def test_an_error_names_its_line(pool: SandboxPool, code: str, end: str):
    result = await run(pool, code)
    assert result.outcome is Outcome.ERROR
    assert 'File "<tool>", line ' in result.stderr
    assert (end in result.stderr) if end == "  x\n" else result.stderr.endswith(end), result.stderr


@pytest.mark.parametrize("end, status", [("1 / 0", 1), ("sys.exit('m')", 1), ("sys.exit(3)", 3), ("pass", 0)])
async def test_without_a_stderr_a_program_still_ends_as_it_would(pool: SandboxPool, end: str, status: int):
    result = await run(pool, f"import atexit, os, sys\natexit.register(os.write, 1, b'bye')\nos.close(2)\n{end}")
    assert (result.exit_status, result.stdout) == (status, "bye")


async def test_a_time_out_cannot_be_forged(pool: SandboxPool):
    result = await run(pool, "import os, signal\nos.kill(os.getpid(), signal.SIGXCPU)")
    assert (result.outcome, result.reason) == (Outcome.KILLED, "ended by SIGXCPU")


async def test_a_forged_value_is_no_longer_than_allowed(pool: SandboxPool):
    code = """
import ctypes, struct
for line in open("/proc/self/maps"):
    place, mode, _, _, _, *name = line.split(None, 5)
    low, high = (int(end, 16) for end in place.split("-"))
    if "s" in mode and high - low == 256 * 1024:
        data = b"x" * 200_000
        ctypes.memmove(low, struct.pack("<II", len(data), 0xFFFFFFFE) + data, 8 + len(data))
"""
    result = await run(pool, code)
    assert result.outcome is Outcome.OK and 1000 < len(result.value) < 1100
    assert result.value_cut_chars == 199_000


@pytest.mark.parametrize(
    "code",
    [
        "import traceback\ndef f(): traceback.print_stack()\nf()",
        "import logging\nlogging.warning('x', stack_info=True)",
        "import sys, traceback\nprint(traceback.StackSummary.extract(traceback.walk_stack(None)).format())",
        "import inspect\nprint([(frame.filename, frame.lineno) for frame in inspect.stack()])",
        "import faulthandler\nfaulthandler.dump_traceback()",
        "import faulthandler, os\nfaulthandler.enable()\nos.abort()",
        "import atexit, traceback\natexit.register(traceback.print_stack)\nprint('<tool>')",
        "import sys\nframe = sys._getframe()\nwhile frame: print(frame); frame = frame.f_back",
    ],
)
async def test_a_stack_names_the_programs_own_lines_and_no_path_of_ours(pool: SandboxPool, code: str):
    result = await run(pool, code, stdout_chars=9000, stderr_chars=9000)
    shown = result.stdout + result.stderr
    assert "<tool>" in shown and str(Path(sandbox.__file__).parent) not in shown
    if "stack" in code and "faulthandler" not in code:
        assert "_run_program" not in shown and "<string>" not in shown and "importlib" not in shown


async def test_a_warning_about_the_caller_of_nobody_names_no_file_of_ours(pool: SandboxPool):
    result = await run(pool, "import warnings\nwarnings.warn('w', stacklevel=2)")
    assert result.stderr in ("<string>:1: UserWarning: w\n", "sys:1: UserWarning: w\n", "<sys>:0: UserWarning: w\n")


async def test_a_timeout_keeps_what_was_printed_even_unflushed(pool: SandboxPool):
    result = await run(pool, "print('so far', end='')\nwhile True: pass", cpu_s=0.5, wall_s=60.0)
    assert (result.outcome, result.stdout) == (Outcome.TIMEOUT, "so far")
    assert tool_text(result) == "so far\nExecution timed out."


async def test_cpu_time_decides_for_a_working_program(pool: SandboxPool):
    result = await run(pool, "while True: pass", cpu_s=0.3, wall_s=60)
    assert result.outcome is Outcome.TIMEOUT
    assert 0.25 < result.cpu_s < 5.0


async def test_cut_output_says_how_much_is_missing(pool: SandboxPool):
    result = await run(pool, "print('é' * 5000)", stdout_chars=100)
    assert result.stdout_cut_chars == 4901
    assert "4901 characters cut" in result.stdout and "�" not in result.stdout


async def test_bytes_that_are_not_text_survive(pool: SandboxPool):
    result = await run(pool, "import os\nos.write(1, b'a\\xff\\x00b')\nprint('\\ud800')")
    assert result.outcome is Outcome.OK
    assert result.stdout == "a�\x00b\\ud800\n"


async def test_stdin_is_read_and_ends(pool: SandboxPool):
    assert (await run(pool, "print(input()[::-1])", "abc\n")).stdout == "cba\n"
    assert "EOFError" in (await run(pool, "input()")).stderr


async def test_each_call_draws_its_own_random_numbers_unless_seeded(pool: SandboxPool):
    code = "import random, numpy\nprint(random.random(), numpy.random.rand())"
    free = {(await run(pool, code)).stdout for _ in range(4)}
    assert len(free) == 4
    seeded = {(await pool.run(ExecutionRequest(code=code, seed=7))).stdout for _ in range(3)}
    assert len(seeded) == 1


SEEKS = """
import os, sys
def can_seek(descriptor):
    try: return os.lseek(descriptor, 0, os.SEEK_CUR) == 0
    except OSError: return False
for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
    stream = getattr(sys, name)
    assert stream.seekable() == stream.buffer.seekable() == can_seek(descriptor), name
    assert getattr(sys, f"__{name}__") is stream, name
print(len(sys.stdin.read()))
"""


@pytest.mark.parametrize("stdin", ["", "5\n", "5\n" * 20_000], ids=["empty", "short", "long"])
async def test_a_standard_stream_says_correctly_whether_it_can_seek(pool: SandboxPool, stdin: str):
    result = await run(pool, SEEKS, stdin)
    assert (result.stdout, result.stderr) == (f"{len(stdin)}\n", "")


@pytest.mark.parametrize("stdin", ["a\né\n", "a\né\n" + "b" * 40_000], ids=["short", "long"])
@pytest.mark.parametrize(
    "change",
    [
        "sys.stdout.reconfigure(encoding='utf-8')\nsys.stderr.reconfigure(line_buffering=True)",
        "sys.stdin.reconfigure(errors='replace')",
        "sys.stdin = io.TextIOWrapper(sys.stdin.buffer, 'utf-8')",
        "sys.stdout = io.TextIOWrapper(sys.stdout.buffer, 'utf-8')\n"
        "sys.stderr = io.TextIOWrapper(sys.stderr.buffer, 'utf-8')",
        "sys.stdout = io.TextIOWrapper(sys.stdout.detach(), 'utf-8')",
    ],
)
async def test_standard_streams_can_be_changed_and_wrapped(pool: SandboxPool, change: str, stdin: str):
    code = f"import io, sys\n{change}\nprint('é' in sys.stdin.read(), 'é')\nprint('ü', file=sys.stderr)"
    result = await run(pool, code, stdin)
    assert (result.stdout, result.stderr) == ("True é\n", "ü\n")


@pytest.mark.parametrize("level", ["namespaces", "landlock"])
async def test_standard_streams_have_names_in_dev(level: str):
    code = """
read = open("/dev/stdin").read()
print(len(read), file=open("/dev/stdout", "w"))
print("later", file=open("/dev/stderr", "a"))
"""
    async with derived.pool(only=level, slots=1, warm=("lean",)) as pool:
        if not pool.report.facts.get("proc", True):
            pytest.skip("the kernel shows this user no /proc in a jail")
        for stdin in ("", "abc", "abc" * 20_000):
            result = await run(pool, code, stdin)
            assert (result.stdout, result.stderr) == (f"{len(stdin)}\n", "later\n")


@pytest.mark.parametrize("end", ["", "1 / 0", "sys.exit(3)", "sys.stdout.flush()\nsys.stdout = None"])
async def test_files_that_are_open_at_the_end_are_flushed_after_the_standard_streams(pool: SandboxPool, end: str):
    code = f"""
import io, sys
out = open(1, "w", closefd=False)
print("second", file=out)
sys.stdout = io.TextIOWrapper(sys.stdout.buffer)
print("first")
{end}
"""
    assert (await run(pool, code)).stdout == "first\nsecond\n"


async def test_what_fails_while_a_file_is_flushed_is_ignored(pool: SandboxPool):
    code = """
import builtins, io, os, sys
class Exits(io.IOBase):
    def flush(self): sys.exit(5)
class Fails(io.IOBase):
    def flush(self): raise ValueError
class Pretends:
    __class__ = io.TextIOWrapper
    def flush(self): os.write(1, b"pretended")
exits, fails, pretends = Exits(), Fails(), Pretends()
closed = open(os.dup(1), "w")
closed.write("lost")
os.close(closed.fileno())
out = open(1, "w", closefd=False)
out.write("kept")
builtins.list = builtins.isinstance = None
"""
    result = await run(pool, code)
    assert (result.outcome, result.stdout, result.stderr) == (Outcome.OK, "kept", "")


async def test_a_file_that_cannot_be_flushed_stalls_a_program_until_its_deadline_at_most(pool: SandboxPool):
    code = "import os\nout = open(os.pipe()[1], 'wb', buffering=1 << 20)\nout.write(bytes(1 << 19))\nprint('done')"
    result = await run(pool, code, wall_s=3)
    assert (result.outcome, result.stdout) == (Outcome.TIMEOUT, "done\n")


@pytest.mark.parametrize(
    "text, shown", [("raise ValueError", "\n"), ("sys.exit(4)", "\n"), ("return 5", "\n"), ("return 'm'", "m\n")]
)
async def test_an_exit_with_an_object_has_status_1_whatever_its_text_does(pool: SandboxPool, text: str, shown: str):
    result = await run(pool, f"import sys\nclass Odd:\n    def __str__(self): {text}\nsys.exit(Odd())")
    assert (result.outcome, result.exit_status, result.stderr) == (Outcome.ERROR, 1, shown)
