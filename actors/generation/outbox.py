"""What a worker sends: turns to the balancer, finished rollouts to the driver."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.remote import Batch
from rstar_ray.agent.rollout import RolloutState
from rstar_ray.rollouts import DroppedRollout, FinishedRollout, TrajectoryRef
from rstar_ray.trajectory import Trajectory, TrajectorySummary
from scheduler.records import RolloutLoad, TurnReport

NUM_PARTS = 16
"""Objects that the trajectories of a batch are spread over: a learner rank fetches those with its own rows in them."""

Ended = TrajectorySummary | DroppedRollout


def rollout_load(state: RolloutState) -> RolloutLoad:
    """A rollout as the scheduler sees it."""
    request, prompt = state.request, len(state.prompt_ids)
    return RolloutLoad(
        rollout_id=request.rollout_id,
        group_id=request.group_id,
        prompt_tokens=prompt,
        max_response_tokens=max(1, min(request.limits.max_response_tokens, request.limits.max_context_tokens - prompt)),
        max_turns=request.limits.max_turns,
        context_tokens=prompt + len(state.response_ids),
        generated_tokens=sum(turn.num_tokens for turn in state.turns),
        turn=len(state.turns),
        draw=request.draw,
    )


@dataclass(slots=True)
class Outbox:
    """In the order of the reports. A report that is delivered twice changes nothing at the balancer."""

    turns: list[TurnReport] = field(default_factory=list[TurnReport])
    returned: dict[str, tuple[RolloutLoad, RolloutState]] = field(default_factory=dict)  # by id, the latest

    def after(self, earlier: "Outbox") -> "Outbox":
        """This one behind an earlier one that was not delivered."""
        return Outbox([*earlier.turns, *self.turns], {**earlier.returned, **self.returned})

    def turn_ended(self, state: RolloutState, *, ended: bool = False) -> None:
        """`ended`: the rollout too; without a `stop_reason` a failure of ours cut it."""
        load = rollout_load(state)
        self.turns.append(
            TurnReport(
                rollout_id=load.rollout_id,
                context_tokens=load.context_tokens,
                generated_tokens=load.generated_tokens,
                turn=load.turn,
                ended=ended,
                truncated=ended and (state.stop_reason is None or state.stop_reason.truncated),
            )
        )

    def hand_back(self, state: RolloutState) -> None:
        self.returned[state.request.rollout_id] = rollout_load(state), state


def without_tokens(batch: Batch[Trajectory | DroppedRollout]) -> tuple[Batch[Ended], list[list[Trajectory]]]:
    """The message to the driver, and the trajectories: the k-th of the message lies in part k % `NUM_PARTS`."""
    ended = tuple(one.summary if isinstance(one, Trajectory) else one for one in batch.items)
    trajectories = [one for one in batch.items if isinstance(one, Trajectory)]
    return Batch(batch.number, ended), [trajectories[part::NUM_PARTS] for part in range(NUM_PARTS)]


def with_refs(ended: Sequence[Ended], parts: Sequence[Any]) -> list[FinishedRollout | DroppedRollout]:
    """The rollouts of a message as the driver holds them; `parts` are the refs of the trajectories' lists."""
    rollouts: list[FinishedRollout | DroppedRollout] = []
    index = 0  # among the trajectories
    for one in ended:
        if isinstance(one, DroppedRollout):
            rollouts.append(one)
            continue
        position, part = divmod(index, NUM_PARTS)
        rollouts.append(FinishedRollout(summary=one, ref=TrajectoryRef(parts[part], position)))
        index += 1
    return rollouts
