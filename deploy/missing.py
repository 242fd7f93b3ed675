"""Which requirements of a lock are to be installed: those that the machine's own Python does not have already.

python deploy/missing.py requirements-rocm.lock hashed
python deploy/missing.py requirements-rocm.lock unhashed

In vLLM's images torch and vLLM are built for the GPUs, with all they need, and a virtual environment over the image
sees them: what is there stays. In an environment that sees nothing outside of itself every requirement is printed.
pip checks hashes only where every requirement has one, so those without a hash are a list of their own.
"""

import re
import sys
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path

OURS = frozenset({"ray"})
"""Always at the lock's version: it is compiled against nothing in the image, and older ones know no token."""


def normal(name: str) -> str:
    """As package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(lock: str) -> list[str]:
    """Each requirement of a lock in one line, with its hashes."""
    lines = lock.replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.strip() and not line.startswith("#")]


def to_install(lock: str, there: Iterable[str]) -> list[str]:
    """Requirements of the lock whose package is not `there`."""
    kept = {normal(name) for name in there} - OURS
    return [line for line in requirements(lock) if normal(re.split(r"[=<>!~;\[ ]", line, maxsplit=1)[0]) not in kept]


def is_hashed(requirement: str) -> bool:
    return " --hash=" in requirement


def outside(prefix: Path) -> list[str]:
    """Packages that this Python sees outside of its own environment."""
    folders = [path for path in sys.path if path and not Path(path).resolve().is_relative_to(prefix.resolve())]
    return [name for found in distributions(path=folders) if (name := found.metadata["Name"])]


def main() -> int:
    if len(sys.argv) != 3 or sys.argv[2] not in ("hashed", "unhashed"):
        print("usage: python deploy/missing.py LOCK hashed|unhashed", file=sys.stderr)
        return 2
    there = outside(Path(sys.prefix)) if sys.prefix != sys.base_prefix else []
    wanted = to_install(Path(sys.argv[1]).read_text(), there)
    print("\n".join(line for line in wanted if is_hashed(line) == (sys.argv[2] == "hashed")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
