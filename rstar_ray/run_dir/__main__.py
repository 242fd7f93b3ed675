"""`python -m rstar_ray.run_dir verify PATH`: is all of a run directory whole, down to the last byte of a checkpoint?"""

import sys
from pathlib import Path

from rstar_ray.errors import ConfigError
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.run_dir.verify import faults


def main(arguments: list[str]) -> int:
    """Exit status: 0 whole, 1 not, 2 not asked rightly."""
    if len(arguments) != 2 or arguments[0] != "verify":
        print("usage: python -m rstar_ray.run_dir verify PATH", file=sys.stderr)
        return 2
    path = Path(arguments[1])
    if not (path / "config.json").is_file():
        print(f"{path} is no run directory: it has no config.json", file=sys.stderr)
        return 2
    try:
        RunDir(path).refuse_newer()
    except ConfigError as newer:
        print(newer, file=sys.stderr)
        return 2
    found = faults(path, show=print)
    for fault in found:
        print(f"fault: {fault}")
    print(f"{path}: {'whole' if not found else f'{len(found)} faults'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
