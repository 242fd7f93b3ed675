"""The first hour with a GPU: runs every part once, in order, and shows measured beside planned figures.

make gpu-first-hour
python -m benchmarks.gpu_first_hour

The learner's steps are first. They need only torch and transformers, and DeepSpeed if `learner` is in their name; this
file needs only Python. A step without its packages or GPUs is reported as not run. Steps that have passed on this GPU
with this commit are not repeated (unless `--again`). Each step has 8 minutes. Exit status: 1 if a step failed, else 0.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
STEP_DEADLINE_S = 480.0
TERMINATE_GRACE_S = 10.0
LEARNER = ("torch", "transformers")
ALL = (*LEARNER, "deepspeed", "ray", "vllm", "pytest")


@dataclass(frozen=True, slots=True)
class Step:
    """One process. `{out}` in its command is the output folder."""

    name: str
    shows: str
    command: tuple[str, ...]  # arguments of Python
    needs: tuple[str, ...] = LEARNER  # packages
    gpus: int = 1
    after: str = ""  # a step that must have passed before


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement; `planned` is None if the planner has no figure."""

    what: str
    measured: float
    unit: str
    planned: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a step."""

    status: str  # passed, failed, not run
    note: str = ""  # why it failed, or did not run
    seconds: float = 0.0
    device: str = ""
    commit: str = ""
    figures: tuple[Figure, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine. `packages` are the installed ones that steps need."""

    gpus: int
    device: str  # name of the first GPU
    packages: frozenset[str]
    commit: str


def _body(name: str, *more: str) -> tuple[str, ...]:
    return ("-m", "benchmarks.gpu_steps", name, *more)


