"""All that a small run leaves behind, and says, to the letter: `data/run.json`; and the stages' rules at their edges.

Whoever means to change what a run does writes it anew and reads what changed:
`python -m tests.rstar_ray.test_stages_exact`.
"""

import asyncio
import json
import re
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from rstar_ray.algorithm.loss_settings import Correction, LossSettings, Normalisation, loss_settings
from rstar_ray.algorithm.lr_schedule import LrSchedule, rl_schedule, sft_schedule
from rstar_ray.algorithm.resample import Candidate, ResampleRule, resample_on_correct
from rstar_ray.algorithm.stage_end import REMEMBERED, WINDOW, StepSigns, reached
from rstar_ray.algorithm.update import LeftOut, SftExample, UpdateResult
from rstar_ray.config import AlgorithmConfig, RunConfig, with_values
from rstar_ray.crew import Crew
from rstar_ray.data.order import DataPosition
from rstar_ray.errors import RStarError
from rstar_ray.evaluation.run import evaluated, run_evaluation
from rstar_ray.hard_set import MOST_LOST
from rstar_ray.rollouts import DroppedRollout, FinishedRollout, TrajectoryRef
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.run_dir.ledger import Fate
from rstar_ray.run_dir.metrics import PlacementFigures, StepTimings, step_metrics
from rstar_ray.seeds import named_generator
from rstar_ray.stage_progress import StageProgress, nothing_to_learn
from rstar_ray.stages import run_rl, run_sft
from rstar_ray.train_loop import (
    MOST_DROPPED,
    TrainingRow,
    TrainingSystem,
    rollout_fates,
    rows_left_out,
    train_step,
    training_rows,
)
from rstar_ray.trajectory import RolloutRequest
from tests.fakes import (
    LocalRollouts,
    SkilledPolicy,
    SkillLearner,
    UnreliableSandbox,
    adding_problems,
    fake_crew,
    summary,
    update_result,
)

pytestmark = pytest.mark.usefixtures("without_fsync")
WRITTEN = Path(__file__).parent / "data" / "run.json"
SMALL = with_values(
    RunConfig(),
    {
        "seed": 5, "steps": 7, "prompts_per_step": 3, "engine.max_context_tokens": 2_000,
        "rollout.max_response_tokens": 400, "rollout.deadline_s": 5.0, "algorithm.rollouts_per_prompt": 6,
        "algorithm.keep": 3, "algorithm.least_failures": 1, "evaluate.max_response_tokens": 400, "evaluate.samples": 2,
        "evaluate.every_steps": 3, "checkpoint.every_steps": 2, "checkpoint.trajectories_every_steps": 3,
        "max_empty_steps": 60, "sft.steps": 5, "sft.batch_size": 2, "optimizer.learning_rate": 1e-3,
    },
)  # fmt: skip


def placement(step: int) -> PlacementFigures:
    return PlacementFigures(
        rule="expected_kv", waiting_most=step, in_flight_most=2, kv_used_share=0.5, kv_used_share_most=0.6,
        kv_reserved_share=0.75, kv_reserved_share_most=0.8, preemptions=0, moves=1, recomputed_tokens=3,
        wait_p50_s=0.25, wait_p99_s=0.5, faults=("r0 is left with 7 reserved tokens",) if step == 3 else (),
    )  # fmt: skip


class Forgetful(SkillLearner):
    """Leaves out its first row at every other step, and does not apply its fifth update."""

    async def train_rl(self, rows: Sequence[TrainingRow], lr: float) -> UpdateResult:
        done = await super().train_rl(rows, lr)
        if self.steps % 5 == 0:
            return replace(done, applied=False, reason="the loss is not finite")
        return replace(done, left_out=(LeftOut(rows[0].rollout_id, "no token"),)) if self.steps % 2 else done


def crew_of(policy: SkilledPolicy, shown: list[str]) -> Crew:
    crew = fake_crew(policy, shown, execute=UnreliableSandbox(fails_every=13))
    asked: list[int] = []

    async def placed() -> PlacementFigures:
        asked.append(1)
        return placement(len(asked))

    def exported(folder: Path) -> tuple[Path, ...]:
        step, _, _own = folder.parent.name.rpartition("-")
        shown.append(f"exported {step}/{folder.name}")
        return ()

    return replace(crew, learner=Forgetful(policy), placed=placed, exported=exported)


def without_times(value: Any) -> Any:
    """Of what is written: without what depends on the clock, or on where the run lies."""
    if isinstance(value, dict):
        timed = {name for name in value if name.endswith(("_s", "_at")) and not name.startswith("wait_")}
        timed.add("longest")  # the one that took most seconds
        return {name: without_times(inner) for name, inner in value.items() if name not in timed}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


