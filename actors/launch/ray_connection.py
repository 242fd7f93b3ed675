"""Connects to the Ray cluster that a job runs on, or starts a local one."""

import atexit
import os
from pathlib import Path
from uuid import uuid4

from actors.cluster.auth import MODE_VARIABLE, PATH_VARIABLE, TOKEN_VARIABLE, default_token_path, require_token_auth
from actors.cluster.gpu_environment import accelerator, gpu_environment, missing
from rstar_ray.config.scales import local_resources
from rstar_ray.errors import ConfigError, RStarError, first_line

SLOW_START = "timed out during startup"
"""Text of Ray's error if a node did not start within Ray's fixed deadline, as on a busy machine."""
AUTH_ERROR = "authenticat"
"""Text of Ray's errors, or of their causes, if the token differs from the cluster's."""
REPOSITORY = Path(__file__).resolve().parent.parent.parent


def connect() -> None:
    """Connect to the cluster that a job runs on, or start a local one; both require the authentication token.

    Raises `ConfigError` if the cluster cannot be reached, or has another token.
    """
    require_token_auth()
    import ray

    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.update(missing(gpu_environment(accelerator())))
    from actors.health.head import exit_within
    from actors.system import quiet_environment

    atexit.register(exit_within)  # registered after Ray's handler, so it runs before it
    namespace = f"rstar_ray-{uuid4().hex[:8]}"  # actor names are separate for each run
    runtime = {"env_vars": quiet_environment()}
    if address := os.environ.get("RAY_ADDRESS"):
        try:
            ray.init(namespace=namespace, runtime_env=runtime, log_to_driver=False)
        except Exception as failed:
            if AUTH_ERROR in f"{failed} {failed.__cause__}".lower():
                raise _wrong_token(address) from None
            if isinstance(failed, ConnectionError | ValueError):  # nothing answers, or not an address
                hint = "give the address of a running cluster, such as 127.0.0.1:6379, or unset it"
                raise ConfigError("RAY_ADDRESS", f"{address}: {first_line(failed)}", hint) from failed
            raise
        return
    path = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]  # modules of the user's too
    runtime["env_vars"]["PYTHONPATH"] = os.pathsep.join(path)
    try:
        ray.init(
            address="local",
            namespace=namespace,
            num_cpus=max(2, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=256 * 2**20 if not local_resources()["GPU"] else None,
            runtime_env=runtime,
            log_to_driver=False,
        )
    except Exception as failed:  # Ray has no exception class for this
        if SLOW_START not in str(failed):
            raise
        raise RStarError(
            f"Ray did not start in its 30 s: {failed} "
            "Hint: stop other programs on this machine, then repeat the command."
        ) from None


def _wrong_token(address: str) -> ConfigError:
    """The error for a wrong token; names the source of this process's token."""
    if os.environ.get(MODE_VARIABLE, "").lower() == "disabled":
        return ConfigError(
            MODE_VARIABLE, f"it is disabled, and the cluster at {address} asks for its token", "unset it"
        )
    hint = f"copy ~/.ray/auth_token from the cluster's head (mode 600), or name the file by {PATH_VARIABLE}"
    ours, field = os.environ.get(PATH_VARIABLE) or default_token_path(), "token"
    if TOKEN_VARIABLE in os.environ:
        ours, field, hint = "it", TOKEN_VARIABLE, f"unset it, and {hint}"
    elif PATH_VARIABLE in os.environ:
        field = PATH_VARIABLE
    return ConfigError(field, f"{ours} is not the token of the cluster at {address}", hint)
