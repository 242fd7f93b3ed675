"""The simulator: the balancer with modelled engines and tools in virtual time. Its figures are *simulated*.

    python -m scheduler.simulator --trace stage1.jsonl --replicas 64 --kv-tokens 650000 --rule expected_kv --json

The rule receives the same data as from real engines: turn reports, ends, and the engines' load.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rstar_ray.config import BalancerConfig
from scheduler.balancer import PLACEMENT, Balancer, MakeRule
from scheduler.cost import EngineCost
from scheduler.records import Registration, ReplicaLoad, RolloutLoad, TurnReport, in_flight_limit
from scheduler.simulator.bound import lower_bound
from scheduler.simulator.engine_model import EngineShape, ModelledEngine
from scheduler.simulator.paged_cache import Request
from scheduler.traces.trace import TraceRollout, check_siblings, cut, stop_reason

MI300X_14B = EngineCost(
    # Computed, not measured: Qwen3-14B in bf16 (29.6 GB, 14.8e9 parameters, 160 KiB of KV per token) on 5.3 TB/s at
    # 70 % and 1307 TFLOP/s at 40 %, and 1 ms of host time per step.
    fixed_s=9.0e-3,
    per_sequence_s=20.0e-6,
    per_context_s=44.0e-9,
    per_prefill_s=57.0e-6,
    per_prefill_context_s=1.6e-9,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorSettings:
    """Settings of one simulation."""

    replicas: int
    shape: EngineShape
    cost: EngineCost
    max_response_tokens: int
    max_turns: int
    placement: BalancerConfig = PLACEMENT  # risk and costs; the rule is a separate argument
    rpc_s: float = 0.002  # from a decision to the engine

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas is {self.replicas}; give at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorResult:
    """One simulated step."""

    rule: str
    makespan_s: float
    lower_bound_s: float
    longest_rollout_s: float
    work_s: float
    kv_area_s: float
    rollouts: int
    generated_tokens: int
    recomputed_tokens: int
    preemptions: int
    moves: int
    kv_utilisation: float  # mean share of all replicas' KV that was in use
    wait_s_p50: float  # submission until the engine first computes
    wait_s_p99: float
    decisions: int  # admissions and moves
    decisions_per_s: float  # over all time inside `decide`, calls without a decision included

    def as_json(self) -> dict[str, str | float | int]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {
            "simulated": True,
            "over_bound": self.makespan_s / self.lower_bound_s,
        }


@dataclass(frozen=True, slots=True)
class CannotHold:
    """A rule that needs more KV than a replica has; other rules may run the same step."""

    rule: str
    reason: str

    def as_json(self) -> dict[str, str | bool]:
        return {"rule": self.rule, "cannot_hold": self.reason, "simulated": True}


@dataclass(slots=True)
class _Progress:
    """The progress of one rollout."""

    load: RolloutLoad
    rollout: TraceRollout
    context: int  # tokens
    turn: int = 0
    answer: int = 0  # tokens of the tool's answer that no engine has received yet
    generated: int = 0
    replica: int = -1  # index
    first_s: float = -1.0  # when an engine first computed it


def named(rollouts: Sequence[TraceRollout]) -> dict[str, TraceRollout]:
    """Rollouts by the ids that the simulator gives them."""
    return {f"{rollout.group}/{number}": rollout for number, rollout in enumerate(rollouts)}


class Simulator:
    """Simulates one step in virtual time.

    `history`: rollouts of an earlier step, whose lengths the balancer has seen; without it the step is the run's first.
    """

    def __init__(
        self,
        rollouts: Sequence[TraceRollout],
        rule: str | MakeRule,
        settings: SimulatorSettings,
        *,
        history: Sequence[TraceRollout] = (),
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.settings = settings
        self._limits = (settings.max_response_tokens, settings.max_turns)
        self.balancer = Balancer(rule, settings.placement)
        self.names = [f"replica-{index:02d}" for index in range(settings.replicas)]
        self._index = {name: index for index, name in enumerate(self.names)}
        self.engines = [ModelledEngine(settings.cost, settings.shape) for _ in self.names]
        self._clock = clock
        self._history = history
        self._progress: dict[str, _Progress] = {}
        self._moving: set[str] = set()
        self._reports: list[list[TurnReport]] = [[] for _ in self.names]
        self._at_tools: list[dict[str, None]] = [{} for _ in self.names]
        self._events: list[tuple[float, int, int, int, str]] = []  # time, order, engine or -1, version, rollout
        self._order = 0
        self._decide_s = 0.0
        self._decisions = 0
        self._paused_until_s = 0.0
        self.rollouts = self._add(rollouts)

    def _add(self, rollouts: Sequence[TraceRollout], draw: int = 0) -> list[TraceRollout]:
        """Add the rollouts of one draw, cut to the limits; groups of different draws need different names."""
        settings = self.settings
        check_siblings(rollouts)
        cut_ones = [cut(rollout, *self._limits) for rollout in rollouts]
        largest = max((rollout.prompt_tokens + rollout.response_tokens for rollout in cut_ones), default=0)
        if largest + settings.shape.block_tokens > settings.shape.kv_tokens:
            raise ValueError(f"a rollout of {largest} tokens does not fit into {settings.shape.kv_tokens} KV tokens")
        for rollout_id, rollout in named(cut_ones).items():
            load = RolloutLoad(
                rollout_id=rollout_id,
                group_id=rollout.group,
                prompt_tokens=rollout.prompt_tokens,
                max_response_tokens=settings.max_response_tokens,
                max_turns=settings.max_turns,
                draw=draw,
            )
            self._progress[rollout_id] = _Progress(load, rollout, rollout.prompt_tokens)
        return cut_ones

    def run(self) -> SimulatorResult:
        """Run until every rollout has ended."""
        self._register()
        self.balancer.submit([one.load for one in self._progress.values()])
        self._decide(0.0)
        now, left = 0.0, len(self._progress)
        while self._events:
            at, ended = self._next_event()
            now, left = max(now, at), left - len(ended)
        if left:
            raise AssertionError(f"{left} rollouts never ended under {self.balancer.rule.name}")
        return self._result(now)

    def _register(self) -> None:
        shape = self.settings.shape
        for name in self.names:
            self.balancer.register(
                Registration(
                    replica_id=name,
                    kv_capacity_tokens=shape.kv_tokens,
                    max_running=in_flight_limit(shape.max_running),
                    block_tokens=shape.block_tokens,
                    cost=self.settings.cost,
                )
            )
        if self._history:
            past = [cut(rollout, *self._limits) for rollout in self._history]
            self.balancer.add_history(
                *self._limits,
                [(r.group, float(r.generated_tokens), stop_reason(r, *self._limits).truncated) for r in past],
                growth=sum(r.response_tokens for r in past) / sum(r.generated_tokens for r in past),
            )

    # -- events ---------------------------------------------------------------------------------------------------
    def _push(self, at_s: float, index: int, version: int, rollout_id: str) -> None:
        self._order += 1
        heapq.heappush(self._events, (at_s, self._order, index, version, rollout_id))

    def _next_event(self) -> tuple[float, list[str]]:
        """Handle the next event; returns its time (0 if it is obsolete) and the rollouts that ended at it."""
        at, _, index, version, rollout_id = heapq.heappop(self._events)
        if index < 0:
            self._arrive(at, rollout_id)
            return 0.0, []
        engine = self.engines[index]
        if engine.version != version:
            return 0.0, []
        done = engine.advance()
        self._schedule(index)
        return at, self._turns_ended(at, index, done) if done else []

    def _schedule(self, index: int) -> None:
        engine = self.engines[index]
        if engine.next_event_s != float("inf"):
            self._push(engine.next_event_s, index, engine.version, "")

    def _arrive(self, now_s: float, rollout_id: str) -> None:
        """At a turn boundary, with the tool's answer: submit the rollout's next turn to its engine, or return it."""
        if now_s < self._paused_until_s:
            self._push(self._paused_until_s, -1, 0, rollout_id)
            return
        one = self._progress[rollout_id]
        self._at_tools[one.replica].pop(rollout_id, None)
        if rollout_id in self._moving:
            self._hand_back(now_s, one)
            return
        if one.turn > one.load.turn:  # from a tool, not an admission: sent with its engine's next report
            self._reports[one.replica].append(
                TurnReport(
                    rollout_id=rollout_id,
                    context_tokens=one.context + one.answer,
                    generated_tokens=one.generated,
                    turn=one.turn,
                )
            )
        self._submit(now_s, one)

    def _submit(self, now_s: float, one: _Progress) -> None:
        seen = one.context if one.turn else 0
        one.context += one.answer
        one.answer = 0
        request = Request(
            one.load.rollout_id,
            one.load.group_id,
            one.load.prompt_tokens,
            one.context,
            one.rollout.turns[one.turn].completion_tokens,
            seen,
        )
        engine = self.engines[one.replica]
        version = engine.version
        engine.submit(now_s, request)
        if engine.version != version:
            self._schedule(one.replica)

    def _turns_ended(self, now_s: float, index: int, done: Sequence[Request]) -> list[str]:
        """Report ended turns as a worker does, and apply the balancer's decisions; returns the rollouts that ended."""
        engine, name = self.engines[index], self.names[index]
        ended: list[TurnReport] = []
        for request in done:
            one = self._progress[request.key]
            if one.first_s < 0:
                one.first_s = request.admitted_s
            turn = one.rollout.turns[one.turn]
            one.turn += 1
            one.context = request.context
            one.generated += turn.completion_tokens
            if one.turn < len(one.rollout.turns):
                one.answer = turn.tool_tokens
                self._push(now_s + turn.tool_seconds, -1, 0, request.key)
                self._at_tools[index][request.key] = None
                continue
            ended.append(
                TurnReport(
                    rollout_id=request.key,
                    context_tokens=one.context,
                    generated_tokens=one.generated,
                    turn=one.turn,
                    ended=True,
                    truncated=stop_reason(one.rollout, *self._limits).truncated,
                )
            )
        load = ReplicaLoad(
            kv_used_tokens=engine.kv_used_tokens,
            running=len(engine.running),
            waiting=len(engine.waiting),
            preemptions=engine.preemptions,
            steps=engine.steps,
            at_tools=tuple(self._at_tools[index]),
        )
        self.balancer.report(name, [*self._reports[index], *ended], load)
        self._reports[index].clear()
        self._decide(now_s)
        return [report.rollout_id for report in ended]

    def _hand_back(self, now_s: float, one: _Progress) -> None:
        """Return a moved rollout to the balancer with its state, the tool's answer included."""
        load, name = one.load, self.names[one.replica]
        self._moving.discard(load.rollout_id)
        self.engines[one.replica].abort(load.rollout_id)
        one.load = replace(
            load,
            context_tokens=one.context + one.answer,
            generated_tokens=one.generated,
            turn=one.turn,
        )
        self.balancer.return_rollouts(name, [(one.load, None)])
        self._decide(now_s)

    def _decide(self, now_s: float) -> None:
        started = self._clock()
        admissions, moves = self.balancer.decide()
        self._decide_s += self._clock() - started
        self._decisions += len(admissions) + len(moves)
        for rollout, replica in admissions:
            rollout_id = rollout.load.rollout_id
            self._progress[rollout_id].replica = self._index[replica.replica_id]
            self._push(now_s + self.settings.rpc_s, -1, 0, rollout_id)
        self._moving.update(move.rollout_id for move in moves)

    def _result(self, makespan_s: float) -> SimulatorResult:
        shape = self.settings.shape
        bound = lower_bound(self.rollouts, replicas=self.settings.replicas, cost=self.settings.cost, shape=shape)
        waits = sorted(one.first_s for one in self._progress.values())
        area = sum(engine.kv_area for engine in self.engines)
        snapshot = self.balancer.snapshot()
        assert snapshot.finished == len(self._progress) and snapshot.waiting == snapshot.in_flight == 0
        return SimulatorResult(
            rule=self.balancer.rule.name,
            makespan_s=makespan_s,
            lower_bound_s=bound.lower_bound_s,
            longest_rollout_s=bound.longest_rollout_s,
            work_s=bound.work_s,
            kv_area_s=bound.kv_area_s,
            rollouts=len(self._progress),
            generated_tokens=sum(rollout.generated_tokens for rollout in self.rollouts),
            recomputed_tokens=sum(engine.recomputed_tokens for engine in self.engines),
            preemptions=sum(engine.preemptions for engine in self.engines),
            moves=snapshot.moves,
            kv_utilisation=area / (makespan_s * len(self.engines) * self.engines[0].capacity),
            wait_s_p50=waits[len(waits) // 2],
            wait_s_p99=waits[len(waits) * 99 // 100],
            decisions=self._decisions,
            decisions_per_s=self._decisions / self._decide_s if self._decide_s else 0.0,
        )


def limits_of(rollouts: Sequence[TraceRollout]) -> tuple[int, int]:
    """Budgets for a trace, which does not contain them: its longest response and its most turns."""
    return max(rollout.response_tokens for rollout in rollouts), max(len(rollout.turns) for rollout in rollouts)
