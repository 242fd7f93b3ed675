"""`make chaos`: injects faults into one real run at scale tiny, one after another; prints a line for each, then JSON.

A fault is injected at a random time of a step, or in its phase (`tests.chaos.faults`). The run must detect it, log it,
lose nothing and return to full speed (`tests.chaos.campaign`).
"""

import argparse
import json
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rstar_ray.run_dir.folder import QUARANTINED
from rstar_ray.run_dir.verify_run import faults as faults_of_run
from tests.chaos.campaign import OVER_S, Campaign, Case, summary
from tests.chaos.faults import AGENT_KINDS, KINDS, Kind
from tests.chaos.run import REPOSITORY, Run, make_policy


def verified(run: Run) -> list[str]:
    """Errors in the run directory, one line each.

    Errors are expected in checkpoints that the run has quarantined or reported as missing.
    """
    found = faults_of_run(run.path)
    known = any("the row is missing" in line.line for line in run.said)
    return [
        line for line in found if QUARANTINED not in line and not (known and line.startswith("ledger.jsonl: the steps"))
    ]


def chosen(pattern: str, options: str) -> list[Kind]:
    """Kinds whose name matches; those of agents only for a run with agents."""
    kinds = KINDS | (AGENT_KINDS if "--agent." in options else {})
    return [kind for name, kind in kinds.items() if re.search(pattern, name)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="", help="a regular expression: only those whose name has this in it")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--folder", default="", help="where the run and its log go; a temporary folder")
    parser.add_argument("--policy", default=str(REPOSITORY / "runs" / "chaos"), help="where the policy is kept")
    parser.add_argument("--over-s", type=float, default=OVER_S, help="a fault that is not over then is a hang [s]")
    parser.add_argument("--staleness", type=int, default=0, help="of the run (docs/async.md)")
    parser.add_argument("--options", default="", help="of the run, such as an agent (--agent.run)")
    parser.add_argument("--list", action="store_true", help="print the kinds")
    options = parser.parse_args()
    if options.list:
        print("\n".join(kind.name for kind in chosen(options.kinds, options.options)))
        return 0
    if options.seeds < 1 or not chosen(options.kinds, options.options):
        parser.error("no fault is chosen: --kinds is to be in a name that --list has, --seeds 1 or more")
    folder = Path(options.folder or tempfile.mkdtemp(prefix="chaos-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    run_options = ("--staleness", str(options.staleness), *shlex.split(options.options))
    run = Run(folder, make_policy(Path(options.policy)), options=run_options)
    cases: list[Case] = []
    wrong: Sequence[str] = ()
    campaign = Campaign(run, options.over_s)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    try:
        campaign.begin()
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for kind in chosen(options.kinds, options.options):
                cases.append(campaign.play(kind, seed))
                print(json.dumps(asdict(cases[-1])), flush=True)
    finally:
        left = run.end()
        wrong = [*verified(run), *(f"left behind: {name}" for name in left)]
        print("\n".join(wrong), flush=True)
        print(json.dumps(summary(cases)), flush=True)
    return 0 if all(case.passed for case in cases) and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