def _test(expression: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-m", "gpu", "-rs", "tests/gpu", "-k", expression)


STEPS = (
    Step("kernels", "attention over packed rows against a dense reference; 100 row lengths", _body("kernels")),
    Step("log-probs", "chunked log-probs against whole ones, and their memory", _body("log-probs")),
    Step("policy", "forward and backward of 0.6B in bfloat16, without DeepSpeed", _body("policy", "--shape", "0.6B")),
    Step(
        "learner-0.6B",
        "updates in bfloat16 under ZeRO-3, a checkpoint and back",
        _body("learner", "--shape", "0.6B"),
        needs=(*LEARNER, "deepspeed"),
    ),
    Step(
        "learner-1.7B",
        "the same with 1.7B",
        _body("learner", "--shape", "1.7B"),
        needs=(*LEARNER, "deepspeed"),
    ),
    Step("ipc", "weights from one process to another by handles", _body("ipc"), needs=(*LEARNER, "vllm")),
    Step("engine", "tokens/s of 0.6B in vLLM", _body("engine", "--shape", "0.6B"), needs=ALL),
    Step("publish", "new weights into an engine, by both ways", _test("weights and not killed"), needs=ALL),
    Step(
        "stage1", "three steps of stage 1, then a stop with a checkpoint", _body("stage1", "--out", "{out}"), needs=ALL
    ),
    Step("resume", "the rest from that checkpoint", _body("resume", "--out", "{out}"), needs=ALL, after="stage1"),
    Step("killed", "an engine killed in a publish", _test("killed"), needs=ALL),
)


def this_machine() -> Machine:
    """Count GPUs with torch in a child process: a CUDA context in this process would take memory from the steps."""
    asked = "import torch; n = torch.cuda.device_count(); print(n, torch.cuda.get_device_name(0) if n else '', sep='|')"
    answer = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    gpus, _, device = (answer.stdout.strip().splitlines() or ["0|"])[-1].partition("|")
    git = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    return Machine(
        gpus=int(gpus) if gpus.isdigit() else 0,
        device=device or f"no GPU ({platform.machine()})",
        packages=frozenset(name for name in ALL if find_spec(name) is not None),
        commit=commit or "unknown",
    )


def missing(step: Step, machine: Machine, done: dict[str, Outcome]) -> str:
    """Why a step cannot run here; empty if it can."""
    if lacking := [name for name in step.needs if name not in machine.packages]:
        return f"{', '.join(lacking)} not installed"
    if machine.gpus < step.gpus:
        return "no GPU" if not machine.gpus else f"{machine.gpus} of {step.gpus} GPUs"
    if step.after and (step.after not in done or done[step.after].status != "passed"):
        return f"{step.after} has not passed"
    return ""


def run_step(step: Step, out: Path, deadline_s: float) -> Outcome:
    """Run a step in a separate session, and end all its processes. The output goes to NAME.log."""
    log = out / f"{step.name}.log"
    command = [sys.executable, *(part.replace("{out}", str(out)) for part in step.command)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "RAY_USAGE_STATS_ENABLED": "0"}
    environment.setdefault("RAY_AUTH_MODE", "token")
    started = time.monotonic()
    with log.open("w") as writes:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=writes, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_session(process)
    seconds = time.monotonic() - started
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if status == 0:
        return Outcome("passed", seconds=seconds, figures=_figures(lines))
    reason = f"took more than {deadline_s:g} s" if status is None else (lines or [f"exit status {status}"])[-1][:160]
    return Outcome("failed", note=f"{reason} ({log})", seconds=seconds)


def _end_session(process: "subprocess.Popen[bytes]") -> None:
    """SIGTERM first, so that a run writes a checkpoint and stops Ray."""
    for number, grace_s in ((signal.SIGTERM, TERMINATE_GRACE_S), (signal.SIGKILL, None)):
        if process.poll() is not None:
            break
        process.send_signal(number)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            continue
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # children that outlived it


def _figures(lines: Sequence[str]) -> tuple[Figure, ...]:
    """Figures in a step's last line, if it is JSON."""
    try:
        return tuple(Figure(**figure) for figure in json.loads(lines[-1])["figures"])
    except (ValueError, KeyError, TypeError, IndexError):
        return ()


def run_all(
    steps: Sequence[Step],
    machine: Machine,
    out: Path,
    *,
    again: bool = False,
    deadline_s: float = STEP_DEADLINE_S,
    tell: Callable[[str], None] = print,
) -> dict[str, Outcome]:
    """Run the steps in order; earlier passes are retained. The state is written after every step."""
    out.mkdir(parents=True, exist_ok=True)
    before = read_state(out)
    done: dict[str, Outcome] = {}
    for step in steps:
        earlier = before.get(step.name)
        here = (machine.device, machine.commit)
        if not again and earlier and earlier.status == "passed" and (earlier.device, earlier.commit) == here:
            done[step.name] = earlier
        elif reason := missing(step, machine, done):
            done[step.name] = Outcome("not run", reason, device=machine.device, commit=machine.commit)
        else:
            tell(f"{step.name}: {step.shows}")
            outcome = run_step(step, out, deadline_s)
            done[step.name] = replace(outcome, device=machine.device, commit=machine.commit)
            tell(f"{step.name}: {done[step.name].status} after {outcome.seconds:.0f} s {outcome.note}".rstrip())
        write_state(out, {**before, **done})
    return done


def read_state(out: Path) -> dict[str, Outcome]:
    """Outcomes by step; empty without a readable file."""
    try:
        found: dict[str, dict[str, Any]] = json.loads((out / "state.json").read_text())
        return {
            name: replace(Outcome(**row), figures=tuple(Figure(**figure) for figure in row["figures"]))
            for name, row in found.items()
        }
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def write_state(out: Path, done: dict[str, Outcome]) -> None:
    """Write atomically, as the machine may be lost at any time."""
    new = out / "state.json.new"
    new.write_text(json.dumps({name: asdict(outcome) for name, outcome in done.items()}, indent=1))
    new.replace(out / "state.json")


def table(done: dict[str, Outcome], machine: Machine) -> str:
    """A line for each step, and below it one for each figure."""
    lines = [f"{machine.device}, commit {machine.commit}", "", f"{'step':<15}{'status':<10}{'s':>5}  "]
    for name, outcome in done.items():
        seconds = f"{outcome.seconds:.0f}" if outcome.seconds else "-"
        lines.append(f"{name:<15}{outcome.status:<10}{seconds:>5}  {outcome.note}".rstrip())
        for figure in outcome.figures:
            planned = f" (planned {figure.planned:.4g})" if figure.planned is not None else ""
            lines.append(f"{'':<32}{figure.what}: {figure.measured:.4g} {figure.unit}{planned}")
    counts = [
        f"{sum(o.status == status for o in done.values())} {status}" for status in ("passed", "failed", "not run")
    ]
    return "\n".join([*lines, "", ", ".join(counts)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "gpu-first-hour", help="logs and state")
    parser.add_argument("--only", nargs="+", metavar="STEP", choices=[step.name for step in STEPS], help="these steps")
    parser.add_argument("--again", action="store_true", help="repeat what has passed")
    options = parser.parse_args(argv)
    machine, out = this_machine(), options.out.resolve()
    steps = [step for step in STEPS if not options.only or step.name in options.only]
    done = run_all(steps, machine, out, again=options.again)
    shown = table(done, machine)
    (out / "table.txt").write_text(shown + "\n")
    print(shown)
    return int(any(outcome.status == "failed" for outcome in done.values()))


if __name__ == "__main__":
    sys.exit(main())
