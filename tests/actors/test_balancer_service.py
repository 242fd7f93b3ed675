"""The balancer's RPCs, without Ray: payloads, numbered grants, deaths and restarts."""

import asyncio
from dataclasses import replace

import pytest

from actors.balancer_service import BalancerService
from scheduler.balancer import PLACEMENT
from scheduler.records import NeverFits, Quarantined, ReplicaLoad, TurnReport
from tests.fakes import end, load, next_orders, registration


async def turn_of_the_loop(*tasks: asyncio.Task[object]) -> None:
    """Tasks that can continue without an event have done so; these wait for one."""
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


async def service_of(*replicas: str, rule: str = "expected_kv", capacity: int = 1_000) -> BalancerService:
    service = BalancerService(placement=replace(PLACEMENT, rule=rule))
    for name in replicas:
        await service.register(registration(name, capacity))
    return service


async def with_one(rule: str = "expected_kv") -> BalancerService:
    """Of a replica that has been granted rollout a."""
    service = await service_of("r0", rule=rule)
    await service.submit([(load("a"), "payload")])
    await granted(service, "r0")
    return service


async def granted(service: BalancerService, replica: str, ack: int = 0, wait_s: float = 1.0) -> tuple[int, list[str]]:
    grants = await next_orders(service, replica, ack, wait_s)
    return grants.number, [grant.load.rollout_id for grant in grants.admissions]


async def test_a_dead_replicas_rollouts_are_granted_elsewhere_with_their_payload():
    service = await with_one()
    await service.register(registration("r1", 1_000))
    turn = TurnReport(rollout_id="a", context_tokens=40, generated_tokens=30, turn=1)
    await service.report("r0", [turn])
    assert await service.replica_lost("r0") == ["a"]
    grants = await next_orders(service, "r1", 0, 1.0)
    assert grants.admissions[0].payload == "payload"
    assert grants.admissions[0].load.context_tokens == 40


async def test_handed_back_rollouts_continue_from_their_new_payload():
    service = await with_one()
    service.balancer.set_serving("r0", False)
    await service.register(registration("r1", 1_000))
    later = replace(load("a", context=50, made=30), turn=2)
    await service.return_rollouts("r0", [(later, "resumed")])
    grants = await next_orders(service, "r1", 0, 1.0)
    assert [(g.payload, g.load.turn) for g in grants.admissions] == [("resumed", 2)]


async def test_a_result_from_a_replica_that_lost_the_rollout_is_stale():
    service = await with_one()
    await service.replica_lost("r0")
    await service.register(registration("r0", 1_000))
    await service.register(registration("r1", 1_000))
    snapshot = await service.snapshot()
    assert snapshot.finished == 0
    holder = "r0" if (await granted(service, "r0", wait_s=0.05))[1] else "r1"
    other = "r1" if holder == "r0" else "r0"
    await service.report(other, [end("a")])
    assert (await service.snapshot()).stale_reports == 1
    await service.report(holder, [end("a")])
    assert (await service.snapshot()).finished == 1


async def test_rollouts_that_need_a_larger_replica_than_takes_work_are_logged_once(caplog: pytest.LogCaptureFixture):
    service = await service_of("r0")
    await service.register(registration("large", 4000))
    await service.submit([(load("big", prompt=2000), None)])
    assert (await granted(service, "large"))[1] == ["big"]
    assert caplog.messages == []
    for _ in range(2):
        await service.replica_lost("large")
        for _ in range(2):
            await service.report("r0", [])
            await turn_of_the_loop()
        assert caplog.messages == ["1 waiting rollouts need a larger replica than any that takes work now"]
        caplog.clear()
        await service.register(registration("large", 4000))
        assert (await granted(service, "large"))[1] == ["big"]


async def test_a_late_return_of_a_rollout_that_runs_elsewhere_is_stopped():
    service = await with_one()
    reply = await service.register(registration("r1", 1_000, resident=(load("a"),)))
    assert reply == ["a"]


async def test_a_cancelled_rollout_is_stopped_where_it_runs():
    service = await service_of("r0")
    await service.submit([(load("a"), None)])
    number, _ = await granted(service, "r0")
    await service.cancel(["a"])
    assert (await next_orders(service, "r0", number, 1.0)).cancels == ("a",)
    assert (await service.snapshot()).in_flight == 0


