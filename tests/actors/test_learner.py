"""The learner as Ray actors: ranks together, and what happens when they cannot continue."""

import asyncio
import json
import math
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.health.watchdog import Watchdog
from actors.learner.gang import Learner
from actors.learner.rank_client import Rank
from actors.weights.buckets import checksum
from actors.weights.transfer import Publication
from rstar_ray.algorithm.batch import TokenRow
from rstar_ray.algorithm.update import SftExample
from rstar_ray.config import DetectorConfig
from rstar_ray.errors import ConfigError, LearnerError, RankLost
from rstar_ray.rollouts import TrainingRow, TrajectoryRef
from rstar_ray.trajectory import Problem, StopReason, Trajectory, TrajectorySummary
from tests import derived
from tests.actors.policies import draw_rows, num_sampled, save_policy
from tests.actors.unpacked import unpack

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, namespace="learner", object_store_memory=100 * 2**20)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@asynccontextmanager
async def learning(folder: Path, **changes: Any) -> AsyncIterator[Learner]:
    plain: dict[str, Any] = {"zero": 0, "grad_clip": 0.0, "micro_batch_tokens": 256, "attention": "sdpa"}
    options = [{"num_cpus": 0.1}] * changes.get("ranks", 1)
    learner = Learner(derived.learner(**plain | changes), folder, rank_options=options)
    try:
        await learner.start()
        yield learner
    finally:
        await learner.close()


def trajectory(row: TokenRow) -> Trajectory:
    """A trajectory whose row is this one: four tokens of prompt."""
    assert row.rollout_logprobs is not None
    response = row.token_ids[4:]
    return Trajectory(
        summary=TrajectorySummary(
            rollout_id=row.name,
            group_id="group",
            problem_id="problem",
            reward=1.0,
            num_calls=0,
            num_failed=0,
            num_answers=1,
            num_turns=1,
            num_prompt_tokens=4,
            num_response_tokens=len(response),
            num_sampled_tokens=row.num_sampled_tokens,
            stop_reason=StopReason.ANSWERED,
        ),
        problem=Problem(id="problem", problem="", answer="1"),
        prompt_ids=row.token_ids[:4],
        response_ids=response,
        loss_mask=row.loss_mask[4:],
        rollout_logprobs=row.rollout_logprobs[4:],
        policy_versions=np.zeros(len(response), np.int32),
        turns=(),
    )


def training_rows(rows: Sequence[TokenRow], ray: Any) -> list[TrainingRow]:
    """In the object store, three trajectories to a batch."""
    made: list[TrainingRow] = []
    for start in range(0, len(rows), 3):
        part = rows[start : start + 3]
        batch = ray.put([trajectory(row) for row in part])
        made += [
            TrainingRow(
                rollout_id=row.name,
                group_id="group",
                ref=TrajectoryRef(batch, index),
                advantage=row.advantage,
                num_tokens=len(row.token_ids),
                num_sampled_tokens=row.num_sampled_tokens,
            )
            for index, row in enumerate(part)
        ]
    return made


def moments(folder: Path, num_ranks: int) -> dict[str, Any]:
    """Gradients of the first update, from a checkpoint: Adam's first moment is a tenth of them."""
    from safetensors import safe_open

    facts = json.loads((folder / "learner.json").read_text())
    assert facts["world_size"] == num_ranks
    found = {f"{name}/exp_avg": np.full(math.prod(shape), np.nan) for name, shape in facts["shapes"].items()}
    for rank in range(num_ranks):
        with safe_open(folder / f"state-{rank:05d}.safetensors", framework="np") as saved:
            for key, start in json.loads(saved.metadata()["starts"]).items():
                if key in found:
                    part = saved.get_tensor(key)
                    assert np.isnan(found[key][start : start + len(part)]).all(), "an element is written by one rank"
                    found[key][start : start + len(part)] = part / 0.1
    assert not any(np.isnan(values).any() for values in found.values())
    return found


def published(publication: Publication, ray: Any) -> dict[str, Any]:
    return {parameter.name: parameter.array for parameter in unpack(ray.get(list(publication.refs)))}


ROWS = draw_rows(9)


