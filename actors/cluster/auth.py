"""Token authentication of Ray, on unless the user sets `disabled` explicitly.

Ray's GCS, raylets and workers listen on every interface of the machine, whatever address they are given, and their
clients can run code. So the token is made before Ray starts, readable only by its owner, where Ray's tools look for it.
docs/security.md lists the listening addresses.

Ray also makes its session directories, which contain the code of jobs, writable for every user (mode 777). So they are
created below a directory with mode 700, which Ray and its tools find by RAY_TMPDIR.

`python -m actors.cluster.auth` creates that directory and prints its path, for scripts that call `ray start`.
"""

import logging
import os
import secrets
import shlex
import stat
import sys
from pathlib import Path

from rstar_ray.errors import ConfigError, one_line
from rstar_ray.exit_status import exit_status_of

log = logging.getLogger(__name__)

MODE_VARIABLE = "RAY_AUTH_MODE"
TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
PATH_VARIABLE = "RAY_AUTH_TOKEN_PATH"
DIRECTORY_VARIABLE = "RAY_TMPDIR"
SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket on Linux."""
_SOCKET = (
    "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/dash_UsageStatsHead"  # the longest path that Ray adds
)


def require_token_auth() -> bool:
    """Set token authentication for this process and its children; call it before Ray is started or joined.

    A Ray that is started afterwards keeps its files in `private_directory`. Returns False, with a warning, if
    RAY_AUTH_MODE=disabled. Raises `ConfigError` for an unknown mode, and for a token file that is missing, empty, or
    cannot be written or made private.
    """
    if not os.environ.get("RAY_ADDRESS"):  # an existing cluster has a directory already
        private_directory()
    mode = os.environ.setdefault(MODE_VARIABLE, "token").lower()
    if mode == "disabled":
        log.warning(
            f"{MODE_VARIABLE}=disabled: anyone who reaches this machine's ports over the network can run code "
            "here as you; unset it for token authentication"
        )
        return False
    if mode != "token":
        raise ConfigError(MODE_VARIABLE, f"{mode!r} is not a mode", "unset it, or give token or disabled")
    if TOKEN_VARIABLE in os.environ:  # for Ray it takes precedence over files
        if not os.environ[TOKEN_VARIABLE].strip():
            raise ConfigError(TOKEN_VARIABLE, "it is empty", "unset it, or give the cluster's token")
    elif PATH_VARIABLE in os.environ:
        _keep_private(Path(os.environ[PATH_VARIABLE]), PATH_VARIABLE)
    else:
        hint = f"set HOME to a directory of yours, or {PATH_VARIABLE} to a file with the token"
        try:
            path = default_token_path()
        except RuntimeError as homeless:
            raise ConfigError("token", "this user has no home directory for it", hint) from homeless
        try:
            _make(path)
        except OSError as refused:
            raise ConfigError("token", f"{path} cannot be written ({refused.strerror})", hint) from refused
        _keep_private(path, "token")
    if "ray" in sys.modules:  # Ray read the mode when it was imported
        from ray._raylet import Config  # pyright: ignore[reportAttributeAccessIssue]

        Config.initialize("")
    return True


def private_directory() -> Path:
    """Create the directory for Ray's sessions with mode 700, and set RAY_TMPDIR to it for child processes.

    If RAY_TMPDIR is set, its directory is checked and used. Raises `ConfigError` if other users can enter the
    directory, if it belongs to another user, or if its path is too long for Ray's sockets.
    """
    named = os.environ.get(DIRECTORY_VARIABLE, "")
    parent = Path(os.environ.get("TMPDIR") or "/tmp")  # as Ray chooses it
    path = Path(named or parent / f"ray-{os.geteuid()}").absolute()
    hint = f"set {DIRECTORY_VARIABLE} to a directory of yours with mode 700 and a short path"
    if len(os.fsencode(f"{path}{_SOCKET}")) > SOCKET_PATH_BYTES:
        room = SOCKET_PATH_BYTES - len(_SOCKET)
        raise ConfigError(DIRECTORY_VARIABLE, f"{path} is longer than {room} bytes, too long for Ray's sockets", hint)
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise ConfigError(DIRECTORY_VARIABLE, f"{path} is not a directory of user {os.geteuid()}", hint)
        if found.st_mode & 0o077:
            if named:
                mode = f"{stat.S_IMODE(found.st_mode):o}"
                raise ConfigError(DIRECTORY_VARIABLE, f"other users can enter {path} (mode {mode})", hint)
            path.chmod(0o700)
    except OSError as failed:
        raise ConfigError(DIRECTORY_VARIABLE, f"{path} cannot be used ({failed.strerror})", hint) from failed
    os.environ[DIRECTORY_VARIABLE] = str(path)
    return path


def export_line() -> str:
    """Shell command that sets the two variables, which `ray` commands need to reach the cluster."""
    directory = f"{DIRECTORY_VARIABLE}={shlex.quote(os.environ[DIRECTORY_VARIABLE])}"
    return f"export {MODE_VARIABLE}={os.environ[MODE_VARIABLE]} {directory}"


def default_token_path() -> Path:
    """The file that Ray's tools read if neither token variable is set."""
    return Path.home() / ".ray" / "auth_token"


def the_token() -> str:
    """The token; call `require_token_auth` first."""
    if TOKEN_VARIABLE in os.environ:
        return os.environ[TOKEN_VARIABLE].strip()
    return Path(os.environ.get(PATH_VARIABLE) or default_token_path()).read_text().strip()


def _make(path: Path) -> None:
    """Create a token atomically unless there is one, because several runs may start at the same time."""
    if path.exists() and path.stat().st_size:
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}-{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    try:
        if path.exists():  # empty
            path.unlink()
        os.link(partial, path)  # fails if another run was faster; its token then applies
    except FileExistsError:
        pass
    finally:
        partial.unlink()


def _keep_private(path: Path, name: str) -> None:
    try:
        if not path.read_text().strip():
            raise ConfigError(name, f"{path} is empty", "run `ray get-auth-token --generate`, or name another file")
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            path.chmod(0o600)
            log.warning(
                f"{path} was readable by others (mode {mode:o}) and is private now; delete it to get a new token"
            )
    except (OSError, UnicodeDecodeError) as refused:
        hint = "name a file of your own with the cluster's token, mode 600"
        raise ConfigError(name, f"{path} cannot be read ({one_line(refused)})", hint) from refused


def main() -> int:
    return exit_status_of(lambda: print(private_directory()))


if __name__ == "__main__":
    sys.exit(main())
