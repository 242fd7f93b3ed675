"""The commands that recipes and pages show are understood, every option of them."""

import re
import shlex
from pathlib import Path

import pytest

from actors.launch.command_line import parse
from recipes.evaluate import EVALUATE
from recipes.rehearse import REHEARSAL
from recipes.sft import SFT
from recipes.stage1 import STAGE_1
from recipes.stage2 import STAGE_2
from recipes.stage3 import STAGE_3
from rstar_ray.config.recipe import Recipe

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [*(REPOSITORY / "recipes").glob("*.py"), REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
PAGES += [*(REPOSITORY / "deploy" / "kubernetes").glob("*.yaml")]
COMMAND = re.compile(r"python recipes/(\w+)\.py((?: +(?:\"[^\"\n]*\"|[^\s`\n\"]+))*)")
RECIPES: dict[str, list[Recipe]] = {
    "sft": [SFT], "stage1": [STAGE_1], "stage2": [STAGE_2], "stage3": [STAGE_3], "evaluate": [EVALUATE],
    "train": [SFT, STAGE_1, STAGE_2, STAGE_3], "rehearse": [REHEARSAL],
}  # fmt: skip
SHOWN = sorted({(name, " ".join(said.split())) for page in PAGES for name, said in COMMAND.findall(page.read_text())})


@pytest.mark.parametrize(("name", "said"), [(name, said) for name, said in SHOWN if name in RECIPES])
def test_a_command_that_is_shown_is_understood(name: str, said: str):
    scale = [] if "--scale" in said else ["--scale", "tiny"]
    configs = parse(RECIPES[name], [*shlex.split(said), *scale])
    assert len(configs) == len(RECIPES[name])
