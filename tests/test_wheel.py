"""The wheel by itself: built, installed into a fresh environment outside the checkout, and trained with."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from rstar_ray.run_dir.durable import read_rows

pytestmark = [pytest.mark.journey, pytest.mark.real]

REPOSITORY = Path(__file__).resolve().parent.parent
FILES = ("pyproject.toml", "README.md", "LICENSE", "rstar_ray", "actors", "sandbox", "scheduler", "recipes")
TINY = """
scale = "tiny"
run_dir = "run"
steps = 1
prompts_per_step = 2

[algorithm]
rollouts_per_prompt = 4
keep = 2
least_failures = 1

[rollout]
max_response_tokens = 32

[learner]
ranks = 1

[sft]
steps = 2
batch_size = 4
num_conversations = 40

[data]
num_heldout = 4

[evaluate]
samples = 1
max_response_tokens = 32
"""
DEADLINE_S = 400


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel, which sees the packages of this one but not its rstar_ray.

    A folder named in a .pth file is searched for packages, and its own .pth files, such as that of an editable install,
    are not read.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in FILES:
        path = REPOSITORY / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run([*pip, *build], check=True, cwd=folder, env=outside())
    (wheel,) = folder.glob("*.whl")
    fresh = folder / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(fresh)], check=True)
    install = ["--python", str(fresh / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, *install], check=True, cwd=folder, env=outside())
    site = Path(sysconfig.get_path("purelib", vars={"base": str(fresh), "platbase": str(fresh)}))
    (site / "packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return fresh


def outside() -> dict[str, str]:
    """The environment variables of a shell that knows nothing of the checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def test_the_command_comes_from_the_wheel_and_starts_at_once(environment: Path, tmp_path: Path):
    where = [str(environment / "bin" / "python"), "-c", "import recipes, rstar_ray; print(recipes.__file__)"]
    imported = subprocess.run(where, cwd=tmp_path, env=outside(), capture_output=True, text=True, check=True).stdout
    assert imported.startswith(str(environment))
    shown = subprocess.run(
        [environment / "bin" / "rstar", "--help"], cwd=tmp_path, env=outside(), capture_output=True, text=True
    )
    assert shown.returncode == 0 and "stage 1" in shown.stdout


def test_the_whole_recipe_reaches_its_first_rl_step(environment: Path, tmp_path: Path):
    (tmp_path / "tiny.toml").write_text(TINY)
    log, metrics = tmp_path / "log", tmp_path / "run" / "metrics.jsonl"
    command = [environment / "bin" / "rstar", "train", "--config", "tiny.toml"]
    with log.open("wb") as output:
        run = subprocess.Popen(command, cwd=tmp_path, env=outside(), stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not any(row["stage"] == "stage1" for row in read_rows(metrics)):
            assert run.poll() is None, log.read_text()[-3_000:]
            assert time.monotonic() < deadline, log.read_text()[-3_000:]
            time.sleep(0.5)
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=DEADLINE_S) in (0, 130), log.read_text()[-3_000:]
    finally:
        if run.poll() is None:
            run.kill()
    assert (tmp_path / "run" / "stage1.toml").is_file()
