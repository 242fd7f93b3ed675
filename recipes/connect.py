"""A Ray to run on: the cluster a job runs on, or one of our own."""

import os
from pathlib import Path
from uuid import uuid4

from actors.door import shut_door
from actors.environment import accelerator, gpu_environment, missing
from recipes.scales import local_resources
from rstar_ray.errors import RStarError

SLOW_START = "timed out during startup"
"""What Ray says where its own deadline for a node's start, which cannot be set, was too short for a busy machine."""
REPOSITORY = Path(__file__).resolve().parent.parent


def connect() -> None:
    """Join the cluster a job runs on, or start a Ray of our own; both talk to those who have the token alone."""
    shut_door(lambda line: print(line, flush=True))
    import ray

    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.update(missing(gpu_environment(accelerator())))
    from actors.system import quiet_environment

    namespace = f"rstar_ray-{uuid4().hex[:8]}"  # actor names are a run's own
    runtime = {"env_vars": quiet_environment()}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(namespace=namespace, runtime_env=runtime, log_to_driver=False)
        return
    runtime["env_vars"]["PYTHONPATH"] = str(REPOSITORY)
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
    except Exception as failed:  # Ray has no class of its own for it
        if SLOW_START not in str(failed):
            raise
        raise RStarError(
            f"Ray did not start in its 30 s: {failed} Give the command again with less beside it"
        ) from None
