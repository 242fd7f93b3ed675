"""The experiment's plan, its resumption and its table; every command of the product is made up."""

import math
import shlex
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from actors.launch.command_line import parse
from benchmarks import evidence
from benchmarks.evidence import HEAD, EvidenceConfig, call, cell, course, experiment, main, rows_of, score_at, svg
from benchmarks.evidence_plan import COMPOSED, PARTS, PREFIXES, Arm, heldout_problems, training_problems
from benchmarks.evidence_rules import RATE, coin
from recipes.stage1 import STAGE_1
from recipes.stage2 import STAGE_2
from recipes.stage3 import STAGE_3
from rstar_ray.config import RunConfig, differences
from rstar_ray.data.order import DataPosition, draw
from rstar_ray.errors import ConfigError, RStarError, Stopped
from rstar_ray.rollouts import rollout_requests
from rstar_ray.run_dir.durable import append_row, read_rows, write_json
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.tiny.programs import PROGRAMS
from rstar_ray.tiny.tiny_problems import Split, generate_problems
from rstar_ray.trajectory import StopReason, Transcript
from tests.rstar_ray.fabricate import run_directory

RECIPES = {"stage1": STAGE_1, "stage2": STAGE_2, "stage3": STAGE_3}


def configs(part: str) -> dict[str, RunConfig]:
    """The settings of each arm's first stage."""
    arms = [arm for arm in PARTS[part].arms if arm.stages]
    words = ["--scale", "tiny", "--model", "m"]
    return {arm.name: parse([RECIPES[arm.stages[0][0]]], [*words, *shlex.split(arm.stages[0][1])])[0] for arm in arms}


@pytest.mark.parametrize("part", PARTS)
def test_arms_differ_in_what_they_are_for_alone(part: str):
    found = configs(part)
    allowed = {
        "B": set(),
        "B2": set(),
        "C": {"algorithm", "own_folder", "reward"},
        "D": {"steps", "optimizer", "rollout", "algorithm"},
        "E": {"algorithm", "data"},
    }
    first = next(iter(found.values()))
    for config in found.values():
        assert {name.partition(".")[0] for name in differences(config, first)} <= allowed[part]


def test_problems_of_part_e_come_back_while_they_may_be_skipped():
    (config, *others) = configs("E").values()
    assert {one.data.num_train for one in others} == {config.data.num_train}
    skipped = configs("E")["skip solved"].data.skip_solved
    problems = range(config.data.num_train)
    position, visited, back = DataPosition(), dict[int, int](), Counter[bool]()
    for step in range(1, config.steps + 1):
        drawn, position = draw(problems, config.prompts_per_step, position, seed=0, stage="stage1")
        back.update(step - visited.get(one, -math.inf) <= skipped for one in drawn)
        visited |= dict.fromkeys(drawn, step)
    assert back[True] > back.total() / 2


def test_rewards_at_random_are_independent_within_a_group():
    config = configs("C")["random reward"]
    ones, steps, siblings = defaultdict[str, float](float), 40, config.algorithm.keep
    for step in range(1, steps + 1):
        problems = generate_problems(0, Split.TRAIN, 50)
        for request in rollout_requests(problems, config, name=step, siblings=siblings):
            of = Transcript(
                rollout_id=request.rollout_id, group_id=request.group_id, stop_reason=StopReason.ANSWERED, turns=(),
                num_prompt_tokens=1, num_response_tokens=1, num_sampled_tokens=1, max_response_tokens=1, max_turns=1,
            )  # fmt: skip
            ones[request.group_id] += coin("", request.problem, of)
    groups, counts = len(ones), Counter(ones.values())
    assert groups == 50 * steps
    deviation = math.sqrt(RATE * (1 - RATE) / (groups * siblings))
    assert sum(ones.values()) / (groups * siblings) == pytest.approx(RATE, abs=4 * deviation)
    for count in range(siblings + 1):
        share = math.comb(siblings, count) * RATE**count * (1 - RATE) ** (siblings - count)
        deviation = math.sqrt(share * (1 - share) / groups)
        assert counts[count] / groups == pytest.approx(share, abs=4 * deviation), f"groups with {count} ones"


