"""The actor in a real Ray: bursts, long-polls and a death."""

import asyncio
import time

import pytest
import ray

from actors.balancer_service import start_balancer
from rstar_ray.config import BalancerConfig
from scheduler.records import Grant, RolloutLoad, TurnReport, UnknownReplica
from tests.fakes import registration

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, namespace="balancer-test", log_to_driver=False)
    yield
    ray.shutdown()


def load(name: str) -> RolloutLoad:
    return RolloutLoad(
        rollout_id=name, group_id=name.split("/")[0], prompt_tokens=300, max_response_tokens=8_192, max_turns=10
    )


def end(name: str) -> TurnReport:
    return TurnReport(rollout_id=name, context_tokens=1_300, generated_tokens=1_000, turn=1, ended=True)


def test_a_burst_of_16384_submissions_is_accepted_and_granted(cluster: None):
    actor = start_balancer(BalancerConfig())
    balancer = actor.handle
    replicas = [registration(f"r{index}", 4_000_000, max_running=1_024) for index in range(64)]
    ray.get([balancer.register.remote(replica) for replica in replicas], timeout=600)
    items = [(load(f"g{number // 32}/{number}"), number) for number in range(16_384)]
    started = time.monotonic()
    ray.get(balancer.submit.remote(items), timeout=600)
    granted: dict[str, int] = {}
    acks = {f"r{index}": 0 for index in range(64)}
    while len(granted) < 16_384 and time.monotonic() - started < 120:
        polls = {name: balancer.next_orders.remote(name, ack, 0.2) for name, ack in acks.items()}
        for name, poll in polls.items():
            orders = ray.get(poll, timeout=600)
            acks[name] = orders.number
            granted |= {order.load.rollout_id: order.payload for order in orders.items if isinstance(order, Grant)}
    assert len(granted) == 16_384
    assert set(granted.values()) == set(range(16_384))
    ray.kill(balancer)


async def test_after_its_death_the_actor_is_rebuilt_from_what_is_resident(cluster: None):
    balancer = start_balancer(BalancerConfig(), settle_s=0.5, name="balancer-restarted").handle
    await balancer.register.remote(registration("r0", 100_000, max_running=64))
    await balancer.submit.remote([(load(name), "payload") for name in ("g/a", "g/b", "h/c")])
    orders = await balancer.next_orders.remote("r0", 0, 10.0)
    assert {order.load.rollout_id for order in orders.items} == {"g/a", "g/b", "h/c"}
    await balancer.report.remote("r0", [end("h/c")])
    before = await balancer.learned.remote()
    ray.kill(balancer, no_restart=False)
    deadline = time.monotonic() + 600
    while True:
        try:
            await balancer.report.remote("r0", [])
        except UnknownReplica:
            break
        except ray.exceptions.RayActorError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
    assert (empty := await balancer.learned.remote()).learned.lengths == ()
    again = await balancer.load_learned.remote(before.learned)
    assert again.learned == before.learned and again.incarnation == empty.incarnation != before.incarnation
    await balancer.register.remote(registration("r0", 100_000, max_running=64, resident=(load("g/a"),)))
    await balancer.submit.remote([(load("g/a"), "payload"), (load("g/b"), "payload")])
    orders = await balancer.next_orders.remote("r0", 0, 30.0)
    assert [order.load.rollout_id for order in orders.items] == ["g/b"], "what runs is not granted twice"
    await balancer.report.remote("r0", [end("g/a"), end("g/b")])
    snapshot = await balancer.snapshot.remote()
    assert (snapshot.finished, snapshot.in_flight, snapshot.waiting) == (2, 0, 0)
