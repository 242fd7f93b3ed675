"""What a balancer has learned, taken to a file and to another: all that outlives a step is there, nonsense is named."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scheduler.balancer import Balancer
from scheduler.expected_kv.estimate import LengthEstimate
from scheduler.expected_kv.learned import Learned
from scheduler.records import TurnReport
from scheduler.simulator.simulate import Simulator, SimulatorResult
from scheduler.traces.stage_traces import synthetic
from tests.fakes import load
from tests.scheduler.test_simulator import STAGE, settings

MOST = 8_000
SETTINGS = settings(40_000)


def step(estimate: LengthEstimate, seed: int) -> None:
    """Groups of eight whose siblings are alike, and have ended."""
    rng = np.random.default_rng(seed)
    for number in range(40):
        group = estimate.add_group(f"{seed}/{number}")
        for length in np.minimum(rng.lognormal(7.0 + rng.normal(0.0, 0.8), 0.3, 8), MOST).tolist():
            estimate.end(estimate.start(group, 0.0), length, truncated=length >= MOST)
    estimate.refresh()


def survivals(estimate: LengthEstimate) -> list[Any]:
    """Of every group there is, and of a fresh one."""
    estimate.add_group("fresh")
    groups = np.arange(estimate.num_groups)
    ages = np.resize([0.0, 900.0, 5_000.0], len(groups))
    return [table.tolist() for table in estimate.survivals(groups, ages, estimate.edges_B1)]


def test_an_estimate_that_was_loaded_answers_and_continues_as_the_one_that_saw_it_all():
    unbroken, restored = LengthEstimate(MOST), LengthEstimate(MOST)
    for seed in (1, 2):
        step(unbroken, seed)
        unbroken.forget_finished()
    restored.load_past(unbroken.past())
    assert unbroken.alikeness != LengthEstimate(MOST).alikeness and restored.past() == unbroken.past()
    assert survivals(restored) == survivals(unbroken)
    for estimate in (unbroken, restored):
        step(estimate, 3)
    assert survivals(restored) == survivals(unbroken)
    for estimate in (unbroken, restored):
        estimate.forget_finished()
    assert restored.past() == unbroken.past() and survivals(restored) == survivals(unbroken)


def test_what_has_ended_since_the_last_version_is_sent_whole_and_fades_with_the_next_one_there_as_here():
    """After a step whose update was not applied no version comes."""
    unbroken, restored = LengthEstimate(MOST), LengthEstimate(MOST)
    step(unbroken, 1)
    before = survivals(unbroken)
    restored.load_past(unbroken.past())
    assert survivals(unbroken) == before  # that was a look
    for estimate in (unbroken, restored):
        estimate.forget_finished()
    assert restored.past() == unbroken.past()


def played(rule: str = "expected_kv") -> Balancer:
    """A first step under two pairs of budgets, with preemptions, tools' text and turns that ended."""
    simulator = Simulator(synthetic(STAGE, groups=8, siblings=8, seed=3), rule, SETTINGS)
    simulator.run()
    balancer = simulator.balancer
    balancer.submit([load(f"other/{n}", group=f"other/{n}", most=500) for n in range(12)])
    balancer.decide()
    busy = balancer.state.rollouts["other/0"].replica
    assert busy is not None
    balancer.report(busy.replica_id, load=replace(busy.load, preemptions=busy.load.preemptions + 1))
    for n in range(12):
        end = TurnReport(
            rollout_id=f"other/{n}", context_tokens=30 + 9 * n, generated_tokens=10 + 5 * n, turn=1, ended=True
        )
        replica = balancer.state.rollouts[f"other/{n}"].replica
        assert replica is not None
        balancer.report(replica.replica_id, [end])
    balancer.set_policy_version(1)
    return balancer


