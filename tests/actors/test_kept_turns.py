"""What a worker keeps of turns under way: only what belongs together, and all of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.generation import kept_turns
from actors.generation.kept_turns import KeptTurns
from actors.generation.under_way import Sampled
from rstar_ray.agent.journal import TurnJournal, journaled
from rstar_ray.agent.rollout import RolloutState
from rstar_ray.errors import EngineError
from rstar_ray.trajectory import Completion
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
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptTurns]:
    monkeypatch.setattr(kept_turns, "KEEP_EVERY_S", 0.0)
    turns = KeptTurns(TurnJournal(tmp_path, "generation/0-a"))
    turns.serve(3, 7)
    yield turns
    turns.close()


def on_disk(folder: Path, weights: int = 7) -> Completion | None:
    found = journaled(folder, [start()], weights)
    return found[NAME].begun if found else None


def bits(*pairs: tuple[int, Completion], turn: int = 0) -> list[dict[str, Sampled]]:
    return [{f"{NAME}/turn-{turn}": Sampled(first, more)} for first, more in pairs]


async def test_bits_are_put_together_on_disk_and_for_who_goes_on(kept: KeptTurns, tmp_path: Path):
    state = start()
    kept.begin(state)
    await kept.keep(Engine(*bits((0, tokens(0, 4)), (4, tokens(4, 6)))), {NAME: state})
    assert on_disk(tmp_path) == tokens(0, 6)
    (reached,) = kept.reached({NAME: state})
    assert reached.begun == tokens(0, 6)
    kept.completed(state, tokens(0, 9))
    kept.write()
    assert on_disk(tmp_path) == tokens(0, 9)
    kept.end(NAME)
    assert kept.reached({NAME: state}) == [state]


async def test_a_second_death_in_one_turn_loses_no_more_than_the_first(kept: KeptTurns, tmp_path: Path):
    kept.begin(start())
    await kept.keep(Engine(*bits((0, tokens(0, 4)))), {NAME: start()})
    (again,) = journaled(tmp_path, [start()], 7).values()
    second = KeptTurns(TurnJournal(tmp_path, "generation/1-b"))
    second.serve(3, 7)
    second.begin(again)
    await second.keep(Engine(*bits((0, tokens(4, 7)))), {NAME: again})
    second.completed(again, tokens(0, 8))
    second.write()
    assert on_disk(tmp_path) == tokens(0, 8)
    assert second.reached({NAME: again})[0].begun == tokens(0, 8)
    second.close()


@pytest.mark.parametrize(
    "later",
    [
        pytest.param((4, tokens(4, 6, version=4)), id="sampled by others"),
        pytest.param((5, tokens(5, 6)), id="one is missing between"),
        pytest.param((0, tokens(50, 56)), id="of another request of the same name"),
    ],
)
async def test_what_does_not_follow_ends_what_is_kept_of_a_turn(
    kept: KeptTurns, tmp_path: Path, later: tuple[int, Completion]
):
    state = start()
    kept.begin(state)
    await kept.keep(Engine(*bits((0, tokens(0, 4)), later, (6, tokens(6, 8)))), {NAME: state})
    kept.completed(state, tokens(0, 20))
    kept.write()
    assert on_disk(tmp_path) == tokens(0, 4)
    assert kept.reached({NAME: state})[0].begun == tokens(0, 4)


async def test_a_swap_between_two_looks_ends_it_too(kept: KeptTurns, tmp_path: Path):
    state = start()
    kept.begin(state)
    await kept.keep(Engine(*bits((0, tokens(0, 4)))), {NAME: state})
    await kept.keep(Engine(*bits((4, tokens(4, 5, version=4)))), {NAME: state})  # before its end is known
    assert on_disk(tmp_path) == tokens(0, 4)
    kept.serve(4, 8)
    await kept.keep(Engine(*bits((5, tokens(5, 6, version=4)))), {NAME: state})
    assert on_disk(tmp_path) == tokens(0, 4) and on_disk(tmp_path, 8) is None


async def test_the_next_turn_begins_anew_and_rollouts_that_are_gone_are_passed_over(kept: KeptTurns, tmp_path: Path):
    state = start()
    kept.begin(state)
    await kept.keep(Engine(*bits((0, tokens(0, 4)))), {NAME: state})
    kept.end(NAME)
    await kept.keep(Engine(*bits((4, tokens(4, 6)))), {})
    kept.begin(state)
    await kept.keep(Engine(*bits((0, tokens(0, 5)))), {NAME: state})
    assert on_disk(tmp_path) == tokens(0, 5)


async def test_without_a_journal_nothing_is_kept():
    turns = KeptTurns(None)
    turns.begin(start())
    await turns.keep(Engine(), {})
    turns.completed(start(), tokens(0, 4))
    turns.finished(start())
    turns.write()
    turns.flush()
    turns.end(NAME)
    turns.close()
    assert turns.reached({NAME: start()}) == [start()]
