"""A lower bound on a step's makespan, for any schedule, even one that knows every length in advance.

The largest of three bounds:
- the longest single rollout, alone on an idle replica, tool waits included;
- total work over capacity: every token's own cost and every prompt's prefill once per group, plus as many steps as the
  largest batch needs, spread evenly over all replicas;
- KV-time area over KV capacity: a sampled token holds its context for one step, so R replicas need at least
  (sum of contexts) / (R capacity) steps each; their fixed cost, plus the same work. Prompts are shared perfectly.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.cost import EngineCost
from scheduler.simulator.engine_model import EngineShape
from scheduler.traces.trace import TraceRollout


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBound:
    """The three bounds, in seconds."""

    longest_rollout_s: float
    work_s: float
    kv_area_s: float

    @property
    def lower_bound_s(self) -> float:
        return max(self.longest_rollout_s, self.work_s, self.kv_area_s)


def lower_bound(rollouts: Sequence[TraceRollout], *, replicas: int, cost: EngineCost, shape: EngineShape) -> LowerBound:
    """The bound for a trace that has already been cut to its limits."""
    siblings = Counter(rollout.group for rollout in rollouts)
    block = shape.block_tokens
    longest = work = held = 0.0
    tokens = 0
    for rollout in rollouts:
        context = float(rollout.prompt_tokens)
        shared = rollout.prompt_tokens // block * block * (1.0 - 1.0 / siblings[rollout.group])
        alone = cost.prefill_s(rollout.prompt_tokens, 0)
        own = cost.prefill_s(rollout.prompt_tokens, 0) / siblings[rollout.group]
        for place, turn in enumerate(rollout.turns):
            n = turn.completion_tokens
            # A turn's first token comes with its prefill; the n - 1 others see contexts context + 1 .. context + n - 1.
            seen = (n - 1) * context + n * (n - 1) / 2
            decode = n * cost.per_sequence_s + seen * cost.per_context_s
            own += decode
            alone += decode + n * cost.fixed_s
            held += max(0.0, n * (context - shared) + n * (n - 1) / 2)
            tokens += n
            context += n
            if place + 1 < len(rollout.turns):
                answer = cost.prefill_s(turn.tool_tokens, context)
                own += answer
                alone += answer + turn.tool_seconds
                context += turn.tool_tokens
        longest = max(longest, alone)
        work += own
    kv_tokens = shape.kv_tokens // block * block
    fewest_steps = tokens / shape.max_running
    return LowerBound(
        longest_rollout_s=longest,
        work_s=(work + cost.fixed_s * fewest_steps) / replicas,
        kv_area_s=(work + cost.fixed_s * held / kv_tokens) / replicas,
    )
