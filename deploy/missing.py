"""Which lines of a lock are to be installed: those that the machine's own Python does not bring already.

python deploy/missing.py requirements-rocm.lock

In vLLM's images torch and vLLM are built for the GPUs, with all they need, and a virtual environment over the image
sees them: what is there stays. In an environment that sees nothing outside of itself every line is printed.
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


def to_install(lock: Iterable[str], there: Iterable[str]) -> list[str]:
    """Lines of the lock whose package is not `there`."""
    kept = {normal(name) for name in there} - OURS
    lines = [line.strip() for line in lock if line.strip() and not line.startswith("#")]
    return [line for line in lines if normal(re.split(r"[=<>!~;\[ ]", line, maxsplit=1)[0]) not in kept]


def outside(prefix: Path) -> list[str]:
    """Packages that this Python sees outside of its own environment."""
    folders = [path for path in sys.path if path and not Path(path).resolve().is_relative_to(prefix.resolve())]
    return [name for found in distributions(path=folders) if (name := found.metadata["Name"])]


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python deploy/missing.py LOCK", file=sys.stderr)
        return 2
    there = outside(Path(sys.prefix)) if sys.prefix != sys.base_prefix else []
    print("\n".join(to_install(Path(sys.argv[1]).read_text().splitlines(), there)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
