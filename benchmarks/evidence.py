"""Evidence of learning at scale tiny, arm by arm: discovery (B, B2), controls (C), curriculum (D), refill (E).

python -m benchmarks.evidence --run-dir runs/evidence --parts B --seeds 1 --minutes 15

`benchmarks/evidence_plan.py` fixes families, arms, seeds and budgets. Every arm trains from its seed's SFT policy with
the commands listed in `commands.log`. After each arm, its row is added to results.jsonl, and evidence.md and
evidence.svg are written again. The same command resumes an interrupted experiment, and refuses rows of another plan.
Part A is `benchmarks/parity.py`.
"""

import json
import logging
import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

from actors.launch.exit_status import status_of
from benchmarks.evidence_plan import PARTS, SFT, Arm, Part, heldout_problems, training_problems
from rstar_ray.config.checks import at_least, check_bounds, require
from rstar_ray.config.options import options_of
from rstar_ray.data.order import digest_of_problems
from rstar_ray.errors import ConfigError, RStarError, Stopped
from rstar_ray.evaluation.request_digest import digest_of
from rstar_ray.report.findings import percent
from rstar_ray.report.markdown import table
from rstar_ray.report.run_record import Row, read_run
from rstar_ray.run_dir.code_version import code_version
from rstar_ray.run_dir.durable import append_row, read_rows, write_text
from rstar_ray.run_dir.folder import RunDir, differing_fields

log = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parents[1]
POOL = 10
"""Steps over which tool errors of training rollouts are pooled."""
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""97.5 % quantiles of Student's t from 1 degree of freedom; the last one is used beyond the table."""
RULES = REPOSITORY / "benchmarks" / "evidence_rules.py"
SHORTFALL = 0.01
"""Share of the first arm's cost that may be missing where scores are compared at it: rollouts may be dropped."""


@dataclass(frozen=True, kw_only=True)
class EvidenceConfig:
    """Which arms run, and for how long."""

    run_dir: Path = Path("runs/evidence")
    """where runs, results.jsonl, evidence.md and evidence.svg go"""
    parts: tuple[str, ...] = tuple(PARTS)
    """parts of the plan, in order"""
    seeds: Annotated[int, at_least(0)] = 0
    """seeds of each part, at most; 0 runs those of the plan"""
    minutes: Annotated[float, at_least(0)] = 0
    """after so long the command under way is stopped at its next checkpoint, and the experiment ends; 0 has no limit"""

    def __post_init__(self) -> None:
        check_bounds("", self)
        for part in self.parts:
            require(part in PARTS, "--parts", f"no part {part!r}", f"choose from {', '.join(PARTS)}")


def experiment(config: EvidenceConfig) -> Path:
    """Run all arms without a row in results.jsonl; returns evidence.md's path.

    Raises `Stopped` at the time limit, and `ConfigError` where an arm's plan has changed since its row.
    """
    root = config.run_dir.expanduser().absolute()
    root.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * config.minutes if config.minutes else math.inf
    results = root / "results.jsonl"
    for row in read_rows(results):
        _refuse_other_plan(root, row)
    for name in config.parts:
        part = PARTS[name]
        for seed in range(min(config.seeds or part.seeds, part.seeds)):
            for arm in part.arms:
                done = read_rows(results)
                if any((row["part"], row["arm"], row["seed"]) == (name, arm.name, seed) for row in done):
                    continue
                log.info(f"part {name}, seed {seed}: {arm.name}")
                figures = run_arm(root, name, arm, seed, deadline)
                ran = {
                    "part": name,
                    "arm": arm.name,
                    "seed": seed,
                    "commit": code_version(),
                    "plan": plan_of(part, arm, seed),
                }
                append_row(results, {**ran, **figures})
                report(root)
    return report(root)


def plan_of(part: Part, arm: Arm, seed: int) -> Row:
    """The settings of an arm as JSON values, with digests of its rules and problems."""
    own = any(RULES.stem in options for _, options in arm.stages)
    return {
        "sft": SFT,
        "stages": [list(stage) for stage in arm.stages],
        "samples": arm.samples,
        "composed": part.composed,
        "prefixes": arm.prefixes,
        "rules": digest_of({"text": RULES.read_text()}) if own else "",
        "problems": _digest_of_composed(seed, arm.prefixes) if part.composed else digest_of_problems([]),
    }


