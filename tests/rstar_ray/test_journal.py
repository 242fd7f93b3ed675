"""Turns on disk, finished or begun: read again as they were, and only where they belong together."""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rstar_ray.agent.journal import TurnJournal, journaled, read
from rstar_ray.agent.rollout import RolloutState, play_turn, run_rollout
from rstar_ray.trajectory import Completion, Placement, RolloutRequest, ToolMemory
from tests.fakes import AddingSandbox, CharChat, ScriptedEngine, adding_problems, answer, call, request

CHAT, SANDBOX = CharChat(), AddingSandbox()
TURNS = (call("1+2"), call("3+4"), answer("3"))


def start(name: str = "stage1/12/0-p/3") -> RolloutState:
    (problem,) = adding_problems(1)
    asked: RolloutRequest = request(problem, rollout_id=name)
    return RolloutState.start(asked, CHAT.prompt_ids(problem))


async def played(state: RolloutState, script: tuple[str, ...] = TURNS, version: int = 0) -> list[RolloutState]:
    """The state after each turn."""
    states: list[RolloutState] = []
    engine = ScriptedEngine(list(script), policy_version=version)
    while state.stop_reason is None:
        state = await play_turn(state, generate=engine, execute=SANDBOX, chat=CHAT)
        states.append(state)
    return states


def write(folder: Path, states: list[RolloutState], writer: str = "generation/0-a", weights: int = 7) -> None:
    journal = TurnJournal(folder, writer)
    for state in states:
        journal.add(state, weights)
    journal.close()


async def test_a_rollout_is_read_again_at_its_last_finished_turn_to_the_token(tmp_path: Path):
    states = await played(start())
    assert len(states) == 3
    for count in (1, 2, 3):
        write(tmp_path / str(count), states[:count])
        assert journaled(tmp_path / str(count), [start()], 7) == {"stage1/12/0-p/3": states[count - 1]}


async def test_a_turn_that_continues_other_tokens_is_not_put_behind_them(tmp_path: Path):
    states, others = await played(start()), await played(start(), (call("2+5"), call("3+3"), answer("9")))
    assert len(states[0].response_ids) == len(others[0].response_ids)
    write(tmp_path, states[:1], "generation/0-a")
    second = TurnJournal(tmp_path, "generation/1-b")
    second.begin(others[0])
    second.add(others[1], 7)
    second.close()
    assert journaled(tmp_path, [start()], 7) == {"stage1/12/0-p/3": states[0]}


async def test_a_torn_or_damaged_record_ends_its_file(tmp_path: Path):
    states = await played(start())
    write(tmp_path, states)
    (file,) = tmp_path.rglob("*.turns")
    whole = file.read_bytes()
    found: list[int] = []
    for length in range(0, len(whole) + 1, 7):
        file.write_bytes(whole[:length])
        kept = journaled(tmp_path, [start()], 7)
        found.append(len(kept["stage1/12/0-p/3"].turns) if kept else 0)
    assert found == sorted(found) and set(found) == {0, 1, 2} | {found[-1]}
    for position in range(0, len(whole), 97):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        for kept_state in journaled(tmp_path, [start()], 7).values():
            assert kept_state in states


async def test_zeros_that_a_lost_power_leaves_and_records_of_another_form_end_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    states = await played(start())
    write(tmp_path, states[:1])
    (file,) = tmp_path.rglob("*.turns")
    file.write_bytes(file.read_bytes() + bytes(4096))
    assert journaled(tmp_path, [start()], 7) == {"stage1/12/0-p/3": states[0]}
    monkeypatch.setattr("rstar_ray.agent.journal._FORM", 1)  # of a version with other fields
    assert journaled(tmp_path, [start()], 7) == {}


class FullOnce(TurnJournal):
    """Its disk is full in the middle of one write."""

    full = True

    def _file(self, folder: Path) -> Any:
        file = super()._file(folder)
        if self.full:
            self.full = False
            file.write(b"torn")
            raise OSError("No space left on device")
        return file


async def test_what_follows_a_write_that_failed_is_not_put_behind_its_torn_end(tmp_path: Path):
    states = await played(start())
    journal = FullOnce(tmp_path, "generation/0-a")
    journal.add(states[0], 7)
    with pytest.raises(OSError, match="No space"):
        journal.flush()
    assert not journal.has_unwritten
    journal.begin(start())
    journal.add(states[0], 7)
    assert journal.has_unwritten
    journal.flush()
    assert journaled(tmp_path, [start()], 7) == {"stage1/12/0-p/3": states[0]}
    journal.close()


async def test_where_a_rollout_stands_with_its_tools_is_read_again_with_its_turns(tmp_path: Path):
    states = [replace(state, restarts=1, reward=0.5) for state in await played(start())]
    states = [replace(state, memories={"notes": ToolMemory(calls=3, snapshot="a b")}) for state in states]
    write(tmp_path, states)
    (found,) = journaled(tmp_path, [start()], 7).values()
    assert (found.memories, found.reward, found.restarts) == (states[-1].memories, 0.5, 1)


