"""`python -m tests.chaos.identity`: compares a run that was killed repeatedly with one that was not.

Two runs of the same command: one undisturbed, and one whose driver is killed (SIGKILL) at random times and started
again. Every step's row (without times), every rollout's status and tokens, and the weights of the last checkpoint must
be equal. Prints the cost of each kill: steps repeated, and seconds until the run had caught up.

`--second-options` are options of the second run only, such as an agent (`--agent.run`) instead of the built-in loop.
With `--kills 0` it is not killed.

With `--staleness` above 0 there is no undisturbed run: steps that had ended before a kill must have the same rows,
tokens and weights after it; later steps may be sampled differently (docs/determinism.md).
"""

import argparse
import itertools
import json
import random
import re
import shlex
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rstar_ray.checkpointing import BALANCER_STATE
from rstar_ray.run_dir.durable import read_json, read_rows
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.run_dir.ledger import LEDGER
from rstar_ray.run_dir.served_weights import read_weights
from tests.chaos.run import REPOSITORY, Run, make_policy

UNSTABLE = ("balancer", "longest", "last_ended", "publish/", "memory_bytes/", "restarts", "judge_retries")
"""Prefixes of metrics that depend on machines and retries; metrics of time end in `_s`."""


def deterministic(row: dict[str, Any]) -> dict[str, Any]:
    """A step's row without metrics of time, machines and retries."""
    return {name: row[name] for name in row if not name.endswith("_s") and not name.startswith(UNSTABLE)}


def computed(run: Run) -> list[dict[str, Any]]:
    """A run's rows without times, its ledger, and the tokens of every recorded rollout."""
    rows = [deterministic(row) for row in run.rows()]
    return [*rows, *read_rows(run.path / LEDGER), *_tokens(run)]


def _tokens(run: Run) -> list[dict[str, Any]]:
    """Tokens by rollout id, as an evaluation's rollouts are recorded in the order in which they end.

    An evaluation's ids contain a digest of its settings, among them the agent.
    """
    rollouts = [row for path in sorted(run.path.glob("trajectories/*.jsonl")) for row in read_rows(path)]
    return [
        {
            "rollout": (row["stage"], row["step"], re.sub(r"(evaluate/.*)/[0-9a-f]{12}/", r"\1/", row["rollout_id"])),
            "prompt": row["prompt_ids"],
            "turns": [(turn["completion_ids"], turn["logprobs"], turn["tool_response"]) for turn in row["turns"]],
            "reward": row["reward"],
        }
        for row in sorted(rollouts, key=lambda row: (row["stage"], row["step"], row["rollout_id"]))
    ]


def weights(run: Run) -> dict[str, str]:
    """Checksums of the last checkpoint's files except the balancer's state, which repeated work changes."""
    newest = RunDir(run.path).newest_checkpoint("stage1")
    assert newest is not None
    files = read_json(newest.path / "manifest.json")["files"]
    return {name: file["sha256"] for name, file in files.items() if name != BALANCER_STATE}


def finish(run: Run, steps: int, seconds: float) -> bool:
    """True if the command ends in time, after its last step."""
    return run.wait(lambda: run.driver is None or run.driver.poll() is not None, seconds) and run.steps() == steps


def _ended(run: Run, steps: int) -> bool:
    """True if the run has ended: after a kill in the last step there may be no further step."""
    return run.steps() == steps and (run.driver is None or run.driver.poll() is not None)


Ended = dict[str, Any]
"""Records of steps that have ended, by table and step."""


def ended(run: Run) -> Ended:
    """Rows, statuses, tokens and checksums of the steps that have ended by the record of served weights."""
    weights = {row.step: row for row in read_weights(RunDir(run.path).journal_path)}
    tables = {
        "row": [deterministic(row) for row in run.rows()],
        "ledger": read_rows(run.path / LEDGER),
        "weights": [asdict(row) for row in weights.values() if row.step],
    }
    found = {f"{name} {row['step']}": row for name, rows in tables.items() for row in rows if row["step"] in weights}
    for token_row in _tokens(run):
        if token_row["rollout"][1] in weights and "evaluate/" not in token_row["rollout"][2]:
            found[f"tokens {token_row['rollout']}"] = token_row
    return found