@cache
def _digest_of_composed(seed: int, prefixes: bool) -> str:
    return digest_of_problems([*training_problems(seed, prefixes=prefixes), *heldout_problems()])


def _refuse_other_plan(root: Path, row: Row) -> None:
    """Raise `ConfigError` where the row's arm has another plan now; rows of earlier versions may lack a part of it."""
    part = PARTS.get(row["part"])
    arm = next((arm for arm in part.arms if arm.name == row["arm"]), None) if part else None
    if part is None or arm is None or "plan" not in row:
        return
    now = {name: value for name, value in plan_of(part, arm, row["seed"]).items() if name in row["plan"]}
    differ = [f"{name}: {there} there, {here} now" for name, there, here in differing_fields(row["plan"], now)]
    if differ:
        folder = root / f"seed-{row['seed']}" / row["part"] / arm_folder(arm)
        raise ConfigError(
            "--run-dir",
            f"results.jsonl has a row of part {row['part']}, arm {arm.name}, seed {row['seed']} with another plan "
            f"({'; '.join(differ)})",
            f"give another --run-dir, or remove the row, {folder} and {folder}-evaluated",
        )


def run_arm(root: Path, part: str, arm: Arm, seed: int, deadline: float) -> Row:
    """Run the missing commands of an arm, and read its figures."""
    sft, folder = root / f"seed-{seed}" / "sft", root / f"seed-{seed}" / part / arm_folder(arm)
    if RunDir(sft).finished_checkpoint("sft") is None:
        call(root, ["recipes/sft.py", *common(sft, seed), *shlex.split(SFT)], deadline)
    data: list[str] = []
    if PARTS[part].composed:
        train = root / f"train-{seed}{'-prefixes' * arm.prefixes}.jsonl"
        data = ["--data.train", str(train), "--data.heldout", str(root / "composed.jsonl")]
        for path, problems in (
            (data[1], training_problems(seed, prefixes=arm.prefixes)),
            (data[3], heldout_problems()),
        ):
            write_text(Path(path), "".join(f"{json.dumps(problem.as_row())}\n" for problem in problems))
    model = _policy(sft, "sft")
    for stage, options in arm.stages:
        first = ["--model", str(model)] if stage == arm.stages[0][0] else []
        call(root, [f"recipes/{stage}.py", *common(folder, seed), *first, *data, *shlex.split(options)], deadline)
    model = _policy(folder, arm.stages[-1][0]) if arm.stages else model
    files = ["--evaluate.files", data[3]] if data else []
    evaluated = folder.with_name(f"{folder.name}-evaluated")
    asked = ["--model", str(model), "--evaluate.samples", str(arm.samples), *files]
    call(root, ["recipes/evaluate.py", *common(evaluated, seed), *asked], deadline)
    return {**end_figures(evaluated), **(course(folder) if arm.stages else {})}


def arm_folder(arm: Arm) -> str:
    return arm.name.replace(",", "").replace(" ", "-").lower()


def common(folder: Path, seed: int) -> list[str]:
    return ["--scale", "tiny", "--run-dir", str(folder), "--seed", str(seed)]


