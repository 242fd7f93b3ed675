"""Which rank takes which row, with which weight: no Ray and no torch here."""

import math
from typing import Any, get_args

import numpy as np
import pytest

from actors.learner.shares import RlWork, rl_shares, sft_shares, usable_rows
from rstar_ray.algorithm.update import LeftOut, SftExample
from rstar_ray.config.algorithm import Normalisation
from rstar_ray.rollouts import TrainingRow, TrajectoryRef
from tests import derived


def rl_work(rows: list[TrainingRow], **changes: Any) -> list[RlWork]:
    config = derived.learner(**{"micro_batch_tokens": 40, "ranks": 2, **changes})
    return rl_shares(rows, config, attention_tokens=math.inf)


def training_row(name: str, *, group: str = "g", tokens: int = 10, sampled: int = 4) -> TrainingRow:
    return TrainingRow(
        rollout_id=name,
        group_id=group,
        ref=TrajectoryRef([], 0),
        advantage=1.0,
        num_tokens=tokens,
        num_sampled_tokens=sampled,
    )


def drawn_rows(count: int = 12) -> list[TrainingRow]:
    rng = np.random.default_rng(0)
    return [
        training_row(f"r{i}", group=f"g{i % 3}", tokens=int(rng.integers(8, 40)), sampled=int(rng.integers(1, 8)))
        for i in range(count)
    ]


def weights(work: list[RlWork], update: int = 0) -> dict[str, float]:
    found = [share for rank in work for batch in rank[update] for share in batch]
    assert len({share.row.rollout_id for share in found}) == len(found)
    return {share.row.rollout_id: share.token_weight for share in found}


def test_rows_above_the_context_or_without_a_sampled_token_are_left_out_with_the_reason():
    rows = [
        training_row("fits", tokens=16),
        training_row("long", tokens=17),
        training_row("silent", sampled=0),
        training_row("one", sampled=1),
    ]
    usable, left_out = usable_rows(rows, 16)
    assert [row.rollout_id for row in usable] == ["fits", "one"]
    assert left_out == (
        LeftOut("long", "17 tokens, above the model's context of 16"),
        LeftOut("silent", "no sampled token"),
    )


@pytest.mark.parametrize("mode", get_args(Normalisation))
def test_weights_are_the_updates_whatever_the_ranks_and_micro_batches(mode: Normalisation):
    rows = drawn_rows()
    want = weights(rl_work(rows, normalisation=mode, ranks=1))
    for world_size in (2, 5):
        for tokens in (1, 10_000):
            work = rl_work(rows, normalisation=mode, ranks=world_size, micro_batch_tokens=tokens)
            assert len(work) == world_size
            assert weights(work) == want


def grouped_rows(*tokens: int, siblings: int = 4) -> list[TrainingRow]:
    """`siblings` rows of each group, interleaved; a row of group `i` has `tokens[i]` tokens, one of them sampled."""
    return [
        training_row(f"g{group}-{sibling}", group=f"g{group}", tokens=length, sampled=1)
        for sibling in range(siblings)
        for group, length in enumerate(tokens)
    ]


@pytest.mark.parametrize("num_updates", [2, 3, 4, 16])
def test_each_update_takes_whole_prompt_groups_and_is_normalised_by_itself(num_updates: int):
    rows = grouped_rows(9, 30, 12, 25, 14, 20, 11)
    work = rl_work(rows, updates_per_step=num_updates)
    assert {len(rank) for rank in work} == {min(num_updates, 7)}
    of_group: dict[str, set[int]] = {}
    for update in range(len(work[0])):
        shares = weights(work, update)
        assert sum(shares.values()) == pytest.approx(1)  # every row has one sampled token
        for name in shares:
            of_group.setdefault(name.split("-")[0], set()).add(update)
    assert sorted(of_group) == [f"g{i}" for i in range(7)]
    assert all(len(updates) == 1 for updates in of_group.values())


def test_updates_of_a_step_get_as_many_tokens_as_whole_groups_allow():
    tokens = (40, 8, 9, 33, 10, 12, 30, 8)
    rows = grouped_rows(*tokens)
    work = rl_work(rows, ranks=1, updates_per_step=2)
    loads = [sum(share.row.num_tokens for batch in update for share in batch) for update in work[0]]
    assert sum(loads) == 4 * sum(tokens) and max(loads) - min(loads) <= 4 * min(tokens)


def test_conversations_share_one_weight_by_their_tokens_with_a_loss():
    def example(mask: list[int]) -> SftExample:
        return SftExample(np.zeros(len(mask), np.int32), np.array(mask, np.bool_))

    two = derived.limits(micro_batch_tokens=40, attention="rows", ranks=2)
    work = sft_shares([example([1, 0, 1, 1]), example([0, 1]), example([1, 0])], two, attention_tokens=math.inf)
    shares = [share for rank in work for batch in rank for share in batch]
    assert len(shares) == 3 and math.isclose(sum({share.token_weight for share in shares}), 1 / 3)
    assert sft_shares([example([1, 0])], two, attention_tokens=math.inf) == []
    assert sft_shares([], two, attention_tokens=math.inf) == []
