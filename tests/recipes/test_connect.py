"""What is said where Ray does not come up."""

from typing import Any

import pytest
import ray

from recipes import connect
from rstar_ray.errors import RStarError


@pytest.mark.parametrize(
    ("said", "error"),
    [("The current node timed out during startup. This could happen", RStarError), ("another fault", RuntimeError)],
)
def test_a_ray_that_is_too_slow_to_start_is_a_line_and_any_other_fault_keeps_its_own(
    said: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    def init(**_: Any) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(connect, "shut_door", lambda show: None)
    monkeypatch.setattr(connect.os, "environ", {})
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(error, match=said.partition(".")[0]):
        connect.connect()
