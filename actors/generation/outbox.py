"""What a worker reports to the balancer next."""

from dataclasses import dataclass, field

from rstar_ray.agent.rollout import RolloutState
from scheduler.records import RolloutLoad, TurnReport


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
