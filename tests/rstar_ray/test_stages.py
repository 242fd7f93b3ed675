import asyncio
import errno
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rstar_ray.agent.journal import turns_folder
from rstar_ray.algorithm.update import LeftOut, SftExample, UpdateResult
from rstar_ray.config import RunConfig, with_values
from rstar_ray.context import RunContext
from rstar_ray.data.order import DataPosition
from rstar_ray.draws import Draws, finish_draw
from rstar_ray.errors import ConfigError, DeadlineExceeded, NothingLearned, RStarError, Stopped
from rstar_ray.evaluation.evaluator import evaluated, run_evaluation
from rstar_ray.rollouts import (
    DroppedRollout,
    FinishedRollout,
    TrainingRow,
    roll_out,
    rollout_requests,
)
from rstar_ray.run_dir import ledger, manifest, metrics
from rstar_ray.run_dir.durable import append_row, read_json, read_rows, write_json
from rstar_ray.run_dir.folder import Checkpoint, RunDir
from rstar_ray.run_dir.ledger import RolloutStatus
from rstar_ray.run_dir.metrics import BalancerStats
from rstar_ray.run_dir.verify_run import faults
from rstar_ray.stage_progress import StageProgress
from rstar_ray.stages import run_rl, run_sft
from rstar_ray.train_loop import StepRecord, train_step
from rstar_ray.trajectory import Problem, RolloutRequest
from tests.fakes import (
    AddingSandbox,
    LocalRollouts,
    Published,
    SkilledPolicy,
    SkillLearner,
    UnreliableSandbox,
    adding_problems,
    fake_context,
    in_run,
    update_result,
)
from tests.logged import Logged

pytestmark = pytest.mark.usefixtures("without_fsync")
SMALL = with_values(
    RunConfig(),
    {
        "steps": 12,
        "prompts_per_step": 8,
        "engine.max_context_tokens": 2_000,
        "rollout.max_response_tokens": 400,
        "rollout.deadline_s": 60.0,
        "algorithm.rollouts_per_prompt": 16,
        "algorithm.keep": 8,
        "evaluate.max_response_tokens": 400,
        "evaluate.samples": 4,
        "checkpoint.every_steps": 4,
        "max_empty_steps": 60,
        "sft.steps": 6,
        "sft.batch_size": 4,
    },
)
STAGES = ("stage1", "stage2", "stage3")


class Stop(Exception): ...


PROBLEMS = adding_problems(40)
HELDOUT = {"held-out": adding_problems(30, seed=1)}


def stage(name: str, **values: object) -> RunConfig:
    return with_values(SMALL, {"stage": name, **{key.replace("__", "."): value for key, value in values.items()}})


async def train(
    config: RunConfig,
    path: Path,
    context: RunContext | None = None,
    problems: Sequence[Problem] = PROBLEMS,
    *,
    stops_after: int | None = None,
    heldout: Sequence[Problem] = (),
) -> Checkpoint:
    """The stage, in this run directory; it is asked to stop after so many of its steps."""
    context = context or fake_context(SkilledPolicy())
    with RunDir.open(path, config.stage, asdict(config)) as run_dir:
        if stops_after is not None:
            rows = run_dir.path / "metrics.jsonl"
            context = replace(context, stop_requested=lambda: len(read_rows(rows)) >= stops_after)
        return await run_rl(config, problems, in_run(context, run_dir), heldout=heldout)


async def run_stage(
    config: RunConfig, policy: SkilledPolicy, path: Path, *, learner: SkillLearner | None = None
) -> None:
    context = fake_context(policy, learner=learner)
    checkpoint = await train(config, path, context)
    if not evaluated(RunDir(path), config.stage, checkpoint.step):
        await run_evaluation(config, HELDOUT, in_run(context, path), step=checkpoint.step)


@pytest.mark.long
async def test_a_whole_recipe_learns_to_solve_and_to_call_without_errors(tmp_path: Path, logged: list[str]):
    policy = SkilledPolicy()
    config = stage("sft")
    examples = [SftExample(np.arange(9, dtype=np.int32), np.ones(9, dtype=bool)) for _ in range(20)]
    with RunDir.open(tmp_path / "run", "sft", asdict(config)) as run_dir:
        context = fake_context(policy)
        await run_sft(config, examples[2:], examples[:2], in_run(context, run_dir))
        await run_evaluation(config, HELDOUT, in_run(context, run_dir), step=6)
    for name in STAGES:
        await run_stage(stage(name, drop_solved=name == "stage3"), policy, tmp_path / "run")
    rows = read_rows(tmp_path / "run" / "evaluations.jsonl")
    assert [row["stage"] for row in rows] == ["sft", *STAGES]
    assert rows[0]["avg_at_k"] < 0.6 and rows[-1]["avg_at_k"] > 0.9
    steps = [(row["stage"], row["step"]) for row in read_rows(tmp_path / "run" / "metrics.jsonl")]
    assert steps == [("sft", i) for i in range(1, 7)] + [(name, i) for name in STAGES for i in range(1, 13)]
    assert any("not solved in 8 of 8" in line for line in logged)


async def test_a_version_names_one_set_of_weights_over_a_whole_run_and_is_sent_once(tmp_path: Path):
    policy, published = SkilledPolicy(), list[Published]()
    context = fake_context(policy, published=published)
    examples = [SftExample(np.arange(9, dtype=np.int32), np.ones(9, dtype=bool)) for _ in range(20)]
    await context.services.publish(0)  # what the run starts from
    for config in (stage("sft"), stage("stage1", steps=3), stage("stage2", steps=2)):
        if config.stage == "sft":
            with RunDir.open(tmp_path / "run", config.stage, asdict(config)) as run_dir:
                checkpoint = await run_sft(config, examples, [], in_run(context, run_dir))
        else:
            checkpoint = await train(config, tmp_path / "run", context)
        version = read_json(checkpoint.path / "progress.json")["policy_version"]
        await context.services.publish(version)  # to be evaluated
    assert [(version, steps) for version, _, _, steps in published] == [(n, n) for n in (0, 6, 7, 8, 9, 10, 11)]


async def test_records_and_figures_that_fail_are_shown_lines_and_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
):
    async def fail(*_: object, **__: object) -> BalancerStats:
        raise OSError("no space left on device")

    class NoTensorBoard:
        def __init__(self, *_: object, **__: object) -> None:
            raise ImportError("no module named tensorboard")

    def gone() -> dict[str, int]:
        raise OSError("no space left on device")

    monkeypatch.setattr(metrics, "TensorBoard", NoTensorBoard)
    config = stage("stage1", steps=2)
    context = fake_context(SkilledPolicy(), services={"record": fail, "balancer_stats": fail, "memory_bytes": gone})
    await train(config, tmp_path / "run", context)
    await run_evaluation(config, {"held-out": adding_problems(4)}, in_run(context, tmp_path / "run"), step=2)
    assert len(read_rows(tmp_path / "run" / "metrics.jsonl")) == 2 and evaluated(RunDir(tmp_path / "run"), "stage1", 2)
    lines = [line for line in logged if "is skipped" in line]
    assert {line.split(" is skipped: ")[0] for line in lines} == {
        "TensorBoard's file",
        "the balancer's row",
        "the run's memory",
        "stage1-step-000001.jsonl",
        "stage1-held-out.jsonl",
    }
    assert all("no space left" in line or "no module" in line for line in lines)


