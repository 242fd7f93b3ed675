"""What a person does to a run directory.

`python -m rstar_ray.run_dir verify PATH`: is all of it whole, down to the last byte of a checkpoint?
`python -m rstar_ray.run_dir forget PATH --stage STAGE`: throw away what one stage left, with `--yes`; else say what.
"""

import sys
from pathlib import Path

from rstar_ray.errors import ConfigError
from rstar_ray.logs import console_logging
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.run_dir.forget import forget
from rstar_ray.run_dir.verify_run import faults

USAGE = "usage: rstar verify PATH | rstar forget PATH --stage STAGE [--yes]"


def main(arguments: list[str]) -> int:
    """Exit status: 0 whole, or gone; 1 not whole; 2 not asked rightly, refused, or nothing done without `--yes`."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    match arguments:
        case ["verify", _] | ["forget", _, "--stage", _] | ["forget", _, "--stage", _, "--yes"]:
            path = Path(arguments[1])
        case _:
            print(USAGE, file=sys.stderr)
            return 2
    if not (path / "config.json").is_file():
        print(f"{path} is not a run directory: it has no config.json", file=sys.stderr)
        return 2
    try:
        RunDir(path).refuse_newer()
        with console_logging():
            return _verify(path) if arguments[0] == "verify" else _forget(path, arguments[3], sure=len(arguments) == 5)
    except ConfigError as refused:
        print(refused, file=sys.stderr)
        return 2


def _verify(path: Path) -> int:
    found = faults(path)
    for fault in found:
        print(f"fault: {fault}")
    print(f"{path}: {'whole' if not found else f'{len(found)} faults'}")
    return 1 if found else 0


def _forget(path: Path, stage: str, *, sure: bool) -> int:
    forget(path, stage, sure=sure)
    if sure:
        return 0
    print("nothing is removed yet: give --yes too")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
