from typing import Any

import pytest

from rstar_ray.algorithm.lr_schedule import rl_learning_rate, sft_learning_rate
from rstar_ray.config import RunConfig, SftConfig, with_values


def rl(steps: range, *, peak: float = 1.0, warmup: int = 4, **changes: Any) -> list[float]:
    values = {"optimizer.learning_rate": peak, "optimizer.warmup_steps": warmup, "reset_optimizer": True, **changes}
    config = with_values(RunConfig(), values)
    return [rl_learning_rate(config, step) for step in steps]


def sft(*steps: int, **values: Any) -> list[float]:
    config = SftConfig(**{"learning_rate": 2.0, **values})
    return [sft_learning_rate(config, step) for step in steps]


def test_an_rl_stage_warms_up_in_equal_steps_and_stays_at_the_peak():
    assert rl(range(1, 7)) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rl(range(1, 3), warmup=0) == [1.0, 1.0]


def test_an_optimizer_that_keeps_its_moments_needs_no_warm_up():
    assert rl(range(1, 3), reset_optimizer=False) == [1.0, 1.0]


def test_a_cosine_falls_from_the_peak_to_its_final_share_and_stays_there():
    rates = sft(*range(1, 21), steps=12, warmup_share=2 / 12, final_share=0.1)
    assert rates[1] == rates[2] == 2.0
    assert rates[7] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates[12:] == pytest.approx([0.2] * 8)
    assert rates[2:13] == sorted(rates[2:13], reverse=True)


def test_wsd_stays_at_the_peak_and_then_falls_in_equal_steps_to_its_final_share():
    wsd: dict[str, Any] = {"schedule": "wsd", "steps": 12, "warmup_share": 2 / 12, "stable_share": 0.6}
    assert sft(1, 2, 3, 9, **wsd) == [1.0, 2.0, 2.0, 2.0]
    assert sft(10, 11, 12, 13, 16, **wsd) == pytest.approx([1.5, 1.0, 0.5, 0.0, 0.0])
    assert sft(13, 14, **wsd, final_share=0.2) == pytest.approx([0.4, 0.4])
    assert sft(2, schedule="wsd", steps=4, warmup_share=0.0, stable_share=0.0) == [1.5]