@pytest.mark.parametrize("staleness", [0, 1])
async def test_with_a_staleness_an_evaluation_leaves_the_balancers_statistics_to_the_next_row(
    tmp_path: Path, staleness: int
):
    """Rollouts of later steps run beside it."""
    num_taken = 0

    async def counted() -> None:
        nonlocal num_taken
        num_taken += 1

    context = fake_context(SkilledPolicy(), services={"balancer_stats": counted})
    config = stage("stage1", steps=4, evaluate__every_steps=2, staleness=staleness)
    await train(config, tmp_path / "run", context, heldout=adding_problems(3, seed=1))
    assert num_taken == 1 + 4 + (0 if staleness else 2)  # before the first step, for each row, after evaluations


async def test_a_run_continues_without_its_rows_of_metrics_and_says_so(tmp_path: Path, logged: list[str]):
    config = stage("stage1", steps=3)
    with RunDir.open(tmp_path / "run", "stage1", asdict(config)) as run_dir:
        (run_dir.path / "metrics.jsonl").write_text('{"stage": "stage1", "step": 1}\n{"torn\n{}\n')
        checkpoint = await run_rl(config, PROBLEMS, fake_context(SkilledPolicy(), run_dir=run_dir))
    assert checkpoint.step == 3 and sum("reward" in line for line in logged) == 3
    assert [line.split(" is skipped: ")[0] for line in logged if "is skipped" in line] == ["metrics.jsonl of stage1"]


