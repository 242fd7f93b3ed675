"""The balancer's memory: replicas and the rollouts on them, mutable, owned by one `Balancer`."""

from dataclasses import dataclass, field

from rstar_ray.config import EngineConfig
from scheduler.cost import EngineCost
from scheduler.records import Registration, ReplicaLoad, ReplicaSnapshot, RolloutLoad

BLOCK_TOKENS = EngineConfig().block_size
"""As the engines have it, while no replica has told its own."""


@dataclass(slots=True, eq=False)
class Rollout:
    """One live rollout: what was last reported of it, and where it is."""

    load: RolloutLoad
    sequence: int  # order of submission, for ties and for fairness
    replica: "Replica | None" = None  # None: waiting
    step_seen: float = 0.0  # the replica's decode clock when `load` was reported, and later by what it spent at tools
    leaving: bool = False  # asked to hand itself back at its next turn boundary
    prefer: str | None = None  # a move's target, tried first
    why: str = ""  # the rule's reason for its replica; of a move, why it is asked to leave
    reserved_tokens: int = 0  # what the rule set aside for it, where it reserves
    profile_row: int = -1  # the rule's own index of it on its replica
    length_row: int = -1  # the estimate's own index of it

    def sampled_at(self, decode_step: float) -> float:
        """Sampled tokens at this step of its replica: those last reported, and one for every step since."""
        return min(self.load.generated_tokens + decode_step - self.step_seen, self.load.max_response_tokens - 1)

    def response_at(self, decode_step: float) -> float:
        """The same, of all tokens after the prompt."""
        return min(self.load.response_tokens + decode_step - self.step_seen, self.load.max_response_tokens - 1)


@dataclass(slots=True, eq=False)
class Replica:
    """One engine: its capacity, what it last said, and who is resident."""

    replica_id: str
    index: int  # position in `Fleet.by_index`
    kv_capacity_tokens: int
    max_running: int
    block_tokens: int = BLOCK_TOKENS
    cost: EngineCost | None = None  # None: nobody has measured it
    serving: bool = True
    set_aside: str | None = None
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    residents: dict[str, Rollout] = field(default_factory=dict[str, Rollout])
    groups: dict[str, int] = field(default_factory=dict[str, int])  # residents per prompt group
    reserved_tokens: int = 0
    admissions: int = 0
    admitted_since_report: int = 0
    decode_step: float = 0.0  # tokens each running rollout has grown by since the start, as far as reports tell
    clock_offset: float | None = None  # decode step minus the engine's own count of steps, where it tells one
    policy_version: int = 0
    told_version: int = 0  # the last that the replica itself registered with or reported; a published one may lag

    @property
    def open(self) -> bool:
        return self.serving and self.set_aside is None

    @property
    def has_seat(self) -> bool:
        return len(self.residents) < self.max_running

    def note(self, load: ReplicaLoad) -> None:
        """What it says of itself, believed."""
        self._tick(load)
        self.load = load
        self.policy_version = self.told_version = load.policy_version
        self.admitted_since_report = 0

    def _tick(self, load: ReplicaLoad) -> None:
        """The decode clock goes on by the engine's own count; it stands still for rollouts that are at a tool."""
        if not load.steps:
            return
        before, told = self.decode_step, self.decode_step - load.steps
        self.clock_offset = told if self.clock_offset is None else max(self.clock_offset, told)
        self.decode_step = max(self.decode_step, self.clock_offset + load.steps)
        for rollout_id in set(self.load.at_tools).intersection(load.at_tools):  # all the time since the last report
            if (rollout := self.residents.get(rollout_id)) is not None:
                rollout.step_seen = min(rollout.step_seen + self.decode_step - before, self.decode_step)

    def whole_blocks(self, tokens: int) -> int:
        """Tokens of the blocks that so many take: an engine never gives half of one."""
        return -(-tokens // self.block_tokens) * self.block_tokens

    def snapshot(self, reserved_tokens: int) -> ReplicaSnapshot:
        return ReplicaSnapshot(
            replica_id=self.replica_id,
            kv_capacity_tokens=self.kv_capacity_tokens,
            kv_used_tokens=self.load.kv_used_tokens,
            kv_reserved_tokens=reserved_tokens,
            in_flight=len(self.residents),
            running=self.load.running,
            preemptions=self.load.preemptions,
            admissions=self.admissions,
            policy_version=self.policy_version,
            serving=self.serving,
            set_aside=self.set_aside,
        )


class Fleet:
    """All replicas, by name and in a stable order."""

    def __init__(self) -> None:
        self.by_id: dict[str, Replica] = {}
        self.by_index: list[Replica | None] = []
        self.generated_tokens = 0  # by all rollouts, as reported
        self.block_tokens = BLOCK_TOKENS  # the largest of any replica

    def published(self, policy_version: int) -> None:
        """All serve it. What was told of a higher one came late, from before versions were withdrawn."""
        for replica in self.by_id.values():
            replica.policy_version = policy_version
            replica.told_version = min(replica.told_version, policy_version)

    def withdraw_versions(self) -> None:
        for replica in self.by_id.values():
            replica.policy_version = replica.told_version = 0

    def __len__(self) -> int:
        return len(self.by_id)

    def add(self, registered: Registration) -> Replica:
        index = self.by_index.index(None) if None in self.by_index else len(self.by_index)
        replica = Replica(
            registered.replica_id,
            index,
            registered.kv_capacity_tokens,
            registered.max_running,
            registered.block_tokens,
            cost=registered.cost,
            policy_version=registered.policy_version,
            told_version=registered.policy_version,
        )
        self.by_id[registered.replica_id] = replica
        self.block_tokens = max(known.block_tokens for known in self.by_id.values())
        if index == len(self.by_index):
            self.by_index.append(replica)
        else:
            self.by_index[index] = replica
        return replica

    def remove(self, replica_id: str) -> Replica:
        replica = self.by_id.pop(replica_id)
        self.by_index[replica.index] = None
        return replica

    def open(self) -> list[Replica]:
        return [replica for replica in self.by_index if replica is not None and replica.open]

    def whole_blocks(self, tokens: int) -> int:
        """As a replica's, where it is not known which."""
        return -(-tokens // self.block_tokens) * self.block_tokens

    @property
    def largest_capacity_tokens(self) -> int:
        return max((replica.kv_capacity_tokens for replica in self.by_id.values()), default=0)
