"""The journal of finished turns as a worker writes it: across swaps of weights, and on a disk that is slow."""

import asyncio
import logging
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from actors.generation import outbox
from actors.generation.outbox import JournalWriter
from rstar_ray.agent.journal import TurnJournal, journaled
from rstar_ray.agent.rollout import RolloutState
from rstar_ray.trajectory import Turn
from tests.fakes import CharChat, adding_problems, request

CHAT = CharChat()


def start(name: str) -> RolloutState:
    (problem,) = adding_problems(1)
    return RolloutState.start(request(problem, rollout_id=name), CHAT.prompt_ids(problem))


def after(state: RolloutState, *versions: int) -> RolloutState:
    """The state after a turn whose tokens these versions sampled."""
    count, first = len(versions), len(state.response_ids)
    return replace(
        state,
        response_ids=[*state.response_ids, *range(first, first + count)],
        loss_mask=[*state.loss_mask, *[True] * count],
        logprobs=[*state.logprobs, *[-1.0] * count],
        policy_versions=[*state.policy_versions, *versions],
        turns=(*state.turns, Turn(num_tokens=count)),
    )


async def test_a_turn_that_several_versions_sampled_counts_where_all_of_their_weights_are_known(tmp_path: Path):
    """A turn may end before the worker receives the new version."""
    writer = JournalWriter(TurnJournal(tmp_path, "generation/0-a"))
    writer.serve(3, 7)
    ends: dict[str, RolloutState] = {}
    for name, versions, served in (("0", (3, 3, 4, 4), False), ("1", (4, 4), False), ("2", (3, 4), True)):
        if served:
            writer.serve(4, 8)
        first = start(f"stage1/12/{name}")
        second = after(first, *versions)
        ends[f"stage1/12/{name}"] = third = after(second, 4, 4)
        writer.turn_finished(first, second)
        writer.turn_finished(second, third)
    await writer.flush()
    starts = [start(name) for name in ends]
    assert journaled(tmp_path, starts, {3: 7, 4: 8}) == ends
    assert [*journaled(tmp_path, starts, {4: 8})] == ["stage1/12/1"]
    for other in ({3: 7}, {3: 9, 4: 8}, {3: 7, 4: 9}):
        assert not {"stage1/12/0", "stage1/12/2"} & journaled(tmp_path, starts, other).keys()
    old = [replace(state, request=replace(state.request, oldest_version=4)) for state in starts]
    assert [*journaled(tmp_path, old, {3: 7, 4: 8})] == ["stage1/12/1"]
    await writer.close()


class SlowDisk(TurnJournal):
    """Writes once it may."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "generation/0-a")
        self.may_write = threading.Event()

    def flush(self) -> None:
        assert self.may_write.wait(60)
        super().flush()


async def test_a_slow_disk_is_not_waited_for_and_has_everything_once_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(outbox, "DISK_PATIENCE_S", 0.05)
    journal = SlowDisk(tmp_path)
    writer = JournalWriter(journal, where="runs/x/journal")
    writer.serve(3, 7)
    starts = [start("stage1/12/0"), start("stage1/12/1")]
    for state in starts:
        writer.turn_finished(state, after(state, 3, 3))
        await writer.flush()
    (line,) = caplog.messages
    assert line.startswith("runs/x/journal cannot be written (") and "disk" in line
    journal.may_write.set()
    while len(caplog.messages) == 1:
        await asyncio.sleep(0.01)
        await writer.flush()
    assert caplog.messages[1:] == ["runs/x/journal is written again"] and journal.unwritten_bytes == 0
    assert [*journaled(tmp_path, starts, {3: 7})] == ["stage1/12/0", "stage1/12/1"]
    await writer.close()
