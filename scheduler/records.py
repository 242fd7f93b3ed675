"""The scheduler's inputs and decisions: small frozen records, lengths in tokens.

A rollout's *context* is its prompt and everything after it (sampled and tool text); its *response* is everything
after the prompt. KV is counted in tokens; an engine holds it in blocks, so a few tokens per rollout are lost to
rounding (`block_tokens`).
"""

from dataclasses import dataclass
from typing import Any

from rstar_ray.errors import RStarError
from rstar_ray.trajectory import Placement
from scheduler.cost import EngineCost

AHEAD_SHARE = 8  # running rollouts per rollout that waits in the engine


def in_flight_limit(max_running: int) -> int:
    """Rollouts that a replica may hold if its engine runs `max_running` at a time.

    A few more, so that the seat of one that ends is filled at the next step and not after a call to the balancer.
    """
    return max_running + -(-max_running // AHEAD_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLoad:
    """One rollout as last reported, usually at the end of a turn."""

    rollout_id: str
    group_id: str  # the same for siblings of one prompt
    prompt_tokens: int
    max_response_tokens: int  # budget for everything after the prompt
    max_turns: int
    context_tokens: int = 0  # prompt and response so far; 0: a new rollout, only the prompt
    generated_tokens: int = 0  # sampled tokens in the context
    turn: int = 0  # turns finished
    draw: int = 0  # the training step that waits for it; lower ones run first
    budget: int = 0  # configured; above `max_response_tokens` if the prompt leaves less room. 0: `max_response_tokens`

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.max_response_tokens < 1 or self.max_turns < 1:
            raise ValueError(
                f"rollout {self.rollout_id!r}: prompt_tokens {self.prompt_tokens}, max_response_tokens "
                f"{self.max_response_tokens} and max_turns {self.max_turns} must all be at least 1"
            )
        if self.context_tokens == 0:
            object.__setattr__(self, "context_tokens", self.prompt_tokens)
        if self.budget == 0:
            object.__setattr__(self, "budget", self.max_response_tokens)
        if self.context_tokens < self.prompt_tokens or self.generated_tokens < 0 or self.turn < 0:
            raise ValueError(
                f"rollout {self.rollout_id!r}: context_tokens {self.context_tokens} below its prompt "
                f"({self.prompt_tokens}), or a negative count (generated {self.generated_tokens}, turn {self.turn})"
            )

    @property
    def response_tokens(self) -> int:
        return self.context_tokens - self.prompt_tokens

    @property
    def least_tokens(self) -> int:
        """KV tokens that it needs to continue: its context and, within its budget, one more token."""
        return min(self.context_tokens + 1, self.worst_case_tokens)

    @property
    def worst_case_tokens(self) -> int:
        """The longest context that this rollout may reach."""
        return self.prompt_tokens + self.max_response_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """An engine's report about itself."""

    kv_used_tokens: int = 0  # blocks in use times block size
    running: int = 0  # requests in the batch
    waiting: int = 0  # requests in the engine's own queue
    preemptions: int = 0  # since the engine started
    policy_version: int = 0
    steps: int = 0  # since the engine started; each gives every running request one token
    at_tools: tuple[str, ...] = ()  # rollouts that wait for a tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A new replica: the size of its engine, and the rollouts that it already runs."""

    replica_id: str
    kv_capacity_tokens: int
    max_running: int  # rollouts that it may hold
    block_tokens: int
    cost: EngineCost | None = None  # measured on the replica; None: not measured
    resident: tuple[RolloutLoad, ...] = ()
    preemptions: int = 0  # counted by its engine so far

    def __post_init__(self) -> None:
        if min(self.kv_capacity_tokens, self.max_running, self.block_tokens) < 1:
            raise ValueError(
                f"replica {self.replica_id!r}: kv_capacity_tokens {self.kv_capacity_tokens}, max_running "
                f"{self.max_running} and block_tokens {self.block_tokens} must be at least 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReport:
    """The end of a turn on a replica. Lengths are totals, and include the tool's result if the rollout continues."""

    rollout_id: str
    context_tokens: int
    generated_tokens: int
    turn: int  # turns finished
    ended: bool = False  # the rollout ended with this turn
    truncated: bool = False  # it was ended by its budget, not by the policy


@dataclass(frozen=True, slots=True)
class Move:
    """A move at the rollout's next turn boundary. `to_replica` None: it waits in the queue."""

    rollout_id: str
    from_replica: str
    to_replica: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """An order to run a rollout from its payload, with the lengths of its load."""

    load: RolloutLoad
    payload: Any
    waited_s: float = 0.0  # since it was submitted
    placement: Placement | None = None  # the reason for the replica


@dataclass(frozen=True, slots=True)
class Cancel:
    """An order to stop a rollout, whose result is not needed."""

    rollout_id: str


Order = Grant | Move | Cancel
"""An order to a replica. A `Move` hands the rollout back at its next turn boundary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSnapshot:
    """One replica, for metrics and logs."""

    replica_id: str
    kv_capacity_tokens: int
    kv_used_tokens: int
    kv_reserved_tokens: int  # expected need of its residents, now or later
    in_flight: int  # resident rollouts, in a turn or at a tool
    quarantine: str | None  # why it gets no more work


@dataclass(kw_only=True)
class Counters:
    """Numbers of rollouts since the start. Invariant: submitted = finished + cancelled + waiting + in flight."""

    in_flight: int = 0  # now
    submitted: int = 0
    admitted: int = 0
    finished: int = 0
    cancelled: int = 0
    moves: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0  # contexts of rollouts that changed replica, and an estimate for preemptions
    stale_reports: int = 0  # about rollouts that the replica does not hold


@dataclass(kw_only=True)
class BalancerSnapshot(Counters):
    """The balancer at one moment, for metrics and logs."""

    rule: str
    waiting: int
    risk: float = 0.0  # share of rollouts that engines may preempt; 0 for rules without an estimate
    too_large: tuple[str, ...] = ()  # waiting rollouts that no open replica can hold
    replicas: tuple[ReplicaSnapshot, ...] = ()


class NeverFits(RStarError, ValueError):
    """A rollout is larger than every replica's cache, so it could never run."""

    def __init__(
        self, rollout_id: str, needed_tokens: int, largest_capacity_tokens: int, need: str = "its context and one more"
    ) -> None:
        super().__init__(
            f"rollout {rollout_id!r} needs at least {needed_tokens} KV tokens ({need}), "
            f"the largest replica holds {largest_capacity_tokens}; shorten the prompt or give the engines more KV"
        )
        self.rollout_id = rollout_id
        self.needed_tokens = needed_tokens
        self.largest_capacity_tokens = largest_capacity_tokens
        self.need = need  # the rule's need, in words

    def __reduce__(self) -> tuple[type["NeverFits"], tuple[str, int, int, str]]:
        return (type(self), (self.rollout_id, self.needed_tokens, self.largest_capacity_tokens, self.need))


class Quarantined(RStarError):
    """A replica sent an impossible report: it gets no more work, and must restart and register again."""


class UnknownReplica(RStarError, KeyError):
    """A call names a replica that is not registered; it must register with its residents."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""
