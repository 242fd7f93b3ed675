"""The picture of one step: a lane per replica, rollouts as bars, tool waits as gaps, and KV use over time.

The twin and real runs give the same `Span`s and `KvSample`s. matplotlib is imported when a picture is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path


class Activity(StrEnum):
    """What a rollout does in a span."""

    QUEUED = "queued"  # admitted, but waiting inside the engine
    GENERATE = "generate"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Span:
    """One rollout, one activity, on one replica."""

    replica_id: str
    rollout_id: str
    activity: Activity
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class KvSample:
    """KV tokens in use on one replica at one moment."""

    replica_id: str
    at_s: float
    used_tokens: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """What one replica did."""

    spans: Sequence[Span]
    kv_samples: Sequence[KvSample]
    kv_capacity_tokens: int

    def since(self, start_s: float) -> "Timeline":
        """The same, with that moment as second 0."""
        spans = [replace(span, start_s=span.start_s - start_s, end_s=span.end_s - start_s) for span in self.spans]
        samples = [replace(sample, at_s=sample.at_s - start_s) for sample in self.kv_samples]
        return Timeline(spans, samples, self.kv_capacity_tokens)


def rows_of(spans: Sequence[Span]) -> dict[str, int]:
    """A row within its lane for every rollout on a replica: the lowest that is free while it lives there.

    Keys are "replica/rollout". At most as many rows as rollouts are ever there at once.
    """
    lives: dict[tuple[str, str], tuple[float, float]] = {}
    for span in spans:
        key = (span.replica_id, span.rollout_id)
        start, end = lives.get(key, (span.start_s, span.end_s))
        lives[key] = (min(start, span.start_s), max(end, span.end_s))
    rows: dict[str, int] = {}
    free_from: dict[str, list[float]] = {}
    for (replica_id, rollout_id), (start, end) in sorted(lives.items(), key=lambda item: item[1]):
        lane = free_from.setdefault(replica_id, [])
        row = next((index for index, free in enumerate(lane) if free <= start), len(lane))
        if row == len(lane):
            lane.append(end)
        else:
            lane[row] = end
        rows[f"{replica_id}/{rollout_id}"] = row
    return rows


def draw_step(
    path: Path,
    spans: Sequence[Span],
    kv_samples: Sequence[KvSample],
    *,
    kv_capacity_tokens: int,
    title: str,
    most_lanes: int = 8,
) -> None:
    """Write the picture (the file's suffix says which format); at most `most_lanes` replicas are shown."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.collections import LineCollection

    replicas = sorted({span.replica_id for span in spans})
    shown = replicas[:most_lanes]
    colours = {Activity.GENERATE: "#3465a4", Activity.TOOL: "#f5b942", Activity.QUEUED: "#d0d0d0"}
    rows = rows_of(spans)
    height = max(rows.values(), default=0) + 1
    figure, axes = plt.subplots(
        len(shown) + 1, 1, figsize=(12, 1.2 * len(shown) + 2.2), sharex=True, height_ratios=[1.0] * len(shown) + [1.4]
    )
    for axis, replica_id in zip(axes[:-1], shown, strict=True):
        for activity, colour in colours.items():
            lines = [
                [(span.start_s, row), (max(span.end_s, span.start_s), row)]
                for span in spans
                if span.replica_id == replica_id and span.activity is activity
                for row in (rows[f"{replica_id}/{span.rollout_id}"],)
            ]
            axis.add_collection(LineCollection(lines, colors=colour, linewidths=max(0.4, 60 / height), label=activity))
        axis.set_ylim(-1, height)
        axis.set_yticks([])
        axis.set_ylabel(replica_id, rotation=0, ha="right", va="center", fontsize=8)
    axes[0].legend(loc="upper right", fontsize=7, ncols=3)
    axes[0].set_title(title if len(shown) == len(replicas) else f"{title} ({len(shown)} of {len(replicas)} replicas)")
    kv_axis = axes[-1]
    for replica_id in shown:
        samples = [sample for sample in kv_samples if sample.replica_id == replica_id]
        kv_axis.plot(
            [sample.at_s for sample in samples],
            [100.0 * sample.used_tokens / kv_capacity_tokens for sample in samples],
            linewidth=0.8,
        )
    kv_axis.axhline(100.0, color="black", linewidth=0.6, linestyle="--")
    kv_axis.set_ylabel("KV in use (%)")
    kv_axis.set_xlabel("seconds")
    kv_axis.set_ylim(0, 108)
    kv_axis.set_xlim(0, max((span.end_s for span in spans), default=1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