async def test_a_step_whose_row_of_the_ledger_cannot_be_written_ends_the_run_and_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config, written = stage("stage1", steps=6, checkpoint__every_steps=2), 0

    def once_full(path: Path, row: dict[str, object], **how: bool) -> None:
        nonlocal written
        written += 1
        if written == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        append_row(path, row, **how)

    monkeypatch.setattr(ledger, "append_row", once_full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/run/ledger\.jsonl'"):
        await run_stage(config, SkilledPolicy(), tmp_path / "run")
    monkeypatch.undo()
    for name in ("run", "whole"):
        await run_stage(config, SkilledPolicy(), tmp_path / name)
    rows, whole = (read_rows(tmp_path / name / "ledger.jsonl") for name in ("run", "whole"))
    assert rows == whole and len(rows) == 6 and faults(tmp_path / "run") == []


async def test_a_ledger_that_may_hold_rows_of_steps_that_are_done_again_ends_the_run_before_its_first_step(
    tmp_path: Path,
):
    config, policy = stage("stage1", steps=3), SkilledPolicy()
    with RunDir.open(tmp_path / "run", "stage1", asdict(config)) as run_dir:
        (run_dir.path / "ledger.jsonl").write_text('{"stage": "stage1", "step": 1}\n{"torn\n{}\n')
        with pytest.raises(ConfigError, match=r"ledger\.jsonl, line 2: not JSON .* Hint: restore it from a backup"):
            await run_rl(config, PROBLEMS, fake_context(policy, run_dir=run_dir))
    assert policy.policy_version == 0 and not (tmp_path / "run" / "metrics.jsonl").exists()


def evaluations(path: Path) -> list[tuple[str, int, str]]:
    return [(row["stage"], row["step"], row["set"]) for row in read_rows(path / "evaluations.jsonl")]


async def test_a_stage_is_evaluated_before_its_first_step_and_every_few(tmp_path: Path):
    policy = SkilledPolicy()
    for name in ("stage1", "stage2"):
        config = stage(name, evaluate__every_steps=4, steps=8)
        context = fake_context(policy)
        checkpoint = await train(config, tmp_path / "run", context, heldout=HELDOUT["held-out"])
        await run_evaluation(config, HELDOUT, in_run(context, tmp_path / "run"), step=checkpoint.step)
    # Stage 2 starts with what stage 1 ended with: that point of the curve is there already.
    steps = [("stage1", 0), ("stage1", 4), ("stage1", 8), ("stage2", 4), ("stage2", 8)]
    assert evaluations(tmp_path / "run") == [(*at, "held-out") for at in steps]
    rows = read_rows(tmp_path / "run" / "evaluations.jsonl")
    assert rows[0]["avg_at_k"] < rows[2]["avg_at_k"]
    assert all(len(read_rows(tmp_path / "run" / row["problems"])) == 30 for row in rows)


@pytest.mark.long
async def test_what_was_evaluated_beyond_the_checkpoint_a_stage_continues_from_is_forgotten(
    tmp_path: Path, logged: Logged
):
    config = stage("stage1", evaluate__every_steps=2, checkpoint__every_steps=4, steps=8)

    def stop_at_seven(line: str) -> None:
        if " 7/8" in line:
            raise Stop

    results = RunDir(tmp_path / "run").results_path
    logged.listeners.append(stop_at_seven)
    with pytest.raises(Stop):
        await train(config, tmp_path / "run", heldout=HELDOUT["held-out"])
    assert [step for _, step, _ in evaluations(tmp_path / "run")] == [0, 2, 4, 6]
    files, steps = len(list(results.iterdir())), list[int]()

    def watch(line: str) -> None:
        steps.append(len(list(results.iterdir())))

    logged.listeners[:] = [watch]
    await train(config, tmp_path / "run", heldout=HELDOUT["held-out"])
    assert [step for _, step, _ in evaluations(tmp_path / "run")] == [0, 2, 4, 6]  # 6 is a new one
    assert (steps[0], files) == (3, 4)


async def test_a_warm_up_counts_training_steps_however_many_updates_each_is_split_into(tmp_path: Path):
    values = {"optimizer__warmup_steps": 4, "optimizer__learning_rate": 1.0, "reset_optimizer": True, "steps": 6}
    config = stage("stage1", optimizer__updates_per_step=4, prompts_per_step=2, **values)
    await train(config, tmp_path, fake_context(SkilledPolicy(skill=0.5)))
    assert [row["lr"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


async def test_a_stage_warms_up_where_its_optimizer_state_is_fresh(tmp_path: Path):
    values = {"optimizer__warmup_steps": 2, "optimizer__learning_rate": 1.0, "steps": 3}
    model = tmp_path / "model"
    model.mkdir()
    (model / "skill.json").write_text("[0.5, 0.3, 0]")

    async def rates(path: Path, config: RunConfig) -> list[float]:
        await train(config, path, fake_context(SkilledPolicy(skill=0.5)))
        return [row["lr"] for row in read_rows(path / "metrics.jsonl") if row["stage"] == config.stage]

    first = await rates(tmp_path / "run", stage("stage1", reset_optimizer=True, **values))
    assert first == [0.5, 1.0, 1.0]
    following = await rates(tmp_path / "run", stage("stage2", **values))
    assert following == [1.0, 1.0, 1.0]  # with the moments of the stage before
    elsewhere = await rates(tmp_path / "other", stage("stage2", model=str(model), **values))
    assert elsewhere == [0.5, 1.0, 1.0]


class Diverging(SkillLearner):
    """Counts updates that are not finite as the learner does: those of chosen SFT batches, or of chosen RL calls."""

    poisoned: frozenset[str] = frozenset()  # SFT examples whose loss is not finite
    bad_calls: frozenset[int] = frozenset()  # of train_rl, from 1
    calls = 0
    bad_updates = 0

    async def train_sft(self, examples: Sequence[SftExample], lr: float) -> UpdateResult:
        bad = any(example.name in self.poisoned for example in examples)
        return self._counted(bad, None if bad else await super().train_sft(examples, lr), lr)

    async def train_rl(self, rows: Sequence[TrainingRow], lr: float) -> UpdateResult:
        self.calls += 1
        bad = self.calls in self.bad_calls
        return self._counted(bad, None if bad else await super().train_rl(rows, lr), lr)

    def _counted(self, bad: bool, done: UpdateResult | None, lr: float) -> UpdateResult:
        self.bad_updates = self.bad_updates + 1 if bad else 0
        done = done or replace(update_result(self.steps, tokens=4, lr=lr, applied=False), reason="loss nan")
        return replace(done, bad_updates=self.bad_updates)

    async def save_checkpoint(self, folder: Path) -> None:
        await super().save_checkpoint(folder)
        write_json(folder / "bad.json", self.bad_updates)
        self.wrote.append(folder / "bad.json")

    async def load_checkpoint(self, folder: Path) -> None:
        await super().load_checkpoint(folder)
        saved = read_json(folder / "bad.json")
        self.bad_updates = 0 if saved >= 2 else saved  # as a rank does with --optimizer.max-bad-updates 2


SFT_ROWS = [SftExample(np.arange(9, dtype=np.int32), np.ones(9, dtype=bool), name=str(n)) for n in range(24)]


async def sft_run(path: Path, learner: SkillLearner, **values: object) -> None:
    config = stage("sft", sft__batch_size=4, checkpoint__every_steps=100, **values)
    context = fake_context(learner.policy, learner=learner)
    with RunDir.open(path, "sft", asdict(config), may_differ=("optimizer",)) as run_dir:
        await run_sft(config, SFT_ROWS, [], in_run(context, run_dir))


async def test_an_sft_update_that_is_not_finite_costs_its_batch_and_not_the_run(tmp_path: Path, logged: list[str]):
    learner = Diverging(SkilledPolicy())
    learner.poisoned = frozenset({"7"})
    await sft_run(tmp_path, learner, sft__steps=12)  # two epochs
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert len(rows) == 12 and learner.steps == 10
    warnings = [line for line in logged if "loss nan" in line]
    assert len(warnings) == 2 and all("not applied" in line for line in warnings)
    (end,) = RunDir(tmp_path).checkpoints("sft")
    assert end.step == 12 and read_json(end.path / "progress.json")["policy_version"] == 10


async def test_a_run_stops_after_bad_updates_in_a_row_and_continues_behind_their_batches(tmp_path: Path):
    """A run that is started again does not draw the batches that stopped it."""
    learner = Diverging(SkilledPolicy())
    seen: list[list[str]] = []

    async def train_sft(examples: Sequence[SftExample], lr: float) -> UpdateResult:
        seen.append([example.name for example in examples])
        return await Diverging.train_sft(learner, examples, lr)

    learner.train_sft = train_sft  # type: ignore[method-assign]
    await sft_run(tmp_path / "whole", learner, sft__steps=6)
    batches, seen[:] = list(seen), []
    learner.poisoned = frozenset(batch[0] for batch in batches[1:5])
    for stops_at in (3, 5):  # it takes two more to stop the run again
        with pytest.raises(
            RStarError, match=rf"sft step {stops_at}: \d updates in a row .*max-bad-updates 2\): loss nan"
        ):
            await sft_run(tmp_path / "run", learner, sft__steps=6, optimizer__max_bad_updates=2)
    await sft_run(tmp_path / "run", learner, sft__steps=6, optimizer__max_bad_updates=2)
    assert seen == batches  # each once
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


async def test_rl_stops_after_bad_updates_in_a_row_with_a_checkpoint_behind_them(tmp_path: Path):
    config = stage("stage1", steps=6, optimizer__max_bad_updates=2, algorithm__loss="mine:loss")
    learner = Diverging(SkilledPolicy(skill=0.5))
    learner.bad_calls = frozenset({2, 3})
    context = fake_context(learner.policy, learner=learner)
    with pytest.raises(NothingLearned, match=r"stage1 step 3: 2 updates in a row .* --algorithm\.loss mine:loss\)"):
        await train(config, tmp_path, context)
    assert [checkpoint.step for checkpoint in RunDir(tmp_path).checkpoints("stage1")] == [3]
    checkpoint = await train(config, tmp_path, context)
    assert checkpoint.step == 6 and faults(tmp_path) == []
    assert [row["policy_version"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 1, 1, 2, 3, 4]


class FarOffPolicy(SkillLearner):
    """A few tokens carry its updates from the third on."""

    async def train_rl(self, rows: Sequence[TrainingRow], lr: float) -> UpdateResult:
        done = await super().train_rl(rows, lr)
        return replace(done, metrics={**done.metrics, "ess_tokens": 0.9 if self.steps < 3 else 0.1})


async def test_rl_stops_with_a_checkpoint_where_the_effective_sample_size_stays_low(tmp_path: Path):
    config = stage("stage1", steps=8, algorithm__max_low_ess_steps=2)
    learner = FarOffPolicy(SkilledPolicy(skill=0.5))
    said = r"stage1 step 4: .*--algorithm\.min-ess 0\.3 in 2 steps .*got 0\.10.*Hint"
    with pytest.raises(Stopped):  # steps before a resume count too
        await train(config, tmp_path, fake_context(learner.policy, learner=learner), stops_after=3)
    with pytest.raises(NothingLearned, match=said):
        await train(config, tmp_path, fake_context(learner.policy, learner=learner))
    assert RunDir(tmp_path).checkpoints("stage1")[-1].step == 4
    with pytest.raises(NothingLearned, match="stage1 step 6:"):  # the same command resumes for as many steps
        await train(config, tmp_path, fake_context(learner.policy, learner=learner))


class StoppingRollouts(LocalRollouts):
    """Is interrupted after so many rollouts; counts those it plays."""

    ends_after = 1_000
    played = 0
    first = ""

    async def run(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[FinishedRollout | DroppedRollout]:
        self.first = requests[0].rollout_id if requests else ""
        async for end in super().run(sorted(requests, key=lambda request: request.rollout_id)):
            self.played += 1
            yield end
            if self.played == self.ends_after:
                raise Stop


async def test_an_interrupted_evaluation_continues_and_computes_nothing_twice(tmp_path: Path):
    sets = {"easy": adding_problems(20), "hard": adding_problems(30, seed=1)}
    context = fake_context(SkilledPolicy())
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    stopping = StoppingRollouts(SkilledPolicy())
    stopping.ends_after = 110
    with pytest.raises(Stop):
        await run_evaluation(
            SMALL, sets, in_run(replace(context, rollouts=stopping), tmp_path / "a"), step=0, model=model
        )
    turns = turns_folder(RunDir(tmp_path / "a").journal_path, stopping.first)
    assert turns is not None
    turns.mkdir(parents=True)  # as workers keep what they had sampled
    rows = [row for path in (tmp_path / "a" / "evaluations").iterdir() for row in read_rows(path)]
    assert 0 < len(rows) < 50 and not (tmp_path / "a" / "evaluations.jsonl").exists()
    rest = StoppingRollouts(SkilledPolicy())
    resumed = await run_evaluation(
        SMALL, sets, in_run(replace(context, rollouts=rest), tmp_path / "a"), step=0, model=model
    )
    assert rest.played == 4 * (50 - len(rows)) and not turns.exists()
    assert resumed == await run_evaluation(SMALL, sets, in_run(context, tmp_path / "b"), step=0, model=model)
    assert [row["set"] for row in read_rows(tmp_path / "a" / "evaluations.jsonl")] == ["easy", "hard"]

    (model / "model.safetensors").write_bytes(b"other weights")
    for changed in ({}, {"evaluate.top_p": 0.9}, {"sandbox.memory_mb": 100}):
        config = with_values(SMALL, changed)
        again = StoppingRollouts(SkilledPolicy())
        await run_evaluation(
            config, sets, in_run(replace(context, rollouts=again), tmp_path / "a"), step=0, model=model
        )
        assert again.played == 200  # other weights under the same path, or other settings: nothing is there
    again = StoppingRollouts(SkilledPolicy())
    config = with_values(SMALL, {"optimizer.learning_rate": 0.1, "engine.replicas": 3, "evaluate.num_problems": 9})
    await run_evaluation(config, sets, in_run(replace(context, rollouts=again), tmp_path / "a"), step=0, model=model)
    assert again.played == 0  # what only trains, or only says where it runs, changes no answer


async def test_a_stage_ends_when_its_policy_has_learned_what_it_can(tmp_path: Path, logged: list[str]):
    config = stage("stage2", until="solved", steps=60)
    policy = SkilledPolicy(skill=0.9, slip=0.0)
    await run_stage(config, policy, tmp_path / "run")
    last = read_rows(tmp_path / "run" / "metrics.jsonl")[-1]
    assert 10 <= last["step"] < 60 and last["frac_all_correct"] > 0.7
    assert any(line.startswith(f"stage2 ends after step {last['step']}: ") for line in logged)
    finished = RunDir(tmp_path / "run").finished_checkpoint("stage2")
    assert finished is not None and finished.step == last["step"]
    (tmp_path / "run" / "finished" / "stage2.json").unlink()  # stopped between its checkpoint and the mark
    await run_stage(config, policy, tmp_path / "run")
    assert len(read_rows(tmp_path / "run" / "metrics.jsonl")) == last["step"]


async def test_a_run_whose_batches_stay_empty_ends_with_the_reason_and_the_fix(tmp_path: Path):
    config = stage("stage1", max_empty_steps=3)
    with pytest.raises(
        NothingLearned, match=r"3 steps in a row, to step 3, .* 100 % of the groups are all right.*--drop"
    ):
        await run_stage(config, SkilledPolicy(skill=1.0, slip=0.0), tmp_path / "right")
    with pytest.raises(RStarError, match=r"0 % of the groups are all right, 100 % all wrong; give easier problems"):
        await run_stage(config, SkilledPolicy(skill=0.0, slip=0.0), tmp_path / "wrong")
    assert len(read_rows(tmp_path / "right" / "metrics.jsonl")) == 3
    assert [one.step for one in RunDir(tmp_path / "right").checkpoints("stage1")] == [3]
    with pytest.raises(RStarError, match=r"3 steps in a row, to step 6, "):  # it may take as many steps again
        await run_stage(config, SkilledPolicy(skill=1.0, slip=0.0), tmp_path / "right")


@pytest.mark.long
async def test_a_stopped_stage_continues_to_the_same_end_as_one_that_was_not(tmp_path: Path, logged: Logged):
    whole, stopped = SkilledPolicy(), SkilledPolicy()
    await run_stage(stage("stage1"), whole, tmp_path / "whole")

    def stop_at_six(line: str) -> None:
        if " 6/12" in line:
            raise Stop

    config = stage("stage1")
    logged.listeners.append(stop_at_six)
    with pytest.raises(Stop):
        await train(config, tmp_path / "run", fake_context(stopped))
    logged.listeners.clear()
    await run_stage(config, SkilledPolicy(), tmp_path / "run")
    assert "stage1: resuming after step 4" in logged
    ours, theirs = (read_rows(tmp_path / name / "metrics.jsonl") for name in ("whole", "run"))
    same = ("step", "policy_version", "reward_mean", "trained_trajectories", "tokens_generated")
    assert [[row[key] for key in same] for row in ours] == [[row[key] for key in same] for row in theirs]


@pytest.mark.long
async def test_a_run_that_is_asked_to_stop_saves_the_step_it_was_in_and_continues_to_the_same_end(tmp_path: Path):
    config = stage("stage1")
    await run_stage(config, SkilledPolicy(), tmp_path / "whole")
    for asked_at in (3, 7):
        with pytest.raises(Stopped, match=f"stopped after step {asked_at} of stage1, with a checkpoint"):
            await train(config, tmp_path / "run", stops_after=asked_at)
        newest = RunDir(tmp_path / "run").newest_checkpoint(config.stage)
        assert newest is not None and newest.step == asked_at
    await run_stage(config, SkilledPolicy(), tmp_path / "run")
    assert faults(tmp_path / "run") == []
    ours, theirs = ((tmp_path / name / "ledger.jsonl").read_text() for name in ("run", "whole"))
    assert ours == theirs and ours.count("\n") == config.steps
    (tmp_path / "run" / "finished" / "stage1.json").unlink()  # stopped between its checkpoint and the mark
    await run_stage(config, SkilledPolicy(), tmp_path / "run")
    assert RunDir(tmp_path / "run").finished_checkpoint("stage1") is not None
    whole, stopped = (read_rows(tmp_path / name / "metrics.jsonl") for name in ("whole", "run"))
    assert [(row["step"], row["reward_mean"]) for row in stopped] == [
        (row["step"], row["reward_mean"]) for row in whole
    ]


@pytest.mark.parametrize("begun", ["stage1", "stage2"], ids=["its own", "the stage's before"])
async def test_the_loop_turns_while_the_checkpoint_that_a_stage_starts_from_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: str
):
    await run_stage(stage("stage1", steps=1), SkilledPolicy(), tmp_path / "run")
    turned, hash_of, hashed = threading.Event(), manifest.checksum, set[str]()

    def once_turned(path: Path) -> str:
        assert turned.wait(60), f"the loop stands while {path.name} is read"
        hashed.add(path.name)
        return hash_of(path)

    monkeypatch.setattr(manifest, "checksum", once_turned)
    asyncio.get_running_loop().call_soon(turned.set)
    await train(stage(begun, steps=1), tmp_path / "run")
    assert {"skill.json", "progress.json"} <= hashed


async def test_a_start_that_is_given_up_while_its_checkpoint_is_read_changes_nothing_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
):
    config = stage("stage1", steps=1)
    await run_stage(config, SkilledPolicy(), tmp_path / "run")
    logged.clear()
    run_dir, reads, may_end, ended = RunDir(tmp_path / "run"), asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def damaged_in_the_end(folder: Path) -> str:
        loop.call_soon_threadsafe(reads.set)
        assert may_end.wait(60)
        ended.set()
        return "a byte of it differs"

    monkeypatch.setattr("rstar_ray.run_dir.folder.damage", damaged_in_the_end)
    start = asyncio.ensure_future(
        run_rl(config, PROBLEMS, fake_context(SkilledPolicy(), run_dir=run_dir)),
    )
    await reads.wait()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    may_end.set()
    assert await asyncio.to_thread(ended.wait, 5.0)
    assert [path.name for path in run_dir.checkpoints_path.iterdir()] == ["stage1-step-000001"] and logged == []


async def test_equal_rewards_everywhere_are_a_logged_step_that_changes_nothing(tmp_path: Path, logged: list[str]):
    policy = SkilledPolicy(skill=1.0, slip=0.0)
    await run_stage(stage("stage1", steps=2), policy, tmp_path / "run")
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["trained_trajectories"] for row in rows] == [0, 0]
    assert [row["groups_dropped"] for row in rows] == [8, 8]
    assert [(row["frac_all_correct"], row["frac_all_wrong"]) for row in rows] == [(1.0, 0.0)] * 2
    assert [row["policy_version"] for row in rows] == [0, 0]
    assert sum("equal rewards" in line for line in logged) == 2


async def test_a_step_draws_other_problems_for_groups_without_a_signal(tmp_path: Path):
    values = {"steps": 3, "algorithm__rollouts_per_prompt": 4, "algorithm__keep": 2, "algorithm__least_failures": 1}
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, rounds in (("without", 0), ("with", 2), ("again", 2)):
        config = stage("stage1", algorithm__refill_rounds=rounds, **values)
        if name == "again":  # stopped once, and started again
            with pytest.raises(Stopped):
                await train(config, tmp_path / name, fake_context(SkilledPolicy(skill=0.9)), stops_after=0)
        await run_stage(config, SkilledPolicy(skill=0.9), tmp_path / name)
        assert faults(tmp_path / name) == []
        rows[name] = read_rows(tmp_path / name / "ledger.jsonl")
        for row in rows[name]:
            rollouts = [rollout for rollouts in row["ids"].values() for rollout in rollouts]
            siblings = Counter(rollout.rpartition("/")[0].partition("-")[2] for rollout in rollouts)
            assert set(siblings.values()) == {4}, "no problem is drawn twice in a step"
            assert row["trained"] <= config.prompts_per_step * config.algorithm.keep
    assert rows["again"] == rows["with"]
    plain, refilled = (sum(row["trained"] for row in rows[name]) for name in ("without", "with"))
    assert refilled > 1.5 * plain


@pytest.mark.parametrize("staleness", [0, 2])
async def test_problems_that_were_all_right_are_not_drawn_again_for_some_steps(tmp_path: Path, staleness: int):
    """Also where the run was stopped between."""

    def alike() -> tuple[SkilledPolicy, SkillLearner]:
        """It learns nothing: what draws that run ahead are rolled out with would depend on timing."""
        policy = SkilledPolicy(skill=0.95, slip=0.0)
        return policy, SkillLearner(policy, rate=0.0)

    config = stage("stage1", steps=10, data__skip_solved=4, staleness=staleness, checkpoint__every_steps=1)
    config = replace(config, checkpoint=replace(config.checkpoint, keep=10))
    policy, learner = alike()
    await run_stage(config, policy, tmp_path / "whole", learner=learner)
    policy, learner = alike()
    with pytest.raises(Stopped):
        await train(config, tmp_path / "stopped", fake_context(policy, learner=learner), stops_after=6)
    await run_stage(config, policy, tmp_path / "stopped", learner=learner)
    whole, stopped = (read_rows(tmp_path / name / "ledger.jsonl") for name in ("whole", "stopped"))
    assert whole == stopped and faults(tmp_path / "whole") == []

    visits: dict[int, dict[str, bool]] = {}
    for checkpoint in (tmp_path / "whole" / "checkpoints").glob("stage1-step-*"):
        for step, solved, others in StageProgress.read(checkpoint).position.visits:
            visits[step] = {**dict.fromkeys(solved, True), **dict.fromkeys(others, False)}
    assert sum(sum(one.values()) for one in visits.values()) > 10
    for row in whole:
        ids = [rollout for rollouts in row["ids"].values() for rollout in rollouts]
        drawn = {rollout.rpartition("/")[0].partition("-")[2] for rollout in ids}
        newest, last = row["step"] - 1 - staleness, dict[str, bool]()
        for step in range(newest, newest - 4, -1):
            last = {**visits.get(step, {}), **last}
        assert not drawn & {name for name, was_solved in last.items() if was_solved}, f"step {row['step']}"


ALL_RIGHT = {"algorithm__rollouts_per_prompt": 2, "algorithm__keep": 2, "algorithm__least_failures": 0}


async def drawn_by(path: Path, problems: Sequence[Problem], **values: object) -> list[list[str]]:
    """The problems of each step of a stage whose rollouts are all right."""
    config = stage("stage1", **ALL_RIGHT, **values)
    await train(config, path, fake_context(SkilledPolicy(skill=1.0, slip=0.0)), problems)
    rows = read_rows(path / "ledger.jsonl")
    names = [[name for names in row["ids"].values() for name in names] for row in rows]
    return [[name.rpartition("/")[0].partition("-")[2] for name in of_step] for of_step in names]


async def test_the_latest_solved_are_skipped_first_and_as_many_remain_as_a_draw_needs(tmp_path: Path):
    problems = adding_problems(10)
    steps = await drawn_by(tmp_path / "run", problems, steps=8, prompts_per_step=4, data__skip_solved=4)
    for before, after in pairwise(steps):  # half of the problems may be skipped: those of the step before are
        assert not {*before} & {*after}
    assert {name for step in steps for name in step} == {one.id for one in problems}
    many: dict[str, Any] = {"data__skip_solved": 8, "data__max_skipped": 0.9}
    steps = await drawn_by(tmp_path / "many", problems, steps=8, prompts_per_step=4, **many)
    assert sum(len({*step}) for step in steps) > 3 * len(steps), "of 9 solved problems 6 are skipped"


async def test_problems_are_skipped_by_source_where_a_mix_is_drawn(tmp_path: Path):
    problems = [replace(one, family="a" if i < 20 else "b") for i, one in enumerate(adding_problems(26))]
    values = {"data__mix": ("a=1", "b=1"), "data__skip_solved": 4, "data__max_skipped": 0.9, "prompts_per_step": 6}
    steps = await drawn_by(tmp_path / "run", problems, steps=6, **values)
    rare = {one.id for one in problems if one.family == "b"}
    for before, after in pairwise(steps):  # a draw has 3 rare ones, so that 3 of the 6 may be skipped
        assert rare & {*after} and not rare & {*before} & {*after}


def test_a_mix_of_which_no_source_is_left_is_refused():
    config = stage("stage1", steps=3, data__mix=("math=1",))
    with pytest.raises(ConfigError, match=r"--data\.mix: no problem of math is left to stage1"):
        Draws(adding_problems(4), fake_context(SkilledPolicy()).rollouts, config, StageProgress())


async def test_a_problem_that_was_not_solved_in_its_last_visit_is_drawn_again(tmp_path: Path):
    problems = adding_problems(4)
    names = [one.id for one in problems]
    visits = ((1, tuple(names[:2]), ()), (2, (names[2],), (names[0],)))
    config = stage("stage1", steps=3, prompts_per_step=2, data__skip_solved=4, **ALL_RIGHT)
    progress = StageProgress(step=2, position=DataPosition(visits=visits))
    async with Draws(problems, fake_context(SkilledPolicy()).rollouts, config, progress) as draws:
        draw = await draws.take(3)
    assert {request.problem.id for request in draw.requests} == {names[0], names[3]}


async def test_a_mix_is_drawn_alike_where_the_run_was_stopped_between_and_where_draws_run_ahead(tmp_path: Path):
    problems = [replace(one, family="ab"[i % 8 == 0]) for i, one in enumerate(PROBLEMS)]
    drawn: dict[str, list[Counter[str]]] = {}
    for name, staleness in (("whole", 0), ("stopped", 0), ("ahead", 2)):
        values = {"data__mix": ("a=3", "b=1"), "data__mix_floor": 1, "algorithm__refill_rounds": 1}
        config = stage("stage1", steps=6, staleness=staleness, checkpoint__every_steps=1, **values)
        if name == "stopped":
            with pytest.raises(Stopped):
                await train(config, tmp_path / name, problems=problems, stops_after=3)
        await train(config, tmp_path / name, problems=problems)
        families = {one.id: one.family for one in problems}
        drawn[name] = []
        for row in read_rows(tmp_path / name / "ledger.jsonl"):
            ids = [rollout for rollouts in row["ids"].values() for rollout in rollouts]
            groups = {rollout.rpartition("/")[0].partition("-")[2] for rollout in ids}
            drawn[name].append(Counter(families[group] for group in groups))
        assert all(count["b"] >= 1 for count in drawn[name])
    whole, stopped = (read_rows(tmp_path / name / "ledger.jsonl") for name in ("whole", "stopped"))
    assert whole == stopped


async def test_a_refill_takes_other_problems_where_a_source_of_the_mix_has_too_few(tmp_path: Path):
    problems = [replace(one, family="a" if i < 36 else "b") for i, one in enumerate(adding_problems(40))]
    values = {"data__mix": ("a=1", "b=1"), "algorithm__refill_rounds": 1, "prompts_per_step": 6}
    (drawn,) = await drawn_by(tmp_path / "run", problems, steps=1, **values)  # all right, so that none has a signal
    families = Counter(next(one.family for one in problems if one.id == name) for name in {*drawn})
    assert families == {"a": 8, "b": 4}


KEEPS_NOTHING = """
def none_of_equal(candidates, algorithm, rng):
    rewards = [candidate.reward for candidate in candidates]
    return range(algorithm.keep) if max(rewards) > min(rewards) else []

def centred(rewards, algorithm):
    return [reward - sum(rewards) / len(rewards) for reward in rewards]
"""


async def test_of_a_group_of_which_nothing_is_kept_nothing_is_trained_on(tmp_path: Path):
    (tmp_path / "keeps_nothing.py").write_text(KEEPS_NOTHING)
    rules = {"resample": "keeps_nothing:none_of_equal", "advantage": "keeps_nothing:centred"}
    values = {f"algorithm__{kind}": name for kind, name in rules.items()} | {"algorithm__reject_equal_reward": False}
    config = stage("stage1", steps=1, own_folder=str(tmp_path), **values)
    await train(config, tmp_path / "run", fake_context(SkilledPolicy(skill=1.0, slip=0.0)))
    (row,) = read_rows(tmp_path / "run" / "ledger.jsonl")
    assert row["trained"] == 0 and row["resampled_away"] == row["rollouts"]


async def test_a_rule_that_blocks_blocks_neither_the_driver_nor_the_run(tmp_path: Path):
    (tmp_path / "blocks.py").write_text("import time\n\ndef slow(rewards, algorithm):\n    time.sleep(3_600)\n")
    detector = {"detector__probe_every_s": 0.1, "detector__still_s": 0.5}
    config = stage("stage1", steps=1, own_folder=str(tmp_path), algorithm__advantage="blocks:slow", **detector)
    ticks = asyncio.create_task(asyncio.sleep(0.2))
    with pytest.raises(RStarError, match=r"--algorithm\.advantage blocks:slow"):
        await train(config, tmp_path / "run")
    assert ticks.done()


async def one_step(problems: Sequence[Problem], context: RunContext, config: RunConfig, *, step: int) -> StepRecord:
    requests = rollout_requests(problems, config, name=step, siblings=config.algorithm.num_rollouts)
    draw = await finish_draw(requests, context.rollouts, config, step=step)
    return await train_step(draw, context, config, policy_version=0)


def count(record: StepRecord) -> Counter[RolloutStatus]:
    return Counter(record.statuses.values())


async def test_rollouts_that_our_failures_end_are_dropped_with_a_reason_and_never_scored():
    context = fake_context(SkilledPolicy(), execute=UnreliableSandbox(fails_every=5))
    record = await one_step(adding_problems(4), context, SMALL, step=1)
    assert len(record.statuses) == 64 and 0 < count(record)[RolloutStatus.DROPPED] < 32
    assert {dropped.reason for dropped in record.dropped} == {"no executor left"}
    assert record.metrics["rollouts"] == 64 - count(record)[RolloutStatus.DROPPED]


async def test_an_evaluation_repeats_what_our_failures_ended_and_each_answer_counts_once(tmp_path: Path):
    for name, execute in (("lossy", UnreliableSandbox(fails_every=9)), ("whole", AddingSandbox())):
        context = fake_context(SkilledPolicy(), execute=execute)
        await run_evaluation(SMALL, {"held-out": adding_problems(30)}, in_run(context, tmp_path / name), step=3)
    lossy, whole = (read_rows(tmp_path / name / "evaluations.jsonl") for name in ("lossy", "whole"))
    assert lossy == whole and lossy[0]["num_problems"] == 30


async def test_an_evaluation_whose_rollouts_fail_every_time_says_why(tmp_path: Path):
    context = fake_context(SkilledPolicy(), execute=UnreliableSandbox(fails_every=1))
    with pytest.raises(RStarError, match="8 rollouts failed 3 times: no executor left"):
        await run_evaluation(SMALL, {"held-out": adding_problems(2)}, in_run(context, tmp_path), step=3)


async def test_a_step_that_loses_most_of_its_rollouts_ends_the_run_with_the_reason():
    context = fake_context(SkilledPolicy(), execute=UnreliableSandbox(fails_every=1))
    with pytest.raises(RStarError, match="32 of 32 rollouts were dropped: no executor left"):
        await one_step(adding_problems(2), context, SMALL, step=1)


async def test_plain_grpo_trains_on_as_many_as_resampling_keeps():
    context = fake_context(SkilledPolicy())
    plain = with_values(SMALL, {"algorithm.resample": "none"})
    record = await one_step(adding_problems(4), context, plain, step=1)
    assert len(record.statuses) == 4 * 8 and RolloutStatus.RESAMPLED_AWAY not in count(record)
    roc = await one_step(adding_problems(4), context, SMALL, step=2)
    assert len(roc.statuses) == 4 * 16 and count(roc)[RolloutStatus.RESAMPLED_AWAY] == 4 * 8


async def test_a_wait_for_rollouts_that_never_finish_ends_with_their_names():
    class Silent:
        num_ended = 0

        async def run(self, requests: object):
            await asyncio.sleep(60)
            yield None

    class Busy(Silent):
        """Rollouts of other runs end, five in all."""

        looked = 0

        @property
        def num_ended(self) -> int:  # type: ignore[override]
            self.looked += 1
            return min(self.looked // 2, 5)

    requests = rollout_requests(adding_problems(1), SMALL, name=3, siblings=2)
    for rollouts, least_s in ((Silent(), 0.05), (Busy(), 0.25)):
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded, match="stage1/3/0-add-0/0"):
            await roll_out(requests, rollouts, deadline_s=0.05)  # type: ignore[arg-type]
        assert asyncio.get_running_loop().time() - began_s >= least_s


async def test_rows_that_the_learner_leaves_out_are_counted_so_and_not_as_trained():
    class Choosy(SkillLearner):
        applies = True

        async def train_rl(self, rows: Sequence[TrainingRow], lr: float) -> UpdateResult:
            result = await super().train_rl(rows[1:], lr)
            left_out = (LeftOut(rows[0].rollout_id, "too long"),)
            return replace(result, left_out=left_out, applied=self.applies, reason="" if self.applies else "NaN")

    choosy = Choosy(SkilledPolicy())
    context = fake_context(SkilledPolicy(), learner=choosy)
    record = await one_step(adding_problems(4), context, SMALL, step=1)
    (batch,) = choosy.batches
    assert (count(record)[RolloutStatus.LEFT_OUT], count(record)[RolloutStatus.TRAINED]) == (1, len(batch))
    assert [row.reason for row in record.left_out] == ["too long"]
    assert record.metrics["trained_trajectories"] == len(batch) and record.metrics["policy_version"] == 1

    choosy.applies = False
    record = await one_step(adding_problems(4), context, SMALL, step=2)
    assert (count(record)[RolloutStatus.LEFT_OUT], count(record)[RolloutStatus.TRAINED]) == (
        1 + len(choosy.batches[1]),
        0,
    )
    assert [row.reason for row in record.left_out][:2] == ["too long", "NaN"]
    assert record.metrics["trained_trajectories"] == 0 and record.metrics["policy_version"] == 0


async def test_a_rollout_that_is_not_accounted_for_exactly_once_ends_the_run():
    class Inventive(SkillLearner):
        async def train_rl(self, rows: Sequence[TrainingRow], lr: float) -> UpdateResult:
            return replace(await super().train_rl(rows, lr), left_out=(LeftOut("stage1/1/nobody", "too long"),))

    context = fake_context(SkilledPolicy(), learner=Inventive(SkilledPolicy()))
    with pytest.raises(RStarError, match="step 1: stage1/1/nobody is not accounted for exactly once"):
        await one_step(adding_problems(4), context, SMALL, step=1)


def test_every_sibling_has_its_own_seed_and_the_same_in_the_next_run():
    first = rollout_requests(adding_problems(3), SMALL, name=1, siblings=4)
    assert len({request.seed for request in first}) == len({request.rollout_id for request in first}) == 12
    assert first == rollout_requests(adding_problems(3), SMALL, name=1, siblings=4)


@dataclass
class HangingJudge(LocalRollouts):
    """Ends every rollout; of some siblings the answers cannot be judged, however often they are asked for."""

    hangs: tuple[str, ...] = ("0-add-0/1", "1-add-1/0")
    asked: int = 0

    async def run(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[FinishedRollout | DroppedRollout]:
        async for end in super().run(requests):
            self.asked += 1
            if isinstance(end, FinishedRollout) and end.summary.rollout_id.partition("/again")[0].endswith(self.hangs):
                end = replace(end, summary=replace(end.summary, reward=0.0, unjudged="judging: it hung"))
            yield end


async def test_an_answer_that_can_never_be_judged_is_asked_for_three_times_counted_and_named(
    tmp_path: Path, logged: list[str]
):
    policy = SkilledPolicy(skill=1.0, slip=0.0)
    judging = HangingJudge(policy)
    context = replace(fake_context(policy), rollouts=judging)
    config = with_values(SMALL, {"evaluate.samples": 2})
    problems = {"held-out": adding_problems(4)}
    (result,) = await run_evaluation(config, problems, in_run(context, tmp_path), step=3)
    assert judging.asked == 8 + 2 + 2
    (again,) = await run_evaluation(config, problems, in_run(context, tmp_path), step=3)
    assert judging.asked == 8 + 2 + 2 and again == result  # their rows are there, and nothing is asked again
    (row, _) = read_rows(RunDir(tmp_path).evaluations_path)
    assert (result.num_unjudged, row["num_unjudged"], result["avg_at_k"]) == (2, 2, 6 / 8)
    assert "2 of 8 answers of held-out could not be judged, such as of problem 'add-0': judging: it hung" in logged[-2]


async def test_a_set_of_which_most_cannot_be_judged_has_no_figures(tmp_path: Path):
    policy = SkilledPolicy(skill=1.0, slip=0.0)
    context = replace(fake_context(policy), rollouts=HangingJudge(policy, hangs=("",)))
    with pytest.raises(RStarError, match=r"could not be judged.*fix the reward, delete .*\.jsonl"):
        await run_evaluation(SMALL, {"held-out": adding_problems(2)}, in_run(context, tmp_path), step=3)


async def test_what_cannot_be_judged_is_dropped_from_a_step_with_its_reason():
    policy = SkilledPolicy()
    context = replace(fake_context(policy), rollouts=HangingJudge(policy))
    record = await one_step(adding_problems(2), context, SMALL, step=1)
    assert [one.reason for one in record.dropped] == ["judging: it hung"] * 2


class Recorded(SkillLearner):
    """Notes how many steps older than the weights it updates the oldest token of each update is."""

    ages: list[int]

    async def train_rl(self, rows: Sequence[TrainingRow], lr: float) -> UpdateResult:
        oldest = min(int(row.ref.batch[row.ref.index].policy_versions.max()) for row in rows)
        self.ages = [*getattr(self, "ages", []), self.steps - oldest]
        await asyncio.sleep(0.01)  # rollouts of later steps run meanwhile
        return await super().train_rl(rows, lr)


async def test_an_evaluation_says_how_many_it_could_not_ask(tmp_path: Path, logged: list[str]):
    config = with_values(SMALL, {"engine.max_context_tokens": 900})
    problems = [*adding_problems(3), Problem(id="long", problem="1" * 1_000, answer="1")]
    context = in_run(fake_context(SkilledPolicy()), tmp_path)
    (result,) = await run_evaluation(config, {"exam": problems}, context, step=1)
    assert logged[-2] == (
        "stage1 exam: 1 of 4 prompts do not fit into a context of 900 tokens (--engine.max-context-tokens); they "
        "count as wrong"
    )
    assert result.num_problems == 4
    await run_evaluation(config, {"short": problems[:3]}, context, step=1)
    assert sum("do not fit" in line for line in logged) == 1


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_rollouts_of_later_steps_run_ahead_within_the_bound(tmp_path: Path, staleness: int):
    policy = SkilledPolicy()
    learner = Recorded(policy)
    config = stage("stage1", steps=8, staleness=staleness)
    await train(config, tmp_path, fake_context(policy, learner=learner))
    assert max(learner.ages) == staleness and learner.ages[0] == 0
    assert [row["step"] for row in read_rows(tmp_path / "ledger.jsonl")] == [*range(1, 9)]
    assert faults(tmp_path) == []
    for row in read_rows(tmp_path / "metrics.jsonl"):
        taken_s = row["step_s"] + row["inter_step_s"] if staleness else row["rollout_s"]
        assert row["tokens_per_s"] == pytest.approx(row["tokens_generated"] / taken_s)


async def test_rollouts_ahead_of_a_stages_early_end_are_abandoned_by_id(tmp_path: Path):
    context = fake_context(SkilledPolicy(skill=1.0, slip=0.0))
    config = stage("stage1", steps=12, staleness=2, until="solved")
    checkpoint = await train(config, tmp_path, context)
    *before, last = read_rows(tmp_path / "ledger.jsonl")
    assert last["step"] == checkpoint.step < 11 and all("abandoned" not in row for row in before)
    draws = Counter(name.split("/")[1] for name in last["ids"]["abandoned"])
    assert draws == {str(checkpoint.step + ahead): 8 * 16 for ahead in (1, 2)}
    assert faults(tmp_path) == []


class Interrupted(SkillLearner):
    """The process ends before the checkpoint of this step is written."""

    before = 0

    async def save_checkpoint(self, folder: Path) -> None:
        if f"stage1-step-{self.before:06d}" in str(folder):
            raise InterruptedError
        await super().save_checkpoint(folder)


async def test_a_kill_at_a_stages_early_end_does_not_lose_the_abandoned_rollouts(tmp_path: Path):
    config = stage("stage1", steps=12, staleness=2, until="solved")
    policy = SkilledPolicy(skill=1.0, slip=0.0)
    learner = Interrupted(policy)
    end = (await train(config, tmp_path / "whole", fake_context(policy))).step
    learner.before = end
    with pytest.raises(InterruptedError):
        await train(config, tmp_path / "killed", fake_context(policy, learner=learner))
    journaled = tmp_path / "killed" / "journal" / f"stage1-step-{end + 1:06d}"
    journaled.mkdir(parents=True)
    await train(config, tmp_path / "killed", fake_context(policy))
    whole, killed = (read_rows(tmp_path / name / "ledger.jsonl") for name in ("whole", "killed"))
    assert killed == whole and len(killed[-1]["ids"]["abandoned"]) == 2 * 8 * 16
    assert not journaled.exists() and faults(tmp_path / "killed") == []


async def test_a_repeated_step_is_trained_without_the_rollouts_that_it_had_lost_before_the_kill(tmp_path: Path):
    config = stage("stage1", steps=4, staleness=1, checkpoint__every_steps=2)
    policy = SkilledPolicy()
    learner = Interrupted(policy)
    learner.before = 2
    with pytest.raises(InterruptedError):
        await train(config, tmp_path, fake_context(policy, learner=learner, execute=UnreliableSandbox(fails_every=9)))
    before = read_rows(tmp_path / "ledger.jsonl")
    await train(config, tmp_path, fake_context(SkilledPolicy()))
    after = read_rows(tmp_path / "ledger.jsonl")
    assert before[0]["dropped"] > 0 and after[0] == before[0]
    assert [row["dropped"] for row in after[2:]] == [0, 0] and faults(tmp_path) == []


async def test_another_staleness_and_one_beyond_the_stage_are_logged(tmp_path: Path, logged: list[str]):
    for staleness, steps in ((0, 2), (5, 4)):
        config = stage("stage1", steps=steps, staleness=staleness)
        with RunDir.open(tmp_path, "stage1", asdict(config), may_differ=("staleness", "steps")) as run_dir:
            (run_dir.path / "finished" / "stage1.json").unlink(missing_ok=True)
            await run_rl(config, PROBLEMS, fake_context(SkilledPolicy(), run_dir=run_dir))
    warnings = [line for line in logged if "--staleness" in line]
    assert len(warnings) == 2 and "5 now, 0 when" in warnings[0] and "4 steps" in warnings[1]


def test_training_on_older_weights_needs_a_correction():
    with pytest.raises(ConfigError, match=r"--algorithm.correction.*--staleness"):
        stage("stage1", staleness=1, algorithm__correction="none")
    with pytest.raises(ConfigError, match=r"--staleness.*at least 0 \(got -1\)"):
        stage("stage1", staleness=-1)
    assert stage("stage1", staleness=1).correction != "none"
