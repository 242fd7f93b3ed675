"""The version of rstar_ray, for a run's records."""

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


@cache
def code_version() -> str:
    """The package's version, with the commit where the code is a git checkout: `0.2.0 (03da9a9)`."""
    try:
        release = version("rstar-ray")
    except PackageNotFoundError:
        release = "of no release"
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return release
    return f"{release} ({answer.stdout.strip()})"
