"""The first GPU hour: steps in order, skipped by name, resumed; and the steps' bodies, as far as a CPU goes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu_first_hour import ALL, STEPS, Machine, Outcome, Step, main, missing, run_all, table
from benchmarks.gpu_steps import BODIES

REPOSITORY = Path(__file__).resolve().parents[2]
H100 = Machine(gpus=1, device="H100", packages=frozenset(ALL), commit="abc")
FIGURES = {"figures": [{"what": "tokens", "measured": 900.0, "unit": "1/s", "planned": 1000.0}]}


def step(name: str, program: str, **changes: object) -> Step:
    return replace(Step(name, "shows it", ("-c", program), needs=()), **changes)  # type: ignore[arg-type]


def ignore(line: str) -> None:
    """Not shown."""


def test_a_step_passes_with_its_figures_fails_with_its_last_line_or_is_ended_after_its_time(tmp_path: Path):
    steps = [
        step("passes", f"print('noise'); print('{json.dumps(FIGURES)}')"),
        step("fails", "print('noise'); raise ValueError('no kernel')"),
        step("follows", "print()", after="fails"),
    ]
    hung = run_all([step("hangs", "import time; time.sleep(60)")], H100, tmp_path / "hung", deadline_s=0.3, tell=ignore)
    done = run_all(steps, H100, tmp_path, deadline_s=60.0, tell=ignore) | hung
    assert {name: outcome.status for name, outcome in done.items()} == {
        "passes": "passed", "fails": "failed", "hangs": "failed", "follows": "not run",
    }  # fmt: skip
    assert "ValueError: no kernel" in done["fails"].note and str(tmp_path / "fails.log") in done["fails"].note
    assert done["hangs"].note.startswith("took more than 0.3 s") and done["follows"].note == "fails has not passed"
    shown = table(done, H100)
    assert "H100, commit abc" in shown and "tokens: 900 1/s (planned 1000)" in shown
    assert shown.endswith("1 passed, 2 failed, 1 not run")


def test_what_passed_on_this_gpu_with_this_commit_is_not_repeated(tmp_path: Path):
    count = tmp_path / "count"
    program = f"open({str(count)!r}, 'a').write('x')"
    steps = [step("one", program), step("two", "raise SystemExit(1)")]
    for machine, again, runs in (
        (H100, False, 1), (H100, False, 1), (H100, True, 2), (replace(H100, commit="def"), False, 3),
        (replace(H100, device="MI300X"), False, 4),
    ):  # fmt: skip
        done = run_all(steps, machine, tmp_path / "out", again=again, tell=ignore)
        assert (done["one"].status, done["two"].status) == ("passed", "failed")
        assert len(count.read_text()) == runs
    (tmp_path / "out" / "state.json").write_text("{")  # cut off by a machine that went away
    assert run_all(steps, H100, tmp_path / "out", tell=ignore)["one"].status == "passed"


def test_steps_are_skipped_by_the_name_of_what_is_missing():
    bare = replace(H100, packages=frozenset({"torch", "transformers"}))
    here = [one.name for one in STEPS if not missing(one, bare, {})]
    assert here == ["kernels", "log-probs", "policy"]
    by_name = {one.name: one for one in STEPS}
    assert missing(by_name["learner-0.6B"], bare, {}) == "deepspeed not installed"
    assert "vllm" in missing(by_name["engine"], bare, {})
    assert missing(by_name["kernels"], replace(H100, gpus=0), {}) == "no GPU"
    assert missing(by_name["resume"], H100, {}) == "stage1 has not passed"
    assert missing(by_name["resume"], H100, {"stage1": Outcome("passed")}) == ""


def test_on_this_machine_it_runs_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    import torch

    if torch.cuda.is_available():
        pytest.skip("it would run everything")
    assert main(["--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert all(f"{one.name:<15}not run" in shown for one in STEPS) and "no GPU" in shown
    assert (tmp_path / "table.txt").read_text() == shown


@pytest.mark.parametrize("name", ["kernels", "log-probs", "policy"])
@pytest.mark.long
def test_the_bodies_for_a_bare_machine_need_torch_and_transformers_alone(name: str):
    blocked = ("ray", "vllm", "deepspeed", "tyro", "psutil", "msgspec", "peft", "pytest")
    program = (
        f"import sys\nfor name in {blocked}: sys.modules[name] = None\n"
        f"from benchmarks.gpu_steps import main\nsys.exit(main([{name!r}, '--device', 'cpu']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    figures = json.loads(done.stdout.strip().splitlines()[-1])["figures"]
    assert figures and all(figure["measured"] >= 0 for figure in figures)


@pytest.mark.real
@pytest.mark.parametrize("name", ["learner", "engine"])
def test_the_bodies_with_deepspeed_and_vllm_run(name: str):
    command = [sys.executable, "-m", "benchmarks.gpu_steps", name, "--device", "cpu"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    assert json.loads(done.stdout.strip().splitlines()[-1])["figures"]


@pytest.mark.real
@pytest.mark.slow
def test_stage_1_is_stopped_and_resumed(tmp_path: Path):
    for name in ("stage1", "resume"):
        command = [sys.executable, "-m", "benchmarks.gpu_steps", name, "--device", "cpu", "--out", str(tmp_path)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-500:]


def test_every_body_is_a_step():
    named = {one.command[2] for one in STEPS if one.command[1] == "benchmarks.gpu_steps"}
    assert named == set(BODIES)
