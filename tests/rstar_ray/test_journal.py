"""The journal of finished turns: what is read equals what was written, and only where it belongs together."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rstar_ray.agent.journal import TurnJournal, journaled
from rstar_ray.agent.rollout import RolloutState, play_turn
from rstar_ray.trajectory import RolloutRequest, ToolMemory
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
    before = start(states[0].request.rollout_id)
    for state in states:
        journal.add(before, state, weights)
        before = state
    journal.close()


async def test_a_rollout_is_read_again_at_its_last_finished_turn_to_the_token(tmp_path: Path):
    states = await played(start())
    assert len(states) == 3
    for count in (1, 2, 3):
        write(tmp_path / str(count), states[:count])
        assert journaled(tmp_path / str(count), [start()], {0: 7}) == {"stage1/12/0-p/3": states[count - 1]}


async def test_a_turn_that_continues_other_tokens_is_not_put_behind_them(tmp_path: Path):
    states, others = await played(start()), await played(start(), (call("2+5"), call("3+3"), answer("9")))
    assert len(states[0].response_ids) == len(others[0].response_ids)
    write(tmp_path, states[:1], "generation/0-a")
    second = TurnJournal(tmp_path, "generation/1-b")
    second.add(others[0], others[1], 7)
    second.close()
    assert journaled(tmp_path, [start()], {0: 7}) == {"stage1/12/0-p/3": states[0]}


@pytest.mark.parametrize("later", ["generation/0-a", "generation/0-z"])
@pytest.mark.parametrize("restarts", [0, 1])
async def test_of_two_samples_of_a_turn_the_later_counts_whatever_its_writer_is_called(
    tmp_path: Path, later: str, restarts: int
):
    """A resumed run that did not know the weights of the first sampled the rollout again, and trained on that."""
    first, second = await played(start(), version=1), await played(start(), (call("2+5"), answer("7")))
    write(tmp_path, [replace(state, restarts=restarts) for state in first], "generation/0-m", weights=6)
    write(tmp_path, second, later, weights=7)
    known = {0: 7, 1: 6}
    kept = journaled(tmp_path, [start()], known)
    assert kept == {start().request.rollout_id: second[-1]}


async def test_a_torn_or_damaged_record_ends_its_file(tmp_path: Path):
    states = await played(start())
    write(tmp_path, states)
    (file,) = tmp_path.rglob("*.turns")
    whole = file.read_bytes()
    found: list[int] = []
    for length in range(0, len(whole) + 1, 7):
        file.write_bytes(whole[:length])
        kept = journaled(tmp_path, [start()], {0: 7})
        found.append(len(kept["stage1/12/0-p/3"].turns) if kept else 0)
    assert found == sorted(found) and set(found) == {0, 1, 2} | {found[-1]}
    for position in range(0, len(whole), 97):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        for kept_state in journaled(tmp_path, [start()], {0: 7}).values():
            assert kept_state in states


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
    journal.add(start(), states[0], 7)
    with pytest.raises(OSError, match="No space"):
        journal.flush()
    assert not journal.has_unwritten
    journal.add(start(), states[0], 7)
    assert journal.has_unwritten
    journal.flush()
    assert journaled(tmp_path, [start()], {0: 7}) == {"stage1/12/0-p/3": states[0]}
    journal.close()


async def test_where_a_rollout_stands_with_its_tools_is_read_again_with_its_turns(tmp_path: Path):
    states = [replace(state, restarts=1, reward=0.5) for state in await played(start())]
    states = [replace(state, memories={"notes": ToolMemory(calls=3, snapshot="a b")}) for state in states]
    write(tmp_path, states)
    (found,) = journaled(tmp_path, [start()], {0: 7}).values()
    assert (found.memories, found.reward, found.restarts) == (states[-1].memories, 0.5, 1)


@pytest.mark.parametrize("name", ["stage3/filter/0a1b/0-p/3", "evaluate/stage1/held-out/step-7/0a1b/0-p/3"])
async def test_evaluations_and_the_choice_of_a_hard_set_continue_as_training_does(name: str, tmp_path: Path):
    states = await played(start(name))
    write(tmp_path, states[:2])
    assert journaled(tmp_path, [start(name)], {0: 7}) == {name: states[1]}
    assert journaled(tmp_path, [start(name.replace("0a1b", "2c3d"))], {0: 7}) == {}  # it is asked in another way


async def test_a_folder_that_was_removed_is_written_again(tmp_path: Path):
    (first, *_) = await played(start())
    journal = TurnJournal(tmp_path, "generation/0-a")
    journal.add(start(), first, 7)
    journal.flush()
    for folder in tmp_path.iterdir():
        shutil.rmtree(folder)
    journal.add(start(), first, 7)
    journal.close()
    assert journaled(tmp_path, [start()], {0: 7}) == {start().request.rollout_id: first}


async def test_a_rollout_that_restarted_is_read_from_its_latest_start(tmp_path: Path):
    states, again = await played(start()), start().restarted()
    write(tmp_path, states[:2])
    journal = TurnJournal(tmp_path, "generation/0-b")
    journal.restart(again, 7)
    journal.flush()
    assert journaled(tmp_path, [start()], {0: 7}) == {"stage1/12/0-p/3": again}
    (first, *_) = await played(again)
    journal.add(again, first, 7)
    journal.close()
    assert journaled(tmp_path, [start()], {0: 7}) == {"stage1/12/0-p/3": first}