def left_behind(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in sorted(path.rglob("*")):
        name = str(file.relative_to(path))
        if file.is_dir() or name in ("launches.jsonl", "config.json") or file.suffix not in (".json", ".jsonl"):
            continue
        lines = file.read_text("utf-8").splitlines()
        if name.startswith("trajectories"):
            found[name] = len(lines)
        elif file.suffix == ".jsonl":
            found[name] = [without_times(json.loads(line)) for line in lines]
        elif "manifest" not in name:
            found[name] = without_times(json.loads(file.read_text("utf-8")))
    return found


async def small_run(path: Path) -> dict[str, Any]:
    """SFT, an RL stage, and one on the problems that its policy does not always solve."""
    policy, shown = SkilledPolicy(skill=0.55, slip=0.3), list[str]()
    crew = crew_of(policy, shown)
    heldout = adding_problems(4, seed=1)
    with RunDir.open(path, "sft", {}) as run_dir:
        await run_sft(with_values(SMALL, {"stage": "sft"}), sft_examples(9), sft_examples(2), crew, run_dir)
    for config in (
        SMALL,
        with_values(SMALL, {"stage": "stage3", "drop_solved": True, "steps": 3, "reset_optimizer": True}),
    ):
        with RunDir.open(path, config.stage, {}) as run_dir:
            end = await run_rl(config, adding_problems(8), crew, run_dir, heldout=heldout)
            if not evaluated(run_dir, config.stage, end.step):
                await run_evaluation(config, {"held-out": heldout}, crew, run_dir, step=end.step)
    timed = re.compile(r"((?:generate|tools|verify|learn|publish) )?[\d,.]+(?(1)| tok/s)")
    return {"said": [timed.sub(r"\1", line) for line in shown], **left_behind(path)}


def sft_examples(count: int) -> list[SftExample]:
    return [SftExample(np.arange(n + 2), np.array([False] + [True] * (n + 1))) for n in range(count)]


async def test_a_run_leaves_behind_what_it_did(tmp_path: Path):
    assert json.loads(json.dumps(await small_run(tmp_path / "run"))) == json.loads(WRITTEN.read_text("utf-8"))


# -- rules of the stages -----------------------------------------------------------------------------------------------


def sign(reward: float = 0.5, cut: float = 0.1, right: float = 0.2) -> StepSigns:
    return StepSigns(reward_mean=reward, share_truncated=cut, share_all_right=right)


@pytest.mark.parametrize(
    ("early", "late", "said"),
    [
        (sign(), sign(), "truncation has settled at 10 % and the reward at 0.50, over 10 steps"),
        (sign(cut=0.125), sign(cut=0.14), "truncation has settled at 14 % and the reward at 0.50, over 10 steps"),
        (sign(cut=0.16), sign(cut=0.16), ""), (sign(cut=0.04), sign(cut=0.04), ""),
        (sign(cut=0.06), sign(cut=0.06), "truncation has settled at 6 % and the reward at 0.50, over 10 steps"),
        (sign(cut=0.09), sign(cut=0.12), ""), (sign(cut=0.12), sign(cut=0.09), ""),
        (sign(reward=0.485), sign(), "truncation has settled at 10 % and the reward at 0.50, over 10 steps"),
        (sign(reward=0.475), sign(), ""),
        (sign(reward=0.9), sign(), "truncation has settled at 10 % and the reward at 0.50, over 10 steps"),
    ],
)  # fmt: skip
def test_stage_1_settles_at_these_figures(early: StepSigns, late: StepSigns, said: str):
    assert (WINDOW, REMEMBERED) == (10, 20)
    assert reached("settled", [sign(0.0, 1.0)] * 5 + [early] * 10 + [late] * 10) == said
    assert reached("settled", [early] * 9 + [late] * 10) == ""


def test_stage_2_is_solved_above_seven_tenths():
    assert reached("solved", [sign(right=0.6875)] * 10) == ""
    assert reached("solved", [sign(right=0.75)] * 9) == ""
    line = "75 % of the problems are all right, over 10 steps"
    assert reached("solved", [sign(right=0.0)] + [sign(right=0.75)] * 10) == line
    assert reached("steps", [sign(right=1.0)] * 30) == ""


def metrics_of(step: int, rewards: Sequence[float], kept: Sequence[int] = ()) -> Any:
    rollouts = [summary(str(at), group_id=str(at // 2), reward=reward) for at, reward in enumerate(rewards)]
    timings = StepTimings(rollout_s=2.0, learn_s=1.0, publish_s=0.5, step_s=4.0)
    return step_metrics(
        rollouts, stage="stage2", step=step, policy_version=7, kept_ids=list(map(str, kept)), timings=timings,
        update=None,
    )  # fmt: skip


def test_a_stage_knows_where_it_stands_after_each_step():
    start = StageProgress(signs=(sign(right=0.0),) * 19, empty_steps=2)
    once = start.after(metrics_of(3, [1, 1, 1, 0]), DataPosition(epoch=1, drawn=4), "steps")
    latest = sign(reward=0.75, cut=0.0, right=0.5)
    assert once == StageProgress(
        step=3, policy_version=7, position=DataPosition(epoch=1, drawn=4), signs=(*start.signs, latest), empty_steps=3
    )
    twice = once.after(metrics_of(4, [1, 0, 0, 0], kept=[0, 1]), DataPosition(), "steps")
    assert (twice.empty_steps, len(twice.signs), twice.signs[-2]) == (0, 20, latest)
    assert StageProgress.from_json(json.loads(json.dumps(twice.as_json()))) == twice
    ended = replace(start, signs=(sign(right=1.0),) * 9).after(metrics_of(4, [1, 1]), DataPosition(), "solved")
    assert ended.ended.startswith("100 % of the problems")
    assert StageProgress() == StageProgress(
        step=0, policy_version=0, position=DataPosition(epoch=0, drawn=0), signs=(), empty_steps=0, ended=""
    )


def test_why_there_is_nothing_to_learn():
    def told(rewards: list[float], resample: Literal["paper", "release", "random", "none"] = "paper") -> str:
        return nothing_to_learn(metrics_of(9, rewards), 4, AlgorithmConfig(resample=resample))

    wrong, right, both = (told(rewards) for rewards in ([0, 0], [1, 1], [1, 1, 0, 0]))
    assert wrong == (
        "stage2: 4 steps in a row, to step 9, had no group whose kept rewards differ; in the last one 0 % of the "
        "groups are all right, 100 % all wrong; give easier problems or larger budgets (--rollout.max-response-tokens, "
        "--rollout.max-turns), draw more rollouts (--algorithm.rollouts-per-prompt), or keep more failures "
        "(--algorithm.least-failures)"
    )
    assert "100 % of the groups are all right, 0 % all wrong; give harder problems (--drop-solved)," in right
    assert "50 % of the groups are all right, 50 % all wrong; give harder problems" in both
    assert told([0, 0], "release").endswith("or keep more failures (--algorithm.min-zero-reward-trace-num)")
    assert told([0, 0], "random").endswith("--rollout.max-turns), or keep more rollouts (--algorithm.keep)")
    assert told([0, 0], "none").endswith("--rollout.max-turns), or draw more rollouts (--algorithm.keep)")


async def test_half_of_a_step_may_be_lost_and_no_more():
    assert MOST_DROPPED == 0.5 and MOST_LOST == 0.05

    async def lost(count: int) -> Any:
        policy = SkilledPolicy()
        system = TrainingSystem(rollouts=Losing(policy, count), learner=SkillLearner(policy), publish=nothing)
        return await train_step(adding_problems(2), system, SMALL, step=1, policy_version=3)

    record = await lost(6)
    assert (record.ledger.requested, record.ledger.dropped, len(record.refs)) == (12, 6, 6)
    with pytest.raises(RStarError, match=r"^step 1: 7 of 12 rollouts were dropped: lost$"):
        await lost(7)


async def nothing(policy_version: int) -> None: ...


class Losing(LocalRollouts):
    """Loses the first few of every run, at every repeat too."""

    def __init__(self, policy: SkilledPolicy, count: int) -> None:
        super().__init__(policy)
        self._count = count

    async def run(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[FinishedRollout | DroppedRollout]:
        lost = {request.rollout_id for request in requests[: self._count]}
        async for end in super().run(requests):
            one = end if isinstance(end, DroppedRollout) else end.summary
            name, group = one.rollout_id, one.group_id
            yield DroppedRollout(rollout_id=name, group_id=group, reason="lost") if name in lost else end


def row(name: str) -> TrainingRow:
    return TrainingRow(
        rollout_id=name, group_id="g", ref=TrajectoryRef([], 0), advantage=1.0, num_tokens=2, num_sampled_tokens=1
    )


def test_rows_that_were_not_trained_on_are_named_with_the_reason():
    rows, some = [row("a"), row("b")], (LeftOut("a", "long"),)
    done = update_result(1, tokens=1, lr=1.0)
    assert rows_left_out(rows, None) == () and rows_left_out(rows, replace(done, left_out=some)) == some
    refused = replace(done, left_out=some, applied=False, reason="not finite")
    assert rows_left_out(rows, refused) == (*some, LeftOut("b", "not finite"))


def finished(name: str, reward: float, **more: Any) -> FinishedRollout:
    return FinishedRollout(summary=summary(name, reward=reward, **more), ref=TrajectoryRef([], 3))


def test_every_rollout_has_one_fate_and_every_row_its_figures():
    group = [finished(name, reward) for name, reward in (("a", 1.0), ("b", 0.0), ("c", 1.0), ("d", 0.5))]
    lost = DroppedRollout(rollout_id="e", group_id="g", reason="lost")
    fates = rollout_fates(
        [group], [group[:3]], rows=[row("a"), row("b")], left_out=[LeftOut("b", "long")], dropped=[lost]
    )
    assert fates == {
        "a": Fate.TRAINED, "b": Fate.LEFT_OUT, "c": Fate.EQUAL_REWARDS, "d": Fate.RESAMPLED_AWAY, "e": Fate.DROPPED
    }  # fmt: skip
    rows = training_rows([group[:2]], SMALL.algorithm)
    assert rows == [
        TrainingRow(rollout_id=name, group_id="g", ref=TrajectoryRef([], 3), advantage=advantage, num_tokens=25,
                    num_sampled_tokens=15)
        for name, advantage in (("a", 1.0), ("b", -1.0))
    ]  # fmt: skip


# -- schedules, resampling, the loss -----------------------------------------------------------------------------------


def schedule(shape: Any, **more: Any) -> LrSchedule:
    given = {"learning_rate": 8.0, "warmup_steps": 4, "total_steps": 12, "final_share": 0.25, "stable_share": 0.5}
    return LrSchedule(shape=shape, **(given | more))


def test_a_schedule_step_by_step():
    warm = [2.0, 4.0, 6.0, 8.0]
    assert [schedule("constant").at(step) for step in range(6)] == [*warm, 8.0, 8.0]
    falling = [8.0, 8.0, 8.0, 8.0, 8.0, 6.5, 5.0, 3.5, 2.0, 2.0]
    assert [schedule("wsd").at(step) for step in range(14)] == pytest.approx([*warm, *falling])
    cosine = [schedule("cosine").at(step) for step in (4, 6, 8, 10, 12, 20)]
    assert cosine == pytest.approx([8.0, 7.12132, 5.0, 2.87868, 2.0, 2.0])
    for wrong, said in (
        ({"learning_rate": -1.0}, "learning_rate and warmup_steps must not be negative"),
        ({"warmup_steps": -1}, "learning_rate and warmup_steps must not be negative"),
        ({"total_steps": 4}, r"cosine needs total_steps \(4\) above warmup_steps \(4\)"),
        ({"stable_share": 1.0}, r"stable_share 1.0 must lie in \[0, 1\)"),
        ({"stable_share": -0.1}, r"stable_share -0.1 must lie in \[0, 1\)"),
    ):
        with pytest.raises(ValueError, match=f"^{said}$"):
            schedule("cosine", **wrong)
    assert schedule("constant", total_steps=0).at(9) == 8.0 and schedule("cosine", total_steps=5).at(4) == 8.0


def test_the_schedules_of_a_run():
    config = with_values(SMALL, {"optimizer.warmup_steps": 3})
    given = {"learning_rate": 1e-3, "shape": "constant", "total_steps": 7, "final_share": 1.0, "stable_share": 0.0}
    assert rl_schedule(config) == LrSchedule(warmup_steps=0, **given)  # type: ignore[arg-type]
    fresh = with_values(config, {"reset_optimizer": True})
    assert rl_schedule(fresh) == LrSchedule(warmup_steps=3, **given)  # type: ignore[arg-type]
    sft = with_values(SMALL, {"sft.steps": 40, "sft.warmup_share": 0.1, "sft.final_share": 0.2}).sft
    assert sft_schedule(sft) == LrSchedule(
        learning_rate=5e-6, warmup_steps=4, shape="cosine", total_steps=40, final_share=0.2, stable_share=0.6
    )


def test_the_loss_of_a_run_and_what_is_no_loss():
    made = loss_settings(with_values(SMALL, {"algorithm.dual_clip": 3.0, "rollout.temperature": 0.0}))
    assert made == LossSettings(
        clip_low=0.2, clip_high=0.28, dual_clip=3.0, normalisation=Normalisation.TOKEN, constant_tokens=2_000,
        entropy_coefficient=0.0, kl_coefficient=0.0, correction=Correction.NONE, correction_cap=2.0,
        correction_low=0.5, temperature=1.0,
    )  # fmt: skip
    assert loss_settings(SMALL).dual_clip is None
    assert loss_settings(with_values(SMALL, {"rollout.temperature": 0.5})).temperature == 0.5
    inf, nan = float("inf"), float("nan")
    for name, taken, refused, meaning in (
        ("dual_clip", (None, 1.01), (1, 0.5, inf, nan), "finite and above 1, or None"),
        ("temperature", (0.01, 1.5), (0, -1, inf, nan), "finite and above 0"),
        ("clip_low", (0, 0.99), (1, -0.1, nan), "at least 0 and below 1"),
        ("clip_high", (0, 5), (-0.1, inf, nan), "finite and at least 0"),
        ("constant_tokens", (1, 2), (0, inf, nan), "finite and at least 1"),
        ("entropy_coefficient", (-1, 1), (-inf, inf, nan), "finite"),
        ("kl_coefficient", (0, 2), (-0.1, inf, nan), "finite and at least 0"),
        ("correction_cap", (0.5, 3), (inf, nan), "finite and above 0"),
        ("correction_low", (0, 2.0), (-0.1, 2.1, nan), "between 0 and correction_cap"),
    ):
        for value in taken:
            assert getattr(replace(made, **{name: value}), name) == value  # type: ignore[arg-type]
        for value in refused:
            with pytest.raises(ValueError) as wrong:
                replace(made, **{name: value})  # type: ignore[arg-type]
            assert str(wrong.value) == f"{name} must be {meaning}, got {value}"
    with pytest.raises(ValueError, match=r"^correction_cap must be finite and above 0, got 0$"):
        replace(made, correction_cap=0, correction_low=0)
    with pytest.raises(
        ValueError, match=r"^normalisation must be one of token, group, sequence, constant, got 'token'"
    ):
        replace(made, normalisation="token")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^correction must be one of none, token, sequence, icepop, got 'none'"):
        replace(made, correction="none")  # type: ignore[arg-type]


RULE = ResampleRule(
    least_failures=0, min_zero_reward_trace_num=2, min_non_zero_reward_trace_num=2, roc_error_ratio=True,
    roc_answer_format=True,
)  # fmt: skip


def candidates(text: str) -> list[Candidate]:
    """`-` a failure, `0` a flawless success, other digits so many failed calls of nine."""
    return [
        Candidate(reward=float(c != "-"), num_calls=9, num_failed=0 if c == "-" else int(c), num_answers=1, num_turns=4)
        for c in text
    ]


@pytest.mark.parametrize(
    ("text", "keep", "mode", "rule", "kept"),
    [
        ("0-0-0-0-", 4, "release", RULE, [0, 1, 2, 3]),
        ("90817263-", 4, "release", RULE, [1, 3, 5, 8]),
        ("--------0", 4, "release", RULE, [0, 1, 2, 8]),
        ("-00000000", 4, "release", replace(RULE, min_zero_reward_trace_num=0), [1, 2, 3, 4]),
        ("----0000", 4, "release", replace(RULE, min_zero_reward_trace_num=4), [0, 1, 2, 3]),
        ("------00", 4, "release", replace(RULE, min_non_zero_reward_trace_num=0), [0, 1, 2, 6]),
        ("9870-", 4, "release", replace(RULE, roc_error_ratio=False, min_zero_reward_trace_num=0), [0, 1, 2, 4]),
        ("0000-", 5, "paper", RULE, [0, 1, 2, 3, 4]),
        ("00-", 2, "paper", RULE, [0, 1]), ("0--", 2, "paper", RULE, [0, 1]),
        ("000-", 2, "paper", replace(RULE, least_failures=5), [0, 3]),
        ("999900", 3, "paper", RULE, [1, 4, 5]),
        ("------", 3, "paper", RULE, [1, 4, 5]),
    ],
)  # fmt: skip
def test_which_candidates_stay(text: str, keep: int, mode: Any, rule: ResampleRule, kept: list[int]):
    rng = named_generator(3, "stage1", "resample", 1, "g")
    assert resample_on_correct(candidates(text), keep, rng, mode, rule) == kept


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        done = asyncio.run(small_run(Path(place) / "run"))
    WRITTEN.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", "utf-8")
