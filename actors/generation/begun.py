"""Turns under way as far as they were sampled: for the journal, and for who goes on with them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rstar_ray.agent.journal import TurnJournal
from rstar_ray.agent.rollout import RolloutState
from rstar_ray.trajectory import Completion


@dataclass(slots=True)
class _Begun:
    """Of one turn, by one version of the weights."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    written: int = 0  # tokens that the journal has, or had when the rollout came here
    goes_on: bool = True  # False where more was sampled than is here

    @classmethod
    def of(cls, before: Completion | None) -> "_Begun":
        if before is None:
            return cls()
        return cls([*before.token_ids], [*before.logprobs], [*before.policy_versions], len(before.token_ids))

    def completion(self, first: int = 0) -> Completion:
        rest = slice(first, None)
        return Completion(
            token_ids=self.token_ids[rest],
            logprobs=self.logprobs[rest],
            policy_versions=self.policy_versions[rest],
            ended=False,
        )


class BegunTurns:
    """Of the rollouts that one worker plays, each turn from its first token until it has finished."""

    def __init__(self, journal: TurnJournal) -> None:
        self._journal = journal
        self._turns: dict[str, _Begun] = {}

    def note(self, state: RolloutState, more: Completion, version: int) -> None:
        """What was sampled since, of the turn that comes after this state, while weights of this version serve.

        A turn that a swap of weights fell into is kept up to there.
        """
        turn = self._turn(state)
        turn.goes_on = turn.goes_on and more.policy_versions[0] == version == more.policy_versions[-1]
        if turn.goes_on:
            turn.token_ids += more.token_ids
            turn.logprobs += more.logprobs
            turn.policy_versions += more.policy_versions

    def note_end(self, state: RolloutState, done: Completion, version: int) -> None:
        """The whole completion of that turn, whose calls are still to be answered."""
        more = done.after(len(self._turn(state).token_ids))
        if more.token_ids:
            self.note(state, more, version)

    def finished(self, rollout_id: str) -> None:
        """The turn has, or is played here no longer."""
        self._turns.pop(rollout_id, None)

    def reached(self, states: Mapping[str, RolloutState]) -> list[RolloutState]:
        """States at their last finished turns, with what there is of the next."""
        begun = {name: self._turns[name].completion() for name in states.keys() & self._turns.keys()}
        return [replace(state, begun=begun.get(name, state.begun)) for name, state in states.items()]

    def write(self, weights: int) -> None:
        """What is not yet in the journal."""
        new = {name: turn for name, turn in self._turns.items() if len(turn.token_ids) > turn.written}
        self._journal.add_begun({name: turn.completion(turn.written) for name, turn in new.items()}, weights)
        self._journal.flush()
        for turn in new.values():
            turn.written = len(turn.token_ids)

    def _turn(self, state: RolloutState) -> _Begun:
        rollout_id = state.request.rollout_id
        if rollout_id not in self._turns:
            self._turns[rollout_id] = _Begun.of(state.begun)
        return self._turns[rollout_id]
