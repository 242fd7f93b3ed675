"""Checks a file for `ray up` before any host is contacted: `make cluster-up CLUSTER=deploy/mi300x.yaml`."""

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from actors.cluster.auth import require_token_auth
from rstar_ray.errors import ConfigError

PLACEHOLDER = re.compile(r"HEAD_ADDRESS|NODE_\d+")


def read_cluster_file(path: Path) -> dict[str, Any]:
    """Raises `ConfigError` for unknown fields, missing addresses, and nodes with different images."""
    import yaml

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"CLUSTER={path}", problem, "give a file like deploy/mi300x.yaml") from error
    if not isinstance(config, dict):
        raise ConfigError(f"CLUSTER={path}", "holds no fields", "give a file like deploy/mi300x.yaml")
    _refuse_unknown(path, config)
    _refuse_hosts(path, config.get("provider", {}), config)
    _refuse_different_images(path, config.get("docker", {}))
    return config


def _refuse_unknown(path: Path, config: dict[str, Any]) -> None:
    """Validate with Ray's schema, after Ray has filled in its defaults."""
    from click import ClickException
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        validate_config(prepare_config(copy.deepcopy(config)))
    except ValidationError as error:
        where = ".".join(str(part) for part in error.absolute_path) or "cluster file"
        raise ConfigError(f"{path}: {where}", error.message, "see deploy/mi300x.yaml for the fields") from error
    except ClickException as error:
        raise ConfigError(str(path), error.message, "see deploy/mi300x.yaml for the fields") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(str(path), f"{error}", "see deploy/mi300x.yaml for the fields") from error


def _refuse_hosts(path: Path, provider: dict[str, Any], config: dict[str, Any]) -> None:
    if provider.get("type") != "local" or provider.get("coordinator_address"):  # the coordinator knows the hosts
        return
    hosts = [str(provider.get("head_ip", "")), *map(str, provider.get("worker_ips") or [])]
    if left := [host for host in hosts if PLACEHOLDER.fullmatch(host)]:
        raise ConfigError(f"{path}: provider", f"{', '.join(left)} are not addresses", "fill in your nodes' addresses")
    if twice := sorted({host for host in hosts if hosts.count(host) > 1}):
        raise ConfigError(f"{path}: provider", f"{', '.join(twice)} is named twice", "name every node once")
    workers = len(hosts) - 1
    for name in ("min_workers", "max_workers"):
        if config.get(name, workers) != workers:
            raise ConfigError(f"{path}: {name}", f"{config[name]}, but {workers} worker_ips", f"give {workers}")


def _refuse_different_images(path: Path, docker: dict[str, Any]) -> None:
    default = docker.get("image")
    head, workers = docker.get("head_image", default), docker.get("worker_image", default)
    if head != workers:
        raise ConfigError(
            f"{path}: docker",
            f"the head runs {head} and the others {workers}: all nodes need the same versions",
            "give one image",
        )


def ray_command(action: Literal["up", "down"], path: Path) -> list[str]:
    return [str(Path(sys.executable).parent / "ray"), action, "--yes", str(path)]


def run_cluster_file(action: Literal["up", "down"], path: Path) -> int:
    """Check the file and run `ray up` or `ray down`; returns its exit status."""
    read_cluster_file(path)
    require_token_auth()  # creates the token, which the file copies to every node
    return subprocess.run(ray_command(action, path)).returncode