async def test_two_ranks_under_zero_3_do_what_one_rank_does_and_continue_from_its_checkpoint(
    cluster: Any, folder: Path, tmp_path: Path
):
    rows = training_rows(ROWS, cluster)
    examples = [SftExample(row.token_ids, row.loss_mask, row.name) for row in ROWS]
    async with learning(folder) as one:
        alone = await one.train_rl(rows, 1e-3)
        await one.save_checkpoint(tmp_path / "one", {"stage": "sft"})
        await one.written()
        next_alone = await one.train_rl(rows, 1e-3)
        sft_alone = await one.evaluate_sft(examples)
        weights_alone = published(await one.publish(2), cluster)
    async with learning(folder, ranks=2, zero=3) as two:
        together = await two.train_rl(rows, 1e-3)
        await two.save_checkpoint(tmp_path / "two")
        files = await two.written()
        assert await two.written() == {}
        assert await two.load_checkpoint(tmp_path / "one") == {"stage": "sft"}
        next_together = await two.train_rl(rows, 1e-3)
        publication = await two.publish(2)
        assert publication.checksum == checksum(cluster.get(list(publication.refs)))
        weights_together = published(publication, cluster)
        assert await two.evaluate_sft(examples) == pytest.approx(sft_alone, abs=1e-6)
        await two.export(tmp_path / "model")
        assert {file.by for file in (await two.written()).values()} == {"learner/rank-0"}
        await two.set_policy(tmp_path / "model")
        assert (await two.publish(3)).checksum == publication.checksum

        # Fewer rows than ranks, and none to train on.
        assert (await two.train_rl(rows[:1], 1e-3)).applied
        masked = [replace(row, num_sampled_tokens=0) for row in rows]
        assert not (await two.train_rl(masked, 1e-3)).applied
        too_long = await two.train_rl([replace(rows[0], num_tokens=513)], 1e-3)
        assert (too_long.applied, "context" in too_long.reason) == (False, True)
        some = await two.train_rl([*rows[1:], replace(rows[0], num_tokens=513)], 1e-3)
        assert some.applied and [(row.rollout_id, "513 tokens" in row.reason) for row in some.left_out] == [
            ("rollout-0", True)
        ]
        assert not (await two.train_sft([SftExample(np.zeros(3, np.int32), np.zeros(3, np.bool_))], 1e-3)).applied
        assert math.isnan(await two.evaluate_sft([]))

    for one_result, other in ((alone, together), (next_alone, next_together)):
        assert other.metrics["trained_tokens"] == one_result.metrics["trained_tokens"] == num_sampled(ROWS)
        for name in ("loss", "grad_norm", "entropy", "logprob_diff_mean", "logprob_diff_max"):
            assert other.metrics[name] == pytest.approx(one_result.metrics[name], abs=1e-6)
    gradients, others = moments(tmp_path / "one", 1), moments(tmp_path / "two", 2)
    assert gradients.keys() == others.keys()
    assert {(path.name, file.by) for path, file in files.items()} == {
        ("learner.json", "learner/rank-0"),
        *((f"state-{rank:05d}.safetensors", f"learner/rank-{rank}") for rank in range(2)),
        *((f"generators-{rank:05d}.pt", f"learner/rank-{rank}") for rank in range(2)),
    }
    assert all(file.num_bytes == path.stat().st_size for path, file in files.items())
    assert max(float(np.abs(gradients[name] - others[name]).max()) for name in gradients) < 1e-6
    assert max(float(np.abs(weights_alone[name] - weights_together[name]).max()) for name in weights_alone) < 1e-6


async def test_a_checkpoint_of_two_ranks_is_resumed_by_any_number_and_one_with_a_hole_by_none(
    cluster: Any, folder: Path, tmp_path: Path
):
    rows = training_rows(ROWS, cluster)
    async with learning(folder, ranks=2, zero=3) as two:
        assert (await two.train_rl(rows, 1e-3)).applied
        await two.save_checkpoint(tmp_path)
        after = await two.train_rl(rows, 1e-3)  # while it is written
        await two.written()
        weights = published(await two.publish(1), cluster)
    for ranks, zero in ((1, 2), (3, 1)):
        async with learning(folder, ranks=ranks, zero=zero) as moved:
            await moved.load_checkpoint(tmp_path)
            again = await moved.train_rl(rows, 1e-3)
            assert (again.step, again.metrics["loss"]) == (2, pytest.approx(after.metrics["loss"], abs=1e-6))
            of_moved = published(await moved.publish(1), cluster)
            assert max(float(np.abs(of_moved[name] - weights[name]).max()) for name in weights) < 1e-6
            if ranks == 3:
                (tmp_path / "state-00001.safetensors").unlink()
                with pytest.raises(ConfigError, match=r"state-00001\.safetensors, the part of rank 1 of 2"):
                    await moved.load_checkpoint(tmp_path)
                assert (await moved.train_rl(rows, 1e-3)).applied  # refused by all, and usable


async def test_a_rank_that_waits_for_another_in_a_collective_ends_with_its_deadline(cluster: Any, folder: Path):
    """In the group that DeepSpeed makes for itself."""
    async with learning(folder, ranks=2, zero=3, step_deadline_s=20.0) as learner:
        waiting, _ = learner._ranks
        with pytest.raises(LearnerError, match=r"learner/rank-0 failed in gathering: .*[Tt]ime(d |)out"):
            await waiting.call_once(
                lambda rank: rank.publish(1, "object_store", ()), deadline_s=240, reason="gathering"
            )


async def test_a_rank_that_cannot_write_is_named_and_the_ranks_continue(cluster: Any, folder: Path, tmp_path: Path):
    rows = training_rows(ROWS, cluster)
    async with learning(folder, ranks=2, zero=1) as learner:
        (tmp_path / "state-00001.safetensors").mkdir()  # where rank 1 wants to write a file
        await learner.save_checkpoint(tmp_path)
        with pytest.raises(LearnerError, match=r"learner/rank-1 failed in writing a checkpoint: .*irectory"):
            await learner.written()
        assert (await learner.train_rl(rows, 1e-3)).applied


