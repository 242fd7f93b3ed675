"""Which rows of an earlier evaluation are of this one: by what lies behind the names of its settings too."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rstar_ray.config import RunConfig, with_values
from rstar_ray.evaluation.request_digest import own_code, plugin_digest, request_digest
from rstar_ray.tools.spec import PYTHON_TOOL

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
    """A run with a reward, two tools and a template, all custom."""
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
    return request_digest(config, plugin_digest(config, [PYTHON_TOOL]), None)


def test_own_code_is_what_is_named_and_what_that_imports_beside_it(own: RunConfig):
    found = own_code([own.reward.name, "search:t"], Path(own.own_folder))
    assert found.keys() == {"graded", "search", "helper", "pack", "pack.deep", "pack.wide", "pack.sibling"}


def test_code_that_is_not_python_is_known_by_its_bytes(tmp_path: Path):
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
