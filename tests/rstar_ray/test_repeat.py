"""A stage that is begun again when the learner is lost in it."""

import pytest

from rstar_ray.errors import LearnerError, RankLost, RStarError
from rstar_ray.learner_restart import MOST_LOSSES_AT_A_STEP, repeated


class Stage:
    """Saves a checkpoint after each step; loses the learner at the calls and restarts it is told to."""

    def __init__(self, losses: list[int], restarts_lost: int = 0) -> None:
        self.losses = losses  # steps saved when each of the first calls is lost
        self.restarts_lost = restarts_lost
        self.saved = 0
        self.told: list[str] = []

    async def run(self) -> str:
        self.told.append("stage")
        if self.losses:
            self.saved = self.losses.pop(0)
            raise RankLost("learner/rank-0 died")
        return "done"

    async def restart(self) -> None:
        self.told.append("restart")
        if self.restarts_lost:
            self.restarts_lost -= 1
            raise RankLost("learner/rank-1 died")

    async def until_done(self) -> str:
        return await repeated(self.run, restart=self.restart, steps_saved=lambda: self.saved)


async def test_a_stage_without_a_loss_runs_once():
    stage = Stage([])
    assert await stage.until_done() == "done" and stage.told == ["stage"]


async def test_after_a_loss_the_learner_starts_again_and_then_the_stage(logged: list[str]):
    stage = Stage([4])
    assert await stage.until_done() == "done"
    assert stage.told == ["stage", "restart", "stage"]
    assert logged == ["learner/rank-0 died; the learner starts again, from the checkpoint of step 4"]


async def test_a_loss_in_the_restart_is_a_loss_like_another():
    stage = Stage([4], restarts_lost=1)
    assert await stage.until_done() == "done"
    assert stage.told == ["stage", "restart", "restart", "stage"]


async def test_any_number_of_losses_is_borne_while_checkpoints_come_in_between():
    assert await Stage([*range(1, 30)]).until_done() == "done"


async def test_losses_at_the_same_checkpoint_end_the_run():
    with pytest.raises(RStarError, match=f"{MOST_LOSSES_AT_A_STEP + 1} times after the checkpoint of step 7"):
        await Stage([7] * 30).until_done()


async def test_other_faults_of_the_learner_end_the_run_at_once():
    class Diverged(Stage):
        async def run(self) -> str:
            raise LearnerError("3 updates in a row were not finite")

    with pytest.raises(LearnerError, match="not finite"):
        await Diverged([]).until_done()
