"""`python -m tests.chaos.resampled`: after a kill, are only the turns under way sampled again?

Stage 1 at scale tiny, its steps as large as they are there. The driver is killed by SIGKILL once half, or nine tenths,
of a step's rollouts have ended, and the same command is started again. Engines note after every decode step how many
tokens they have sampled. Tokens sampled for the step beyond those that it has in the end were sampled again. They may
not be more than those of turns that had not finished, which the journal does not have. With `--evaluation` the driver,
or the worker, of an evaluation is killed; an undisturbed one says how many tokens it needs.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from rstar_ray.agent.journal import read
from rstar_ray.run_dir.folder import RunDir
from tests.chaos.run import REPOSITORY, Run, make_policy
from tests.chaos.seams import SAMPLED

OPTIONS = (
    "--prompts-per-step 32 --rollout.max-response-tokens 256 --engine.replicas 1 --engine.cpus-per-replica 0.8"
    " --evaluate.every-steps 100000 --data.num-train 2000 --balancer.risk 0.05"
)
PROBLEMS, SAMPLES = 96, 8
EVALUATION = (
    f"--scale tiny --evaluate.num-problems {PROBLEMS} --evaluate.samples {SAMPLES} --evaluate.max-response-tokens 256"
    " --evaluate.temperature 1.0 --engine.replicas 1 --engine.cpus-per-replica 0.8"
)


MARGIN = 0.01
"""Of a step's tokens: sampled after the journal was last read and before the kill."""


def on_disk(files: Iterable[Path]) -> tuple[int, int]:
    """Rollouts that have ended, and sampled tokens of finished turns, by these files of the journal."""
    ended: set[str] = set()
    turns: dict[tuple[str, int], int] = {}
    for path in files:
        for record, _ in read(path):
            turns[record.rollout_id, record.start] = sum(turn["num_tokens"] for turn in record.turns)
            if record.stop_reason:
                ended.add(record.rollout_id)
    return len(ended), sum(turns.values())


def of_step(run: Run, step: int) -> tuple[int, int]:
    return on_disk((RunDir(run.path).journal_path / f"stage1-step-{step:06d}").glob("*.turns"))


def sampled(run: Run, since_s: float) -> int:
    """Tokens that engines have sampled since then."""
    lines = [line.split() for path in run.control.glob(f"{SAMPLED}-*") for line in path.read_text().splitlines()]
    return sum(int(line[1]) for line in lines if len(line) == 2 and float(line[0]) >= since_s)


def kill_at(run: Run, share: float, rollouts: int, over_s: float) -> dict[str, float]:
    """End the driver in the next step, once this share of its rollouts has ended; what was lost by it."""
    step = run.steps() + 2  # a whole one
    if not run.wait(lambda: run.steps() == step - 1, over_s, every_s=0.005):
        raise TimeoutError(f"no step {step - 1}")
    began_s = time.monotonic()
    if not run.wait(lambda: of_step(run, step)[0] >= share * rollouts, over_s, every_s=0.02):
        raise TimeoutError(f"step {step} did not get so far")
    assert run.driver is not None
    family = run.note_family()
    run.driver.send_signal(signal.SIGKILL)
    for process in family:  # what a killed driver leaves ends by itself within seconds; here at once
        if process.is_running():
            process.kill()
    time.sleep(1.0)
    (done, kept), before = of_step(run, step), sampled(run, began_s)
    went_on_s = time.monotonic()
    run.keep_up()
    if not run.wait(lambda: run.steps() >= step, over_s, every_s=0.005):
        raise TimeoutError(f"the run did not come back to step {step}")
    again = sampled(run, went_on_s) - sampled(run, time.monotonic())
    row = next(row for row in run.rows() if row["step"] == step)
    tokens = row["tokens_generated"]
    return {
        "step": step,
        "rollouts_ended": round(done / rollouts, 3),
        "tokens_of_the_step": tokens,
        "sampled_before": before,
        "under_way": before - kept,
        "sampled_after": again,
        "sampled_again": before + again - tokens,
        "share": round((before + again - tokens) / tokens, 4),
        "only_turns_under_way": again - tokens + kept <= MARGIN * tokens,
    }