def test_all_of_it_goes_through_a_file_and_another_balancer_to_the_last_bit():
    balancer = played()
    learned = balancer.learned()
    assert learned is not None and [one.max_response_tokens for one in learned.lengths] == [
        STAGE.max_response_tokens,
        500,
    ]
    assert all(one.response_tokens > 0.0 and sum(one.past.deaths_B) > 0.0 for one in learned.lengths)
    assert learned.moves.turns and learned.moves.preempted_tokens and learned.admissions >= 76
    again = Balancer("expected_kv")
    read = Learned.from_json(json.loads(json.dumps(learned.as_json())))
    again.load_learned(read)
    assert read == learned == again.learned()
    again.load_learned(read)  # twice is the same as once
    assert again.learned() == learned


def played_on(balancer: Balancer) -> SimulatorResult:
    """The step after, under this balancer."""
    simulator = Simulator(synthetic(STAGE, groups=8, siblings=16, seed=4), "expected_kv", SETTINGS)
    balancer.state.moves = balancer.state.finished = 0
    simulator.balancer = balancer
    return simulator.run()


@pytest.mark.long
def test_the_step_after_a_resume_is_the_one_of_a_run_that_was_never_stopped():
    unbroken, resumed = played(), Balancer("expected_kv")
    learned = unbroken.learned()
    assert learned is not None
    resumed.set_policy_version(1)  # published again, before it is restored
    resumed.load_learned(Learned.from_json(json.loads(json.dumps(learned.as_json()))))
    step_after = played_on(unbroken)
    assert played_on(resumed) == step_after != played_on(Balancer("expected_kv"))


def saved() -> dict[str, Any]:
    learned = played().learned()
    assert learned is not None
    return json.loads(json.dumps(learned.as_json()))


SAVED = saved()
NAN = float("nan")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("admissions",), -1, "'admissions' is -1, not from 0"),
        (("admissions",), "much", "'admissions' is 'much', not a whole number"),
        (("lengths", 0, "sampled_tokens"), NAN, "'sampled_tokens' is nan"),
        (("admissions",), 1.5, "'admissions' is 1.5, not a whole number"),
        (("admissions",), True, "'admissions' is True, not a whole number"),
        (("lengths",), {}, "'lengths' is {}, not a list"),
        (("lengths",), [7], "'lengths' is 7, not an object"),
        (("moves", "turns"), -1, "'turns' is -1, not from 0"),
        (("moves", "more"), 1, "'more' is unknown"),
        (("moves", "turns"), ..., "'turns' is missing"),
        (("lengths", 0, "max_turns"), 0, "'max_turns' is 0, not from 1"),
        (("lengths", 0, "sampled_tokens"), 0.0, "'sampled_tokens' is 0.0, not from 1"),
        (("lengths", 0, "response_tokens"), 1e300, "'response_tokens' is 1e\\+300, not from 0"),
        (("lengths", 0, "past"), None, "'past' is None, not an object"),
        (("lengths", 0, "past", "deaths_B"), [1.0] * 47, "'deaths_B' has 47 bins, not 48"),
        (("lengths", 0, "past", "tokens_B"), "x" * 48, "'tokens_B' is 'x"),
        (("lengths", 0, "past", "tokens_B", 3), -5.0, "'tokens_B' has -5.0, not a count"),
        (("lengths", 0, "past", "tokens_B", 3), None, "'tokens_B' is None, not a number"),
        (("lengths", 0, "past", "deaths_B", 0), float("inf"), "'deaths_B' has inf"),
        (("lengths", 0, "past", "alikeness"), 1.0, r"'alikeness' is 1.0, not in \[0, 1\)"),
        (("lengths", 0, "past", "fit_at"), 0.0, "'fit_at' is 0.0"),
    ],
)
def test_nonsense_is_refused_by_its_name(path: tuple[Any, ...], value: Any, said: str):
    edited: Any = json.loads(json.dumps(SAVED))
    at = edited
    for name in path[:-1]:
        at = at[name]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    with pytest.raises(ValueError, match=said):
        Learned.from_json(edited)
