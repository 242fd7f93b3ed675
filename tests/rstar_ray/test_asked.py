"""Which rows of an earlier evaluation are of this one: by what lies behind the names of its settings too."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rstar_ray.config import RunConfig, leaves, may_change, same_answers, with_values
from rstar_ray.evaluation.asked import asked_by, brought_along
from rstar_ray.evaluation.own_code import module_file, own_code
from rstar_ray.evaluation.run import run_evaluation
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.tools.spec import PYTHON_TOOL
from tests.fakes import LocalRollouts, SkilledPolicy, adding_problems, fake_crew

pytestmark = pytest.mark.usefixtures("without_fsync")


def written(folder: Path, **files: str) -> Path:
    """Modules; `a_in_b` is a.py in the folder b, and `b` its own `__init__.py` in there."""
    for name, text in files.items():
        module, _, package = name.partition("_in_")
        path = folder / package / f"{module if module != package else '__init__'}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def own(tmp_path: Path) -> RunConfig:
    """A run with a reward, two tools and a template of one's own."""
    folder = written(
        tmp_path / "own",
        graded="import helper\nfrom pack.deep import rule\nimport numpy, missing\n",
        helper="from . import nothing\nimport json\n",
        beside="",
        pack_in_pack="",
        deep_in_pack="from .wide import more\nfrom .. import beyond\n",
        wide_in_pack="from pack import sibling\n",
        sibling_in_pack="x = 1\n",
        other_in_pack="",
        search="",
    )
    (tmp_path / "my.jinja").write_text("one")
    values = {"reward.name": "graded:f", "tools.use": ("python", "search:t"), "own_folder": str(folder)}
    return with_values(RunConfig(), {**values, "chat.template": str(tmp_path / "my.jinja")})


def digest(config: RunConfig) -> str:
    return asked_by(config, brought_along(config, [PYTHON_TOOL]), None)


def test_own_code_is_what_is_named_and_what_that_imports_beside_it(own: RunConfig):
    found = own_code([own.reward.name, "search:t"], Path(own.own_folder))
    assert found.keys() == {"graded", "search", "helper", "pack", "pack.deep", "pack.wide", "pack.sibling"}


def test_the_programs_own_modules_are_nobodys_own_code(tmp_path: Path):
    here = Path(__file__).parents[2]
    written(tmp_path, mine="from rstar_ray.tools.tool import Tool\n")
    assert own_code(["rstar_ray.tiny.broken_tool:x"], here) == {}
    (tmp_path / "rstar_ray").symlink_to(here / "rstar_ray")
    assert own_code(["mine:x"], tmp_path).keys() == {"mine"}


def test_a_named_module_elsewhere_is_looked_at_alone(tmp_path: Path):
    away = written(tmp_path / "away", named="import more", more="")
    assert own_code(["named:x", "absent.x:y"], tmp_path, [str(away)]).keys() == {"named"}
    assert module_file("named", [str(tmp_path)]) is None


def test_code_that_is_no_python_is_known_by_its_bytes(tmp_path: Path):
    before = own_code(["mine:x"], written(tmp_path, mine="def ("))
    assert before != own_code(["mine:x"], written(tmp_path, mine="def (\0"))


CHANGES: list[tuple[str, Callable[[Path], object]]] = [
    ("the reward", lambda path: written(path / "own", graded="import helper\n")),
    ("what the reward imports", lambda path: written(path / "own", sibling_in_pack="x = 2\n")),
    ("a tool", lambda path: written(path / "own", search="x = 1\n")),
    ("the template", lambda path: (path / "my.jinja").write_text("two")),
]


@pytest.mark.parametrize(("what", "change"), CHANGES, ids=[what for what, _ in CHANGES])
def test_another_content_behind_the_same_name_is_another_evaluation(
    what: str, change: Callable[[Path], object], own: RunConfig, tmp_path: Path
):
    before = digest(own)
    written(tmp_path / "own", beside="x = 1\n", other_in_pack="x = 1\n")  # nobody's
    assert digest(own) == before
    change(tmp_path)
    os.utime(tmp_path / "own")
    assert digest(own) != before, what


def test_a_tool_that_the_policy_is_told_of_otherwise_is_another_evaluation(own: RunConfig):
    """As those of a server are, whose code is not here."""
    told = replace(PYTHON_TOOL, description="Another.")
    assert asked_by(own, brought_along(own, [told]), None) != digest(own)


def test_what_changes_no_answer_is_marked_so_and_nothing_else(own: RunConfig):
    marked = same_answers(own)
    assert {name for name in marked if "." not in name} == {
        "stage", "scale", "model", "steps", "until", "prompts_per_step", "drop_solved", "reset_optimizer"
    }  # fmt: skip
    branches = {name.partition(".")[0] for name in marked if "." in name}
    assert branches == {"algorithm", "optimizer", "learner", "sft", "tiny", "data", "evaluate"}
    whole = {name for name in leaves(own) if name.partition(".")[0] in branches - {"evaluate"}}
    assert whole | {"evaluate.num_problems"} == {name for name in marked if "." in name}
    asked = leaves(own).keys() - marked - may_change(own)
    assert {"seed", "engine.dtype", "chat.system", "reward.place", "sandbox.memory_mb", "rollout.instruct"} <= asked
    assert {name for name in asked if name.startswith("evaluate.")} == {
        f"evaluate.{name}" for name in ("samples", "temperature", "top_p", "max_response_tokens", "max_turns")
    }


async def test_rows_that_are_taken_from_before_are_told_and_where_they_lie(own: RunConfig, tmp_path: Path):
    config = with_values(own, {"evaluate.samples": 2, "evaluate.max_response_tokens": 400})
    run_dir, shown, sets = RunDir(tmp_path / "run"), list[str](), {"held-out": adding_problems(3)}
    crew = fake_crew(SkilledPolicy(), shown)
    crew = replace(crew, brought=brought_along(config, []))
    await run_evaluation(config, {"held-out": sets["held-out"][:2]}, crew, run_dir, step=1)
    assert not any("taken from" in line for line in shown)
    await run_evaluation(config, sets, crew, run_dir, step=1)
    (file,) = run_dir.results_path.iterdir()
    (line,) = (line for line in shown if "taken from" in line)
    assert line == (
        f"stage1 held-out: 2 of 3 problems taken from {file}, where they were asked in the same way; delete it to play "
        "them again"
    )
    written(tmp_path / "own", graded="")
    crew = replace(crew, rollouts=LocalRollouts(SkilledPolicy()), brought=brought_along(config, []))
    await run_evaluation(config, sets, crew, run_dir, step=1)
    assert len([*run_dir.results_path.iterdir()]) == 2 and sum("taken from" in line for line in shown) == 1
