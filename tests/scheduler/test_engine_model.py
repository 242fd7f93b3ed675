"""The modelled engine against a step-by-step reading of the same rules."""

import pytest

from scheduler.cost import EngineCost
from scheduler.simulator.engine_model import EngineShape, ModelledEngine
from scheduler.simulator.paged_cache import Request

COST = EngineCost(fixed_s=1.0, per_sequence_s=0.1, per_context_s=0.001, per_prefill_s=0.01)


def engine(kv_tokens: int = 16_000, **limits: int) -> ModelledEngine:
    shape: dict[str, int] = {"kv_tokens": kv_tokens, "block_tokens": 16, "max_running": 1_024, **limits}
    return ModelledEngine(COST, EngineShape(**shape))


def run(model: ModelledEngine) -> list[tuple[str, float]]:
    """Advance until idle; (rollout, time) of every completion."""
    done: list[tuple[str, float]] = []
    while model.next_event_s != float("inf"):
        now = model.next_event_s
        done += [(request.key, now) for request in model.advance()]
    return done


def request(key: str, prompt: int, tokens: int, *, group: str = "", context: int = 0, seen: int = 0) -> Request:
    return Request(key, group or key, prompt, context or prompt, tokens, seen)


def test_one_request_takes_its_prefill_and_a_step_for_every_further_token():
    model = engine()
    model.submit(0.0, request("a", 100, 5))
    expected = 1.0 + 0.1 + 100 * 0.01  # the prefill step samples the first token
    for context in range(101, 105):
        expected += 1.0 + 0.1 + context * 0.001
    assert run(model) == [("a", pytest.approx(expected))]
    assert model.used_blocks == 0 and not model.running


def test_many_steps_at_once_equal_single_steps():
    model = engine()
    for key, prompt, tokens in (("a", 100, 50), ("b", 37, 20), ("c", 5, 33)):
        model.submit(0.0, request(key, prompt, tokens))
    now = 1.0 + 0.1 + 100 * 0.01  # the first prefill starts at once,
    now += 1.0 + 0.1 + 0.101 + 2 * 0.1 + 42 * 0.01  # the other two join at the next boundary
    contexts, left = {"a": 102, "b": 38, "c": 6}, {"a": 48, "b": 19, "c": 32}
    expected: list[tuple[str, float]] = []
    while left:
        now += 1.0 + 0.1 * len(left) + 0.001 * sum(contexts[key] for key in left)
        for key in list(left):
            contexts[key] += 1
            left[key] -= 1
            if left[key] == 0:
                del left[key]
                expected.append((key, now))
    assert run(model) == [(key, pytest.approx(at)) for key, at in expected]


def test_a_full_cache_preempts_the_latest_and_computes_it_again():
    model = engine(kv_tokens=320)  # 20 blocks
    model.submit(0.0, request("a", 100, 120))
    model.submit(0.0, request("b", 100, 120))
    assert [key for key, _ in run(model)] == ["a", "b"]
    assert model.preemptions == 1
    assert model.recomputed_tokens >= 96
    assert model.used_blocks == 0


def test_a_later_turn_finds_its_earlier_ones_in_the_cache():
    model = engine()
    model.submit(0.0, request("a", 100, 60))
    model.advance()
    (first,) = model.advance()
    before = model.prefilled_tokens
    model.submit(1_000.0, request("a", 100, 5, context=first.context + 20, seen=first.context))
    run(model)
    assert model.prefilled_tokens - before < 20 + 16
    assert model.recomputed_tokens == 0


def test_blocks_in_use_are_never_more_than_there_are():
    model = engine(kv_tokens=960)
    for number in range(12):
        model.submit(0.0, request(f"r{number}", 30 + number // 3, 40 + 13 * number, group=f"g{number // 3}"))
    done = 0
    while model.next_event_s != float("inf"):
        done += len(model.advance())
        assert 0 <= model.used_blocks <= model.capacity
        assert model.used_blocks + model._cache._cached_blocks <= model.capacity
    assert done == 12
    assert model.used_blocks == 0 and model._decoding == 0 and model._context == 0 and not any(model._phase)
