"""Levels of isolation, best first, and the choice between them. See docs/sandbox.md."""

import os
import sys
import sysconfig
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sandbox.cage.build import CageSpec, outermost
from sandbox.limits import MIB

SCRATCH_BYTES = 64 * MIB
SCRATCH_FILES = 4096
FIRST_UID = 1_879_048_192  # far above what accounts and containers use
MAX_THREADS = 64  # processes of a program that may have any, too


class IsolationLevel(StrEnum):
    """How a program is kept from the rest of the machine."""

    NAMESPACES = "namespaces"  # own namespaces and private root, seccomp, rlimits
    LANDLOCK = "landlock"  # Landlock, seccomp, rlimits, another uid where we are root
    PROCESS = "process"  # rlimits only: for code that is trusted anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationReport:
    """The level a pool achieved and what it rests on."""

    level: IsolationLevel
    facts: dict[str, Any] = field(default_factory=dict[str, Any])  # as the first cell reported them
    contained: int = 0  # probes of the self-test that were refused, all of them
    declined: tuple[str, ...] = ()  # better levels that did not work here, and why


def interpreter_trees() -> list[str]:
    """Folders a program may read: the interpreter and its installed libraries."""
    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    wanted = [paths[name] for name in names] + [sys.prefix, sys.base_prefix]
    return outermost([path for path in wanted if path != "/"])


def program_path() -> list[str]:
    """`sys.path` for programs: the standard library and what is installed, not where we are."""
    paths = sysconfig.get_paths()
    archive = f"{sys.base_prefix}/lib/python{sys.version_info[0]}{sys.version_info[1]}.zip"
    dynamic = os.path.join(paths["platstdlib"].replace(sys.prefix, sys.base_prefix), "lib-dynload")  # noqa: PTH118
    found = [archive, paths["stdlib"], dynamic, paths["purelib"], paths["platlib"]]
    return list(dict.fromkeys(found))


def cage_spec(level: IsolationLevel) -> CageSpec:
    """What a pool at `level` builds its cells from."""
    return CageSpec(
        level=str(level),
        trees=interpreter_trees(),
        scratch_bytes=SCRATCH_BYTES,
        scratch_files=SCRATCH_FILES,
        first_uid=FIRST_UID,
        max_threads=MAX_THREADS,
    )


def mend(level: IsolationLevel) -> str:
    """What to do on a machine that refuses `level`."""
    if level is IsolationLevel.NAMESPACES:
        return (
            "Allow user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns; "
            "in a container: a seccomp profile that permits unshare), or accept landlock (--sandbox.level landlock; in "
            "`python -m sandbox`, --allow-landlock)."
        )
    return "Use Linux 5.15 or newer with Landlock and seccomp, and an interpreter that other users may read."
