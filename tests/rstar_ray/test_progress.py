from rstar_ray.progress_lines import EVERY_S, Progress


class Clock:
    """Stands still until it is moved."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_other_units_are_named():
    shown, clock = list[str](), Clock()
    progress = Progress("sft", 2, shown.append, unit="conversations", clock=clock)
    clock.now_s += EVERY_S
    progress.ended()
    assert shown == ["sft: 1 of 2 conversations, 20 s"]
