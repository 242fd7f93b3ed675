"""Groups of rollouts: order, retries and losses, and near-duplicate problems against a comparison of all pairs."""

# pyright: reportPrivateUsage=false

import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from rstar_ray.agent.rollout import RolloutState, run_rollout
from rstar_ray.config import RunConfig
from rstar_ray.data.overlap import _shingles, near_duplicates
from rstar_ray.rollouts import (
    DroppedRollout,
    FinishedRollout,
    TrajectoryRef,
    roll_out,
    rollout_requests,
    whole_groups,
)
from rstar_ray.trajectory import (
    Problem,
    RolloutLimits,
    RolloutRequest,
    ToolCall,
    ToolResult,
)
from tests.fakes import LIMITS, AddingSandbox, CharChat, ScriptedEngine, answer, call, request
from tests.rstar_ray.fabricate import summary

# -- one rollout -------------------------------------------------------------------------------------------------------

CHAT = CharChat()


def limits(response: int = 400, turns: int = 4, context: int = 1_000) -> RolloutLimits:
    return replace(LIMITS, max_response_tokens=response, max_turns=turns, max_context_tokens=context)


def begin(**more: int) -> RolloutState:
    wanted = request(limits=limits(**more))
    return RolloutState.start(wanted, CHAT.prompt_ids(wanted.problem))


async def test_calls_of_one_turn_run_at_once_and_one_alone_without_a_task():
    running = most = 0

    async def execute(call: ToolCall) -> ToolResult:
        nonlocal running, most
        running += 1
        most = max(most, running)
        result = await AddingSandbox()(call)
        running -= 1
        return result

    engine = ScriptedEngine([call("1+2") * 3, answer("3")])
    await run_rollout(begin(), generate=engine, execute=execute, chat=CHAT)
    assert most == 3


# -- many rollouts -----------------------------------------------------------------------------------------------------

PROBLEMS = [Problem(id=name, problem=name, answer="1") for name in ("a", "b")]
ASKED = rollout_requests(PROBLEMS, RunConfig(stage="s", seed=3), name=1, siblings=2, at="/step-4")


class Flaky:
    """Ends requests from the last to the first; those named fail as often as given."""

    num_ended = 0

    async def abandon(self) -> None: ...

    def __init__(self, **fails: int) -> None:
        self.fails, self.asked = {name.replace("_", "/"): times for name, times in fails.items()}, list[str]()

    async def run(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[FinishedRollout | DroppedRollout]:
        for one in reversed(requests):
            self.asked.append(one.rollout_id)
            tail = one.rollout_id.partition("/again-")[0][-3:]
            if self.fails.get(tail, 0) > 0:
                self.fails[tail] -= 1
                yield DroppedRollout(rollout_id=one.rollout_id, group_id=one.group_id, reason="ours")
                continue
            record = replace(summary(one.group_id), rollout_id=one.rollout_id)
            yield FinishedRollout(summary=record, ref=TrajectoryRef(None, 0))


async def test_groups_come_in_the_order_of_the_requests_and_losses_apart():
    groups, dropped, last = await roll_out(ASKED, Flaky(a_1=1), deadline_s=9.0)
    assert last == ASKED[0].rollout_id
    ids = [[one.summary.rollout_id[-3:] for one in group] for group in groups]
    assert ids == [["a/0"], ["b/0", "b/1"]] and [one.rollout_id[-3:] for one in dropped] == ["a/1"]


async def gathered(rollouts: Flaky) -> tuple[list[list[str]], list[str]]:
    groups: list[list[str]] = []
    lost: list[str] = []
    async for end in whole_groups(ASKED, rollouts, deadline_s=9.0):
        if isinstance(end, DroppedRollout):
            lost.append(end.rollout_id)
        else:
            groups.append([one.summary.rollout_id.partition("-a/")[2] or one.summary.rollout_id[-3:] for one in end])
    return groups, lost


async def test_a_group_is_whole_when_its_last_sibling_ends_though_it_was_asked_for_three_times():
    rollouts = Flaky(a_1=2)
    groups, lost = await gathered(rollouts)
    assert groups == [["b/0", "b/1"], ["0", "1/again-2"]] and lost == []
    assert [name[-11:] for name in rollouts.asked[4:]] == ["a/1/again-1"[-11:], "a/1/again-2"[-11:]]


async def test_what_fails_every_time_comes_last_and_its_group_not_at_all():
    rollouts = Flaky(a_1=9)
    groups, lost = await gathered(rollouts)
    assert groups == [["b/0", "b/1"]] and [name[-11:] for name in lost] == ["a/1/again-2"]
    assert len(rollouts.asked) == 4 + 2


@pytest.mark.parametrize("siblings", [1, 2])
async def test_a_problem_whose_id_reads_as_a_repeat_has_its_group_though_one_was_asked_for_again(siblings: int):
    problems = [Problem(id=name, problem="?", answer="1") for name in ("a/again-1", "a/again-1/x")]
    asked = rollout_requests(problems, RunConfig(seed=3), name=1, siblings=siblings)
    rollouts, again = Flaky(), asked[0].rollout_id
    rollouts.fails[again.partition("/again-")[0][-3:]] = 1
    ends = [end async for end in whole_groups(asked, rollouts, deadline_s=9.0)]
    groups = [end for end in ends if not isinstance(end, DroppedRollout)]
    assert len(groups) == len(ends) == 2 and {len(group) for group in groups} == {siblings}
    assert len(rollouts.asked) == 2 * siblings + 1


# -- data --------------------------------------------------------------------------------------------------------------


def test_near_duplicates_are_those_that_a_comparison_of_all_pairs_finds():
    rng = random.Random(0)
    vocabulary = [f"w{n}" for n in range(60)]
    texts: list[list[str]] = []
    for _ in range(60):
        text = [rng.choice(vocabulary) for _ in range(rng.randint(2, 40))]
        texts.append(text)
        for _ in range(3):  # alike to all degrees
            other = [rng.choice(vocabulary) if rng.random() < 0.04 else word for word in text]
            texts.append(other)
    groups = [rng.randrange(2) for _ in texts]
    expected: list[int] = []
    for index, text in enumerate(texts):
        alike = [
            other
            for other in range(index)
            if expected[other] == other and groups[other] == groups[index]
            and len(_shingles(text) & _shingles(texts[other])) >= 0.7 * len(_shingles(text) | _shingles(texts[other]))
        ]  # fmt: skip
        expected.append(alike[0] if alike else index)
    assert near_duplicates(texts, groups) == expected
    assert 40 < sum(first != index for index, first in enumerate(expected)) < 160
