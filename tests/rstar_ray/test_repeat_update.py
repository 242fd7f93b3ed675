"""A recorded step's update once more: the rows that the learner is given are those it was given then."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from recipes import replay
from rstar_ray.algorithm.update import UpdateResult
from rstar_ray.errors import ConfigError
from rstar_ray.replay_update import recorded_step, repeat_update, repeatable, rows_of
from rstar_ray.rollouts import TrainingRow, TrajectoryRef
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.run_dir.recorded_trajectories import recorded_trajectories
from rstar_ray.run_dir.trajectory_log import write_trajectories
from rstar_ray.stages import run_rl
from tests.fakes import CharChat, SkilledPolicy, SkillLearner, adding_problems, fake_context, in_run
from tests.rstar_ray.test_stages import stage

pytestmark = pytest.mark.usefixtures("without_fsync")
OPTIONS = {
    "checkpoint__every_steps": 1,
    "checkpoint__keep": 9,
    "checkpoint__trajectories_every_steps": 1,
    "prompts_per_step": 4,
    "algorithm__rollouts_per_prompt": 6,
    "algorithm__keep": 4,
    "rollout__deadline_s": 60.0,
}


@dataclass
class Telling(SkillLearner):
    """Its figures depend on every row, on the rate and on the policy; it keeps what it was given."""

    received: list[Any] = field(default_factory=list)

    async def train_rl(self, rows: Sequence[TrainingRow], lr: float) -> UpdateResult:
        self.received.append([(row.rollout_id, row.advantage, row.num_tokens, row.num_sampled_tokens) for row in rows])
        lengths = [len(row.ref.batch[row.ref.index].response_ids) for row in rows]
        logprobs = [float(row.ref.batch[row.ref.index].rollout_logprobs.sum()) for row in rows]
        loss = self.policy.skill * sum(row.advantage * length for row, length in zip(rows, lengths, strict=True))
        result = await super().train_rl(rows, lr)
        figures = {"loss": loss, "grad_norm": 1 + lr, "entropy": -sum(logprobs) / sum(lengths)}
        return replace(result, metrics={**result.metrics, **figures})


async def record(refs: Sequence[TrajectoryRef], path: Path, *, stage: str, step: int, trained: bool = False) -> None:
    write_trajectories(path, [ref.batch[ref.index] for ref in refs], CharChat().decode, stage=stage, step=step)


@pytest.fixture
async def run(tmp_path: Path) -> tuple[Path, Telling]:
    """A run of three steps, and the learner that took them."""
    policy = SkilledPolicy()
    learner = Telling(policy)
    context = fake_context(policy, learner=learner, services={"record": record})
    config = stage("stage1", steps=3, **OPTIONS)
    with RunDir.open(tmp_path / "run", "stage1", asdict(config)) as run_dir:
        await run_rl(config, adding_problems(40), in_run(context, run_dir))
    return tmp_path / "run", learner


async def test_another_policy_before_the_update_is_a_difference(run: tuple[Path, Telling]):
    path, _ = run
    recorded = recorded_step(path, "stage1", 2)
    skill = path / "checkpoints/stage1-step-000001/skill.json"
    skill.write_text(json.dumps([0.9, 0.1, 1]))
    figures = await repeat_update(recorded, Telling(SkilledPolicy()))
    assert [figure.name for figure in figures if not figure.alike] == ["loss"]


def test_steps_that_can_be_repeated_are_listed(run: tuple[Path, Telling], capsys: pytest.CaptureFixture[str]):
    path, _ = run
    assert repeatable(path) == [("stage1", 2), ("stage1", 3)]  # before the first there is no checkpoint here
    assert replay.main([str(path)]) == 0
    assert capsys.readouterr().out == "stage1 step 2\nstage1 step 3\n"
    assert replay.main([str(path), "--stage", "stage1"]) == 0
    assert capsys.readouterr().out == "stage1 step 2\nstage1 step 3\n"
    assert replay.main([str(path), "--stage", "stage2"]) == 2
    assert "has no step of stage2 with its trajectories" in capsys.readouterr().err


def test_trajectories_that_are_gone_or_of_another_version_are_refused(run: tuple[Path, Telling]):
    path = run[0] / "trajectories/stage1-step-000002.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        del row["num_answers"]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(ConfigError, match=r"has no num_answers. Hint: record the step with this version"):
        recorded_step(run[0], "stage1", 2)
    path.unlink()
    with pytest.raises(ConfigError, match=r"does not exist. Hint: see trajectories/"):
        recorded_trajectories(path)


def test_settings_that_choose_other_rollouts_are_refused(run: tuple[Path, Telling]):
    recorded = recorded_step(run[0], "stage1", 2)
    assert {row.rollout_id for row in rows_of(recorded)} == recorded.handed_over
    other = replace(recorded, config=replace(recorded.config, seed=recorded.config.seed + 1))
    with pytest.raises(ConfigError, match=r"resampling chooses .* only once"):
        rows_of(other)


def test_an_exported_step_has_the_tokens_and_advantages_that_the_learner_was_given(
    run: tuple[Path, Telling], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, learner = run
    file = tmp_path / "step.safetensors"
    assert replay.main([str(path), "--step", "2", "--export", str(file)]) == 0
    step = load_file(file)
    assert f"{len(step['lengths'])} rows" in capsys.readouterr().out
    given = learner.received[1]
    with safe_open(file, "np") as opened:
        names = json.loads(opened.metadata()["rollout_ids"])
    assert names == [rollout_id for rollout_id, *_ in given]
    for place, (_, advantage, num_tokens, num_sampled) in enumerate(given):
        mask = step["loss_mask"][place]
        assert mask.sum() == num_sampled and step["lengths"][place] == num_tokens
        assert step["advantages"][place][mask] == pytest.approx(advantage)
        assert (step["rollout_logprobs"][place][~mask] == 0).all()
    recorded = {one.summary.rollout_id: one for one in recorded_step(path, "stage1", 2).trajectories}
    for name, ids, length in zip(names, step["input_ids"], step["lengths"], strict=True):
        assert ids[:length].tolist() == [*recorded[name].prompt_ids, *recorded[name].response_ids][:length]
    assert replay.main([str(path), "--export", str(file)]) == 2
