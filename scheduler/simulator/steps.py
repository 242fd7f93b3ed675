"""Simulates training steps with a staleness in virtual time: draws, learner, publishing and modelled engines.

`StalenessRule` of `rstar_ray/draws.py` decides when a draw begins, as in a run. A step learns when its draw and the
previous step have ended; the next draws begin when all engines serve its weights.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from rstar_ray.draws import StalenessRule
from scheduler.balancer import MakeRule
from scheduler.simulator.bound import lower_bound
from scheduler.simulator.simulate import Simulator, SimulatorSettings
from scheduler.traces.trace import TraceRollout

LEARNER = -2  # instead of an engine's index: the event is the end of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerTime:
    """Times of every step, in seconds."""

    learn_s: float = 0.0
    engines_pause_s: float = 0.0  # of it, engines pause: all of it if both take turns on the same GPUs
    publish_s: float = 0.0  # engines pause
    recompute: bool = False  # recompute contexts after it: engines that slept, or `--engine.recompute-kv`


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step; seconds of virtual time."""

    begun_s: float  # start of its draw
    drawn_s: float  # the last rollout of its draw ended
    ended_s: float  # all engines serve its weights
    bound_s: float  # of its draw: the larger of the bounds by work and by KV area
    generated_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSteps:
    """Figures of all steps but the first few, which depend on how the stage began."""

    staleness: int
    steps: Sequence[SimulatedStep]
    step_s: float  # mean
    over_bound: float  # mean time of a step in which engines ran, over the bound of its draw
    tokens_per_s: float  # generated, of draws that were trained on
    recomputed_share: float  # of generated tokens, over the whole time
    preemptions: int


class StepsSimulator(Simulator):
    """Simulates a number of steps of a stage."""

    def __init__(
        self,
        draw_of: Callable[[int], Sequence[TraceRollout]],
        rule: str | MakeRule,
        settings: SimulatorSettings,
        *,
        steps: int,
        staleness: int,
        learner: LearnerTime,
        continues: bool = True,
    ) -> None:
        """`draw_of`: rollouts of step 1, 2, ...; here their groups' names get the step's number. Unless the stage
        `continues` after the last of these steps, no draw begins that they do not train on."""
        super().__init__((), rule, settings)
        self._draw_of = draw_of
        self._steps = steps
        self._staleness = staleness
        self._learner = learner
        self._rule = StalenessRule(staleness, last=steps + staleness * continues)
        self._begun_s: dict[int, float] = {}
        self._bound_s: dict[int, float] = {}
        self._tokens: dict[int, int] = {}
        self._left: dict[int, int] = {}  # rollouts of each draw that have not ended
        self._drawn_s: dict[int, float] = {}
        self._done: list[SimulatedStep] = []
        self._learns = False

    def run_steps(self) -> SimulatedSteps:
        self._register()
        self._begin(0.0)
        while len(self._done) < self._steps:
            if self._events[0][2] == LEARNER:
                self._step_ended()
                continue
            at, ended = self._next_event()
            for rollout_id in ended:
                draw = self._progress.pop(rollout_id).load.draw
                self._left[draw] -= 1
                if not self._left[draw]:
                    self._drawn_s[draw] = at
                    self._learn(at)
        return self._figures()

    def _begin(self, now_s: float) -> None:
        for draw in self._rule.begin():
            rollouts = [
                TraceRollout(f"{draw}:{rollout.group}", rollout.prompt_tokens, rollout.turns)
                for rollout in self._draw_of(draw)
            ]
            before = len(self._progress)
            added = self._add(rollouts, draw)
            settings = self.settings
            bound = lower_bound(added, replicas=settings.replicas, cost=settings.cost, shape=settings.shape)
            self._begun_s[draw], self._left[draw] = now_s, len(added)
            self._bound_s[draw] = max(bound.work_s, bound.kv_area_s)
            self._tokens[draw] = sum(rollout.generated_tokens for rollout in added)
            self.balancer.submit([one.load for one in [*self._progress.values()][before:]])
        self._decide(now_s)

    def _learn(self, now_s: float) -> None:
        """Start the next step if its draw has ended and no step is in progress."""
        if self._learns or len(self._done) + 1 not in self._drawn_s:
            return
        self._learns = True
        learner = self._learner
        pause_s = learner.engines_pause_s + learner.publish_s
        self._paused_until_s = now_s + pause_s
        for index, engine in enumerate(self.engines):
            engine.pause(pause_s)
            self._schedule(index)
        self._push(now_s + learner.learn_s + learner.publish_s, LEARNER, 0, "")

    def _step_ended(self) -> None:
        now_s = heapq.heappop(self._events)[0]
        step = len(self._done) + 1
        self._learns = False
        self._done.append(
            SimulatedStep(
                begun_s=self._begun_s[step],
                drawn_s=self._drawn_s[step],
                ended_s=now_s,
                bound_s=self._bound_s[step],
                generated_tokens=self._tokens[step],
            )
        )
        if self._learner.recompute:
            for index, engine in enumerate(self.engines):
                engine.drop_kv(now_s)
                self._schedule(index)
        self.balancer.set_policy_version(step)
        self._rule.end(step)
        self._begin(now_s)
        self._learn(now_s)

    def _figures(self) -> SimulatedSteps:
        first = min(self._staleness + 2, self._steps - 1)  # counting begins at its end
        counted, learner = self._done[first:], self._learner
        step_s = (self._done[-1].ended_s - self._done[first - 1].ended_s) / len(counted)
        runs_s = step_s - learner.engines_pause_s - learner.publish_s
        if not self._staleness:
            runs_s = step_s - learner.learn_s - learner.publish_s
        generated = sum(self._tokens.values())
        return SimulatedSteps(
            staleness=self._staleness,
            steps=tuple(self._done),
            step_s=step_s,
            over_bound=runs_s / mean(step.bound_s for step in counted),
            tokens_per_s=mean(step.generated_tokens for step in counted) / step_s,
            recomputed_share=sum(engine.recomputed_tokens for engine in self.engines) / generated,
            preemptions=sum(engine.preemptions for engine in self.engines),
        )
