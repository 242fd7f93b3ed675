"""Environment variables for processes on GPUs, from `deploy/rocm.env`, `deploy/cuda.env` and `deploy/site.env`.

Docker, `kubectl create configmap --from-env-file` and a shell's `source` read the files' format in the same way, so
that every way of starting Ray uses the same files.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rstar_ray.errors import ConfigError

Accelerator = Literal["cpu", "cuda", "rocm"]

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SITE = "site.env"
"""Site-dependent settings (network interfaces); optional, and not under version control."""

_SETTING = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([A-Za-z0-9_.,:/@%+=-]*)")
_HARMFUL = re.compile(r"# not ([A-Za-z_][A-Za-z0-9_]*): (.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One variable of a file."""

    name: str
    value: str
    reason: str  # the comment line above it


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFile:
    """The variables that a file sets, and those that must not be set."""

    variables: tuple[Variable, ...] = ()
    harmful: Mapping[str, str]  # name to reason

    @property
    def values(self) -> dict[str, str]:
        return {variable.name: variable.value for variable in self.variables}


def parse_env_file(text: str, where: str) -> EnvFile:
    """Raises `ConfigError` with the line that Docker, Kubernetes and a shell would read differently."""
    variables: list[Variable] = []
    harmful: dict[str, str] = {}
    reason = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            if match := _HARMFUL.fullmatch(line):
                harmful[match[1]] = match[2]
            reason = line.lstrip("# ").rstrip()
            continue
        match = _SETTING.fullmatch(line)
        if match is None:
            hint = "write NAME=value without export, quotes, spaces, $ or anything behind it"
            raise ConfigError(f"{where}:{number}", f"{line!r}: Docker, Kubernetes and shells read it differently", hint)
        if any(variable.name == match[1] for variable in variables):
            raise ConfigError(f"{where}:{number}", f"{match[1]} is set twice", "remove one")
        variables.append(Variable(name=match[1], value=match[2], reason=reason))
        reason = ""
    return EnvFile(variables=tuple(variables), harmful=harmful)


def read_env_file(path: Path) -> EnvFile:
    """Raises `ConfigError` if the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"cannot be read ({error})", "restore it from the repository") from error
    return parse_env_file(text, f"{path.parent.name}/{path.name}")


def accelerator(devices: Path = Path("/dev")) -> Accelerator:
    """The kind of GPU of this machine, by its device files. A machine with NVIDIA GPUs may also have AMD's driver, for
    integrated graphics.
    """
    if any(path.name[6:].isdigit() for path in devices.glob("nvidia[0-9]*")):
        return "cuda"
    return "rocm" if (devices / "kfd").exists() else "cpu"


def gpu_environment(kind: Accelerator, folder: Path = DEPLOY) -> dict[str, str]:
    """Variables for processes on such GPUs; site.env overrides the GPU's file. Empty on a CPU."""
    if kind == "cpu":
        return {}
    site = read_env_file(folder / SITE).values if (folder / SITE).exists() else {}
    return read_env_file(folder / f"{kind}.env").values | site


def missing(wanted: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that `environment` does not set; the user's values win."""
    return {name: value for name, value in wanted.items() if name not in environment}
