"""What an engine's steps cost, measured on it before it serves: some 150 decode steps and a few prefills.

Requests of one prompt, timed from outside by the clock: how much longer more tokens take is what decode steps take, how
much longer a longer prompt takes is what its prefill takes. Everything is the best of a few rounds, since engines start
beside one another.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from scheduler.cost import EngineCost

SampleFn = Callable[[Sequence[int], int], Awaitable[object]]
"""Sample so many tokens after these."""

ROUNDS = 3
FEW_TOKENS, MORE_TOKENS = 4, 16  # sampled by each request
SHORT_PROMPT, LONG_PROMPT = 16, 2_048  # tokens, at most
MANY = 32  # requests at once, at most
FIRST_TOKEN, TOKENS = 8, 50  # prompts are made of so many different ones, which every vocabulary has
LEAST_STEP_S = 1e-6  # whatever the clock says


async def measure_cost(
    sample: SampleFn,
    *,
    context_tokens: int,
    kv_tokens: int,
    max_running: int,
    clock: Callable[[], float] = time.perf_counter,
) -> EngineCost:
    """`context_tokens` a request may have, `kv_tokens` all of them hold, `max_running` decode at once."""
    room = min(context_tokens, kv_tokens) - MORE_TOKENS
    short, long = min(SHORT_PROMPT, max(1, room // 2)), min(LONG_PROMPT, max(2, room // 2))
    many = max(1, min(MANY, max_running, (kv_tokens - long) // (2 * MORE_TOKENS + SHORT_PROMPT)))
    salt = 0

    def prompt(tokens: int) -> list[int]:
        """A new one, which no cache has."""
        nonlocal salt
        salt += 1
        return [FIRST_TOKEN + (salt * 7 + place * place * salt) % TOKENS for place in range(tokens)]

    async def seconds(prompt_ids: Sequence[int], tokens: int, requests: int) -> float:
        began = clock()
        await asyncio.gather(*(sample(prompt_ids, tokens) for _ in range(requests)))
        return clock() - began

    async def step_s(tokens: int, requests: int) -> float:
        """A decode step of so many requests, after a prompt of so many tokens that they share."""
        shared = prompt(tokens)
        await seconds(shared, 1, 1)
        few = min([await seconds(shared, FEW_TOKENS, requests) for _ in range(ROUNDS)])
        more = min([await seconds(shared, MORE_TOKENS, requests) for _ in range(ROUNDS)])
        return max(LEAST_STEP_S, (more - few) / (MORE_TOKENS - FEW_TOKENS))

    async def prefill_s(tokens: int) -> float:
        return min([await seconds(prompt(tokens), 1, 1) for _ in range(ROUNDS)])

    one, all_short, all_long = await step_s(short, 1), await step_s(short, many), await step_s(long, many)
    brief, whole = await prefill_s(short), await prefill_s(long)
    per_sequence_s = min(one, max(0.0, (all_short - one) / max(1, many - 1)))
    return EngineCost(
        fixed_s=max(LEAST_STEP_S, one - per_sequence_s),
        per_sequence_s=per_sequence_s,
        per_context_s=max(0.0, (all_long - all_short) / (many * (long - short))),
        per_prefill_s=max(0.0, (whole - brief) / (long - short)),
    )
