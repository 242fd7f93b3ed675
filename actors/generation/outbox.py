"""What has happened at a worker since it last reported to the balancer."""

from dataclasses import dataclass, field

from rstar_ray.agent.rollout import RolloutState
from scheduler.records import Finished, RolloutLoad, TurnReport


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
    )


@dataclass(slots=True)
class Outbox:
    """In the order in which the balancer hears of it. What is delivered twice changes nothing there."""

    turns: list[TurnReport] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    returned: dict[str, tuple[RolloutLoad, RolloutState]] = field(default_factory=dict)  # by id, the latest

    def after(self, earlier: "Outbox") -> "Outbox":
        """With what has happened before, and was not delivered."""
        return Outbox(
            [*earlier.turns, *self.turns], [*earlier.finished, *self.finished], {**earlier.returned, **self.returned}
        )

    def turn_finished(self, state: RolloutState) -> None:
        load = rollout_load(state)
        self.turns.append(
            TurnReport(
                rollout_id=load.rollout_id,
                context_tokens=load.context_tokens,
                generated_tokens=load.generated_tokens,
                turn=load.turn,
            )
        )

    def ended(self, state: RolloutState) -> None:
        load = rollout_load(state)
        self.finished.append(
            Finished(
                rollout_id=load.rollout_id,
                context_tokens=load.context_tokens,
                generated_tokens=load.generated_tokens,
                turn=load.turn,
                truncated=state.stop_reason is None or state.stop_reason.truncated,  # None: a failure of ours cut it
            )
        )

    def hand_back(self, state: RolloutState) -> None:
        self.returned[state.request.rollout_id] = rollout_load(state), state
