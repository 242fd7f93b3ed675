import pytest

from rstar_ray.algorithm.stage_end import WINDOW, StepSigns, reached


def signs(count: int, *, reward: float = 0.5, cut: float = 0.1, right: float = 0.2) -> list[StepSigns]:
    return [StepSigns(reward_mean=reward, share_truncated=cut, share_all_right=right) for _ in range(count)]


def test_fixed_steps_end_for_no_other_reason():
    assert reached("steps", signs(40, right=1.0)) == ""


@pytest.mark.parametrize(
    ("early", "late", "ends"),
    [
        (signs(WINDOW), signs(WINDOW), True),
        ([], signs(WINDOW), False),  # nothing to compare with
        (signs(WINDOW), signs(WINDOW - 1), False),
        (signs(WINDOW, reward=0.4), signs(WINDOW, reward=0.5), False),  # still learning
        (signs(WINDOW, reward=0.5), signs(WINDOW, reward=0.4), True),  # past its best
        (signs(WINDOW, cut=0.2), signs(WINDOW, cut=0.12), False),  # still settling
        (signs(WINDOW, cut=0.01), signs(WINDOW, cut=0.01), False),  # budgets do not bind
        (signs(WINDOW, cut=0.4), signs(WINDOW, cut=0.4), False),
    ],
)
def test_stage_1_ends_once_truncation_has_settled_near_a_tenth_and_the_reward_on_a_plateau(
    early: list[StepSigns], late: list[StepSigns], ends: bool
):
    assert bool(reached("settled", [*early, *late])) == ends


def test_stage_2_ends_once_over_70_percent_of_the_problems_are_all_right():
    assert reached("solved", signs(WINDOW, right=0.69)) == ""
    assert reached("solved", signs(WINDOW - 1, right=1.0)) == ""
    assert reached("solved", [*signs(30), *signs(WINDOW, right=0.71)]).startswith("71 % of the problems are all right")
