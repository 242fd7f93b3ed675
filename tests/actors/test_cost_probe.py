"""An engine's costs as they are measured from outside, against those of a modelled engine."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from actors.generation.engine import measure_cost
from scheduler.cost import EngineCost
from scheduler.simulator.engine_model import EngineShape, ModelledEngine
from scheduler.simulator.paged_cache import Request

COST = EngineCost(fixed_s=4e-3, per_sequence_s=1e-4, per_context_s=2e-7, per_prefill_s=3e-5)


class Modelled:
    """A modelled engine as a probe sees one: it samples, and a clock advances."""

    def __init__(self, cost: EngineCost, shape: EngineShape) -> None:
        self.engine, self.shape = ModelledEngine(cost, shape), shape
        self.now = 0.0
        self.asked = 0
        self._running: dict[str, asyncio.Future[None]] = {}
        self._prompts: dict[tuple[int, ...], str] = {}
        self._together: set[tuple[int, ...]] = set()

    async def sample(self, prompt_ids: Sequence[int], tokens: int) -> None:
        group = self._prompts.setdefault(tuple(prompt_ids), f"g{len(self._prompts)}")
        assert len(prompt_ids) + tokens <= self.shape.kv_tokens and len(set(prompt_ids)) <= 50
        self.asked += 1
        assert tuple(prompt_ids) not in self._together, "KV that requests share is read faster than their own"
        self._together.add(tuple(prompt_ids))
        key, done = f"{self.asked}", asyncio.get_running_loop().create_future()
        self._running[key] = done
        self.engine.submit(self.now, Request(key, group, len(prompt_ids), len(prompt_ids), tokens, 0))
        await asyncio.sleep(0)  # all that come together
        while not done.done():
            self.now = self.engine.next_event_s
            for request in self.engine.advance():
                self._running.pop(request.key).set_result(None)
        self._together.discard(tuple(prompt_ids))


async def measured(cost: EngineCost, kv_tokens: int = 65_536, **limits: Any) -> EngineCost:
    model = Modelled(cost, EngineShape(kv_tokens=kv_tokens, max_running=limits.get("max_running", 256)))
    given = {"context_tokens": 32_768, "max_running": 256} | limits
    found = await measure_cost(model.sample, kv_tokens=kv_tokens, clock=lambda: model.now, **given)
    assert model.engine.preemptions == 0 and model.engine.steps < 400
    return found


@pytest.mark.parametrize(
    "limits",
    [{"kv_tokens": 256, "context_tokens": 200}, {"max_running": 1}, {"kv_tokens": 96}, {"context_tokens": 40}],
)
async def test_a_probe_stays_within_a_small_engine(limits: dict[str, int]):
    found = await measured(COST, **limits)
    assert found.fixed_s == pytest.approx(COST.fixed_s, rel=0.2)


async def test_a_slow_prefill_does_not_make_a_long_start():
    slow = replace(COST, per_prefill_s=3e-3)
    model = Modelled(slow, EngineShape(kv_tokens=65_536, max_running=256))
    found = await measure_cost(
        model.sample, kv_tokens=65_536, context_tokens=32_768, max_running=256, clock=lambda: model.now
    )
    assert model.now < 8 * slow.prefill_s(2_048, 0)
    assert found.per_context_s == pytest.approx(COST.per_context_s, rel=0.3)


@pytest.mark.parametrize("per_request_s", [0.0, 2e-3])
async def test_the_host_time_of_a_request_is_measured(per_request_s: float):
    found = await measured(replace(COST, per_request_s=per_request_s))
    assert found.per_request_s == pytest.approx(per_request_s, abs=2 * COST.per_sequence_s)
    assert found.fixed_s == pytest.approx(COST.fixed_s, rel=0.2)
    assert found.per_sequence_s == pytest.approx(COST.per_sequence_s, rel=0.2)
    assert found.per_prefill_s == pytest.approx(COST.per_prefill_s, rel=0.2)
