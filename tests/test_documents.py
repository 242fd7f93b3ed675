"""Documents name files, targets and options that exist."""

import ast
import asyncio
import json
import os
import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from deploy import docs_pages
from rstar_ray.algorithm.rules import check_rules
from rstar_ray.config import AlgorithmConfig, RunConfig, leaves
from rstar_ray.config.options import spelled
from rstar_ray.run_dir.ledger import LEDGER, RolloutStatus, append_ledger
from rstar_ray.run_dir.trajectory_log import readable
from rstar_ray.tools.loader import check_function, tool_specs
from rstar_ray.trajectory import Problem
from tests.rstar_ray.fabricate import decode, example_trajectories

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")])
ROOMS = ("rstar_ray", "sandbox", "scheduler", "actors", "recipes", "benchmarks", "examples", "tests", "docs", "deploy")
NAMED = re.compile(rf"`((?:{'|'.join(ROOMS)})/[\w./-]*)`")
MKDOCS = shutil.which("mkdocs", path=f"{REPOSITORY / '.venv-docs' / 'bin'}:{os.environ.get('PATH', '')}")
DEFINED = re.compile(r"^(?:async )?def (\w+)", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


def test_every_row_of_the_table_of_places_names_a_file():
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    rows = [line for line in text.partition("## Where to change what")[2].splitlines() if line.startswith("| ")]
    assert all(NAMED.search(row) for row in rows[1:])


def folders() -> set[str]:
    """Every folder of the project that holds code, and the packages inside it."""
    tops = [REPOSITORY / room for room in ROOMS if room not in ("tests", "docs")]
    inner = [folder for top in tops for folder in top.iterdir() if (folder / "__init__.py").exists()]
    return {f"{folder.relative_to(REPOSITORY)}/" for folder in [*tops, *inner]}


def test_the_table_of_folders_names_every_folder():
    table = (REPOSITORY / "CONTRIBUTING.md").read_text().partition("## Folders")[2].partition("\n## ")[0]
    named = {
        name for line in table.splitlines() if line.startswith("| `") for name in NAMED.findall(line.split("|")[1])
    }
    assert named == folders()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path):
    text = page.read_text()
    named = {name for name in NAMED.findall(text) if "<" not in name}
    assert not [name for name in named if not (REPOSITORY / name).exists()]
    assert not [link for link in LINK.findall(text) if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_makes_can_be_made(page: Path):
    targets = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z][\w-]*)", page.read_text(), re.MULTILINE)) <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_and_recipes_that_a_page_runs_exist(page: Path):
    text = page.read_text()
    for module in set(re.findall(r"python -m ((?:rstar_ray|sandbox|scheduler|actors)[\w.]*)", text)):
        path = REPOSITORY / module.rstrip(".").replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for recipe in set(re.findall(r"\brecipes/\w+\.py", text)):
        assert (REPOSITORY / recipe).exists(), recipe


def test_every_claim_about_the_sandbox_names_tests_that_exist():
    table = (REPOSITORY / "docs" / "sandbox.md").read_text().partition("## Claims")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert len(rows) >= 25
    tests = REPOSITORY / "tests" / "sandbox"
    cases = {case["name"] for case in json.loads((tests / "data" / "sandbox_cases.json").read_text())}
    for claim, held_by in rows:
        named = re.findall(r"`(\w+)::(\w+)`", held_by)
        assert named and len(named) == held_by.count("`") / 2, claim
        for file, name in named:
            known = cases if file == "cases" else set(DEFINED.findall((tests / f"{file}.py").read_text()))
            assert name in known, f"{claim}: {file}::{name}"


