"""A recorded step's update, repeated: the rows that the learner is given are those it was given then."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from actors.learner.shares import rl_shares, rows_refused, usable_rows
from recipes import replay
from rstar_ray.algorithm.update import UpdateResult
from rstar_ray.errors import ConfigError
from rstar_ray.lines import NEW, line_sizes
from rstar_ray.outcome import Outcome
from rstar_ray.replay_update import RecordedStep, export_step, recorded_step, repeat_update, repeatable, rows_of
from rstar_ray.rollouts import TrainingRow, TrajectoryRef
from rstar_ray.run_dir.durable import read_rows
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.run_dir.ledger import LEDGER
from rstar_ray.run_dir.recorded_trajectories import recorded_trajectories
from rstar_ray.run_dir.trajectory_log import write_trajectories
from rstar_ray.trajectory import Completion, Trajectory
from tests.fakes import CharChat, SkilledPolicy, SkillLearner, adding_problems, fake_context
from tests.rstar_ray.fabricate import trajectory, write_rows
from tests.rstar_ray.test_stages import stage, train

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


class Varied(SkilledPolicy):
    """Each token of a completion has another log-prob."""

    async def __call__(self, prompt_ids: Sequence[int], **asked: Any) -> Completion:
        said = await super().__call__(prompt_ids, **asked)
        return replace(said, logprobs=[-0.01 * (place + 1) for place in range(len(said.token_ids))])


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


UPDATES = 3
CONTEXT = 140  # tokens: some rows are longer


@dataclass
class Excluding(Telling):
    """Excludes rows above its context, and does not apply the second update of a step."""

    async def train_rl(self, rows: Sequence[TrainingRow], lr: float) -> UpdateResult:
        result = replace(await super().train_rl(rows, lr), reason="loss nan", refused=(1,))
        usable, left_out = usable_rows(rows, CONTEXT)
        return replace(result, left_out=(*left_out, *rows_refused(usable, UPDATES, result)))


async def record(refs: Sequence[TrajectoryRef], path: Path, *, stage: str, step: int, trained: bool = False) -> None:
    write_trajectories(path, [ref.batch[ref.index] for ref in refs], CharChat().decode, stage=stage, step=step)


@pytest.fixture
async def run(tmp_path: Path) -> tuple[Path, Telling]:
    """A run of three steps, and the learner that took them."""
    return await taken(tmp_path)


async def taken(
    tmp_path: Path, learns: Callable[[SkilledPolicy], Telling] = Telling, /, **options: object
) -> tuple[Path, Telling]:
    policy = Varied()
    learner = learns(policy)
    context = fake_context(policy, learner=learner, services={"record": record})
    await train(stage("stage1", steps=3, **OPTIONS, **options), tmp_path / "run", context)
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
    for options in ([], ["--stage", "stage1"]):
        assert replay.main([str(path), *options]) == 0
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
    for place, (name, length) in enumerate(zip(names, step["lengths"], strict=True)):
        one = recorded[name]
        assert step["input_ids"][place][:length].tolist() == [*one.prompt_ids, *one.response_ids][:length]
        logprobs = [*np.zeros(len(one.prompt_ids), np.float32), *one.rollout_logprobs][:length]
        assert step["rollout_logprobs"][place][:length].tolist() == logprobs and len(set(logprobs)) > 9
    assert replay.main([str(path), "--export", str(file)]) == 2
    assert replay.main([str(path), "--step", "2", "--export", str(tmp_path / "absent" / "step")]) == 2
    assert "--export: " in capsys.readouterr().err


async def test_an_exported_row_has_its_update_or_none_where_it_was_not_trained_on(tmp_path: Path):
    path, learner = await taken(tmp_path, Excluding, optimizer__updates_per_step=UPDATES)
    recorded = recorded_step(path, "stage1", 2)
    export_step(recorded, tmp_path / "step")
    with safe_open(tmp_path / "step", "np") as opened:
        names, settings = (json.loads(opened.metadata()[name]) for name in ("rollout_ids", "settings"))
    usable, too_long = usable_rows(learner.batches[1], CONTEXT)
    (of_rank,) = rl_shares(usable, recorded.config, attention_tokens=inf)
    updates = {share.row.rollout_id: number for number in (0, 2) for batch in of_rank[number] for share in batch}
    assert len(of_rank) == UPDATES == settings["updates_per_step"] and of_rank[1] and too_long
    assert load_file(tmp_path / "step")["updates"].tolist() == [updates.get(name, -1) for name in names]


def test_the_loss_is_that_of_the_steps_staleness_which_may_have_changed_since_the_stage_began(
    run: tuple[Path, Telling],
):
    path, _ = run
    metrics = path / "metrics.jsonl"
    rows = [{name: value for name, value in row.items() if name != "staleness"} for row in read_rows(metrics)]
    write_rows(metrics, *({**row, "staleness": int(row["step"] > 2)} for row in rows))
    two, three = (recorded_step(path, "stage1", step).config for step in (2, 3))
    assert (two.staleness, two.loss.correction, two.loss.dual_clip) == (0, "token", 0)
    assert (three.staleness, three.loss.correction, three.loss.dual_clip) == (1, "sampler", 3)

    write_rows(metrics, *rows)  # of an earlier version
    assert recorded_step(path, "stage1", 3).config == two
    RunDir(path).log_launch(stage="stage1", importance_correction="sampler")
    assert recorded_step(path, "stage1", 3).config == three
    RunDir(path).log_launch(stage="stage1", importance_correction="token")
    with pytest.raises(ConfigError, match=r"had corrections sampler, token: the loss of step 3 is unknown"):
        recorded_step(path, "stage1", 3)


def test_an_advantage_that_was_recorded_as_null_is_unknown(run: tuple[Path, Telling]):
    path, _ = run
    ledger = read_rows(path / LEDGER)
    ledger[1]["advantages"][min(ledger[1]["advantages"])] = None
    write_rows(path / LEDGER, *ledger)
    recorded = recorded_step(path, "stage1", 2)
    assert len(recorded.advantages) == len(recorded.handed_over) - 1
    assert {row.rollout_id for row in rows_of(recorded)} == recorded.handed_over


READS_OUTCOMES = """
def less_for_failures(rewards, algorithm, summaries):
    mean = sum(rewards) / len(rewards)
    return [r - mean - FACTOR * sum(o.failed for o in s.outcomes) for r, s in zip(rewards, summaries)]

