"""The client that all actors are called through, and the queue that delivers until acknowledged; no Ray."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from actors import remote
from actors.remote import AckedQueue, Batch, Remote, ReplyCache
from rstar_ray.errors import DeadlineExceeded


class Doubler:
    """What callers see; behind the handle each call may fail first."""

    async def double(self, number: int) -> int:
        return 2 * number


def remote_doubler(*failures: Exception) -> tuple[Remote[Doubler], list[int]]:
    asked, left = list[int](), list(failures)

    async def double(number: int) -> int:
        asked.append(number)
        if left:
            raise left.pop(0)
        return 2 * number

    async def probe() -> Any:
        return "a heartbeat"

    handle = SimpleNamespace(double=SimpleNamespace(remote=double), probe=SimpleNamespace(remote=probe))
    return Remote[Doubler](handle, "doubler"), asked


RESTARTS = ActorUnavailableError("it restarts", None)


async def test_a_call_is_repeated_while_the_actor_restarts_only_where_its_caller_says_so(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(remote, "ASK_AGAIN_S", 0.0)
    doubler, asked = remote_doubler(RESTARTS, RESTARTS)
    assert await doubler.call(lambda d: d.double(3), deadline_s=5, reason="a double", retry=True) == 6
    assert asked == [3, 3, 3]
    for failure in (RESTARTS, ActorDiedError()):
        doubler, asked = remote_doubler(failure)
        with pytest.raises(type(failure)):
            await doubler.call(lambda d: d.double(3), deadline_s=5, reason="a double")
    doubler, asked = remote_doubler(ActorDiedError())
    with pytest.raises(ActorDiedError):
        await doubler.call(lambda d: d.double(3), deadline_s=5, reason="a double", retry=True)


async def test_a_deadline_names_caller_actor_and_reason():
    async def never() -> int:
        await asyncio.Event().wait()
        return 0

    silent = Remote[Any](SimpleNamespace(probe=SimpleNamespace(remote=never)), "sandbox/0", caller="generation/1")
    with pytest.raises(DeadlineExceeded, match=r"generation/1 waited 0\.01 s for sandbox/0 \(a sign\)"):
        await silent.call(lambda actor: actor.probe(), deadline_s=0.01, reason="a sign")
    assert await silent.probe(0.01) is None
    assert await remote_doubler()[0].probe(5) == "a heartbeat"


async def test_items_are_delivered_again_until_acknowledged_in_their_order():
    queue = AckedQueue[str]()
    queue.put("a")
    queue.put("b")
    first = await queue.take(0, 1)
    queue.put("c")
    again = await queue.take(0, 1)  # the reply was lost
    assert (first.items, again.items) == (("a", "b"), ("a", "b", "c"))
    rest = await queue.take(first.number, 1)
    assert rest.items == ("c",)
    assert (await queue.take(rest.number, 0)).items == ()
    assert (await queue.take(rest.number, 0)).number == rest.number


async def test_a_poll_wakes_at_the_first_item_and_raises_once_the_queue_is_closed():
    queue = AckedQueue[str]()
    polls = [asyncio.ensure_future(queue.take(0, 10)) for _ in range(2)]
    await asyncio.sleep(0)
    polls[0].cancel()
    queue.put("a")
    assert (await polls[1]).items == ("a",)
    waiting = asyncio.ensure_future(queue.take(1, 10))
    await asyncio.sleep(0)
    queue.close(KeyError("gone"))
    for poll in (waiting, queue.take(1, 10)):
        with pytest.raises(KeyError):
            await poll


async def test_items_are_delivered_before_the_fault_that_closes_their_queue():
    queue = AckedQueue[str]()
    queue.put("a")
    queue.close(KeyError("gone"))
    last = await queue.take(0, 1)
    assert last.items == ("a",)
    with pytest.raises(KeyError):
        await queue.take(last.number, 1)


def test_a_repeated_call_is_done_once_and_fails_as_it_did():
    replies, done = ReplyCache(), list[int]()

    def work(number: int) -> int:
        done.append(number)
        if number == 2:
            raise ValueError("no")
        return number

    assert [replies.of(1, lambda: work(1)) for _ in range(2)] == [1, 1]
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            replies.of(2, lambda: work(2))
    assert done == [1, 2]


def test_a_batch_without_items_is_empty():
    assert Batch[int](4).items == ()
