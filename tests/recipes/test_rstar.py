"""The `rstar` command: each name runs the same module as before, and its help imports nothing heavy."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from recipes.__main__ import COMMANDS, main

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def rstar(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "recipes", *words]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)


def test_the_help_lists_all_commands_and_imports_nothing_heavy():
    code = "import sys; from recipes.__main__ import main; main(['--help']); print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    *lines, imported = shown.stdout.splitlines()
    assert all(any(line.split("  ")[1] == name for line in lines if line.startswith("  ")) for name in COMMANDS)
    assert not {"torch", "ray", "tyro", "numpy"} & set(imported.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_name_leads_to_a_module_that_can_be_run(name: str):
    spec = find_spec(COMMANDS[name][0])
    assert spec is not None and (spec.submodule_search_locations is None or find_spec(f"{spec.name}.__main__"))


def test_what_is_not_a_command_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]):
    assert main(["stage", "4"]) == 2
    assert capsys.readouterr().err == "error: stage: no such command. Hint: rstar --help lists all\n"


@pytest.mark.long
def test_a_command_ends_as_its_page_does(tmp_path: Path):
    assert "stage1: 64 x 32 rollouts" in rstar("plan", "--scale", "gpu-8").stdout
    refused = rstar("stage", "1", "--scale", "tiny", "--stepz", "3")
    assert (refused.returncode, refused.stderr) == (
        2,
        "error: --stepz: no such option. Hint: perhaps --steps; --help lists all\n",
    )
    assert rstar("verify", str(tmp_path)).returncode == 2
    assert (reported := rstar("report", str(tmp_path))).returncode == 2 and reported.stderr.startswith("error: ")
