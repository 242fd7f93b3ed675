"""The records of a rollout. Legend: P prompt tokens, T tokens after the prompt, C tokens of one completion."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rstar_ray.outcome import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question with its ground truth."""

    id: str
    problem: str
    answer: str
    family: str = ""  # its source for --data.mix; at scale tiny the generator that made it
    difficulty: float = 0.0
    reward: str = ""  # name of the rule that judges it; empty: --reward.name
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)  # the row's other columns
    environment: str = ""  # the environment of its rollouts; empty: --tools.environment

    def as_row(self) -> dict[str, Any]:
        """The row of a problem file, without `metadata` and `environment` where they are empty."""
        row = asdict(self)
        for name in ("metadata", "environment"):
            if not row[name]:
                del row[name]
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn; frozen, so that no rollout can change it for another."""

    temperature: float
    top_p: float


UNMODIFIED = Sampling(temperature=1.0, top_p=1.0)
"""Unmodified distribution of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """Budgets of one rollout; the length budget counts everything after the prompt (PAPER: tool text too)."""

    max_response_tokens: int
    max_turns: int
    max_context_tokens: int  # the engine's context: prompt and response together
    max_calls_per_turn: int  # further calls get an error message and count as failed
    max_environment_turns: int | None = None  # replies of the environment, which `max_turns` does not count; None: any


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One rollout to run; `seed` is derived from (run seed, step, prompt, sibling)."""

    rollout_id: str  # unique in a run: "<phase>/<step>/<problem id>/<sibling>"
    group_id: str  # siblings of one prompt share it
    problem: Problem
    seed: int
    limits: RolloutLimits
    sampling: Sampling
    draw: int = 0  # the training step that it is for; 0: an evaluation, or no step waits for it
    cache_salt: str = ""  # cached KV of its prefixes is shared under the same salt alone
    oldest_version: int = 0  # of the policy: turns of older weights do not count, where they are on record


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call as parsed from a completion; `parse_error` is set when it could not be."""

    code: str = ""  # of the built-in Python
    stdin: str = ""
    tool: str = "python"
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of every other tool
    parse_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolMemory:
    """A rollout's state at a tool that holds one for it."""

    calls: int  # finished ones
    snapshot: str | None = None  # restores the state; None where the tool takes no snapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What the model sees of a call, and what GRPO-RoC counts."""

    outcome: Outcome
    text: str
    wall_s: float = 0.0  # issue to result
    tool: str = ""  # the called tool; empty where no tool in use was called
    memory: tuple[str, ToolMemory] | None = None  # of a tool with state: its name, and where the rollout now stands


