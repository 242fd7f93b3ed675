"""Many simulated steps with a staleness, on small fleets."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from scheduler.simulator.simulate import Simulator
from scheduler.simulator.steps import LearnerTime, SimulatedSteps, StepsSimulator
from scheduler.traces.stage_traces import synthetic
from scheduler.traces.trace import TraceRollout
from tests.scheduler.test_simulator import STAGE, settings

SETTINGS = settings(60_000)
TURNS = LearnerTime(learn_s=60.0, engines_pause_s=60.0, publish_s=2.0)


def draw_of(step: int) -> Sequence[TraceRollout]:
    return synthetic(STAGE, groups=4, siblings=8, seed=step)


def simulated(staleness: int, learner: LearnerTime = TURNS, *, continues: bool = True) -> SimulatedSteps:
    simulator = StepsSimulator(
        draw_of, "expected_kv", SETTINGS, steps=6, staleness=staleness, learner=learner, continues=continues
    )
    return simulator.run_steps()


def test_without_a_staleness_a_step_is_its_rollouts_then_the_learner():
    found = simulated(0)
    assert found.steps[0].drawn_s == pytest.approx(Simulator(draw_of(1), "expected_kv", SETTINGS).run().makespan_s)
    for before, step in zip(found.steps, found.steps[1:], strict=False):
        assert step.begun_s == before.ended_s
    assert all(step.ended_s == pytest.approx(step.drawn_s + 62.0) for step in found.steps)


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_draw_begins_when_as_many_steps_have_ended_as_the_rule_says(staleness: int):
    ended_s = [0.0, *(step.ended_s for step in simulated(staleness).steps)]
    begun_s = [step.begun_s for step in simulated(staleness).steps]
    assert begun_s == [ended_s[max(0, step - 1 - staleness)] for step in range(1, 7)]


def test_a_staleness_fills_the_tail_and_an_overlapped_learner_more():
    synchronous, stale = simulated(0), simulated(1)
    overlapped = simulated(1, replace(TURNS, engines_pause_s=0.0))
    assert overlapped.step_s < stale.step_s < synchronous.step_s
    assert 1.0 <= stale.over_bound < synchronous.over_bound


def test_contexts_that_are_computed_again_cost_time():
    kept, again = simulated(1), simulated(1, replace(TURNS, recompute=True))
    assert again.recomputed_share > kept.recomputed_share + 0.05
    assert again.step_s > kept.step_s


def test_no_draw_is_begun_behind_the_last_step_of_a_stage_that_ends():
    drawn: list[int] = []

    def noted(step: int) -> Sequence[TraceRollout]:
        drawn.append(step)
        return draw_of(step)

    StepsSimulator(noted, "least_sessions", SETTINGS, steps=3, staleness=1, learner=TURNS, continues=False).run_steps()
    assert drawn == [1, 2, 3]