async def test_rollouts_that_are_cancelled_right_behind_their_submission_do_not_run():
    service = await service_of("r0")
    submitted = asyncio.create_task(service.submit([(load("a"), "payload")]))
    cancelled = asyncio.create_task(service.cancel(["a"]))
    await asyncio.gather(submitted, cancelled)
    assert (await granted(service, "r0", wait_s=0.05))[1] == []


async def test_what_can_never_fit_is_refused_with_the_numbers():
    service = await service_of("r0", capacity=100)
    with pytest.raises(NeverFits, match=r"needs at least 101 KV tokens.*holds 100"):
        await service.submit([(load("a", prompt=100), None)])


async def test_a_quarantined_replica_is_logged_once_with_the_reason(caplog: pytest.LogCaptureFixture):
    service = await service_of("r0")
    for _ in range(2):
        with pytest.raises(Quarantined, match="r0 is in quarantine: it reports 1001 KV tokens"):
            await service.report("r0", [], ReplicaLoad(kv_used_tokens=1001))
    (line,) = caplog.messages
    assert "r0 is in quarantine" in line and "reports 1001 KV tokens in use of 1000" in line
    assert (await service.step_figures()).quarantined == ("r0: reports 1001 KV tokens in use of 1000",)


async def test_what_leaks_is_logged_when_the_balancer_is_idle(caplog: pytest.LogCaptureFixture):
    service = await with_one("worst_case")
    service.balancer.state.replica("r0").reserved_tokens += 7  # a fault of ours
    await service.report("r0", [end("a")])
    await turn_of_the_loop()
    (line,) = caplog.messages
    assert "r0 is left with 7 reserved tokens" in line
    assert (await service.step_figures()).faults == ("r0 is left with 7 reserved tokens",)


async def test_what_a_lost_replica_held_is_reported_and_none_of_it_goes_back_there_before_the_loss_is_complete():
    service = await service_of("r0", "r1", capacity=100_000)
    await service.submit([(load(f"x{number}"), None) for number in range(8)])
    held = {name: (await granted(service, name))[1] for name in ("r0", "r1")}
    assert await service.held_by_lost("r0", [f"x{number}" for number in range(8)]) == held["r0"] != []
    await service.return_rollouts("r0", [(load(name), "with its turns") for name in held["r0"]])
    grants = await next_orders(service, "r1", len(held["r1"]), 1.0)
    assert [grant.load.rollout_id for grant in grants.admissions] == held["r0"]
    assert {grant.payload for grant in grants.admissions} == {"with its turns"}


async def test_a_reborn_balancer_says_of_a_lost_replica_what_no_other_holds_once_those_that_live_are_back():
    service = BalancerService(settle_s=0.05)
    asked = asyncio.create_task(service.held_by_lost("r0", ["a", "b", "c"]))
    await turn_of_the_loop(asked)
    await service.register(registration("r1", 1_000, resident=(load("b"),)))
    assert await asked == ["a", "c"]


async def ended(service: BalancerService, count: int) -> None:
    """So many rollouts, and a new version after them."""
    names = [f"x{number}" for number in range(count)]
    await service.submit([(load(name, group=name), None) for name in names])
    await granted(service, "r0")
    await service.report("r0", [end(name) for name in names])
    await service.set_policy_version(1)


async def test_what_one_incarnation_has_learned_another_loads_under_its_own_name():
    services = [BalancerService(), BalancerService()]
    for service in services:
        await service.register(registration("r0", 100_000, max_running=64))
    await ended(services[0], 20)
    before, empty = [await service.learned() for service in services]
    assert before.learned is not None and empty.learned is not None
    assert before.learned.lengths[0].past.deaths_B != () == empty.learned.lengths
    after = await services[1].load_learned(before.learned)
    assert after == await services[1].learned() and after.learned == before.learned
    assert after.incarnation == empty.incarnation != before.incarnation
    await ended(services[1], 20)  # and it continues
    assert (await services[1].step_figures()).faults == ()
