"""Starting a Python of this environment as another user, though the environment lies in somebody's private home."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from sandbox.jail import kernel

REPOSITORY = Path(__file__).resolve().parents[2]
OTHER = 65_534
USERS = ("root", "other") if os.geteuid() == 0 else ("this user",)


def start(user: str, script: str, *arguments: str, first: Callable[[], None] = lambda: None) -> "subprocess.Popen[str]":
    """Run a module of the tests as `user`, after `first` as who we are; its stdout and stderr are pipes."""
    become = _become_other() if user == "other" else None

    def prepare() -> None:
        first()
        if become is not None:
            become()

    return subprocess.Popen(
        [sys.executable, "-m", script, *arguments],
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,
    )


def _become_other() -> Callable[[], None]:
    open_folders = folders_opened()

    def become() -> None:
        open_folders()
        os.setgroups([])
        os.setresgid(OTHER, OTHER, OTHER)
        os.setresuid(OTHER, OTHER, OTHER)

    return become


def folders_opened() -> Callable[[], None]:
    """What root does, in separate mounts, so that everybody may read this environment and nothing else beside it."""
    needed = {Path(place).resolve() for place in (sys.prefix, sys.base_prefix, REPOSITORY)}
    closed = {top: sorted(path for path in needed if top in path.parents) for top in map(_first_closed, needed) if top}

    def open_folders() -> None:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        for top, paths in closed.items():
            places = [os.open(path, os.O_PATH) for path in paths]
            kernel.mount("tmpfs", str(top), "tmpfs", 0, "mode=755")
            for path, place in zip(paths, places, strict=True):
                path.mkdir(parents=True, exist_ok=True)  # one may lie inside another, mounted before it
                kernel.mount(f"/proc/self/fd/{place}", str(path), "", kernel.MS_BIND | kernel.MS_REC)

    return open_folders


def _first_closed(path: Path) -> Path | None:
    """The topmost folder on the way that others may not enter."""
    return next((each for each in reversed(path.parents) if not each.stat().st_mode & 0o001), None)
