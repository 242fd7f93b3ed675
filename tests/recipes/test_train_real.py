"""The whole recipe as a user starts it: every actor real, killed in stage 2, and gone on with by the same command."""

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rstar_ray.run_dir.durable import read_rows

pytestmark = pytest.mark.real

REPOSITORY = Path(__file__).resolve().parents[2]
OPTIONS = shlex.split("""
    --scale tiny --sft.steps 8 --sft.batch-size 8 --sft.num-conversations 120 --steps 2 --prompts-per-step 4
    --algorithm.rollouts-per-prompt 4 --algorithm.keep 2 --algorithm.least-failures 1
    --evaluate.num-problems 6 --evaluate.samples 2
    --rollout.max-response-tokens 48 --evaluate.max-response-tokens 48 --checkpoint.every-steps 1
    --data.num-filtered 6 --engine.replicas 1 --learner.ranks 1 --sandbox.deadline-s 60
""")
DEADLINE_S = 280


def start(run_dir: Path, log: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "recipes/train.py", "--run-dir", str(run_dir), *OPTIONS]
    with log.open("ab") as output:
        return subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT)


def wait_for(text: str, log: Path, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()[-3_000:]
        assert time.monotonic() < deadline, f"{text!r} did not come:\n{log.read_text()[-3_000:]}"
        time.sleep(0.1)


def name_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def test_a_run_killed_in_stage_2_goes_on_and_ends_with_a_report(tmp_path: Path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    first = start(run_dir, log)
    try:
        wait_for("stage2 1/2", log, first)
        its_own = psutil.Process(first.pid).children(recursive=True)
        engines = [process for process in its_own if "EngineCore" in name_of(process)]
    finally:
        first.kill()
        first.wait()
    assert engines
    assert not psutil.wait_procs(its_own, timeout=30)[1]  # an engine's memory is another's by then
    finished = sorted(path.stem for path in (run_dir / "finished").iterdir())
    assert finished == ["sft", "stage1"]

    second = start(run_dir, log)
    try:
        assert second.wait(DEADLINE_S) == 0, log.read_text()[-3_000:]
    finally:
        second.kill()
    steps = [(row["stage"], row["step"]) for row in read_rows(run_dir / "metrics.jsonl")]
    assert steps == [("sft", i) for i in range(1, 9)] + [(f"stage{s}", i) for s in (1, 2, 3) for i in (1, 2)]
    assert [row["stage"] for row in read_rows(run_dir / "evaluations.jsonl")] == ["sft", "stage1", "stage2", "stage3"]
    assert (run_dir / "report.md").read_text() and (run_dir / "report.html").exists()
    assert json.loads((run_dir / "report.json").read_text())
    assert list((run_dir / "plots").glob("*.png")) and list((run_dir / "tensorboard").rglob("events*"))
    evaluate_the_result(run_dir, tmp_path)


def evaluate_the_result(run_dir: Path, tmp_path: Path) -> None:
    """The kept checkpoint is an ordinary model folder, and any problem file can be evaluated."""
    problems = tmp_path / "problems.jsonl"
    rows = [
        {"id": "a", "problem": "What is $1 + 1$?", "answer": "2"},
        {"id": "b", "problem": "Evaluate " + "x + " * 1_500 + "1.", "answer": "\\frac{1}{2}"},  # above the context
    ]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "recipes/evaluate.py", "--scale", "tiny", "--run-dir", str(run_dir)]
    command += ["--evaluate.files", str(problems), "--evaluate.samples", "2", "--engine.replicas", "1"]
    command += ["--evaluate.max-response-tokens", "32"]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    assert "problems: avg@2" in done.stdout
    assert "problems" in {row["set"] for row in read_rows(run_dir / "evaluations.jsonl")}
