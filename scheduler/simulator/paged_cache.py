"""A modelled paged KV cache: blocks of running sequences, prompts shared by a group, and cached blocks.

Blocks freed by an ended turn stay cached until running sequences need them, oldest entry first. Counts are blocks.
"""

from collections import OrderedDict


class Request:
    """One turn of one rollout inside an engine."""

    __slots__ = (
        "admitted_s", "computed", "context", "end_step", "group", "held", "key", "left", "new_tokens", "order",
        "prefill_left", "prompt", "seen",
    )  # fmt: skip

    def __init__(self, key: str, group: str, prompt: int, context: int, new_tokens: int, seen: int) -> None:
        self.key = key  # the rollout
        self.group = group
        self.prompt = prompt
        self.context = context  # tokens to hold before the next one is sampled
        self.left = new_tokens  # tokens to sample
        self.new_tokens = new_tokens
        self.seen = seen  # context tokens that an engine has computed before: computing them again is waste
        self.order = 0
        self.held = 0  # private blocks while running
        self.prefill_left = 0
        self.end_step = 0
        self.computed = False  # prefill done: it decodes
        self.admitted_s = -1.0  # first time in the batch


class PagedCache:
    """Counts blocks by holder; the growth of decoding sequences is counted as a sum (`grow`)."""

    def __init__(self, capacity: int, block_tokens: int) -> None:
        self.capacity = capacity
        self.used = 0  # by running sequences, a group's shared prompt once
        self._block_tokens = block_tokens
        self._group_users: dict[str, int] = {}
        self._cached: OrderedDict[str, int] = OrderedDict()  # key -> blocks, oldest first; a group's prompt as "/group"
        self._cached_blocks = 0

    def needs(self, request: Request) -> int:
        """Blocks that a request would add: its own, and its prompt's if the group has none here."""
        shared = 0 if request.group in self._group_users else request.prompt // self._block_tokens
        return self._own(request) + shared

    def _own(self, request: Request) -> int:
        """Blocks of its context except the full blocks of the prompt, which the group shares."""
        return -(-(request.context + 1) // self._block_tokens) - request.prompt // self._block_tokens

    def hold(self, request: Request) -> int:
        """Start running a request; returns the tokens of its context that were cached."""
        found = self._take_cached(request)
        request.held = self._own(request)
        self.used += self.needs(request)
        self._group_users[request.group] = self._group_users.get(request.group, 0) + 1
        return found

    def _take_cached(self, request: Request) -> int:
        prompt_blocks = request.prompt // self._block_tokens
        if request.group in self._group_users:
            found = prompt_blocks
        else:
            found = self._cached.pop("/" + request.group, 0)
            self._cached_blocks -= found
        own = self._cached.pop(request.key, 0)
        self._cached_blocks -= own
        if found < prompt_blocks:
            return found * self._block_tokens
        return min((found + own) * self._block_tokens, request.context - 1)

    def grow(self, blocks: int) -> None:
        """The running sequences take this many more blocks."""
        self.used += blocks
        self.trim()

    def release(self, request: Request, context: int) -> None:
        """Stop a request with `context` tokens; its full blocks, if computed, stay cached as the newest."""
        shared = request.prompt // self._block_tokens
        self.used -= -(-context // self._block_tokens) - shared if request.computed else request.held
        users = self._group_users[request.group] - 1
        if users:
            self._group_users[request.group] = users
        else:
            del self._group_users[request.group]
            self.used -= shared
            self._keep("/" + request.group, shared)
        if request.computed:
            self._keep(request.key, context // self._block_tokens - shared)
        self.trim()

    def forget(self, key: str) -> None:
        """Drop the cached blocks of a rollout that has moved to another replica."""
        self._cached_blocks -= self._cached.pop(key, 0)

    def clear(self) -> None:
        """Drop all cached blocks."""
        self._cached.clear()
        self._cached_blocks = 0

    def _keep(self, key: str, blocks: int) -> None:
        if blocks > 0:
            self._cached_blocks += blocks - self._cached.pop(key, 0)
            self._cached[key] = blocks

    def trim(self) -> None:
        """Evict cached blocks that running sequences have taken, oldest entry first, its tail first."""
        excess = self.used + self._cached_blocks - self.capacity
        while excess > 0 and self._cached:
            key = next(iter(self._cached))
            blocks = self._cached[key]
            taken = min(blocks, excess)
            self._cached_blocks -= taken
            excess -= taken
            if taken == blocks:
                del self._cached[key]
            else:
                self._cached[key] = blocks - taken