def test_no_family_of_sft_has_the_calls_of_a_composed_one():
    shown = [tuple(step.right for step in program.steps) for program in PROGRAMS.values()]
    followed = {pair for steps in shown for pair in pairwise(steps)}
    composed = {
        "sum_times_squared": ("print({a}+{b})", "print({r}*{c})", "print({r}*{r})"),
        "lcm_plus_times": ("import math; print(math.lcm({a},{b}))", "print({r}+{c})", "print({r}*{c})"),
        "difference_squared_times_plus": ("print({a}-{b})", "print({r}*{r})", "print({r}*{c})", "print({r}+{c})"),
        "product_plus_squared_times": ("print({a}*{b})", "print({r}+{c})", "print({r}*{r})", "print({r}*{c})"),
    }
    assert composed.keys() == {family.name for family in COMPOSED}
    for steps in composed.values():
        assert all(any(step in program for program in shown) for step in steps), "a part that SFT does not show"
        assert not all(pair in followed for pair in pairwise(steps))


def test_composed_problems_have_the_answers_of_their_programs_and_no_split_shares_one():
    train, heldout = training_problems(0), heldout_problems()
    assert not {one.id for one in train} & {one.id for one in heldout}
    names = {family.name for family in COMPOSED}
    assert {one.family for one in heldout} == names and len(heldout) == 160
    assert sum(one.family in names for one in train) == len(train) / 2
    (text, answer), *_ = [(one.problem, one.answer) for one in train if one.family == "difference_squared_times_plus"]
    b, a, c, _ = (int(word.strip(".,")) for word in text.split() if word.strip(".,").isdigit())
    assert int(answer) == (a - b) ** 2 * c + c
    beside = training_problems(0, prefixes=True)
    assert not {one.id for one in beside} & {one.id for one in heldout}
    assert {family.name for family in PREFIXES} | names < {one.family for one in beside}


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run; each leaves a made-up run directory."""
    commands: list[list[str]] = []

    def run(root: Path, command: list[str], deadline: float) -> None:
        commands.append(command)
        path, stage = Path(command[command.index("--run-dir") + 1]), Path(command[0]).stem
        if stage == "evaluate":
            run_directory(path, stages={})
            return
        run_directory(path, stages={} if stage == "sft" else {stage: 45})
        with RunDir(path).write_checkpoint(stage, 45) as folder:
            (folder / "model").mkdir()
            write_json(folder / "model" / "config.json", {})
        RunDir(path).finish_stage(stage, 45)

    monkeypatch.setattr(evidence, "call", run)
    return commands


@pytest.mark.long
def test_an_arm_runs_once_and_the_table_follows_each(made_up: list[list[str]], tmp_path: Path):
    config = EvidenceConfig(run_dir=tmp_path, parts=("B", "C"), seeds=1)
    page = experiment(config)
    arms = [(row["part"], row["arm"]) for row in read_rows(tmp_path / "results.jsonl")]
    assert arms == [(part, arm.name) for part in ("B", "C") for arm in PARTS[part].arms]
    assert [Path(command[0]).stem for command in made_up].count("sft") == 1
    text = page.read_text()
    assert all(f"| {name} |" in text for _, name in arms)
    assert "</svg>" in (tmp_path / "evidence.svg").read_text()
    done = len(made_up)
    experiment(config)
    assert len(made_up) == done


def test_a_row_of_another_plan_is_refused_and_one_without_a_plan_is_not(
    made_up: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def plan(options: str) -> None:
        arm = Arm(name="neither", stages=(("stage1", options),))
        monkeypatch.setitem(PARTS, "E", replace(PARTS["E"], arms=(arm,)))

    config = EvidenceConfig(run_dir=tmp_path, parts=("E",), seeds=1)
    plan("--steps 45")
    experiment(config)
    done = len(made_up)
    experiment(config)
    plan("--steps 46")
    with pytest.raises(ConfigError, match=r"part E, arm neither, seed 0 .*--steps 46.*another --run-dir, or remove"):
        experiment(config)
    with pytest.raises(ConfigError, match="arm neither"):
        experiment(replace(config, parts=("B",)))
    (row,) = read_rows(tmp_path / "results.jsonl")
    (tmp_path / "results.jsonl").unlink()
    append_row(tmp_path / "results.jsonl", {name: value for name, value in row.items() if name != "plan"})
    experiment(config)
    assert len(made_up) == done


def test_the_rows_of_the_docs_are_of_the_present_plan(made_up: list[list[str]], tmp_path: Path):
    rows = (evidence.REPOSITORY / "docs" / "evidence.jsonl").read_text()
    (tmp_path / "results.jsonl").write_text(rows)
    assert "rejection sampling" in experiment(EvidenceConfig(run_dir=tmp_path, parts=("C",), seeds=1)).read_text()
    assert not made_up


def test_columns_that_need_the_true_reward_are_empty_for_the_random_one():
    figures: dict[str, Any] = {
        "pass_at": {"1": 0.5}, "errors": 0.2, "families": {}, "tokens": 10, "rollouts": 10,
        "curve": [(0, 0, 0, 0.2), (1, 10, 10, 0.5)], "training_errors": [0.4, 0.2],
    }  # fmt: skip
    part = PARTS["C"]
    table = {row[0]: row for row in rows_of(part, [{"arm": arm.name, "seed": 0, **figures} for arm in part.arms])}
    names = ("of the first arm's at the start", "pass@1 at its tokens", "pass@1 at its rollouts")
    columns = [HEAD.index(name) for name in names]
    for name, row in table.items():
        assert [bool(row[column]) for column in columns] == [name != "random reward"] * 3, name
    assert table["random reward"][HEAD.index("tool errors in correct rollouts")]


def test_a_command_at_the_deadline_is_stopped_and_one_that_fails_is_named(tmp_path: Path):
    with pytest.raises(Stopped, match="-c"):
        call(tmp_path, ["-c", "import time; time.sleep(60)"], 0.0)
    with pytest.raises(RStarError, match="ended with status 3"):
        call(tmp_path, ["-c", "raise SystemExit(3)"], float("inf"))
    assert len((tmp_path / "commands.log").read_text().splitlines()) == 2


def test_scores_are_compared_where_equally_much_was_spent():
    curve = [(0, 0, 0, 0.2), (10, 1_000, 80, 0.4), (20, 3_000, 160, 0.8)]
    assert score_at(curve, 1, 2_000) == pytest.approx(0.6) and score_at(curve, 2, 40) == pytest.approx(0.3)
    assert score_at(curve, 1, 4_000) is None
    assert score_at(curve, 2, 161) == 0.8 and score_at(curve, 2, 170) is None, "a dropped rollout is tolerated"


def test_a_mean_has_the_interval_of_students_t():
    assert cell([0.5, 0.7], "{:.3f}".format) == "0.600 ± 1.271"
    assert cell([0.5, None], "{:.3f}".format) == "0.500 (1 of 2)" and cell([None], str) == ""
    assert cell([0.0, 1.0] * 6, "{:.3f}".format) == "0.500 ± 0.332", "11 degrees of freedom"
    assert svg([("a", 0.5, 0.1)]).count("<rect") == 2


def test_part_b2_is_compared_with_part_b():
    figures = {"pass_at": {"1": 0.5, "64": 0.6}, "errors": 0.2, "families": {}, "tokens": 10, "rollouts": 10}
    course = {"curve": [(0, 0, 0, 0.2), (1, 10, 10, 0.5)], "training_errors": [0.4, 0.2]}
    row: dict[str, Any] = {"arm": PARTS["B2"].arms[0].name, "seed": 0, **figures, **course}
    ((*_, difference, _, _, _, _, _, _),) = rows_of(PARTS["B2"], [row], [{**row, "pass_at": {"1": 0.25}}])
    assert difference == "+25.0"


def test_the_rollouts_that_choose_stage_3s_problems_are_a_cost(tmp_path: Path):
    folder = tmp_path / "run"
    run_directory(folder, stages={"stage2": 3, "stage3": 3})
    without = course(folder)
    results = RunDir(folder).results_path
    results.mkdir(exist_ok=True)
    for _ in range(2):
        append_row(results / "stage3-filter-a.jsonl", {"k": 8, "response_tokens": [5] * 8})
    with_it = course(folder)
    assert with_it["rollouts"] - without["rollouts"] == 16 and with_it["tokens"] - without["tokens"] == 80


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["--parts", "Z"]))
    assert ended.value.code == 2 and "--parts" in capsys.readouterr().err
