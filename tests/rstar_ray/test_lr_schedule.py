import pytest

from tests import derived


def test_a_constant_schedule_warms_up_in_equal_steps_and_stays():
    schedule = derived.schedule(learning_rate=1.0, warmup_steps=4)
    assert [schedule.at(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_cosine_falls_from_the_peak_to_its_final_share_and_stays_there():
    schedule = derived.schedule(learning_rate=2.0, warmup_steps=2, shape="cosine", total_steps=12, final_share=0.1)
    rates = [schedule.at(step) for step in range(20)]
    assert rates[1] == rates[2] == 2.0
    assert rates[7] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates[12:] == pytest.approx([0.2] * 8)
    assert rates[2:13] == sorted(rates[2:13], reverse=True)


def test_wsd_stays_at_the_peak_and_then_falls_in_equal_steps():
    schedule = derived.schedule(learning_rate=1.0, warmup_steps=2, shape="wsd", total_steps=12, stable_share=0.6)
    assert [schedule.at(step) for step in (0, 1, 2, 8)] == [0.5, 1.0, 1.0, 1.0]
    assert [schedule.at(step) for step in (9, 10, 11, 12, 15)] == pytest.approx([0.75, 0.5, 0.25, 0.0, 0.0])


def test_edges_with_a_meaning_are_taken():
    assert derived.schedule(learning_rate=0.0, warmup_steps=0).at(3) == 0.0
    assert derived.schedule(warmup_steps=0, shape="cosine", total_steps=1).at(1) == 0.0
    assert (
        derived.schedule(learning_rate=1.0, warmup_steps=0, shape="wsd", total_steps=4, stable_share=0.0).at(1) == 0.75
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rate": -1.0},
        {"warmup_steps": -1},
        {"shape": "wsd", "total_steps": 20, "warmup_steps": 20},
        {"shape": "cosine", "total_steps": 20, "warmup_steps": 21},
        {"stable_share": 1.0},
        {"stable_share": -0.1},
    ],
)
def test_a_schedule_without_a_meaning_is_refused(wrong: dict[str, object]):
    with pytest.raises(ValueError):
        derived.schedule(**wrong)
