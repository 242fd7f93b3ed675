"""The whole recipe as a user starts it: every actor real, killed in stage 2, resumed, and an update replayed."""

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

from rstar_ray.replay_update import COMPARED
from rstar_ray.run_dir.durable import read_rows

pytestmark = [pytest.mark.real, pytest.mark.journey]

REPOSITORY = Path(__file__).resolve().parents[2]
OPTIONS = shlex.split("""
    --scale tiny --sft.steps 8 --sft.batch-size 8 --sft.num-conversations 120 --steps 2 --prompts-per-step 4
    --algorithm.rollouts-per-prompt 4 --algorithm.keep 2 --algorithm.least-failures 1
    --evaluate.num-problems 6 --evaluate.samples 2
    --rollout.max-response-tokens 48 --evaluate.max-response-tokens 48 --checkpoint.every-steps 1
    --data.num-filtered 6 --engine.replicas 1 --learner.ranks 1 --sandbox.deadline-s 60
    --checkpoint.trajectories-every-steps 1 --reward.name mine:short
""")
REWARD = '''
def short(completion, problem):
    """A policy that has hardly learned to speak differs in this, and in little else."""
    return float(len(completion) % 2)
'''
DEADLINE_S = 900


def start(run_dir: Path, log: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "recipes/train.py", "--run-dir", str(run_dir), *OPTIONS]
    command += ["--own-folder", str(run_dir.parent)]
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


def test_a_run_killed_in_stage_2_continues_and_ends_with_a_report(tmp_path: Path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    (tmp_path / "mine.py").write_text(REWARD)
    first = start(run_dir, log)
    try:
        wait_for("stage2 1/2", log, first)
        its_own = psutil.Process(first.pid).children(recursive=True)
        engines = [process for process in its_own if "EngineCore" in name_of(process)]
    finally:
        first.kill()
        first.wait()
    assert engines
    assert not psutil.wait_procs(engines, timeout=300)[1]  # their memory is the next ones' by then
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
    assert (run_dir / "report.html").exists() and list((run_dir / "tensorboard").rglob("events*"))
    evaluate_the_result(run_dir, tmp_path)
    repeat_an_update(run_dir)


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


def repeat_an_update(run_dir: Path) -> None:
    """What a step recorded is what the learner was given: in another process it comes to the same loss and gradient."""
    listed = replay(run_dir)
    assert listed.returncode == 0, listed.stderr
    updates = [row for row in read_rows(run_dir / "metrics.jsonl") if row.get("grad_norm") and row["stage"] != "sft"]
    there = [row for row in updates if f"{row['stage']} step {row['step']}" in listed.stdout.splitlines()]
    assert there, listed.stdout
    step = there[-1]
    again = replay(run_dir, "--stage", step["stage"], "--step", str(step["step"]))
    assert again.returncode == 0, again.stdout + again.stderr[-2_000:]
    figures = [line.split() for line in again.stdout.splitlines() if line.split()[0] in COMPARED]
    assert {"loss", "grad_norm", "entropy", "logprob_diff_mean", "lr"} <= {words[0] for words in figures}
    assert all(words[-1] == "same" for words in figures)
    assert again.stdout.splitlines()[-1] == "the update is repeated"

    recorded = read_rows(run_dir / "trajectories" / f"{step['stage']}-step-{step['step']:06d}.jsonl")
    trained = [turn for row in recorded for turn in row["turns"] if turn["entropies"] is not None]
    entropies = [entropy for turn in trained for entropy in turn["entropies"]]
    diffs = [abs(diff) for turn in trained for diff in turn["logprob_diffs"]]
    assert sum(entropies) / len(entropies) == pytest.approx(step["entropy"], rel=5e-3)
    assert sum(diffs) / len(diffs) == pytest.approx(step["logprob_diff_mean"], rel=2e-2)
    assert max(diffs) == pytest.approx(step["logprob_diff_max"], rel=1e-2)


def replay(run_dir: Path, *asked: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "recipes/replay.py", str(run_dir), *asked]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S)
