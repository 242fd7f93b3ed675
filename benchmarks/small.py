"""Shared by benchmarks: settings for a tiny model on the CPU, spreads, and a process with its children."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from rstar_ray.config import RunConfig, with_values

SMALL = with_values(
    RunConfig(),
    {
        "engine.dtype": "float32",
        "engine.max_context_tokens": 2_048,
        "engine.max_running": 128,
        "rollout.max_response_tokens": 1_024,
        "evaluate.max_response_tokens": 1_024,
        "learner.dtype": "float32",
        "learner.zero": 1,
        "learner.activation_checkpointing": False,
        "learner.micro_batch_tokens": 2_048,
    },
)


def spread(values: Sequence[float], *, digits: int = 3) -> dict[str, float]:
    """Median, smallest and largest."""
    figures = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in figures.items()}


def process_tree(root: int) -> dict[int, list[str]]:
    """The process and all its descendants, with the fields of /proc/PID/stat after the command."""
    found: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
    tree = {root}
    while more := {pid for pid, fields in found.items() if int(fields[1]) in tree} - tree:
        tree |= more
    return {pid: found[pid] for pid in tree & found.keys()}