async def test_a_rank_that_dies_ends_the_gang_at_once_and_is_named(cluster: Any, folder: Path):
    rows = training_rows(ROWS, cluster)
    async with learning(folder, ranks=2, zero=1) as learner:
        assert (await learner.train_rl(rows, 1e-3)).applied
        doomed = cluster.get_actor("learner/rank-1")
        cluster.kill(doomed)
        with pytest.raises(LearnerError, match="learner/rank-1 died"):
            await learner.train_rl(rows, 1e-3)
        with pytest.raises(LearnerError, match="not running"):
            await learner.publish(1)


async def test_a_rank_that_dies_or_stops_is_noticed_while_nobody_asks_it_and_new_ones_continue_from_a_checkpoint(
    cluster: Any, folder: Path, tmp_path: Path, logged: list[str]
):
    rows = training_rows(ROWS, cluster)
    watchdog = Watchdog(
        DetectorConfig(probe_every_s=0.5, silent_s=8, learner_silent_s=8, engine_step_s=8, still_s=300),
    )
    watchdog.start()
    async with learning(folder, ranks=2, zero=1) as learner:
        learner._watchdog, learner._silent_s = watchdog, 8.0
        await learner.restart()
        assert (await learner.train_rl(rows, 1e-3)).applied
        await learner.save_checkpoint(tmp_path / "first")
        await learner.written()
        assert (await learner.train_rl(rows, 1e-3)).applied
        uninterrupted = (await learner.publish(2)).checksum
        for fault in (signal.SIGKILL, signal.SIGSTOP):
            victim = await cluster.get_actor("learner/rank-1").probe.remote()
            os.kill(victim.pid, fault)
            with pytest.raises(RankLost, match="learner/rank-1 died"):
                await learner.unless_lost(asyncio.sleep(120))
            await learner.restart()
            await learner.load_checkpoint(tmp_path / "first")
            assert (await learner.unless_lost(learner.train_rl(rows, 1e-3))).applied
            assert (await learner.publish(2)).checksum == uninterrupted
        # Ray reports a death; on a slow machine the learner's start may log more.
        assert any(f"process {victim.pid} is killed" in line for line in logged if "rank-1 was silent for" in line)
    await watchdog.close()


async def test_what_a_rank_refuses_or_cannot_finish_reaches_the_driver_by_name(
    cluster: Any, folder: Path, tmp_path: Path
):
    with pytest.raises(ConfigError, match=r"--model"):
        async with learning(tmp_path):
            pass
    async with learning(folder) as learner:
        with pytest.raises(ConfigError, match="cannot read"):
            await learner.load_checkpoint(tmp_path / "nowhere")
        rows = training_rows(ROWS, cluster)
        wrong = [replace(rows[0], num_sampled_tokens=1), *rows[1:]]
        with pytest.raises(LearnerError, match="rollout-0 has"):
            await learner.train_rl(wrong, 1e-3)
    async with learning(folder, updates_per_step=2) as learner:
        first, second = rows[: len(rows) // 2], [replace(row, group_id="other") for row in rows[len(rows) // 2 :]]
        result = await learner.train_rl([replace(first[0], advantage=math.nan), *first[1:], *second], 1e-3)
        assert result.applied and result.step == 1
        assert [row.rollout_id for row in result.left_out] == [row.rollout_id for row in first]
        assert all("rollout-0" in row.reason for row in result.left_out)
    async with learning(folder, step_deadline_s=30.0) as learner:
        bad = [replace(rows[0], advantage=math.nan), *rows[1:]]
        results = [await learner.train_rl(bad, 1e-3) for _ in range(2)]
        assert [(result.applied, result.bad_updates) for result in results] == [(False, 1), (False, 2)]
        assert all("rollout-0" in result.reason for result in results)
        assert (await learner.train_rl(rows, 1e-3)).applied  # the ranks train on: the run decides whether to stop


async def test_a_rank_that_does_not_answer_is_waited_for_no_longer_than_the_deadline(cluster: Any, folder: Path):
    @cluster.remote(num_cpus=0)
    class Silent:
        async def call(self, number: int, method: str, arguments: Sequence[Any]) -> None:
            await asyncio.sleep(60)

    learner = Learner(derived.learner(step_deadline_s=1), folder)
    learner._ranks = [Rank(Silent.remote(), "learner/rank-0")]
    with pytest.raises(RankLost, match=r"driver waited 1 s for learner/rank-0 \(the weights\)"):
        await learner.publish(1)


def test_importing_the_learner_imports_neither_torch_nor_deepspeed():
    import subprocess
    import sys

    code = "import sys, actors.learner.gang; sys.exit(bool({'torch', 'deepspeed', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False).returncode == 0