def play(
    run: Run, kills: int, rng: random.Random, *, steps: int, over_s: float, before: list[Ended] | None = None
) -> list[dict[str, Any]]:
    """Kill the driver `kills` times during the run; returns the costs. `before` receives the records at each kill."""
    costs: list[dict[str, Any]] = []
    for kill in range(kills):
        at_least = steps * kill // kills  # spread over the run
        if not run.wait(lambda least=at_least: run.steps() > least, over_s):
            raise TimeoutError(f"no step after {at_least}")
        time.sleep(rng.uniform(0.0, 3.0))
        assert run.driver is not None
        if run.driver.poll() is not None:
            break
        run.note_family()
        killed_s, said = time.monotonic(), len(run.said)
        run.driver.send_signal(signal.SIGKILL)
        run.driver.wait(20)
        reached = run.steps()  # another step may have ended just before
        if before is not None:
            before.append(ended(run))
        run.keep_up()
        if not run.wait(lambda reached=reached: run.steps() > reached or _ended(run, steps), over_s):
            raise TimeoutError(f"the run did not come back after kill {kill + 1}")
        resumed = [line.line for line in run.said[said:] if "resuming after step" in line.line]
        anew = reached if _ended(run, steps) else 0  # it had ended, or starts again without a checkpoint
        saved = int(resumed[0].rpartition(" ")[2]) if resumed else anew
        lost = reached - saved
        costs.append({"kill": kill + 1, "after_step": reached, "steps_lost": lost,
                      "caught_up_s": round(time.monotonic() - killed_s, 1)})  # fmt: skip
        print(json.dumps(costs[-1]), flush=True)
    return costs


def repeats_ended_steps(options: argparse.Namespace, folder: Path, policy: Path) -> int:
    """Check that steps that had ended at a kill have the same records in the resumed run; returns the exit status."""
    recorded = ("--checkpoint.trajectories-every-steps", "1", "--checkpoint.every-steps", "6")
    ahead = ("--staleness", str(options.staleness), "--evaluate.every-steps", "0")
    run, before = Run(folder / "killed", policy, steps=options.steps, options=(*recorded, *ahead)), list[Ended]()
    try:
        run.start()
        rng = random.Random(options.seed)
        costs = play(run, options.kills, rng, steps=options.steps, over_s=options.over_s, before=before)
        whole = finish(run, options.steps, options.over_s + 20 * options.steps)
    finally:
        run.end()
    after = ended(run)
    compared = [(name, was, after.get(name)) for one in before for name, was in one.items()]
    differing = [(name, was, now) for name, was, now in compared if was != now]
    print("\n".join(json.dumps(one)[:600] for one in differing[:3]))
    lost = max((cost["steps_lost"] for cost in costs), default=0)
    found = {"steps": options.steps, "staleness": options.staleness, "kills": len(costs), "compared": len(compared)}
    print(json.dumps(found | {"that_differ": len(differing), "ended": whole, "most_steps_lost": lost}))
    return 0 if whole and lost and compared and not differing else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--over-s", type=float, default=300.0)
    parser.add_argument("--folder", default="")
    parser.add_argument("--policy", default=str(REPOSITORY / "runs" / "chaos"))
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--options", default="", help="of both runs")
    parser.add_argument("--second-options", default="", help="of the second run only")
    options = parser.parse_args()
    folder = Path(options.folder or tempfile.mkdtemp(prefix="identity-")).absolute()
    policy = make_policy(Path(options.policy))
    if options.staleness:
        return repeats_ended_steps(options, folder, policy)
    both = ["--checkpoint.trajectories-every-steps", "1", *shlex.split(options.options)]
    alone = Run(folder / "alone", policy, steps=options.steps, options=both)
    second = [*both, *shlex.split(options.second_options)]
    killed = Run(folder / "killed", policy, steps=options.steps, options=second)
    try:
        alone.start()
        if not finish(alone, options.steps, options.over_s + 20 * options.steps):
            print("the run alone did not end", file=sys.stderr)
            return 1
        killed.start()
        costs = play(killed, options.kills, random.Random(options.seed), steps=options.steps, over_s=options.over_s)
        whole = finish(killed, options.steps, options.over_s + 20 * options.steps)
    finally:
        for run in (alone, killed):
            run.end()
    pairs = itertools.zip_longest(computed(alone), computed(killed))
    differing = [(ours, theirs) for ours, theirs in pairs if ours != theirs]
    print("\n".join(json.dumps(pair)[:600] for pair in differing[:3]))
    same_weights = weights(alone) == weights(killed)
    found = {"steps": options.steps, "kills": len(costs), "rows_that_differ": len(differing)}
    lost = max((cost["steps_lost"] for cost in costs), default=0)
    found |= {"same_bytes": same_weights, "ended": whole, "most_steps_lost": lost}
    print(json.dumps(found))
    return 0 if whole and same_weights and not differing else 1


if __name__ == "__main__":
    sys.exit(main())
