"""What a worker keeps of turns under way: only what belongs together, and all of it."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from actors.generation import kept_turns
from actors.generation.kept_turns import KeptTurns
from actors.generation.under_way import Sampled
from rstar_ray.agent.journal import TurnJournal, journaled
from rstar_ray.agent.rollout import RolloutState
from rstar_ray.errors import EngineError
from rstar_ray.trajectory import Completion, Turn
from tests.fakes import CharChat, adding_problems, request

CHAT = CharChat()
NAME = "stage1/12/0-p/3"


def start(name: str = NAME) -> RolloutState:
    (problem,) = adding_problems(1)
    return RolloutState.start(request(problem, rollout_id=name), CHAT.prompt_ids(problem))


def tokens(first: int, last: int, version: int = 3) -> Completion:
    ids = list(range(first, last))
    return Completion(
        token_ids=ids, logprobs=[-float(one) for one in ids], policy_versions=[version] * len(ids), ended=False
    )


class Engine:
    """Tells what it is given, look by look, then is gone."""

    def __init__(self, *looks: dict[str, Sampled]) -> None:
        self.looks: Iterator[dict[str, Sampled]] = iter(looks)

    def newly_sampled(self) -> dict[str, Sampled]:
        try:
            return next(self.looks)
        except StopIteration:
            raise EngineError("the engine died") from None


@pytest.fixture
async def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KeptTurns]:
    monkeypatch.setattr(kept_turns, "KEEP_EVERY_S", 0.0)
    turns = KeptTurns(TurnJournal(tmp_path, "generation/0-a"))
    turns.serve(3, 7)
    yield turns
    await turns.close()


def timeless(begun: Completion | None) -> Completion | None:
    return begun and replace(begun, spent_s=0.0)


def on_disk(folder: Path, weights: int = 7) -> Completion | None:
    found = journaled(folder, [start()], weights)
    return timeless(found[NAME].begun) if found else None


def after(state: RolloutState, completion: Completion) -> RolloutState:
    """The state behind a turn that is this completion, and nothing told."""
    count = len(completion.token_ids)
    return replace(
        state,
        response_ids=[*state.response_ids, *completion.token_ids],
        loss_mask=[*state.loss_mask, *[True] * count],
        logprobs=[*state.logprobs, *completion.logprobs],
        policy_versions=[*state.policy_versions, *completion.policy_versions],
        turns=(*state.turns, Turn(num_tokens=count)),
        begun=None,
    )


def bits(*pairs: tuple[int, Completion], turn: int = 0) -> list[dict[str, Sampled]]:
    return [{f"{NAME}/turn-{turn}": Sampled(first, more)} for first, more in pairs]


async def test_bits_are_put_together_on_disk_and_for_who_goes_on(kept: KeptTurns, tmp_path: Path):
    state = start()
    kept.begin(state)
    await kept.keep(Engine(*bits((0, tokens(0, 4)), (4, tokens(4, 6)))))
    assert on_disk(tmp_path) == tokens(0, 6)
    (reached,) = kept.reached({NAME: state})
    assert timeless(reached.begun) == tokens(0, 6)
    kept.completed(NAME, tokens(0, 9))
    await kept.write()
    assert on_disk(tmp_path) == tokens(0, 9)
    kept.end(NAME)
    assert kept.reached({NAME: state}) == [state]


async def test_a_second_death_in_one_turn_loses_no_more_than_the_first(kept: KeptTurns, tmp_path: Path):
    kept.begin(start())
    await kept.keep(Engine(*bits((0, tokens(0, 4)))))
    (again,) = journaled(tmp_path, [start()], 7).values()
    second = KeptTurns(TurnJournal(tmp_path, "generation/1-b"))
    second.serve(3, 7)
    second.begin(again)
    await second.keep(Engine(*bits((0, tokens(4, 7)))))
    second.completed(NAME, tokens(0, 8))
    await second.write()
    assert on_disk(tmp_path) == tokens(0, 8)
    assert timeless(second.reached({NAME: again})[0].begun) == tokens(0, 8)
    await second.close()


async def test_of_turns_that_a_swap_falls_into_none_is_kept_for_either_weights(kept: KeptTurns, tmp_path: Path):
    """One ends between the swap and its end here, when the weights before still count as those that serve."""
    mixed = replace(tokens(0, 4), policy_versions=[3, 3, 4, 4])
    for name, done, served in (("0", mixed, False), ("1", tokens(0, 4, version=4), False), ("2", mixed, True)):
        if served:
            kept.serve(4, 8)
        state = start(f"stage1/12/{name}")
        kept.begin(state)
        kept.finished(turned := after(state, done))
        kept.finished(after(turned, tokens(4, 6, version=4)))
    await kept.flush()
    starts = [start(f"stage1/12/{name}") for name in "012"]
    assert journaled(tmp_path, starts, 7) == {} and journaled(tmp_path, starts, 8) == {}


async def test_a_rollout_that_began_behind_a_swap_is_kept(kept: KeptTurns, tmp_path: Path):
    kept.begin(start())
    kept.serve(4, 8)
    told = replace(after(start(), tokens(0, 4, version=4)), response_ids=[0, 1, 2, 9], policy_versions=[4, 4, 4, -1])
    kept.finished(told)
    await kept.keep(Engine(*bits((0, tokens(4, 6, version=4)), turn=1)))
    (found,) = journaled(tmp_path, [start()], 8).values()
    assert found == replace(told, begun=found.begun) and timeless(found.begun) == tokens(4, 6, version=4)


async def test_the_time_that_a_turn_took_goes_along_from_engine_to_engine(kept: KeptTurns, tmp_path: Path):
    began_s = time.monotonic()
    before = replace(tokens(0, 2), spent_s=100.0)
    for count, state in enumerate((start(), replace(start(), begun=before))):
        kept.begin(state)
        await asyncio.sleep(0.05)
        kept.completed(NAME, tokens(0, 4))
        await kept.write()
        spent_s = kept.reached({NAME: state})[0].begun.spent_s  # type: ignore[union-attr]
        assert 0.05 + 100.0 * count <= spent_s <= 100.0 * count + time.monotonic() - began_s
        kept.end(NAME)
    (found,) = journaled(tmp_path, [start()], 7).values()
    assert found.begun and 0.05 <= found.begun.spent_s < 100.0


class SlowDisk(TurnJournal):
    """Writes once it is let."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "generation/0-a")
        self.let = threading.Event()
        self.asked = threading.Event()

    def flush(self) -> None:
        self.asked.set()
        assert self.let.wait(60)
        super().flush()


async def test_a_disk_that_answers_no_more_is_not_waited_for_and_has_all_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kept_turns, "DISK_PATIENCE_S", 0.05)
    journal, shown = SlowDisk(tmp_path), list[str]()
    kept = KeptTurns(journal, where="runs/x/journal", show=shown.append)
    kept.serve(3, 7)
    for name in ("stage1/12/0", "stage1/12/1"):
        kept.begin(start(name))
        kept.finished(after(start(name), tokens(0, 4)))
        await kept.flush()
    (line,) = shown
    assert line.startswith("runs/x/journal cannot be written (") and "disk" in line
    journal.let.set()
    while len(shown) == 1:
        await asyncio.sleep(0.01)
        await kept.flush()
    assert shown[1:] == ["runs/x/journal is written again"] and journal.unwritten_bytes == 0
    both = [start("stage1/12/0"), start("stage1/12/1")]
    assert [*journaled(tmp_path, both, 7)] == ["stage1/12/0", "stage1/12/1"]
    await kept.close()
