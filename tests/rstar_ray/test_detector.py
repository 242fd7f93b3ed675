"""Who is silent or stuck, to the tick, on a clock that the tests turn."""

from rstar_ray.stall_detector import Detector, Limit

LIMIT = Limit(silent_s=10, stuck_s=5)


def watching(*names: str) -> Detector:
    detector = Detector(tick_s=1.0)
    detector.tick(100.0)
    for name in names:
        detector.watch(name, LIMIT)
    return detector


def test_silence_is_found_at_the_first_tick_past_the_limit_and_said_once():
    detector = watching("a")
    detector.tick(101.0)
    detector.heard("a")
    found = [(second, wedged) for second in range(102, 130) for wedged in detector.tick(float(second))]
    assert [(second, wedged.seen) for second, wedged in found] == [(112, "silent for 11.0 s (limit 10 s)")]


def test_the_time_in_which_it_got_no_core_is_not_silence():
    detector = watching("a")
    found: list[tuple[int, str]] = []
    for second in range(101, 130):
        detector.starved("a", min(second - 101, 12))
        found += [(second, wedged.seen) for wedged in detector.tick(float(second))]
    assert found == [(123, "silent for 11.0 s (limit 10 s)")]


def test_one_that_has_work_and_answers_but_gets_nowhere_is_stuck():
    detector = watching("a")
    found: list[tuple[int, str]] = []
    for second in range(101, 112):
        found += [(second, wedged.seen) for wedged in detector.tick(float(second))]
        detector.heard("a", work=3, progress=7)
    assert found == [(107, "3 items of work and no step for 6.0 s (limit 5 s)")]


def test_steps_idleness_and_new_work_each_restart_the_limit():
    detector = watching("a")
    for second in range(101, 105):
        detector.tick(float(second))
        detector.heard("a", work=1, progress=1)
    for second, work, progress in ((105, 1, 2), (109, 0, 2), (113, 1, 2), (117, 1, 3)):  # stepped, idle, new, stepped
        for between in range(second - 3, second + 1):
            assert detector.tick(float(between)) == []
        detector.heard("a", work=work, progress=progress)


def test_a_gap_in_its_own_ticks_condemns_nobody():
    """All stopped together for a minute: the detector was, too."""
    detector = watching("a", "b")
    for second in range(101, 109):
        detector.tick(float(second))
        detector.heard("a", work=1, progress=second)
        detector.heard("b")
    assert detector.tick(168.0) == []
    assert detector.tick(169.0) == []
    detector.heard("a", work=1, progress=3)
    found = [(second, w.name) for second in range(170, 181) for w in detector.tick(float(second))]
    assert found == [(175, "a"), (177, "b")]  # both limits are still counted by the ticks it made


def test_a_detector_that_is_slow_at_every_tick_still_finds_the_silent():
    detector = watching("a")
    assert [w.name for second in range(105, 150, 5) for w in detector.tick(float(second))] == ["a"]


def test_what_is_forgotten_is_not_judged_and_what_is_watched_again_begins_again():
    detector = watching("a", "b")
    detector.forget("a")
    for second in range(101, 111):
        detector.tick(float(second))
    detector.watch("b", LIMIT)
    assert not detector.watches("a")
    assert [w for second in range(111, 121) for w in detector.tick(float(second))] == []
    assert [w.name for w in detector.tick(121.0)] == ["b"]
    detector.heard("b")  # of what is not watched any more: nothing to note
    assert not detector.watches("b")
