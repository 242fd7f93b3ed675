"""C++ programs: compiled and run inside the jail by a small Python program."""

import shutil

_COMPILE_AND_RUN = """
import os, subprocess, sys
with open("program.cpp", "w", errors="surrogateescape") as file:
    file.write({source!r})
command = [{compiler!r}, "-O2", "-std=c++17", "-o", "program", "program.cpp"]
done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
os.unlink("program.cpp")
if done.returncode:
    os.write(2, done.stderr)
    os._exit(1)
os.execv("./program", ["./program"])
"""


def compiler() -> str | None:
    """The path of g++; None if programs cannot see one."""
    return shutil.which("g++", path="/usr/local/bin:/usr/bin:/bin")


def wrap(source: str, path: str) -> str:
    """A Python program that compiles `source` with the compiler at `path` and becomes the result."""
    return _COMPILE_AND_RUN.format(source=source, compiler=path)
