"""A modelled engine in virtual time: continuous batching with a paged KV cache, advanced from event to event.

Between two events (a completion, a prefill, an overflow) the only change is that every running context grows by one
token per step, so a closed formula covers all steps between them, without a loop over tokens. Legend: B running
sequences, K the sum of their context tokens, k steps.

    one step          fixed + B per_sequence + K per_context
    k decode steps    k (fixed + B per_sequence) + (K k + B k (k - 1) / 2) per_context
    prefill of n tokens after c cached ones adds   per_request + n per_prefill + n (c + n / 2) per_prefill_context

As in vLLM: first come, first served; prefill mixes with decode within a token budget; blocks freed by an ended turn
stay cached until evicted, oldest first; when a step needs a block and none is free, the latest sequence is preempted
and recomputed later.
"""

import heapq
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from math import inf

from scheduler.cost import EngineCost
from scheduler.simulator.paged_cache import PagedCache, Request
from scheduler.state import BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """Limits of one engine."""

    kv_tokens: int
    block_tokens: int = BLOCK_TOKENS
    max_running: int
    max_batched_tokens: int = 8_192  # decode and prefill tokens of one step

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")


class ModelledEngine:
    """Submit requests with a time, read `next_event_s`, and call `advance` at it to get the completed requests."""

    def __init__(self, cost: EngineCost, shape: EngineShape) -> None:
        self.cost = cost
        self.shape = shape
        self._cache = PagedCache(shape.kv_tokens // shape.block_tokens, shape.block_tokens)
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self.version = 0  # changes whenever `next_event_s` does
        self.next_event_s = inf
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.prefilled_tokens = 0
        self.kv_area = 0.0  # block seconds
        self._now = 0.0  # the last step boundary
        self._step = 0
        self._context = 0  # K of the decoding sequences
        self._decoding = 0  # B
        self._phase = [0] * shape.block_tokens  # number of decoding sequences by (context - step) mod block
        self._ends: list[tuple[int, int, Request]] = []  # heap by end step
        self._prefilling: deque[Request] = deque()
        self._latest: list[Request] = []  # stack of admissions; stale entries are skipped
        self._order = 0
        self._planned = 0  # steps until the event; 0: idle
        self._mixed = False  # the planned step prefills
        self._mixed_s = 0.0

    # -- public ---------------------------------------------------------------------------------------------------
    @property
    def steps(self) -> int:
        return self._step

    @property
    def capacity(self) -> int:
        """Blocks."""
        return self._cache.capacity

    @property
    def used_blocks(self) -> int:
        """By running sequences."""
        return self._cache.used

    @property
    def kv_used_tokens(self) -> int:
        return self.used_blocks * self.shape.block_tokens

    def submit(self, now_s: float, request: Request) -> None:
        """Queue a request that arrives at `now_s`; it joins at the next step boundary."""
        self._order += 1
        request.order = self._order
        self.waiting.append(request)
        if self._planned == 0:
            self._now = max(self._now, now_s)
            self._plan()
        elif not self._mixed and len(self.waiting) == 1 and self._room_for(request):
            self._cut(now_s)

    def abort(self, key: str) -> None:
        """Drop the cached blocks of a rollout that has moved to another replica."""
        self._cache.forget(key)

    def advance(self) -> list[Request]:
        """Run to the event at `next_event_s`; returns the requests that completed at it."""
        done = self._run_mixed() if self._mixed else self._run_decode(self._planned)
        self._plan()
        return done

    def pause(self, seconds: float) -> None:
        """Delay all planned steps by this time."""
        self._now += seconds
        if self._planned:
            self.version += 1
            self.next_event_s += seconds

    def drop_kv(self, now_s: float) -> None:
        """Recompute all contexts, first those that were admitted first. A step in progress is lost."""
        if self._planned and not self._mixed:
            self._run_decode(bisect_left(range(1, self._planned), now_s, key=lambda n: self._now + self._decode_s(n)))
        preemptions = self.preemptions
        while self.running:
            self._preempt()
        self.preemptions = preemptions
        self._cache.clear()
        self._now = max(self._now, now_s)
        self._plan()

    # -- steps ----------------------------------------------------------------------------------------------------
    def _decode_s(self, steps: int) -> float:
        cost = self.cost
        rate = cost.fixed_s + self._decoding * cost.per_sequence_s
        return steps * rate + cost.per_context_s * (self._context * steps + self._decoding * steps * (steps - 1) / 2)

    def _new_blocks(self, steps: int) -> int:
        """Blocks that the decoding sequences take within the next `steps` steps."""
        block = self.shape.block_tokens
        cycles, rest = divmod(steps, block)
        return cycles * self._decoding + sum(self._phase[-(self._step + i) % block] for i in range(rest))

    def _steps_that_fit(self, free: int) -> int:
        """The most steps whose new blocks fit into `free`."""
        block = self.shape.block_tokens
        cycles, left = divmod(free, self._decoding)
        steps = cycles * block
        for i in range(block):
            left -= self._phase[-(self._step + i) % block]
            if left < 0:
                break
            steps += 1
        return steps

    def _grow(self, steps: int, seconds: float) -> None:
        """All decoding sequences grow by `steps`."""
        blocks = self._new_blocks(steps)
        self.kv_area += (self._cache.used + blocks / 2) * seconds
        self._context += self._decoding * steps
        self._step += steps
        self._now += seconds
        self._cache.grow(blocks)

    def _finish_due(self) -> list[Request]:
        done: list[Request] = []
        while self._ends and self._ends[0][0] <= self._step:
            _, _, request = heapq.heappop(self._ends)
            if self.running.get(request.key) is request and request.computed and request.end_step <= self._step:
                request.context += request.left
                request.left = 0
                self._leave(request, request.context)
                done.append(request)
        return done

    def _run_decode(self, steps: int) -> list[Request]:
        self._grow(steps, self._decode_s(steps))
        return self._finish_due()

    def _run_mixed(self) -> list[Request]:
        """One step that also prefills, within the budget."""
        budget = max(1, self.shape.max_batched_tokens - self._decoding)
        ready: list[Request] = []
        for request in self._prefilling:
            share = min(budget, request.prefill_left)
            request.prefill_left -= share
            budget -= share
            if request.prefill_left > 0:
                break
            ready.append(request)
        self._grow(1, self._mixed_s)
        done = self._finish_due()
        for request in ready:
            self._prefilling.popleft()
            request.computed = True
            request.context += 1
            request.left -= 1
            request.end_step = self._step + request.left
            request.seen = request.context
            self._decoding += 1
            self._context += request.context
            self._phase[(request.context - self._step) % self.shape.block_tokens] += 1
            heapq.heappush(self._ends, (request.end_step, request.order, request))
        done.extend(self._finish_due())
        return done

    # -- plans ----------------------------------------------------------------------------------------------------
    def _plan(self) -> None:
        """At a step boundary: preempt requests that do not fit, admit those that do, and set the next event."""
        self.version += 1
        preempted = False
        while (
            self._decoding
            and self._cache.used + self._phase[-self._step % self.shape.block_tokens] > self._cache.capacity
        ):
            self._preempt()
            preempted = True
        if not preempted:
            self._admit()
        if self._prefilling:
            self._plan_mixed()
        elif self._decoding:
            self._mixed = False
            steps = self._ends_in()
            if self._cache.used + self._decoding * (steps // self.shape.block_tokens + 1) > self._cache.capacity:
                steps = min(steps, max(1, self._steps_that_fit(self._cache.capacity - self._cache.used)))
            self._planned = steps
            self.next_event_s = self._now + self._decode_s(steps)
        else:
            self._mixed = False
            self._planned = 0
            self.next_event_s = inf

    def _ends_in(self) -> int:
        while True:
            step, _, request = self._ends[0]
            if self.running.get(request.key) is request and request.computed and request.end_step == step:
                return max(1, step - self._step)
            heapq.heappop(self._ends)

    def _plan_mixed(self) -> None:
        budget = max(1, self.shape.max_batched_tokens - self._decoding)
        seconds = self.cost.step_s(self._decoding, self._context)
        for request in self._prefilling:
            share = min(budget, request.prefill_left)
            seconds += self.cost.per_sequence_s + self.cost.prefill_s(share, request.context - request.prefill_left)
            budget -= share
            if budget == 0:
                break
        self._mixed, self._mixed_s, self._planned = True, seconds, 1
        self.next_event_s = self._now + seconds

    def _cut(self, now_s: float) -> None:
        """End the planned run of decode steps at the first boundary after `now_s`."""
        steps = 1 + bisect_left(range(1, self._planned), now_s, key=lambda n: self._now + self._decode_s(n))
        if steps < self._planned:
            self.version += 1
            self._planned = steps
            self.next_event_s = self._now + self._decode_s(steps)

    # -- blocks ---------------------------------------------------------------------------------------------------
    def _room_for(self, request: Request) -> bool:
        next_step = self._phase[-self._step % self.shape.block_tokens]  # running sequences take their blocks first
        fits = self._cache.used + next_step + self._cache.needs(request) <= self._cache.capacity
        return fits and len(self.running) < self.shape.max_running

    def _admit(self) -> None:
        budget = self.shape.max_batched_tokens - self._decoding - sum(r.prefill_left for r in self._prefilling)
        while self.waiting and budget > 0 and self._room_for(self.waiting[0]):
            request = self.waiting.popleft()
            cached = self._cache.hold(request)
            request.prefill_left = max(1, request.context - cached)
            self.prefilled_tokens += request.prefill_left
            whole = request.seen // self.shape.block_tokens * self.shape.block_tokens
            self.recomputed_tokens += max(0, whole - cached)
            request.computed = False
            if request.admitted_s < 0:
                request.admitted_s = self._now
            self.running[request.key] = request
            self._prefilling.append(request)
            self._latest.append(request)
            budget -= request.prefill_left
        self._cache.trim()

    def _leave(self, request: Request, context: int) -> None:
        """Stop a request with `context` tokens."""
        if request.computed:
            self._phase[(context - self._step) % self.shape.block_tokens] -= 1
            self._decoding -= 1
            self._context -= context
        del self.running[request.key]
        self._cache.release(request, context)

    def _preempt(self) -> None:
        """Move the sequence admitted last to the head of the queue, and free its blocks."""
        while True:
            request = self._latest.pop()
            if self.running.get(request.key) is request:
                break
        self.preemptions += 1
        if request.computed:
            sampled = request.left - (request.end_step - self._step)
            request.context += sampled
            request.left -= sampled
            request.seen = request.context
        else:
            self._prefilling.remove(request)
        self._leave(request, request.context)
        request.computed = False
        self.waiting.appendleft(request)
