import asyncio

import pytest

from rstar_ray.progress import EVERY_S, Progress
from rstar_ray.run_dir.decoration import decoration


class Clock:
    """Stands still until it is moved."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_line_comes_when_one_is_due_and_not_for_the_last():
    shown, clock = list[str](), Clock()
    progress = Progress("aime2024", 4_000, shown.append, clock=clock)
    progress.ended()
    clock.now_s += EVERY_S - 1
    progress.ended(10)
    assert shown == []
    clock.now_s += 1
    progress.ended(1_000, note="0.500 right")
    assert shown == ["aime2024: 1,011 of 4,000 problems, 20 s, 0.500 right"]
    clock.now_s += EVERY_S
    progress.ended()
    assert shown[1:] == ["aime2024: 1,012 of 4,000 problems, 40 s"]
    clock.now_s += EVERY_S - 1
    progress.ended()
    clock.now_s += 10 * EVERY_S
    progress.ended(2_987)  # the end has a line of its own
    assert len(shown) == 2


def test_what_had_ended_before_counts():
    shown, clock = list[str](), Clock()
    progress = Progress("filter", 20, shown.append, done=7, clock=clock)
    clock.now_s += EVERY_S
    progress.ended()
    assert shown == ["filter: 8 of 20 problems, 20 s"]


def test_other_units_are_named():
    shown, clock = list[str](), Clock()
    progress = Progress("sft", 2, shown.append, unit="conversations", clock=clock)
    clock.now_s += EVERY_S
    progress.ended()
    assert shown == ["sft: 1 of 2 conversations, 20 s"]


@pytest.mark.parametrize("ends", [KeyboardInterrupt, asyncio.CancelledError])
def test_an_interrupt_passes_through_a_decoration(ends: type[BaseException]):
    shown: list[str] = []
    with pytest.raises(ends), decoration("the picture", shown.append):
        raise ends
    assert shown == []


def test_a_failure_without_words_is_named_by_its_kind_and_one_with_many_by_the_first_line():
    shown: list[str] = []
    for failed in (ValueError(), ValueError("one\ntwo")):
        with decoration("the picture", shown.append):
            raise failed
    assert shown == ["the picture is left out: ValueError", "the picture is left out: ValueError: one"]