class Evaluation(Run):
    """The evaluation of a folder's policy, on one replica."""

    def _command(self) -> list[str]:
        command = [sys.executable, "tests/chaos/driver.py", "evaluate", "--run-dir", str(self.path)]
        return [*command, "--model", str(self._policy), *EVALUATION.split()]

    def on_disk(self) -> tuple[int, int]:
        """As the function of this name; nothing once the evaluation has ended."""
        return on_disk(RunDir(self.path).journal_path.glob("*/*/*.turns"))

    def finish(self, over_s: float) -> None:
        assert self.driver is not None
        if self.driver.wait(over_s):
            raise RuntimeError(f"the evaluation failed: {self.said[-1].line}")


def evaluate(folder: Path, policy: Path, whom: str, share: float, over_s: float) -> tuple[int, int]:
    """Tokens sampled for an evaluation of which the driver, the worker or nobody is killed, and those that were under
    way at the kill."""
    run = Evaluation(folder, policy)
    (run.control / SAMPLED).touch()
    run.start()
    try:
        if whom != "nobody" and not run.wait(
            lambda: run.on_disk()[0] >= share * PROBLEMS * SAMPLES, over_s, every_s=0.02
        ):
            raise TimeoutError("the evaluation did not get so far")
        killed: list[psutil.Process] = []
        if whom == "driver":
            killed = run.note_family()
        elif whom == "worker":
            worker = run.starting()
            assert worker is not None
            killed = [worker]
        for process in killed:
            process.kill()
        under_way = sampled(run, 0.0) - run.on_disk()[1]
        if whom == "driver":
            time.sleep(1.0)
            run.start()
        run.finish(over_s)
        return sampled(run, 0.0), under_way
    finally:
        run.end()


def evaluations(options: argparse.Namespace) -> int:
    folder, policy = Path(tempfile.mkdtemp(prefix="evaluated-")), make_policy(Path(options.policy))
    undisturbed, _ = evaluate(folder / "whole", policy, "nobody", 0.0, options.over_s)
    most, kept_all = 0.0, True
    for number in range(options.kills):
        for share in options.shares:
            for whom in ("driver", "worker"):
                tokens, under_way = evaluate(folder / f"{number}-{share}-{whom}", policy, whom, share, options.over_s)
                again = tokens - undisturbed
                row = {"killed": whom, "rollouts_ended": share, "undisturbed": undisturbed, "sampled": tokens}
                row |= {"under_way": under_way, "share": round(again / undisturbed, 4)}
                print(json.dumps(row), flush=True)
                most = max(most, again / undisturbed)
                kept_all = kept_all and again <= under_way + MARGIN * undisturbed
    found = {"most_sampled_again": round(most, 4), "only_turns_under_way": kept_all}
    print(json.dumps({"kills": 2 * options.kills * len(options.shares), **found}))
    return 0 if kept_all else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=3, help="at each share")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.9], help="of a step's rollouts")
    parser.add_argument("--over-s", type=float, default=300.0)
    parser.add_argument("--policy", default=str(REPOSITORY / "runs" / "chaos"))
    parser.add_argument("--evaluation", action="store_true", help="of an evaluation instead of training steps")
    options = parser.parse_args()
    if options.evaluation:
        return evaluations(options)
    folder = Path(tempfile.mkdtemp(prefix="resampled-"))
    run = Run(folder, make_policy(Path(options.policy)), options=OPTIONS.split())
    found: list[dict[str, float]] = []
    (run.control / SAMPLED).touch()
    try:
        run.start()
        if not run.wait(lambda: run.steps() > 0, options.over_s):
            raise TimeoutError("the run did not start")
        for share in options.shares * options.kills:
            found.append(kill_at(run, share, 256, options.over_s))
            print(json.dumps(found[-1]), flush=True)
    finally:
        run.end()
    most = max(one["share"] for one in found)
    kept_all = all(one["only_turns_under_way"] for one in found)
    print(json.dumps({"kills": len(found), "most_sampled_again": most, "only_turns_under_way": kept_all}))
    return 0 if kept_all else 1


if __name__ == "__main__":
    sys.exit(main())
