"""Levels of isolation, best first, and the choice between them. See docs/sandbox.md."""

import os
import secrets
import sys
import sysconfig
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from rstar_ray.config import SandboxConfig
from sandbox.jail.build import JailSpec, outermost
from sandbox.limits import MIB

SCRATCH_BYTES = 64 * MIB
SCRATCH_FILES = 4096
FIRST_UID = 1_879_048_192  # far above the uids of accounts and containers
NUM_UIDS = 1_000_000
POOL_UIDS = 4_096  # more than the workers of one pool, or the commands that one process runs at once
MAX_THREADS = 64  # also the limit of processes for programs that may start any


class IsolationLevel(StrEnum):
    """How a program is isolated from the machine."""

    NAMESPACES = "namespaces"  # separate namespaces, private root, seccomp, rlimits
    LANDLOCK = "landlock"  # Landlock, seccomp, rlimits; a separate uid if we are root
    PROCESS = "process"  # rlimits only: for trusted code


def levels_of(config: SandboxConfig) -> tuple[IsolationLevel, ...]:
    """Levels that a run accepts, best first."""
    if config.level == "landlock":
        return IsolationLevel.NAMESPACES, IsolationLevel.LANDLOCK
    return (IsolationLevel(config.level),)


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationReport:
    """The isolation level of a pool, with evidence."""

    level: IsolationLevel
    facts: dict[str, Any] = field(default_factory=dict[str, Any])  # reported by the first worker
    contained: int = 0  # number of probes in the self-test, all of which were refused


def interpreter_trees() -> list[str]:
    """Folders a program may read: the interpreter and its installed libraries."""
    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    wanted = [paths[name] for name in names] + [sys.prefix, sys.base_prefix]
    return outermost([path for path in wanted if path != "/"])


def program_path() -> list[str]:
    """`sys.path` for programs: the standard library and installed packages, without the current folder."""
    paths = sysconfig.get_paths()
    archive = f"{sys.base_prefix}/lib/python{sys.version_info[0]}{sys.version_info[1]}.zip"
    dynamic = os.path.join(paths["platstdlib"].replace(sys.prefix, sys.base_prefix), "lib-dynload")  # noqa: PTH118
    found = [archive, paths["stdlib"], dynamic, paths["purelib"], paths["platlib"]]
    return list(dict.fromkeys(found))


def choose_first_uid(uid_map: str | None = None) -> int:
    """A random first uid for the programs of one pool of root: pools that share a uid share its limit of processes.

    A container with a user namespace may have only 65,536 uids; then it is in their third quarter, above the accounts.
    If fewer than 16,384 are mapped, it is one that is not: no server can start then.
    """
    lines = (uid_map or Path("/proc/self/uid_map").read_text("ascii")).splitlines()
    start, _, length = max(([int(field) for field in line.split()] for line in lines), key=lambda mapped: mapped[2])
    if start <= FIRST_UID and start + length >= FIRST_UID + NUM_UIDS:
        return FIRST_UID + secrets.randbelow(NUM_UIDS - POOL_UIDS)
    if length < 4 * POOL_UIDS:
        return FIRST_UID
    return start + length // 2 + secrets.randbelow(length // 4)


def jail_spec(level: IsolationLevel, first_uid: int) -> JailSpec:
    """The specification of a pool's jails at `level`."""
    return JailSpec(
        level=str(level),
        trees=interpreter_trees(),
        scratch_bytes=SCRATCH_BYTES,
        scratch_files=SCRATCH_FILES,
        first_uid=first_uid,
        max_threads=MAX_THREADS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Facts of this kernel, container or machine about namespaces; empty if unknown."""

    seccomp: str = ""  # 2: an outer seccomp filter applies
    apparmor: str = ""  # the AppArmor profile that applies
    most_user_namespaces: str = ""
    restricted_by_apparmor: str = ""  # 1: only programs with an AppArmor profile
    unprivileged: str = ""  # 0: only root (an old setting of Debian)


def read_host() -> Host:
    """Read the facts of this machine."""
    status = _text("/proc/self/status").splitlines()
    profile = _text("/proc/self/attr/current").rstrip("\0")
    return Host(
        seccomp=next((line.split()[1] for line in status if line.startswith("Seccomp:")), ""),
        apparmor="" if profile.startswith("unconfined") else profile,
        most_user_namespaces=_text("/proc/sys/user/max_user_namespaces"),
        restricted_by_apparmor=_text("/proc/sys/kernel/apparmor_restrict_unprivileged_userns"),
        unprivileged=_text("/proc/sys/kernel/unprivileged_userns_clone"),
    )


def obstacles(host: Host) -> list[str]:
    """The obstacles to namespaces here, each with the flag or switch that removes it."""
    found: list[str] = []
    if host.seccomp == "2":
        found.append(
            "a seccomp filter of the container: --security-opt seccomp=unconfined, or a profile that permits unshare, "
            "mount and its kin (Docker, Podman); securityContext.seccompProfile.type: Unconfined (Kubernetes)"
        )
    if host.apparmor:
        found.append(
            f"the AppArmor profile {host.apparmor}: --security-opt apparmor=unconfined (Docker); "
            "securityContext.appArmorProfile.type: Unconfined (Kubernetes)"
        )
    if host.most_user_namespaces == "0":
        found.append("no user namespaces are allowed: sysctl -w user.max_user_namespaces=15000 on the host")
    if host.restricted_by_apparmor == "1":
        found.append("AppArmor: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 on the host")
    if host.unprivileged == "0":
        found.append("only root may create namespaces: sysctl -w kernel.unprivileged_userns_clone=1 on the host")
    return found


def fix_for(level: IsolationLevel, host: Host) -> str:
    """How to fix a machine that refuses `level`."""
    if level is IsolationLevel.NAMESPACES:
        unknown = "allow user namespaces (a kernel with CONFIG_USER_NS, no chroot, user.max_user_namespaces above 0)"
        return (
            f"To fix it: {'; '.join(obstacles(host)) or unknown}. Or accept landlock (--sandbox.level landlock; in "
            "`python -m sandbox`, --level landlock)."
        )
    return "Use Linux 5.15 or newer with Landlock and seccomp, and an interpreter that other users may read."


INTERPRETER_HINT = "Hint: let this user read and execute that file, and enter every directory above it"
# After a slow start no lower level is tried, because the requested level was not refused.
SLOW_HINT = (
    "Nothing was refused: the machine has too little CPU time or memory. Try again with less load; if that does not "
    "help, look for hanging processes of this interpreter"
)


def _text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace").strip()
    except OSError:
        return ""
