"""Figures of small simulated steps, to the digit: a change that should not move numbers shows that it did not.

Whoever means to move them writes the file anew, and says in the change which moved and why:
`python -m tests.scheduler.test_twin_figures`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rstar_ray.config import BalancerConfig
from scheduler.balancer import RULES
from scheduler.cost import EngineCost
from scheduler.picture import KvSample, Span
from scheduler.traces.kinds import KINDS, NAMES, draw, family, kind_named, log_normal
from scheduler.traces.record import TraceRollout
from scheduler.traces.stages import STAGES, StageShape, synthetic
from scheduler.twin.clairvoyant import clairvoyant_step
from scheduler.twin.engine_model import EngineShape
from scheduler.twin.simulate import MI300X_14B, Twin, TwinResult, TwinSettings, limits_of

FILE = Path(__file__).parent / "data" / "twin_figures.json"
STAGE = STAGES["stage1"]
TRACE = synthetic(STAGE, groups=8, siblings=16, seed=3)
EARLIER = synthetic(STAGE, groups=24, siblings=8, seed=9)
SCARCE = TwinSettings(
    replicas=2,
    shape=EngineShape(kv_tokens=60_000, max_running=1_024),
    cost=MI300X_14B,
    max_response_tokens=STAGE.max_response_tokens,
    max_turns=STAGE.max_turns,
)
NARROW = replace(SCARCE, shape=EngineShape(kv_tokens=40_000, block_tokens=32, max_running=9, max_batched_tokens=700))
DEAR = EngineCost(
    fixed_s=2e-3, per_sequence_s=1e-3, per_context_s=1e-7, per_prefill_s=5e-5, per_prefill_context_s=1e-8,
    per_request_s=2e-2,
)  # fmt: skip


def kind(name: str, *, groups: int = 6, siblings: int = 6, seed: int = 1) -> list[TraceRollout]:
    return draw(kind_named(name), groups=groups, siblings=siblings, seed=seed)


def of_kind(name: str, kv_tokens: int, rule: str = "expected_kv", **more: Any) -> TwinResult:
    rollouts = kind(name)
    budget, turns = limits_of(rollouts)
    settings = replace(
        SCARCE,
        shape=EngineShape(kv_tokens=kv_tokens, max_running=1_024),
        max_response_tokens=budget,
        max_turns=turns,
        **more,
    )
    return Twin(rollouts, rule, settings).run()


STEPS = {
    **{f"{rule}, scarce": lambda rule=rule: Twin(TRACE, rule, SCARCE).run() for rule in RULES},
    **{f"{rule}, narrow": lambda rule=rule: Twin(TRACE[:64], rule, NARROW).run() for rule in RULES},
    "clairvoyant": lambda: clairvoyant_step(
        TRACE, replace(SCARCE, shape=EngineShape(kv_tokens=90_000, max_running=1_024))
    ),
    "clairvoyant, narrow": lambda: clairvoyant_step(TRACE[:64], NARROW),
    "lengths known": lambda: Twin(TRACE, "expected_kv", SCARCE, history=EARLIER).run(),
    "lengths known, bold": lambda: Twin(
        TRACE, "expected_kv", replace(SCARCE, placement=BalancerConfig(risk=0.3)), history=EARLIER
    ).run(),
    "roomy": lambda: Twin(
        TRACE, "expected_kv", replace(SCARCE, shape=EngineShape(kv_tokens=400_000, max_running=1_024))
    ).run(),
    "four replicas": lambda: Twin(TRACE, "expected_kv", replace(SCARCE, replicas=4), history=EARLIER).run(),
    "three workers for tools": lambda: Twin(TRACE, "expected_kv", replace(SCARCE, tool_workers=3)).run(),
    "slow to reach": lambda: Twin(TRACE[:48], "expected_kv", replace(SCARCE, rpc_s=0.5)).run(),
    "dear requests": lambda: Twin(TRACE[:64], "least_sessions", replace(SCARCE, cost=DEAR)).run(),
    "long prompts": lambda: of_kind("long_prompts", 60_000),
    "bimodal": lambda: of_kind("bimodal", 40_000),
    "minutes at tools": lambda: of_kind("minutes_at_tools", 40_000),
    "heavy tail, many preempted": lambda: of_kind("heavy_tail", 24_000, "least_requests"),
}


def figures(result: TwinResult) -> dict[str, float]:
    row = {name: value for name, value in result.as_json().items() if isinstance(value, int | float)}
    return {name: round(value, 9) for name, value in row.items()}


def trace_figures(rollouts: list[TraceRollout]) -> list[float]:
    """Sums that tell one trace from another: prompts, turns, sampled, tools' text and seconds."""
    turns = [(place, turn) for place, rollout in enumerate(rollouts) for turn in rollout.turns]
    return [
        sum(place * rollout.prompt_tokens for place, rollout in enumerate(rollouts, 1)),
        sum(place for place, _ in turns),
        sum(place * turn.completion_tokens for place, turn in turns),
        sum(place * turn.tool_tokens for place, turn in turns),
        round(sum(place * turn.tool_seconds for place, turn in turns), 3),
    ]


