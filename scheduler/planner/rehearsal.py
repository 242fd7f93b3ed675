"""Compares planned and measured figures of a rehearsal."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rstar_ray.algorithm.state_bytes import BYTES
from rstar_ray.config import RunConfig
from rstar_ray.config.gpus import shares_gpus
from scheduler.planner.capacity import Pools, adapter_parameters, learner_gb, plan_pools, pools_of, publish_parts
from scheduler.planner.gpus import EXPECTED, nearest_gpu
from scheduler.planner.model_shape import GB, ModelShape
from scheduler.traces.stage_traces import StageShape

BYTES_TOLERANCE = 0.05
TIMES_FACTOR = 2.0  # the plan assumes shares of peak performance: a larger difference is a remark, not an error
MEMORY_FACTOR = 1.1
"""A run that needs this many times the planned memory may not fit although the plan does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Measurements of a run of a few steps."""

    steps: tuple[Mapping[str, Any], ...]  # rows of metrics.jsonl
    evaluations: int  # rows of evaluations.jsonl
    learner_bytes: int  # the checkpoint's weights and moments
    model_bytes: int  # the checkpoint's exported model
    worker_back_s: float | None  # from the kill to its next process; None if it did not return
    worker_problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure; `wrong` if it shows that the run does not follow the plan."""

    what: str
    planned: float | None  # None: not planned
    seen: float | None  # None: not measured
    unit: str
    wrong: bool = False
    remark: str = ""

    def row(self) -> dict[str, Any]:
        return asdict(self)


def compared(config: RunConfig, model: ModelShape, gpu_memory_gb: float, seen: Seen) -> list[Line]:
    """Events, bytes, memory and times; without a GPU no time is planned."""
    return [*_events(config, seen), *_bytes(config, model, seen), *_memory(config, model, seen),
            *_times(config, model, gpu_memory_gb, seen)]  # fmt: skip


def as_table(lines: Sequence[Line]) -> str:
    """A table of computed (planned) and measured (seen) figures."""
    rows = [("", "planned", "seen", "ratio", "")]
    for line in lines:
        ratio = f"{line.seen / line.planned:.2f}" if line.seen is not None and line.planned else "-"
        verdict = "NOT AS PLANNED" if line.wrong else "ok"
        remark = f"{verdict}: {line.remark}" if line.remark else verdict
        rows.append((line.what, _figure(line.planned, line.unit), _figure(line.seen, line.unit), ratio, remark))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  " + "  ".join(f"{row[n]:>{widths[n]}}" for n in (1, 2, 3)) + f"  {row[4]}".rstrip()
        for row in rows
    )


def _figure(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.4g} {unit}".strip()


def _events(config: RunConfig, seen: Seen) -> list[Line]:
    steps, trained = len(seen.steps), sum(row.get("loss") is not None for row in seen.steps)
    lines = [
        Line(what="steps", planned=config.steps, seen=steps, unit="", wrong=steps != config.steps),
        Line(what="updates", planned=config.steps, seen=trained, unit="", wrong=trained != config.steps),
        Line(
            what="killed worker back after", planned=None, seen=seen.worker_back_s, unit="s",
            wrong=seen.worker_back_s is None, remark=seen.worker_problem,
        ),
    ]  # fmt: skip
    expected = 1.0 if config.scale == "tiny" or config.data.heldout else 0.0
    missing = seen.evaluations < expected
    return [*lines, Line(what="evaluations", planned=expected, seen=seen.evaluations, unit="", wrong=missing)]


def _bytes(config: RunConfig, model: ModelShape, seen: Seen) -> list[Line]:
    published = [row["publish/num_bytes"] for row in seen.steps if "publish/num_bytes" in row]
    each, float32 = BYTES[config.learner.dtype], BYTES["float32"]
    sent = exported = model.parameters * each
    saved = 3 * float32 * model.parameters
    if config.learner.lora_rank:  # a checkpoint has the adapters twice, and the model merged in float32
        adapters = adapter_parameters(model, config.learner.lora_rank)
        sent, exported = adapters * each, model.parameters * float32
        saved = (3 * float32 + each) * adapters + float32 * model.parameters
    planned = {
        "weights published": (sent, published[-1] if published else None),
        "model in the checkpoint": (exported, seen.model_bytes),
        "learner in the checkpoint": (saved, seen.learner_bytes),
    }
    return [_near(what, expected, found) for what, (expected, found) in planned.items()]