class StopReason(StrEnum):
    """Why a rollout ended."""

    ANSWERED = "answered"  # a turn without a tool call
    TRUNCATED = "truncated"  # the length budget or the context ran out
    MAX_TURNS = "max_turns"  # the last allowed turn still called a tool, or the environment had replied its last
    REFUSED = "refused"  # the prompt alone exceeds the context
    AGENT_FAILED = "agent_failed"  # the user's agent around the policy raised, or its process failed
    AGENT_TIMEOUT = "agent_timeout"  # it neither requested a completion nor ended within its deadline

    @property
    def truncated(self) -> bool:
        """Whether a token budget cut the rollout: its natural length is unknown."""
        return self is StopReason.TRUNCATED


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """How long a completion was prefilled and decoded in the engine; what came before was its queue."""

    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One turn as the engine sampled it."""

    token_ids: list[int]  # [C], with the end-of-turn token where it was sampled
    logprobs: list[float]  # [C], at sampling time
    policy_versions: list[int]  # [C] weights that sampled the token; they change inside a turn where a swap fell
    ended: bool  # True at the end-of-turn token, False where max_tokens cut it
    times: EngineTimes | None = None  # if the engine reports them

    def __post_init__(self) -> None:
        assert len(self.logprobs) == len(self.policy_versions) == len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One completion by the policy and the sandbox's answers to its tool calls."""

    num_tokens: int  # C
    tool_results: tuple[ToolResult, ...] = ()
    generate_s: float = 0.0
    tool_s: float = 0.0
    continues: int | None = None  # of an agent's: the turn whose tokens it continues, or `NEW`; None: the one before
    why_new: str = ""  # agents only: why it begins another line


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptTurn:
    """One completion as text, with its tool calls and their results."""

    completion: str  # as sampled, special tokens included
    num_tokens: int
    calls: tuple[ToolCall, ...] = ()  # in order; a call that could not be parsed has a `parse_error`
    results: tuple[ToolResult, ...] = ()  # of the calls; empty where a turn limit or the budget ended the rollout first


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A whole rollout as text, for a reward function that takes it as its third argument."""

    rollout_id: str
    group_id: str  # shared by all rollouts of one prompt
    stop_reason: StopReason
    turns: tuple[TranscriptTurn, ...]
    num_prompt_tokens: int
    num_response_tokens: int  # everything after the prompt: completions and tool results
    num_sampled_tokens: int  # the completions alone
    max_response_tokens: int  # the budget that `num_response_tokens` counts against
    max_turns: int

    @property
    def truncated(self) -> bool:
        return self.stop_reason.truncated

    @property
    def num_calls(self) -> int:
        return sum(len(turn.results) for turn in self.turns)

    @property
    def num_failed(self) -> int:
        return sum(result.outcome.failed for turn in self.turns for result in turn.results)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One stay of a rollout on a replica: the wait, the reason for the choice, and the replica's load."""

    replica_id: str
    turn: int  # turns finished by then; above 0 where it moved, or its replica was lost
    why: str
    waited_s: float = 0.0
    held_s: Mapping[str, float] = field(default_factory=dict[str, float])  # of these: the queue stood still, by what
    kv_used_tokens: int  # as the engine had reported last
    kv_expected_tokens: int  # expected need of the residents, with this one
    kv_capacity_tokens: int
    residents: int  # rollouts there, with this one


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySummary:
    """What resampling, metrics and the driver need of a trajectory: no tokens."""

    rollout_id: str
    group_id: str
    problem_id: str
    reward: float
    num_calls: int
    num_failed: int
    num_answers: int | None  # answers the policy wrote where its reward reads them; None if it reads no marked answer
    num_turns: int
    num_prompt_tokens: int
    num_response_tokens: int  # everything after the prompt
    num_sampled_tokens: int  # of those, what the policy sampled: the tokens trained on
    stop_reason: StopReason
    answer: str = ""  # as the policy wrote it; empty without one
    outcomes: tuple[Outcome, ...] = ()
    tools: tuple[str, ...] = ()  # the tool of each outcome, as in `ToolResult`
    reward_components: Mapping[str, float] = field(default_factory=dict[str, float])  # as the reward function gave them
    version_tokens: tuple[tuple[int, int], ...] = ()  # weights that sampled, oldest first, and how many tokens
    generate_s: float = 0.0
    tool_s: float = 0.0
    verify_s: float = 0.0
    restarts: int = 0  # begun again because a tool had lost its state
    judge_retries: int = 0  # infrastructure failures of judging before the reward was computed
    turn_s: tuple[tuple[float, float], ...] = ()  # of every turn: generating, in tools
    placements: tuple[Placement, ...] = ()
    unjudged: str = ""  # why judging failed on every try; the reward of 0 is then not a score
    lines: tuple[tuple[int, int], ...] = ()  # of an agent with several lines: the tokens and trained tokens of each
    loose: float | None = None  # what the answer is worth taken loosely; None where its problem names no such rule

    @property
    def truncated(self) -> bool:
        return self.stop_reason.truncated

    @property
    def policy_version_min(self) -> int:
        """Oldest weights that sampled a token; 0 without one."""
        return min((version for version, _ in self.version_tokens), default=0)

    @property
    def policy_version_max(self) -> int:
        """Newest weights that sampled a token; 0 without one."""
        return max((version for version, _ in self.version_tokens), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The full record of one rollout, as numpy arrays; travels by object ref."""

    summary: TrajectorySummary
    problem: Problem
    prompt_ids: NDArray[np.int32]  # [P]
    response_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.bool_]  # [T] True exactly where the policy sampled
    rollout_logprobs: NDArray[np.float32]  # [T] from the engine at sampling; 0 where the mask is False
    policy_versions: NDArray[np.int32]  # [T] weights that sampled the token; -1 where the mask is False
    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        length = len(self.response_ids)
        assert len(self.loss_mask) == len(self.rollout_logprobs) == len(self.policy_versions) == length
