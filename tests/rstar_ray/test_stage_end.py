import pytest

from rstar_ray.algorithm.stage_end import SETTLED_AFTER, SETTLED_WINDOW, WINDOW, StepSigns, Until, reached
from rstar_ray.data.order import DataPosition
from rstar_ray.run_dir.metrics import step_metrics
from rstar_ray.stage_progress import StageProgress
from rstar_ray.trajectory import StopReason
from tests.rstar_ray.fabricate import summary

LONG_AFTER = 10 * SETTLED_AFTER


def signs(count: int, *, reward: float = 0.5, cut: float = 0.1, right: float = 0.2) -> list[StepSigns]:
    return [StepSigns(reward_mean=reward, frac_truncated=cut, frac_all_correct=right) for _ in range(count)]


def rising(count: int, *, start: float, end: float) -> list[StepSigns]:
    """Rewards on a straight line, truncation as in `signs`."""
    return [signs(1, reward=start + (end - start) * step / (count - 1))[0] for step in range(count)]


def test_fixed_steps_end_for_no_other_reason():
    assert reached("steps", signs(400, right=1.0), steps_since_warmup=LONG_AFTER) == ""


@pytest.mark.parametrize(
    ("early", "late", "ends"),
    [
        (signs(SETTLED_WINDOW), signs(SETTLED_WINDOW), True),
        ([], signs(SETTLED_WINDOW), False),  # nothing to compare with
        (signs(SETTLED_WINDOW), signs(SETTLED_WINDOW - 1), False),
        (signs(SETTLED_WINDOW, reward=0.4), signs(SETTLED_WINDOW, reward=0.5), False),  # still learning
        (signs(SETTLED_WINDOW, reward=0.5), signs(SETTLED_WINDOW, reward=0.4), False),  # falling
        (signs(SETTLED_WINDOW, reward=0.51), signs(SETTLED_WINDOW, reward=0.5), True),
        (signs(SETTLED_WINDOW, cut=0.2), signs(SETTLED_WINDOW, cut=0.12), False),  # still settling
        (signs(SETTLED_WINDOW, cut=0.01), signs(SETTLED_WINDOW, cut=0.01), False),  # budgets do not bind
        (signs(SETTLED_WINDOW, cut=0.4), signs(SETTLED_WINDOW, cut=0.4), False),
        (signs(SETTLED_WINDOW + 10, cut=0.3), signs(10, cut=0.1), False),  # crosses 10 % for a few steps
        (rising(20, start=0.60, end=0.41), rising(20, start=0.40, end=0.22), False),
    ],
)
def test_stage_1_ends_once_truncation_has_settled_near_a_tenth_and_the_reward_on_a_plateau(
    early: list[StepSigns], late: list[StepSigns], ends: bool
):
    assert bool(reached("settled", [*early, *late], steps_since_warmup=LONG_AFTER)) == ends


def test_stage_1_never_settles_during_the_warm_up_or_shortly_after():
    steady = signs(2 * SETTLED_WINDOW)
    assert reached("settled", steady, steps_since_warmup=SETTLED_AFTER - 1) == ""
    assert reached("settled", steady, steps_since_warmup=SETTLED_AFTER)


def ends_at(until: Until, *, warmup_steps: int) -> int:
    """The step after which a stage of steady steps ends, resumed from its saved progress at every step."""
    rollouts = [
        summary(f"g{n}", reward=float(n < 10), stop=StopReason.TRUNCATED if n >= 18 else StopReason.ANSWERED)
        for n in range(20)
    ]
    seconds = {"rollout_s": 1.0, "learn_s": 1.0, "publish_s": 1.0, "step_s": 3.0}
    progress = StageProgress()
    while not progress.ended and progress.step < 400:
        step = progress.step + 1
        metrics = step_metrics(
            rollouts,
            stage="stage1",
            step=step,
            policy_version=step,
            learner_version=step,
            kept_ids=["g0/0"],
            seconds=seconds,
            update=None,
        )
        progress = StageProgress.from_json(progress.as_json())
        progress = progress.after(metrics, DataPosition(), until, warmup_steps=warmup_steps)
    return progress.step


def test_a_steady_stage_ends_60_steps_after_its_own_warm_up():
    assert ends_at("settled", warmup_steps=20) == 80
    assert ends_at("settled", warmup_steps=0) == 60
    assert ends_at("steps", warmup_steps=0) == 400


def test_stage_2_ends_once_over_70_percent_of_the_problems_are_all_right():
    def solved(steps: list[StepSigns]) -> str:
        return reached("solved", steps, steps_since_warmup=0)

    assert solved(signs(WINDOW, right=0.69)) == ""
    assert solved(signs(WINDOW - 1, right=1.0)) == ""
    assert solved([*signs(30), *signs(WINDOW, right=0.71)]).startswith("71 % of the problems are all right")


def test_progress_that_was_saved_under_earlier_names_of_its_metrics_is_read():
    saved = StageProgress(signs=tuple(signs(1))).as_json()
    saved["signs"] = [{"reward_mean": 0.5, "share_truncated": 0.1, "share_all_right": 0.2}]
    assert StageProgress.from_json(saved).signs == tuple(signs(1))