def _near(what: str, planned: float, seen: float | None) -> Line:
    off = math.inf if seen is None else abs(seen / planned - 1)
    figure = None if seen is None else seen / GB
    return Line(what=what, planned=planned / GB, seen=figure, unit="GB", wrong=off > BYTES_TOLERANCE)


def _memory(config: RunConfig, model: ModelShape, seen: Seen) -> list[Line]:
    """On a device the plan is an upper bound. On a host nothing is planned: libraries dominate."""
    held = [memory for row in seen.steps if (memory := _memory_by_type(row))]
    lines = [
        Line(what=f"{kind}, host", planned=None, seen=held[-1][kind] / GB, unit="GB")
        for kind in (sorted(held[-1]) if held else ())
        if kind != "learner_device"
    ]
    planned = learner_gb(model, _pools(config), config.engine.max_context_tokens)
    device = max((row.get("learner_device", 0) for row in held), default=0) / GB
    if config.learner.gpus_per_rank:
        wrong = not 0 < device < MEMORY_FACTOR * planned
        lines.append(Line(what="a rank, device", planned=planned, seen=device or None, unit="GB", wrong=wrong))
    return lines


def _pools(config: RunConfig) -> Pools:
    return pools_of(
        config,
        engine_gpus=config.engine.replicas * config.engine.tensor_parallel,
        learner_gpus=config.learner.ranks,
        colocated=shares_gpus(config.engine, config.learner),
    )


def _memory_by_type(row: Mapping[str, Any]) -> dict[str, float]:
    prefix = "memory_bytes/"
    return {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}


def _times(config: RunConfig, model: ModelShape, gpu_memory_gb: float, seen: Seen) -> list[Line]:
    """Times of the last step, in which engines and allocators are warm."""
    if not seen.steps:
        return []
    row = seen.steps[-1]
    generate_s = row["generate_s"] + row["tools_s"] + row["verify_s"]
    found = {"generate": generate_s, "learn": row["learn_s"], "publish": row["publish_s"], "step": row["step_s"]}
    planned, ahead = dict[str, float](), dict[str, float]()
    if config.engine.gpus_per_replica:
        budget = config.rollout.max_response_tokens
        stage = StageShape(max_response_tokens=budget, max_turns=config.rollout.max_turns, mean_response_tokens=budget)
        pools = _pools(config)
        rollouts = config.prompts_per_step * config.algorithm.num_rollouts
        gpu = nearest_gpu(gpu_memory_gb)
        time = plan_pools(model, gpu, pools, stage=stage, rollouts=rollouts).expected
        planned = {
            "generate": time.generation.total_s, "learn": time.learning.total_s, "publish": time.publish_s,
            "step": time.total_s,
        }  # fmt: skip
        ahead = publish_parts(model, gpu, EXPECTED, pools)
    lines = [_time(what, planned.get(what), seconds) for what, seconds in found.items()]
    of_publish = [
        _time(f"  publish: {part}", ahead.get(part) or None, row[f"publish/{part}_s"])
        for part in ("gather", "move", "load")
        if f"publish/{part}_s" in row
    ]
    return [*lines[:3], *of_publish, *lines[3:]]


def _time(what: str, planned: float | None, seen: float) -> Line:
    far = planned is not None and not 1 / TIMES_FACTOR < seen / max(planned, 1e-9) < TIMES_FACTOR
    remark = "further from the plan than its assumptions reach: calibrate" if far else ""
    return Line(what=what, planned=planned, seen=seen, unit="s", remark=remark)
