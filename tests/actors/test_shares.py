"""Which rank takes which row, with which weight: no Ray and no torch here."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from actors.learner.shares import RlWork, rl_shares, rows_refused, sft_shares, usable_rows
from rstar_ray.algorithm.loss_settings import Normalisation
from rstar_ray.algorithm.update import LeftOut, SftExample
from rstar_ray.rollouts import TrajectoryRef
from rstar_ray.train_loop import TrainingRow
from tests import derived
from tests.fakes import update_result

LIMITS = derived.limits(micro_batch_tokens=40, packed=True)


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
    shares = [share for rank in work for batch in rank[update] for share in batch]
    assert len({share.row.rollout_id for share in shares}) == len(shares)
    return {share.row.rollout_id: share.token_weight for share in shares}


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


@pytest.mark.parametrize("mode", list(Normalisation))
def test_weights_are_the_updates_whatever_the_ranks_and_micro_batches(mode: Normalisation):
    loss = derived.loss(normalisation=mode, constant_tokens=9)
    rows = drawn_rows()
    want = weights(rl_shares(rows, loss, LIMITS, world_size=1, num_updates=1))
    for world_size in (2, 5):
        for tokens in (1, 10_000):
            limits = derived.limits(micro_batch_tokens=tokens, packed=True)
            work = rl_shares(rows, loss, limits, world_size=world_size, num_updates=1)
            assert len(work) == world_size
            assert weights(work) == want


def test_by_group_each_group_weighs_the_same_and_its_tokens_alike():
    rows = drawn_rows()
    work = rl_shares(rows, derived.loss(normalisation=Normalisation.GROUP), LIMITS, world_size=2, num_updates=1)
    found, totals = weights(work), Counter[str]()
    for row in rows:
        totals[row.group_id] += row.num_sampled_tokens
    for row in rows:
        assert found[row.rollout_id] == pytest.approx(1 / (3 * totals[row.group_id]))


def test_several_updates_take_the_rows_in_turn_and_each_is_normalised_by_itself():
    rows = [training_row(f"r{i}", sampled=i + 1) for i in range(5)]
    work = rl_shares(rows, derived.loss(), LIMITS, world_size=2, num_updates=2)
    assert {len(rank) for rank in work} == {2}
    assert weights(work, 0) == pytest.approx(dict.fromkeys(("r0", "r2", "r4"), 1 / 9))
    assert weights(work, 1) == pytest.approx(dict.fromkeys(("r1", "r3"), 1 / 6))
    assert {len(rank) for rank in rl_shares(rows[:1], derived.loss(), LIMITS, world_size=2, num_updates=3)} == {1}


def test_the_rows_of_an_update_that_was_refused_are_those_that_were_dealt_to_it():
    rows = [training_row(f"r{i}", sampled=i + 1) for i in range(5)]
    applied = update_result(1, tokens=9, lr=1e-3)
    result = replace(applied, reason="not finite", refused=(1,))
    assert rows_refused(rows, 2, result) == (LeftOut("r1", "not finite"), LeftOut("r3", "not finite"))
    assert rows_refused(rows, 2, applied) == ()


def test_conversations_share_one_weight_by_their_tokens_with_a_loss():
    def example(mask: list[int]) -> SftExample:
        return SftExample(np.zeros(len(mask), np.int32), np.array(mask, np.bool_))

    work = sft_shares([example([1, 0, 1, 1]), example([0, 1]), example([1, 0])], LIMITS, world_size=2)
    shares = [share for rank in work for batch in rank for share in batch]
    assert len(shares) == 3 and math.isclose(sum({share.token_weight for share in shares}), 1 / 3)
    assert sft_shares([example([1, 0])], LIMITS, world_size=2) == []
    assert sft_shares([], LIMITS, world_size=2) == []