STAY = Placement(
    replica_id="generation/0", turn=0, why="most room", waited_s=1.5, held_s={"no room": 1.0}, kv_used_tokens=16,
    kv_expected_tokens=64, kv_capacity_tokens=128, residents=2,
)  # fmt: skip


async def test_of_a_turn_under_way_where_it_was_placed_and_the_time_it_took_are_read_again_and_written_once(
    tmp_path: Path,
):
    (first, *_) = await played(start())
    name = first.request.rollout_id
    for writer, stays, bits in (("0-a", (STAY,), (0, 3, 5)), ("1-b", (STAY, replace(STAY, turn=1)), (5, 8))):
        journal = TurnJournal(tmp_path, f"generation/{writer}")
        begun = replace(sampled(first, 0, bits[0]), spent_s=1.0) if bits[0] else None
        journal.begin(replace(start(), placements=stays, begun=begun))
        for known, count in itertools.pairwise(bits):
            journal.add_begun({name: replace(sampled(first, known, count), spent_s=0.5 * count)}, 7)
        journal.close()
        (found,) = journaled(tmp_path, [start()], 7).values()
        assert found.placements == stays
        assert found.begun == replace(sampled(first, 0, bits[-1]), spent_s=0.5 * bits[-1])
    parts = [part for file in sorted(tmp_path.rglob("*.turns")) for _, part, _ in read(file)]
    assert [len(part.placements) for part in parts] == [1, 0, 2]


async def test_nothing_is_kept_of_rollouts_that_are_played_for_nothing_that_is_asked_for_again(tmp_path: Path):
    write(tmp_path, await played(start("validation/0-p/3")))
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("name", ["stage3/filter/0a1b/0-p/3", "evaluate/stage1/held-out/step-7/0a1b/0-p/3"])
async def test_evaluations_and_the_choice_of_a_hard_set_go_on_as_training_does(name: str, tmp_path: Path):
    states = await played(start(name))
    write(tmp_path, states[:2])
    assert journaled(tmp_path, [start(name)], 7) == {name: states[1]}
    assert journaled(tmp_path, [start(name.replace("0a1b", "2c3d"))], 7) == {}  # it is asked in another way


async def test_a_folder_that_was_removed_is_written_anew(tmp_path: Path):
    (first, *_) = await played(start())
    journal = TurnJournal(tmp_path, "generation/0-a")
    journal.begin(start())
    journal.add(first, 7)
    journal.flush()
    for folder in tmp_path.iterdir():
        shutil.rmtree(folder)
    journal.begin(start())
    journal.add(first, 7)
    journal.close()
    assert journaled(tmp_path, [start()], 7) == {start().request.rollout_id: first}


def sampled(state: RolloutState, first: int, last: int) -> Completion:
    """Of a finished turn that is its whole response, these tokens."""
    chosen = slice(first, last)
    return Completion(
        token_ids=state.response_ids[chosen], logprobs=state.logprobs[chosen],
        policy_versions=state.policy_versions[chosen], ended=False,
    )  # fmt: skip


async def test_who_goes_on_within_a_turn_writes_what_came_after_alone(tmp_path: Path):
    (first, *_) = await played(start())
    name = first.request.rollout_id
    lost, next_one = TurnJournal(tmp_path, "generation/0-a"), TurnJournal(tmp_path, "generation/1-b")
    lost.begin(start())
    lost.add_begun({name: sampled(first, 0, 5)}, 7)
    lost.close()
    (found,) = journaled(tmp_path, [start()], 7).values()
    next_one.begin(found)
    next_one.add_begun({name: sampled(first, 5, 8)}, 7)
    next_one.close()
    (found,) = journaled(tmp_path, [start()], 7).values()
    assert found == replace(start(), begun=sampled(first, 0, 8))
    (file,) = tmp_path.rglob("*1-b*")
    ((_, part, columns),) = read(file)
    assert (part.start, part.num_tokens, len(columns)) == (5, 3, 36)


async def test_a_part_without_tokens_is_followed_by_what_comes_after_it(tmp_path: Path):
    (first, *_) = await played(start())
    name, journal = first.request.rollout_id, TurnJournal(tmp_path, "generation/0-a")
    journal.begin(start())
    for known, count in ((0, 3), (3, 3), (3, 5), (5, 5)):
        journal.add_begun({name: sampled(first, known, count)}, 7)
    journal.close()
    assert journaled(tmp_path, [start()], 7) == {name: replace(start(), begun=sampled(first, 0, 5))}


async def test_a_turn_goes_on_with_what_was_sampled_of_it_and_ends_as_it_would_have(tmp_path: Path):
    first, *_, whole = await played(start())
    begun = replace(start(), begun=sampled(first, 0, 6))
    asked: list[Completion | None] = []

    async def generate(prompt_ids: list[int], **more: Any) -> Completion:
        asked.append(more.pop("begun"))
        return await engine(prompt_ids, **more)

    engine = ScriptedEngine(list(TURNS))
    state = await run_rollout(begun, generate=generate, execute=SANDBOX, chat=CHAT)
    assert state.response_ids == whole.response_ids and state.begun is None
    assert asked == [begun.begun, None, None]
    assert begun.begun_again() == replace(start(), restarts=1)
