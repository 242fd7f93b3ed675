"""Which problems stage 3 keeps, and what becomes of the choice where it is interrupted."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rstar_ray.agent.journal import turns_folder
from rstar_ray.config import RunConfig, with_values
from rstar_ray.errors import RStarError, Stopped
from rstar_ray.evaluation.results import ResultLog
from rstar_ray.hard_set import SIBLINGS, hard_set, unsolved
from rstar_ray.rollouts import DroppedRollout, FinishedRollout, Rollouts
from rstar_ray.run_dir.durable import read_rows, write_json
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.trajectory import Problem, RolloutRequest
from tests.fakes import LocalRollouts, SkilledPolicy, UnreliableSandbox, adding_problems, fake_context
from tests.rstar_ray.test_stages import stage

pytestmark = pytest.mark.usefixtures("without_fsync")
SMALL = stage(
    "stage3", drop_solved=True, steps=1, prompts_per_step=2, rollout__deadline_s=5.0,
    algorithm__rollouts_per_prompt=4, algorithm__keep=2, algorithm__least_failures=1,
)  # fmt: skip
PROBLEMS = adding_problems(12)


def often_right() -> SkilledPolicy:
    """Solves about half of its problems 8 times of 8."""
    return SkilledPolicy(skill=0.92, slip=0.0)


class Losing(LocalRollouts):
    """Loses rollouts, at every repeat too: those whose names hold one of these, or the first few of every run."""

    def __init__(self, policy: SkilledPolicy, *names: str, first: int = 0) -> None:
        super().__init__(policy)
        self._names, self._first = names, first

    async def run(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[FinishedRollout | DroppedRollout]:
        first = [request.rollout_id for request in requests[: self._first]]
        async for end in super().run(requests):
            one = end if isinstance(end, DroppedRollout) else end.summary
            lost = one.rollout_id in first or any(name in one.rollout_id for name in self._names)
            yield DroppedRollout(rollout_id=one.rollout_id, group_id=one.group_id, reason="lost") if lost else end


class Killed(Exception): ...


class Watched(LocalRollouts):
    """Remembers what it is asked for, and may be killed when so many of its rollouts have ended."""

    def __init__(self, policy: SkilledPolicy, *, dies_after: int = -1) -> None:
        super().__init__(policy)
        self._left = dies_after
        self.asked: list[RolloutRequest] = []

    async def run(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[FinishedRollout | DroppedRollout]:
        self.asked += requests
        async for end in super().run(requests):
            if not self._left:
                raise Killed
            self._left -= 1
            yield end

    @property
    def problems(self) -> set[str]:
        return {request.problem.id for request in self.asked}


async def choice(path: Path, problems: Sequence[Problem], rollouts: Rollouts) -> list[str]:
    context = fake_context(SkilledPolicy())
    context = replace(context, rollouts=rollouts)
    with ResultLog(path / "rows.jsonl", problems) as log:
        return [problem.id for problem in await unsolved(log, SMALL, context, choice="0a1b")]


async def test_a_problem_that_lacks_rollouts_is_not_counted_as_solved(tmp_path: Path):
    losing = Losing(SkilledPolicy(skill=1.0, slip=0.0), "0-add-0/1", "0-add-0/2")  # solves all that is not lost
    assert await choice(tmp_path, adding_problems(20), losing) == ["add-0"]


async def test_the_hard_set_is_not_chosen_from_what_is_left_of_our_losses(tmp_path: Path):
    unreliable = LocalRollouts(SkilledPolicy(), UnreliableSandbox(fails_every=2))
    with pytest.raises(RStarError, match=r"choosing the hard set: \d+ of 80 rollouts failed 3 times"):
        await choice(tmp_path, adding_problems(10), unreliable)


async def test_the_choice_may_lack_one_in_twenty_of_all_its_rollouts_however_often_it_began(tmp_path: Path):
    solves, five = SkilledPolicy(skill=1.0, slip=0.0), adding_problems(5)
    assert await choice(tmp_path / "none", five, Losing(solves)) == []
    assert await choice(tmp_path / "two", five, Losing(solves, first=2)) == ["add-0"]
    said = "choosing the hard set: 3 of 40 rollouts failed 3 times: lost; the same command repeats the problems that "
    with pytest.raises(RStarError, match=rf"^{said}lack some$"):
        await choice(tmp_path / "three", five, Losing(solves, first=3))
    again = Losing(solves, first=2)
    assert await choice(tmp_path / "three", five, again) == ["add-0"]
    assert len(again.latest) == 2  # of the one problem that lacked some, at the last repeat


async def chosen(
    path: Path,
    rollouts: Rollouts,
    *,
    config: RunConfig = SMALL,
    problems: Sequence[Problem] = PROBLEMS,
    stopping: Callable[[], bool] = lambda: False,
) -> list[str]:
    """As a stage chooses, in this run directory."""
    context = replace(fake_context(SkilledPolicy(), run_dir=RunDir(path)), rollouts=rollouts, stop_requested=stopping)
    return [problem.id for problem in await hard_set(problems, config, context)]


async def killed(path: Path, config: RunConfig = SMALL) -> set[str]:
    """The problems that a choice had finished when it was killed in its middle."""
    with pytest.raises(Killed):
        await chosen(path, Watched(often_right(), dies_after=8 * len(PROBLEMS) - 12), config=config)
    (log,) = RunDir(path).results_path.glob(f"{config.stage}-filter-*.jsonl")
    return {row["id"] for row in read_rows(log)}


async def test_a_choice_that_was_killed_continues_with_the_problems_that_are_missing_to_the_same_end(
    tmp_path: Path, logged: list[str]
):
    whole = Watched(often_right())
    hard = await chosen(tmp_path / "whole", whole)
    assert 0 < len(hard) < len(PROBLEMS)
    finished = await killed(tmp_path / "run")
    assert 0 < len(finished) < len(PROBLEMS) and not (tmp_path / "run" / "stage3-problems.json").exists()
    (log,) = (tmp_path / "run" / "evaluations").iterdir()
    with log.open("a") as file:
        file.write('{"id": "add-1", "num_cor')  # torn
    turns = turns_folder(RunDir(tmp_path / "run").journal_path, whole.asked[0].rollout_id)
    assert turns is not None
    turns.mkdir(parents=True)  # as workers keep what they had sampled
    rest = Watched(often_right())
    logged.clear()
    assert await chosen(tmp_path / "run", rest) == hard and not turns.exists()
    assert rest.problems == {problem.id for problem in PROBLEMS} - finished
    assert [one for one in whole.asked if one.problem.id in rest.problems] == rest.asked  # seeds too
    assert logged == [
        f"stage3: choosing the hard set: results of {len(finished)} of 12 problems reused from {log} (same settings); "
        "delete it to evaluate them again",
        f"stage3: {len(hard)} of 12 problems are not solved in 8 of 8 rollouts",
    ]
    assert sorted(row["id"] for row in read_rows(log)) == sorted(problem.id for problem in PROBLEMS)
    nothing = Watched(often_right())
    (tmp_path / "run" / "stage3-problems.json").unlink()
    assert await chosen(tmp_path / "run", nothing) == hard and not nothing.asked


async def test_part_of_a_file_is_looked_at_by_the_seed_and_not_its_first_rows(tmp_path: Path):
    problems = adding_problems(60)  # as a file that two sources wrote one after the other

    async def looked_at(name: str, of: Sequence[Problem] = problems, **values: object) -> list[str]:
        wanted = {"data.train": "two_sources.jsonl", "data.num_filtered": 20, **values}
        rollouts = Watched(SkilledPolicy(skill=0.0))
        hard = await chosen(tmp_path / name, rollouts, config=with_values(SMALL, wanted), problems=of)
        assert rollouts.problems == set(hard)  # none is ever solved
        return hard

    first = await looked_at("first")
    assert len(first) == 20 and first != [problem.id for problem in problems[:20]]
    assert 4 <= len({problem.id for problem in problems[30:]} & set(first)) <= 16
    assert first == await looked_at("again") == await looked_at("another stage", stage="stage2")
    assert first != await looked_at("another seed", seed=5)
    assert set(first) < set(await looked_at("more", **{"data.num_filtered": 30}))
    without = [problem for problem in problems if problem.id != first[0]]
    assert set(first[1:]) < set(await looked_at("one prompt too long", without))


async def test_the_hard_set_is_of_the_sources_of_the_mix(tmp_path: Path):
    problems = [replace(one, family="ab"[number % 2]) for number, one in enumerate(PROBLEMS)]
    rollouts = Watched(SkilledPolicy(skill=0.0))
    config = with_values(SMALL, {"data.mix": ("a=1",)})
    hard = await chosen(tmp_path / "run", rollouts, config=config, problems=problems)
    assert {*hard} == rollouts.problems == {one.id for one in problems if one.family == "a"}


def with_model(path: Path, weights: str) -> RunConfig:
    folder = path / weights
    folder.mkdir(exist_ok=True)
    (folder / "weights").write_text(weights)
    return with_values(SMALL, {"model": str(folder)})


def reached(path: Path, stage: str, skill: float) -> RunDir:
    with RunDir(path).write_checkpoint(stage, 9) as folder:
        write_json(folder / "skill.json", [skill, 0.0, 9])
    return RunDir(path)


OTHER_POLICIES: dict[str, Callable[[Path], object]] = {
    "the stage before ended again": lambda path: reached(path, "stage2", 0.6),
    "the stage has continued": lambda path: reached(path, "stage3", 0.5),
    "another folder": lambda path: with_model(path.parent, "other"),
    "other weights in it": lambda path: (path.parent / "mine" / "weights").write_text("theirs"),
}


@pytest.mark.parametrize("what", OTHER_POLICIES)
async def test_another_policy_chooses_for_itself(what: str, tmp_path: Path):
    path = tmp_path / "run"
    given = "folder" in what or "weights" in what
    reached(path, "stage2", 0.5).finish_stage("stage2", 9)
    config = with_model(tmp_path, "mine") if given else SMALL
    await killed(path, config)
    changed = OTHER_POLICIES[what](path)
    all_again = Watched(often_right())
    await chosen(path, all_again, config=changed if isinstance(changed, RunConfig) else config)
    assert len(all_again.asked) == SIBLINGS * len(PROBLEMS)
    assert len([*(path / "evaluations").iterdir()]) == 2


@pytest.mark.parametrize(
    ("option", "value"), [("rollout.temperature", 0.5), ("rollout.max_turns", 3), ("seed", 1), ("chat.system", "Hm.")]
)
async def test_other_settings_make_another_choice(option: str, value: object, tmp_path: Path):
    await killed(tmp_path)
    all_again = Watched(often_right())
    await chosen(tmp_path, all_again, config=with_values(SMALL, {option: value}))
    assert len(all_again.asked) == SIBLINGS * len(PROBLEMS)


async def test_of_other_problems_those_that_read_the_same_are_not_asked_for_again(tmp_path: Path):
    finished = await killed(tmp_path)
    edited = [replace(one, answer="7") if one.id == min(finished) else one for one in PROBLEMS]
    more = [*edited, replace(PROBLEMS[0], id="more")]
    rest = Watched(often_right())
    await chosen(tmp_path, rest, problems=more)
    assert rest.problems == {one.id for one in more} - finished | {min(finished)}


async def test_a_choice_that_is_asked_to_stop_keeps_what_is_known_and_continues(tmp_path: Path):
    hard = await chosen(tmp_path / "whole", Watched(often_right()))
    looks = iter([False, False, True])
    with pytest.raises(Stopped, match=r"^stopped while choosing the hard set, 3 of 12 problems in$"):
        await chosen(tmp_path / "run", Watched(often_right()), stopping=lambda: next(looks))
    rest = Watched(often_right())
    assert await chosen(tmp_path / "run", rest) == hard and len(rest.problems) == 9
