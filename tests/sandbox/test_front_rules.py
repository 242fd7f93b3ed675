"""Who may be a front's worker, and what of its answers is believed: pure functions."""

import re

import pytest

from rstar_ray.errors import ConfigError
from sandbox.http.front import FrontConfig, may_join, worker_address
from sandbox.http.link import OTHER_BYTES, Gone, believed, most_bytes
from sandbox.http.server import ServerConfig
from sandbox.isolation import IsolationLevel
from tests import derived


def test_levels_are_as_good_as_was_asked_for_or_better():
    def levels(level: str, landlock: bool = False) -> set[str]:
        config = FrontConfig(
            server=ServerConfig(),
            queue_size=1,
            level=IsolationLevel(level),
            allow_landlock=landlock,
            workers=("http://a:1",),
        )
        return {str(each) for each in config.levels()}

    assert levels("namespaces") == {"namespaces"}
    assert levels("namespaces", landlock=True) == levels("landlock") == {"namespaces", "landlock"}
    assert levels("process") == {"namespaces", "landlock", "process"}


def test_what_is_believed_is_within_what_was_asked_for():
    limits = derived.program(stdout_chars=10, stderr_chars=10)
    fine = {"outcome": "ok", "stdout": "x" * 100, "call_id": "a"}
    assert believed(fine, "a", limits).stdout == "x" * 100
    for wrong in ({"stdout": "x" * 111}, {"value": "x" * 111}, {"stderr": "x" * 1_101}, {"reason": "x" * 1_001}):
        with pytest.raises(Gone):
            believed(fine | wrong, "a", limits)
    assert most_bytes(limits) < OTHER_BYTES + 10_000


def test_workers_are_at_hosts_of_the_list():
    allowed = ("node-7.cluster", "10.0.0.0/24", "fd00::/8", "192.0.2.7")
    for host in ("127.0.0.1", "localhost", "[::1]", "node-7.cluster", "10.0.0.9", "[fd00::7]", "192.0.2.7"):
        assert may_join(worker_address(f"http://{host}:8088"), allowed), host
    for host in ("node-8.cluster", "7.cluster", "10.0.1.9", "[fe80::1]", "192.0.2.8", "0.0.0.0"):
        assert not may_join(worker_address(f"http://{host}:8088"), allowed), host


@pytest.mark.parametrize(
    "text",
    [
        "",
        "node-7:8088",
        "http://node-7",
        "http://a b:1",
        "http://u:p@a:1",
        "http://a:1/x",
        "http://a:99999",
        "http://[a:1",
    ],
)
def test_an_address_that_is_none_is_refused(text: str):
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        worker_address(text)


def test_a_front_without_workers_or_with_one_token_for_all_is_refused():
    level, door = IsolationLevel.NAMESPACES, ServerConfig()
    with pytest.raises(ConfigError, match="--worker"):
        FrontConfig(server=door, queue_size=1, level=level)
    with pytest.raises(ConfigError, match="clients' token"):
        FrontConfig(server=ServerConfig(token="one"), queue_size=1, level=level, join_token="one")
    with pytest.raises(ConfigError, match=re.escape("10.0.0.0/24")):
        FrontConfig(server=door, queue_size=1, level=level, join_token="j", allow_workers=("10.0.0.0/99",))
