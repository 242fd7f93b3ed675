"""The rule of staleness, token by token over random schedules of everything that happens to a run."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from rstar_ray.draws import StalenessRule

MakeRule = Callable[..., StalenessRule]


@dataclass
class Playing:
    """A rollout. Weights are named by the number of ended steps behind them."""

    draw: int
    left: int  # tokens until its end
    begun: int  # ended steps when its draw began in this life of the run: its oldest cached KV
    tokens: list[int] = field(default_factory=list)  # the weights that sampled each
    replica: int = -1  # -1: waits
    dropped: bool = False

    @property
    def ended(self) -> bool:
        return self.dropped or not self.left


class Schedule:
    """A stage in virtual time: replicas that load weights one after the other and are lost, refused updates,
    evaluations, rollouts that are dropped, kills with another staleness after them, an early end."""

    def __init__(self, seed: int, make_rule: MakeRule) -> None:
        rng = self.rng = random.Random(seed)
        self.make_rule = make_rule
        self.staleness = rng.choice([0, 1, 1, 2, 2, 3, 5])
        self.steps, self.size = rng.randint(3, 8), rng.randint(1, 3)
        self.early_end = rng.choice([0, 0, rng.randint(1, self.steps)])
        self.keeps_kv = rng.random() < 0.5
        self.kills = rng.choice([0, 0, 1, 2])
        self.checkpoint_every = rng.randint(1, 3)
        self.saved = self.ended = self.farthest = 0
        self.replicas = [0] * rng.randint(1, 3)  # the weights that each serves
        self.newest = 0
        self.rollouts: dict[int, list[Playing]] = {}  # by draw, in this life
        self.journal: dict[int, list[Playing]] = {}
        self.trained: dict[int, list[Playing]] = {}
        self.oldest_age = 0
        self.faults: list[str] = []

    def run(self) -> "Schedule":
        self.rule = self.make_rule(self.staleness, last=self.steps)
        while self.ended < self.steps and not (self.early_end and self.ended >= self.early_end):
            self._step(self.ended + 1)
        return self

    def _step(self, step: int) -> None:
        self.rule.end(step - 1)
        for draw in self.rule.begin():
            self._begin(draw)
        for _ in range(10_000):
            if all(one.ended for one in self.rollouts.get(step, [])):
                break
            if self._tick():  # killed
                return
        else:
            self.faults.append(f"step {step} waits for ever")
            self.ended = self.steps
            return
        self._train(step)
        if self._ticks() or self._publish(step) or self._ticks():  # learning; then an evaluation, a checkpoint
            return
        if step % self.checkpoint_every == 0:
            self.saved = step

    def _begin(self, draw: int) -> None:
        if draw in self.rollouts or draw > self.steps:
            self.faults.append(f"draw {draw} began twice, or is beyond the stage")
        kept = self.journal.pop(draw, None)
        if kept is None:
            lengths = [self.rng.choice([1, 2, 3, 4, 30]) for _ in range(self.size)]
            kept = [Playing(draw, length, self.ended) for length in lengths]
        for one in kept:
            one.begun, one.replica = self.ended, -1
            if one.tokens and (one.tokens[0] < self.rule.oldest(draw) or max(one.tokens) > self.newest):
                if max(one.tokens) > self.newest:
                    self.faults.append(f"draw {draw} continues from tokens of weights that are not back yet")
                one.left, one.tokens = one.left + len(one.tokens), []
        self.rollouts[draw] = kept

    def _ticks(self) -> bool:
        return any(self._tick() for _ in range(self.rng.choice([0, 3, 40])))

    def _tick(self) -> bool:
        """One token, or one accident; True for a kill."""
        rng, live = self.rng, [one for draw in self.rollouts.values() for one in draw if not one.ended]
        chance = rng.random()
        if chance < 0.003 and self.kills:
            self._kill()
            return True
        if chance < 0.01:
            lost = rng.randrange(len(self.replicas))
            self.replicas[lost] = self.newest  # its next process loads the newest weights before it serves
            for one in live:
                if one.replica == lost:
                    keeps = rng.randint(0, len(one.tokens))  # finished turns
                    one.left, one.tokens, one.replica = one.left + len(one.tokens) - keeps, one.tokens[:keeps], -1
        elif live:
            one = rng.choice(live)
            one.dropped = chance > 0.995
            if one.replica < 0:
                one.replica = rng.randrange(len(self.replicas))
            one.tokens.append(self.replicas[one.replica])
            one.left -= 1
        return False

    def _train(self, step: int) -> None:
        if step in self.trained:
            self.faults.append(f"draw {step} is trained twice")
        self.trained[step] = self.rollouts.pop(step)
        for one in self.trained[step]:
            oldest = min([*one.tokens, one.begun] if self.keeps_kv else [*one.tokens, step - 1])
            self.oldest_age = max(self.oldest_age, step - 1 - oldest)
            if step - 1 - oldest > self.staleness or max(one.tokens, default=0) > step - 1:
                self.faults.append(f"step {step} trains weights of {step - 1} steps on a token of {oldest}")

    def _publish(self, step: int) -> bool:
        if self.rng.random() < 0.15:  # refused: what is served stays what it is
            self.replicas = [step] * len(self.replicas)
        self.newest = step
        for number in self.rng.sample(range(len(self.replicas)), len(self.replicas)):
            self.replicas[number] = step
            if self.rng.random() < 0.5 and self._tick():
                return True
        self.ended, self.farthest = step, max(self.farthest, step)
        return False

    def _kill(self) -> None:
        """The run continues from its checkpoint; finished turns are in the journal."""
        rng = self.rng
        self.kills -= 1
        self.journal |= self.rollouts | {step: self.trained.pop(step) for step in [*self.trained] if step > self.saved}
        for kept in self.journal.values():
            for one in kept:
                if one.dropped:
                    one.dropped, one.left = False, one.left + len(one.tokens)
                    one.tokens = []
        if rng.random() < 0.3:  # other weights come out of the repeated steps: what these sampled does not count
            self.farthest = self.saved
            for one in (one for kept in self.journal.values() for one in kept):
                keeps = next((at for at, weights in enumerate(one.tokens) if weights > self.saved), len(one.tokens))
                one.left, one.tokens = one.left + len(one.tokens) - keeps, one.tokens[:keeps]
        for one in (one for kept in self.journal.values() for one in kept):  # the step under way had not ended
            keeps = next((at for at, weights in enumerate(one.tokens) if weights > self.farthest), len(one.tokens))
            one.left, one.tokens = one.left + len(one.tokens) - keeps, one.tokens[:keeps]
        self.rollouts = {}
        if rng.random() < 0.3:
            self.staleness = rng.choice([0, 1, 2, 4])
        self.ended = self.newest = self.saved
        self.replicas = [self.saved] * len(self.replicas)
        self.rule = self.make_rule(self.staleness, last=self.steps, ended=self.saved, repeats_to=self.farthest)


def violations(make_rule: MakeRule, seeds: range) -> tuple[int, int]:
    """Schedules with a fault, and those that reach the bound."""
    faulty = at_bound = 0
    for seed in seeds:
        done = Schedule(seed, make_rule).run()
        steps = range(1, done.ended + 1)
        if not done.faults and sorted(done.trained) != [*steps]:
            done.faults.append("not every step trained on its own draw, once")
        faulty += bool(done.faults)
        at_bound += not done.faults and done.oldest_age == done.staleness
    return faulty, at_bound


@pytest.mark.long
def test_no_token_is_older_than_the_bound_when_it_is_trained_and_every_draw_is_trained_once():
    faulty, at_bound = violations(StalenessRule, range(10_000))
    assert faulty == 0
    assert at_bound > 5_000  # the bound is not looser than it has to be


def test_draws_run_ahead_again_once_a_repeated_step_has_left_other_weights():
    rule = StalenessRule(2, last=9, repeats_to=5)
    assert [*rule.begin()] == [1]
    rule.end(1)
    assert [*rule.begin()] == [2]
    rule.end(2)
    rule.repeat_at_most_to(2)
    assert [*rule.begin()] == [3, 4, 5]


class OneTooMany(StalenessRule):
    def __init__(self, staleness: int, **more: int) -> None:
        super().__init__(staleness + 1, **more)


class KeepsOldTurns(StalenessRule):
    def oldest(self, number: int) -> int:
        return 0


class NeverWaitsForWeights(StalenessRule):
    def __init__(self, staleness: int, *, repeats_to: int = 0, **more: int) -> None:
        super().__init__(staleness, **more)


@pytest.mark.parametrize("wrong", [OneTooMany, KeepsOldTurns, NeverWaitsForWeights])
def test_a_rule_that_is_slightly_wrong_is_found_out(wrong: MakeRule):
    assert violations(wrong, range(1_000))[0] > 0
