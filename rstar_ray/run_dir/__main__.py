"""Maintenance of a run directory.

`python -m rstar_ray.run_dir verify PATH`: check all records, and every byte of the checkpoints.
`python -m rstar_ray.run_dir forget PATH --stage STAGE`: list the files and rows of a stage; with `--yes`, delete them.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from rstar_ray.config.options import run_command
from rstar_ray.errors import ConfigError
from rstar_ray.logs import console_logging
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.run_dir.forget import forget
from rstar_ray.run_dir.verify_run import faults

USAGE = "usage: rstar verify PATH | rstar forget PATH --stage STAGE [--yes]"


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    run: Annotated[Path, tyro.conf.Positional]
    """a run directory"""

    def __post_init__(self) -> None:
        if not (self.run / "config.json").is_file():
            raise ConfigError(
                "RUN", f"{self.run} is not a run directory: it has no config.json", "give the --run-dir of a run"
            )
        RunDir(self.run).refuse_newer()


@dataclass(frozen=True, kw_only=True)
class ForgetOptions(VerifyOptions):
    stage: str
    """stage whose rows, checkpoints and settings are deleted"""
    yes: bool = False
    """delete; otherwise only list"""


def main(arguments: list[str]) -> int:
    """Exit status: 0 undamaged, or deleted; 1 damaged; 2 invalid usage, refused, or nothing deleted without `--yes`."""
    match arguments:
        case ["verify", *options]:
            return run_command(VerifyOptions, _verify, options, description=__doc__)
        case ["forget", *options]:
            return run_command(ForgetOptions, _forget, options, description=__doc__)
        case _:
            wants_help = {"-h", "--help"} & set(arguments)
            print(USAGE, file=None if wants_help else sys.stderr)
            return 0 if wants_help else 2


def _verify(options: VerifyOptions) -> int:
    with console_logging():
        found = faults(options.run)
    for fault in found:
        print(f"fault: {fault}")
    print(f"{options.run}: {len(found) or 'no'} faults")
    return 1 if found else 0


def _forget(options: ForgetOptions) -> int:
    with console_logging():
        forget(options.run, options.stage, sure=options.yes)
    if options.yes:
        return 0
    print("nothing was removed. Hint: add --yes to remove it")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
