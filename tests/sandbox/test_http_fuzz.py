"""A short round of `make fuzz-sandbox ARGS="--door"` against the real server, in a process of its own."""

from collections.abc import Iterator

import pytest

from tests.fuzz.door import MIB, Round, Server, check, settled

pytestmark = pytest.mark.isolated


@pytest.fixture(scope="module")
def door() -> Iterator[Round]:
    server = Server()
    yield Round(server)
    server.stop()


def test_whatever_is_sent_is_answered_and_leaves_nothing(door: Round):
    before = settled(door.server)
    door.random(1, 60)
    door.ids(1)
    door.crowd(200)
    door.slow(5, 1.0)
    door.huge(300 * MIB, 1)
    assert {200, 413, 422} <= set(door.seen) and 500 not in door.seen
    check(door.server, before)
