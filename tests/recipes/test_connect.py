"""What is said where Ray does not come up."""

from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import AuthenticationError

from actors.launch import ray_connection as connect
from rstar_ray.errors import ConfigError, RStarError


def ray_that_raises(patch: pytest.MonkeyPatch, faults: list[Exception], **environment: str) -> None:
    """One by one, in place of Ray's own start."""

    def init(**_: Any) -> None:
        raise faults.pop(0)

    patch.setattr(connect, "require_token_auth", lambda: None)
    patch.setattr(connect.os, "environ", environment)
    patch.setattr(ray, "is_initialized", lambda: False)
    patch.setattr(ray, "init", init)


@pytest.mark.parametrize(
    ("said", "error"),
    [("The current node timed out during startup. This could happen", RStarError), ("another fault", RuntimeError)],
)
def test_a_ray_that_is_too_slow_to_start_is_a_line_and_any_other_fault_keeps_its_own(
    said: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    ray_that_raises(monkeypatch, [RuntimeError(said)])
    with pytest.raises(error, match=said.partition(".")[0]):
        connect.connect()


FIX = "copy ~/.ray/auth_token from the cluster's head (mode 600), or name the file by RAY_AUTH_TOKEN_PATH"


@pytest.mark.parametrize(
    ("environment", "refused"),
    [
        ({}, f"token: {Path.home()}/.ray/auth_token is not the token of the cluster at head:6379. Hint: {FIX}"),
        (
            {"RAY_AUTH_TOKEN_PATH": "/mine"},
            f"RAY_AUTH_TOKEN_PATH: /mine is not the token of the cluster at head:6379. Hint: {FIX}",
        ),
        (
            {"RAY_AUTH_TOKEN": "x", "RAY_AUTH_TOKEN_PATH": "/mine"},
            f"RAY_AUTH_TOKEN: it is not the token of the cluster at head:6379. Hint: unset it, and {FIX}",
        ),
        (
            {"RAY_AUTH_MODE": "Disabled"},
            "RAY_AUTH_MODE: it is disabled, and the cluster at head:6379 asks for its token. Hint: unset it",
        ),
    ],
)
def test_a_cluster_with_another_token_is_refused_by_where_ours_is_from(
    environment: dict[str, str], refused: str, monkeypatch: pytest.MonkeyPatch
):
    said: list[Exception] = [ConnectionError("no answer"), RuntimeError("Unauthenticated: InvalidAuthToken")]
    said[0].__cause__ = AuthenticationError("Authentication failed: the token is not valid")
    ray_that_raises(monkeypatch, said, RAY_ADDRESS="head:6379", **environment)
    while said:
        with pytest.raises(ConfigError) as caught:
            connect.connect()
        assert str(caught.value) == refused
    said.append(RuntimeError("another fault"))
    with pytest.raises(RuntimeError, match="another fault"):
        connect.connect()


def test_actors_of_a_local_ray_find_the_modules_of_the_users_python_path(monkeypatch: pytest.MonkeyPatch):
    ray_that_raises(monkeypatch, [], PYTHONPATH="/mine")
    given: dict[str, Any] = {}
    monkeypatch.setattr(ray, "init", lambda **options: given.update(options))
    connect.connect()
    assert given["runtime_env"]["env_vars"]["PYTHONPATH"].split(":")[-1] == "/mine"
