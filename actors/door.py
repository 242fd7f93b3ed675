"""Who may talk to Ray: token authentication, on unless a person asks for `disabled` by name.

Ray's GCS, raylets and workers listen on every interface of the machine, whatever address they are given, and whoever
they answer runs code. So the token is made before the first of them starts, readable by its owner alone, where Ray's
own tools look for it. docs/security.md says what listens where.
"""

import os
import secrets
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from rstar_ray.errors import ConfigError

MODE_VARIABLE = "RAY_AUTH_MODE"
TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
PATH_VARIABLE = "RAY_AUTH_TOKEN_PATH"
EXPORT_LINE = f"export {MODE_VARIABLE}=token"
"""For a shell whose `ray` commands talk to the cluster: Ray's tools do not all turn authentication on by themselves."""


def shut_door(show: Callable[[str], None]) -> bool:
    """Put this process, and all that it starts, under token authentication; before Ray is started or joined.

    False where RAY_AUTH_MODE=disabled asked for none, which is shown as a warning. Raises `ConfigError` for a mode
    that does not exist, and for a token that is named and not there, empty, or readable by others for good.
    """
    mode = os.environ.setdefault(MODE_VARIABLE, "token").lower()
    if mode == "disabled":
        show(
            f"warning: {MODE_VARIABLE}=disabled: whoever reaches this machine's ports over the network can run code "
            "here as you; unset it for token authentication"
        )
        return False
    if mode != "token":
        raise ConfigError(MODE_VARIABLE, f"{mode!r} is no mode", "unset it, or give token or disabled")
    if TOKEN_VARIABLE in os.environ:  # Ray takes it before any file
        if not os.environ[TOKEN_VARIABLE].strip():
            raise ConfigError(TOKEN_VARIABLE, "it is empty", "unset it, or give the cluster's token")
    elif PATH_VARIABLE in os.environ:
        _keep_private(Path(os.environ[PATH_VARIABLE]), PATH_VARIABLE, show)
    else:
        path = default_token_path()
        _make(path)
        _keep_private(path, "token", show)
    if "ray" in sys.modules:  # it read the mode when it was imported
        from ray._raylet import Config  # pyright: ignore[reportAttributeAccessIssue]

        Config.initialize("")
    return True


def default_token_path() -> Path:
    """Where Ray's own tools look when neither variable is set."""
    return Path.home() / ".ray" / "auth_token"


def the_token() -> str:
    """The token that `shut_door` found or made."""
    if TOKEN_VARIABLE in os.environ:
        return os.environ[TOKEN_VARIABLE].strip()
    return Path(os.environ.get(PATH_VARIABLE) or default_token_path()).read_text().strip()


def _make(path: Path) -> None:
    """A new token, unless there is one; whole at once, for several runs may start together."""
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
        os.link(partial, path)  # refused where another run was faster, whose token then holds
    except FileExistsError:
        pass
    finally:
        partial.unlink()


def _keep_private(path: Path, name: str, show: Callable[[str], None]) -> None:
    try:
        if not path.read_text().strip():
            raise ConfigError(name, f"{path} is empty", "run `ray get-auth-token --generate`, or name another file")
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            path.chmod(0o600)
            show(f"{path} was readable by others (mode {mode:o}) and is yours alone now; delete it for a new token")
    except OSError as refused:
        mend = "name a file of your own with the cluster's token, mode 600"
        raise ConfigError(name, f"{path}: {refused.strerror}", mend) from refused