def by_answer(rewards, algorithm, summaries):
    return [float(len(summary.answer)) for summary in summaries]
"""


async def test_an_advantage_rule_reads_recorded_outcomes_and_one_that_reads_more_is_refused(tmp_path: Path):
    (tmp_path / "reads_outcomes.py").write_text(READS_OUTCOMES.replace("FACTOR", "0.1"))
    own: dict[str, object] = {"own_folder": str(tmp_path), "algorithm__resample": "random"}
    rule = "reads_outcomes:less_for_failures"
    path, learner = await taken(tmp_path / "outcomes", **own, algorithm__advantage=rule)
    recorded = recorded_step(path, "stage1", 2)
    assert any(outcome.failed for one in recorded.trajectories for outcome in one.summary.outcomes)
    given = [advantage for _, advantage, *_ in learner.received[1]]
    assert [row.advantage for row in rows_of(recorded)] == pytest.approx(given)
    path, _ = await taken(tmp_path / "answer", **own, algorithm__advantage="reads_outcomes:by_answer")
    with pytest.raises(ConfigError, match=r"--algorithm.advantage reads_outcomes:by_answer: it gives .* then"):
        rows_of(recorded_step(path, "stage1", 2))


def test_each_line_of_an_agents_rollout_is_exported_as_its_own_row(tmp_path: Path):
    problem = adding_problems(1)[0]
    trajectories: list[Trajectory] = []
    for sibling in range(2):
        one = trajectory(problem, [("ab", "c", Outcome.OK), ("def", "", None)], reward=float(sibling), sibling=sibling)
        turns = (one.turns[0], replace(one.turns[1], continues=NEW))
        lines = line_sizes(turns, one.loss_mask, len(one.prompt_ids))
        trajectories.append(replace(one, turns=turns, summary=replace(one.summary, lines=lines)))
    names = [one.summary.rollout_id for one in trajectories]
    recorded = RecordedStep(
        config=stage("stage1", algorithm__resample="none", algorithm__keep=2),
        step=1,
        row={},
        handed_over=frozenset(names),
        left_out={names[0]: "no sampled token"},  # the reason of another line
        advantages=dict(zip(names, (-1.0, 1.0), strict=True)),
        trajectories=trajectories,
        before=None,
    )
    assert export_step(recorded, tmp_path / "step") == 4
    step = load_file(tmp_path / "step")
    sampled = ["".join(map(chr, ids[mask])) for ids, mask in zip(step["input_ids"], step["loss_mask"], strict=True)]
    assert sampled == ["ab", "def"] * 2 and step["updates"].tolist() == [0] * 4
    lengths = step["lengths"].tolist()
    above = f"{max(lengths)} tokens, above the model's context of {max(lengths) - 1}"
    export_step(replace(recorded, left_out=dict.fromkeys(names, above)), tmp_path / "step")
    assert load_file(tmp_path / "step")["updates"].tolist() == [-(length == max(lengths)) for length in lengths]
