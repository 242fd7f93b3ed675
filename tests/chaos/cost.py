"""`python -m tests.chaos.cost --run-dir DIR --steps 15 ...`: what surviving costs stage 1, whose options follow.

What holds the driver up is timed in it: taking a checkpoint, writing the ledger, and the detector's looks. Writing a
checkpoint's files and answering probes is done by other processes, beside the steps, and is not in these figures; but
for a stage's last checkpoint, which has no step beside it: it is timed until it is on disk, and told apart.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from rstar_ray.run_dir.durable import read_rows

seconds: dict[str, list[float]] = defaultdict(list)


def timed(what: str, work: Callable[..., Any], *, awaited: bool = False) -> Callable[..., Any]:
    @wraps(work)
    def called(*args: Any, **options: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return work(*args, **options)
        finally:
            seconds[what].append(time.perf_counter() - began_s)

    @wraps(work)
    async def waited_for(*args: Any, finishes: bool = False, **options: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return await work(*args, finishes=finishes, **options)
        finally:
            seconds[f"last of the {what}" if finishes else what].append(time.perf_counter() - began_s)

    return waited_for if awaited else called


def main() -> None:
    import rstar_ray.stages as stages
    from actors.health.watchdog import Watchdog
    from actors.launch.run import launch
    from recipes.stage1 import STAGE_1
    from rstar_ray.checkpointing import Saving

    Saving.take = timed("checkpoints", Saving.take, awaited=True)
    stages.append_ledger = timed("ledger", stages.append_ledger)
    Watchdog.tick = timed("detector", Watchdog.tick)
    Watchdog._report_changes = timed("detector", Watchdog._report_changes)  # pyright: ignore[reportPrivateUsage]
    rows_path = Path(sys.argv[sys.argv.index("--run-dir") + 1]) / "metrics.jsonl"
    try:
        launch([STAGE_1])
    finally:
        steps = [row["step_s"] for row in read_rows(rows_path) if row["stage"] == STAGE_1.stage]
        found: dict[str, Any] = {"steps": len(steps), "of_steps_s": round(sum(steps), 2)}
        for what, each in seconds.items():
            found[what] = {"times": len(each), "s": round(sum(each), 4), "longest_s": round(max(each), 4)}
        found["share"] = round(sum(map(sum, seconds.values())) / sum(steps), 5)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
