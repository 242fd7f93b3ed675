"""A short round of `make fuzz-sandbox ARGS="--http"` against the real server, in a separate process."""

from collections.abc import Iterator

import pytest

from tests.fuzz.http_requests import MIB, Round, Server, check, settled

pytestmark = pytest.mark.isolated


@pytest.fixture(scope="module")
def one_round() -> Iterator[Round]:
    server = Server()
    yield Round(server)
    server.stop()


def test_whatever_is_sent_is_answered_and_leaves_nothing(one_round: Round):
    before = settled(one_round.server)
    one_round.random(1, 60)
    one_round.ids(1)
    one_round.crowd(200)
    one_round.slow(5, 1.0)
    one_round.huge(300 * MIB, 1)
    assert {200, 413, 422} <= set(one_round.seen) and 500 not in one_round.seen
    check(one_round.server, before)