def fields(page: Path, heading: str) -> set[str]:
    """The names in the first column of the table that a heading or a head row begins."""
    table = page.read_text().partition(heading)[2].strip().split("\n\n")[0]
    return {name for row in table.splitlines()[1:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_what_is_written_of_trajectories_and_the_ledger_is_what_is_documented(tmp_path: Path):
    page = REPOSITORY / "docs" / "watching.md"
    row = readable(example_trajectories(1.0)[0], decode, stage="stage1", step=1)
    assert fields(page, "a row per trajectory:\n\n| field | |\n") == set(row)
    assert fields(page, "| field of a turn | |\n") == set(row["turns"][0])
    abandoned = {"stage1/2/add-0/0": RolloutStatus.ABANDONED}
    append_ledger(tmp_path, abandoned, stage="stage1", step=1, reasons={}, advantages={})
    assert fields(page, "a row per RL step:\n\n| field | |\n") == set(json.loads((tmp_path / LEDGER).read_text()))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_settings_that_a_page_names_exist(page: Path):
    config = leaves(RunConfig())
    known = {spelled(name) for name in config} | {
        spelled(name, False) for name, value in config.items() if isinstance(value, bool)
    }
    branches = {name.partition(".")[0] for name in config if "." in name}
    named = re.findall(r"--([a-z]+)\.([a-z0-9-]+)", page.read_text())
    assert {f"--{branch}.{leaf}" for branch, leaf in named if branch in branches} <= known


def said_by_the_program() -> list[str]:
    """Every piece of text in the program, with `...` for what is filled in."""
    texts: list[str] = []
    for room in ("rstar_ray", "sandbox", "scheduler", "actors", "recipes"):
        for path in (REPOSITORY / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                    texts.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
                elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ConfigError":
                    texts.append(ast.unparse(node))
    return texts


@pytest.mark.long
def test_every_line_that_the_page_on_troubles_quotes_is_one_that_the_program_prints():
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) >= 35
    texts = said_by_the_program()
    for row in rows:
        (quoted,) = re.findall(r"`([^`]+)`", row.split("|")[1])
        line = re.sub(r"^(--run-dir|run_dir|cluster|placement|port \.\.\.): ", "", quoted)  # the option, said apart
        pieces = [re.escape(piece.strip()) for piece in line.split("...") if piece.strip(" :()")]
        assert any(re.search(".*".join(pieces), text, re.DOTALL) for text in texts), quoted


def test_every_page_has_its_place_in_the_site_and_links_lead_there():
    listed = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"]
    places = {place for one in listed for at in one.values() for place in (at if isinstance(at, list) else [at])}
    assert places == {str(page.relative_to(REPOSITORY / "docs")) for page in (REPOSITORY / "docs").rglob("*.md")} | set(
        docs_pages.BESIDE.values()
    )
    assert {page.name for page in REPOSITORY.glob("*.md")} == docs_pages.BESIDE.keys()
    markdown = "[a](docs/own.md) [b](../README.md) [c](images/step.png) [d](https://x.org/docs/y.md) [e](#docs/there)"
    assert docs_pages.on_page_markdown(markdown, page=None) == (
        "[a](own.md) [b](index.md) [c](images/step.png) [d](https://x.org/docs/y.md) [e](#docs/there)"
    )


@pytest.mark.skipif(MKDOCS is None, reason="no mkdocs here: `make docs` installs it into a separate folder")
@pytest.mark.parametrize("more", ["", "[gone](nowhere.md)", "[no such part](own.md#nothing)"])
def test_the_site_is_built_unless_a_link_in_it_leads_nowhere(more: str, tmp_path: Path):
    assert MKDOCS is not None
    for name in ("docs", "deploy", "rstar_ray", "examples"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    for name in ("mkdocs.yml", *docs_pages.BESIDE):
        shutil.copy(REPOSITORY / name, tmp_path)
    with (tmp_path / "docs" / "watching.md").open("a") as page:
        page.write(f"\n{more}\n")
    built = subprocess.run([MKDOCS, "build", "--strict"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    pages = {page.name for page in tmp_path.glob("build/docs/*")}
    assert (built.returncode == 0) == (not more), built.stderr
    assert "watching.md" in built.stderr if more else {"index.html", "watching.html", "troubleshooting.html"} <= pages


async def test_the_code_of_readme_does_what_it_says(tmp_path: Path):
    shown = (REPOSITORY / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    (tmp_path / "readme_code.py").write_text(shown)
    folder = str(tmp_path)
    await asyncio.to_thread(check_rules, AlgorithmConfig(loss="readme_code:reinforce"), folder)
    assert [spec.name for spec in tool_specs(["readme_code:lookup_tool"], folder)] == ["lookup"]
    check_function("readme_code:solve", 2, folder, option="--agent.run")
    mine = import_module("readme_code")  # by now in sys.path
    assert await mine.lookup_tool.function(word="capital of France") == "Paris"
    capital = Problem(id="0", problem="The capital of France?", answer="Paris")
    assert [mine.reward(text, capital) for text in (r"\boxed{paris}", "Paris")] == [1.0, 0.0]
