"""What the paper decides by whether a stage goes on (arXiv:2508.20722 section 4.3), over each stage's last steps."""

from collections.abc import Sequence

from rstar_ray.algorithm.stage_end import SETTLED_WINDOW, WINDOW
from rstar_ray.report.findings import percent
from rstar_ray.report.run_record import Row, RunRecord, stage_title

STAGE_END_HEAD = (
    "stage",
    "steps",
    "reward, before",
    "reward",
    "truncated, before",
    "truncated",
    "all right",
    "all wrong",
)
STAGE_END_NOTE = (
    f"Means over the last {SETTLED_WINDOW} steps of a stage and the {SETTLED_WINDOW} steps before them, of all "
    f"rollouts before resampling. *All right* and *all wrong* are shares of problems, over the last {WINDOW} steps."
)
"""What the figures are."""


def stage_end_rows(run: RunRecord) -> list[list[str]]:
    """A row per RL stage: whether truncation has settled, the reward stands, and problems are left to learn from."""
    rows: list[list[str]] = []
    for span in run.spans:
        steps = [row for row in run.steps if row["stage"] == span.name]
        late, early = steps[-SETTLED_WINDOW:], steps[-2 * SETTLED_WINDOW : -SETTLED_WINDOW]
        rows.append(
            [
                stage_title(span.name),
                str(len(steps)),
                _reward(early),
                _reward(late),
                percent(_mean(early, "share_truncated")),
                percent(_mean(late, "share_truncated")),
                percent(_mean(steps[-WINDOW:], "share_all_right"), 0),
                percent(_mean(steps[-WINDOW:], "share_all_wrong"), 0),
            ]
        )
    return rows


def _reward(steps: Sequence[Row]) -> str:
    reward = _mean(steps, "reward_mean")
    return "–" if reward is None else f"{reward:.2f}"


def _mean(steps: Sequence[Row], name: str) -> float | None:
    return sum(row[name] for row in steps) / len(steps) if steps else None