def seen_figures() -> list[float]:
    """Of the spans and samples of one step."""
    seen: list[Span | KvSample] = []
    Twin(
        TRACE[:32],
        "round_robin",
        replace(SCARCE, shape=EngineShape(kv_tokens=12_000, max_running=1_024)),
        watch=seen.append,
    ).run()
    spans = [one for one in seen if isinstance(one, Span)]
    samples = [one for one in seen if isinstance(one, KvSample)]
    by_activity = [
        round(sum(s.end_s - s.start_s for s in spans if s.activity == activity), 6)
        for activity in ("queued", "generate", "tool")
    ]
    return [*by_activity, len(spans), len(samples), sum(sample.used_tokens for sample in samples)]


def traces() -> dict[str, list[float]]:
    found = {name: trace_figures(kind(name)) for name in NAMES if name != "family"}
    found |= {f"{name}, earlier": trace_figures(draw(kind_named(name), groups=4, siblings=4, seed=2, earlier=True))
              for name in ("longer", "briefer")}  # fmt: skip
    found |= {f"family {number}": trace_figures(draw(kind_named("family", number), groups=5, siblings=4))
              for number in range(16)}  # fmt: skip
    brief = replace(STAGE, mean_response_tokens=60, calls_mean=6.0)
    found["brief"] = trace_figures(synthetic(brief, groups=6, siblings=6))
    found["brief kind"] = trace_figures(
        draw(replace(KINDS["log_normal"], lengths_GS=log_normal(60.0, 0.5, 0.5), calls_mean=6.0), groups=6, siblings=6)
    )
    return found | {name: trace_figures(synthetic(stage, groups=4, siblings=6)) for name, stage in STAGES.items()}


def families() -> list[list[Any]]:
    kinds = [family(number) for number in range(16)]
    return [
        [one.summary, one.max_response_tokens, one.max_turns, one.tool_tokens_mean]
        + [round(x, 9) for x in (one.shift, one.calls_mean, *one.prompt_tokens, *one.tool_s, *one.tool_shares)]
        for one in kinds
    ]


def recorded() -> dict[str, Any]:
    return json.loads(FILE.read_text("utf-8"))


@pytest.mark.parametrize("name", STEPS)
def test_a_step_has_the_figures_it_had(name: str):
    assert figures(STEPS[name]()) == pytest.approx(recorded()["steps"][name], rel=1e-6)


def test_traces_are_what_they_were():
    assert traces() == recorded()["traces"]


def test_the_family_of_kinds_is_what_it_was():
    assert families() == recorded()["families"]
    assert isinstance(kind_named("stage2"), StageShape) and kind_named("bimodal") is KINDS["bimodal"]


def test_a_trace_has_a_group_a_sibling_and_a_seed():
    assert len(draw(KINDS["bimodal"], groups=1, siblings=1)) == 1
    for wrong in ({"groups": 0}, {"siblings": 0}, {"seed": -1}):
        given = {"groups": 1, "siblings": 1, "seed": 0} | wrong
        said = "groups {groups} and siblings {siblings} must be at least 1, and seed {seed} at least 0"
        with pytest.raises(ValueError, match=f"^{said.format(**given)}$"):
            draw(KINDS["bimodal"], **given)


def test_what_is_watched_of_a_step_is_what_it_was():
    assert seen_figures() == pytest.approx(recorded()["seen"], rel=1e-6)


if __name__ == "__main__":
    every = {
        "steps": {name: figures(step()) for name, step in STEPS.items()},
        "traces": traces(),
        "families": families(),
        "seen": seen_figures(),
    }
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(every, indent=1) + "\n", "utf-8")