def call(root: Path, command: Sequence[str], deadline: float) -> None:
    """Run a command of the product, and stop it by SIGTERM at the deadline.

    Raises `Stopped` at the deadline, and `RStarError` if the command fails.
    """
    with (root / "commands.log").open("a") as commands:
        commands.write(f"python {shlex.join(command)}\n")
    process = subprocess.Popen([sys.executable, *command], cwd=REPOSITORY, start_new_session=True)
    try:
        status = process.wait(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as ended:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise Stopped(f"{command[0]} was stopped") from ended
    if status:
        raise RStarError(f"{shlex.join(command)} ended with status {status}")


def _policy(folder: Path, stage: str) -> Path:
    checkpoint = RunDir(folder).finished_checkpoint(stage)
    if checkpoint is None:
        raise RStarError(f"{folder} has no finished checkpoint of {stage}")
    return checkpoint.path / "model"


# ---------------------------------------------------------------- figures of an arm


def end_figures(folder: Path) -> Row:
    """Figures of the evaluation at an arm's end."""
    row = read_rows(RunDir(folder).evaluations_path)[-1]
    return {
        "pass_at": row["pass_at"],
        "errors": row["tool_error_rate_correct"],
        "families": {name: of["avg_at_k"] for name, of in row["by_family"].items()},
    }


def course(folder: Path) -> Row:
    """Cost of training, and the held-out score during it: (updates, tokens, rollouts, score) at each evaluation.

    The rollouts by which stage 3 chooses its problems are a cost too; their tokens include the replies of tools.
    """
    run, choice = read_run(folder), filter_cost(folder)
    scores = {row["rl_step"]: row["avg_at_k"] for row in run.evaluations if row["set"] == "held-out"}
    tokens = rollouts = 0
    curve = [(0, 0, 0, scores[0])] if 0 in scores else []
    for number, row in enumerate(run.steps, 1):
        if row["stage"] == "stage3":
            (more_tokens, more_rollouts), choice = choice, (0, 0)
            tokens, rollouts = tokens + more_tokens, rollouts + more_rollouts
        tokens, rollouts = tokens + row["tokens_generated"], rollouts + row["rollouts"]
        if row["rl_step"] in scores:
            curve.append((number, tokens, rollouts, scores[row["rl_step"]]))
    errors = [tool_error_rate(run.steps[:POOL]), tool_error_rate(run.steps[-POOL:])]
    return {"tokens": tokens, "rollouts": rollouts, "curve": curve, "training_errors": errors}


def filter_cost(folder: Path) -> tuple[int, int]:
    """Tokens and rollouts of stage 3's choice of problems; 0 without one."""
    files = RunDir(folder).results_path.glob("stage3-filter-*.jsonl")
    rows = [row for path in files for row in read_rows(path)]
    return sum(sum(row["response_tokens"]) for row in rows), sum(row["k"] for row in rows)


def tool_error_rate(steps: Sequence[Row]) -> float:
    """Share of failed tool calls in the correct rollouts of these steps; 0 without a call."""
    calls = sum(row["calls_in_correct"] for row in steps)
    return sum((row["tool_error_rate_correct"] or 0.0) * row["calls_in_correct"] for row in steps) / max(1, calls)


def score_at(curve: Sequence[Sequence[float]], column: int, value: float) -> float | None:
    """The score, linearly interpolated, where a column of `course`'s curve has this value; None outside it.

    A curve that ends a little earlier (`SHORTFALL`) counts with its last score.
    """
    if curve and value * (1 - SHORTFALL) <= curve[-1][column] < value:
        return curve[-1][3]
    for before, after in pairwise(curve):
        if before[column] <= value <= after[column]:
            share = (value - before[column]) / max(1e-9, after[column] - before[column])
            return before[3] + share * (after[3] - before[3])
    return None


# ---------------------------------------------------------------- table and figure


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of the mean; None for a single value."""
    if len(values) < 2:
        return None
    t = T_975[min(len(values) - 1, len(T_975)) - 1]
    return t * stdev(values) / math.sqrt(len(values))


def cell(values: Sequence[float | None], show: Callable[[float], str]) -> str:
    """The mean of the known values with its interval, and their number where some are not known."""
    known = [value for value in values if value is not None]
    half, some = interval(known), f" ({len(known)} of {len(values)})" if len(known) < len(values) else ""
    return show(mean(known)) + ("" if half is None else f" ± {show(half).removeprefix('+')}") + some if known else ""


def rows_of(part: Part, rows: Sequence[Row], others: Sequence[Row] = ()) -> Iterator[list[str]]:
    """The table's rows; the arms of a seed are compared with its first one, or with `others` by seed."""
    of = {(row["arm"], row["seed"]): row for row in rows}
    firsts = [row for row in rows if row["arm"] == part.arms[0].name]
    base = {row["seed"]: row for row in (others if any(part.compared_with) else firsts)}
    for arm in part.arms:
        own = [row for (name, _), row in sorted(of.items()) if name == arm.name]
        if not own:
            continue
        pairs = [(row, base[row["seed"]]) for row in own if row["seed"] in base]
        largest = max(own[0]["pass_at"], key=int)
        score = [row["pass_at"]["1"] for row in own]
        equal = [
            [
                score_at(row["curve"], column, first[name]) if name in first and "curve" in row else None
                for row, first in pairs
            ]
            for column, name in ((1, "tokens"), (2, "rollouts"))
        ]
        true_reward = arm.name != "random reward"  # the other one calls training rollouts correct at random
        yield [
            arm.name,
            str(len(own)),
            cell(score, percent),
            cell([100 * (row["pass_at"]["1"] - first["pass_at"]["1"]) for row, first in pairs], "{:+.1f}".format),
            f"{cell([row['pass_at'][largest] for row in own], percent)} @{largest}",
            cell([row["errors"] for row in own], percent),
            cell([_errors_kept(row, first) for row, first in pairs], "{:.2f}".format) if true_reward else "",
            *(cell(values, percent) if true_reward else "" for values in equal),
            cell([row.get("tokens") for row in own], "{:,.0f}".format),
        ]


def _errors_kept(row: Row, first: Row) -> float | None:
    """Tool error rate of the last training steps over that of the first arm's first steps."""
    if not row.get("training_errors") or not first.get("training_errors") or not first["training_errors"][0]:
        return None
    return row["training_errors"][1] / first["training_errors"][0]


HEAD = ("", "seeds", "pass@1", "less the first arm's [points]", "pass@k", "tool errors in correct rollouts",
        "of the first arm's at the start", "pass@1 at its tokens", "pass@1 at its rollouts", "tokens")  # fmt: skip


def report(root: Path) -> Path:
    """Write evidence.md and evidence.svg from the results so far."""
    results = read_rows(root / "results.jsonl") if (root / "results.jsonl").exists() else []
    texts, bars = ["# Evidence"], list[tuple[str, float, float]]()
    for name, part in PARTS.items():
        rows = [row for row in results if row["part"] == name]
        if not rows:
            continue
        others = [row for row in results if (row["part"], row["arm"]) == part.compared_with]
        texts += [f"## {name}. {part.title}", table(HEAD, rows_of(part, rows, others))]
        if part.composed:
            families = sorted({family for row in rows for family in row["families"]})
            per = [
                [
                    f"{family}, {arm.name}",
                    cell([row["families"][family] for row in rows if row["arm"] == arm.name], percent),
                ]
                for family in families
                for arm in part.arms
            ]
            texts.append(table(("pass@1 of a family", ""), per))
        for arm in part.arms:
            own = [row["pass_at"] for row in rows if row["arm"] == arm.name]
            for k in dict.fromkeys((max(own[0], key=int), "1") if part.composed else ("1",)) if own else ():
                values = [pass_at[k] for pass_at in own]
                bars.append((f"{name}: {arm.name}, pass@{k}", mean(values), interval(values) or 0.0))
    texts.append(
        "A figure with ± is the mean over seeds with its 95 % interval (Student's t). "
        "A figure without ± is of one seed: its difference from other seeds is not known. "
        "Where scores are compared at the first arm's cost, seeds in which an arm spent less are missing, such as "
        "(2 of 3); an empty cell has none. "
        "Part B2 is compared with part B's `after RL`."
    )
    write_text(root / "evidence.svg", svg(bars))
    write_text(root / "evidence.md", "\n\n".join(texts) + "\n")
    return root / "evidence.md"


def svg(bars: Sequence[tuple[str, float, float]]) -> str:
    """Horizontal bars of shares, each with its interval."""
    left, width, line = 260, 400, 22
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 70}" height="{line * len(bars) + 10}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for number, (label, share, half) in enumerate(bars):
        y = line * number + 8
        low, high = (left + width * min(1.0, max(0.0, share + sign * half)) for sign in (-1, 1))
        parts += [
            f'<text x="{left - 8}" y="{y + 11}" text-anchor="end">{label}</text>',
            f'<rect x="{left}" y="{y}" width="{width * share:.1f}" height="14" fill="#4c78a8"/>',
            f'<path d="M{low:.1f} {y + 7}H{high:.1f}" stroke="black"/>',
            f'<text x="{high + 6:.1f}" y="{y + 11}">{percent(share)}</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status as for recipes."""

    def act() -> None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        print(experiment(options_of(EvidenceConfig, argv, description=__doc__)))

    return status_of(act)


if __name__ == "__main__":
    sys.exit(main())
