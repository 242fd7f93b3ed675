"""What the analysis found, as a page of markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.entropy.zones import MARKED_SHARE, REFLECTION_TOKENS, Zone, ZoneCount
from rstar_ray.report.findings import percent
from rstar_ray.report.markdown import table
from rstar_ray.report.run_record import stage_title


@dataclass(frozen=True, slots=True)
class Example:
    """What a policy wrote right after an error, its marked tokens in guillemets."""

    problem: str
    right: bool
    text: str
    entropy: float  # nats, of its most uncertain token


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One policy's counts over its trajectories."""

    stage: str
    step: int
    num_trajectories: int
    counts: list[ZoneCount]
    examples: list[Example]


def reflection_example(
    row: dict[str, Any],
    zone_T: Sequence[Zone],
    texts_T: Sequence[str],
    entropy_T: NDArray[np.float64],
    marked_T: NDArray[np.bool_],
) -> Example | None:
    """The first reflection on an error in a trajectory; None where there is none, or none of it is marked."""
    if Zone.AFTER_ERROR not in zone_T:
        return None
    first = zone_T.index(Zone.AFTER_ERROR)
    last = next((place for place in range(first, len(zone_T)) if zone_T[place] is not Zone.AFTER_ERROR), len(zone_T))
    if not marked_T[first:last].any():
        return None
    shown = [f"«{text}»" if hit else text for text, hit in zip(texts_T[first:last], marked_T[first:last], strict=True)]
    return Example(row["problem"], row["reward"] >= 1, "".join(shown), float(entropy_T[first:last].max()))


def markdown_analysis(found: Sequence[Checkpoint]) -> str:
    """A table of zones for each policy, and what was written after errors."""
    parts = [
        "# Where the policy hesitates",
        f"The {MARKED_SHARE:.0%} of sampled tokens with the highest entropy are marked in every trajectory. "
        f"*Reflection* is what a turn writes in its first {REFLECTION_TOKENS} tokens after a tool's answer; marked "
        f"tokens of prose are forking tokens. *Marked here* above {MARKED_SHARE:.0%} says that the policy is less sure "
        "in this part than elsewhere.",
    ]
    for one in found:
        total = sum(count.marked for count in one.counts) or 1
        rows = [
            [
                count.zone.value,
                f"{count.tokens:,}",
                f"{count.marked:,}",
                percent(count.marked / total),
                percent(count.density) if count.tokens else "–",
                f"{count.entropy_mean:.3f}" if count.tokens else "–",
            ]
            for count in one.counts
        ]
        head = ["", "tokens", "marked", "of all marked", "marked here", "mean entropy, nats"]
        parts += [
            f"## {stage_title(one.stage)}, step {one.step} ({one.num_trajectories} trajectories)",
            table(head, rows),
        ]
        for example in one.examples:
            verdict = "right" if example.right else "wrong"
            parts += [f"After an error ({verdict} in the end): *{example.problem}*", f"```\n{example.text}\n```"]
    return "\n\n".join(parts) + "\n"
