"""Fakes for the Protocols: a chat with one token per character, a policy with one skill, a sandbox that adds."""

import asyncio
import contextlib
import io
import json
import random
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from actors.balancer_service import BalancerService
from actors.service import Service
from rstar_ray.agent.rollout import RolloutState, run_rollout, score
from rstar_ray.algorithm.update import SftExample, UpdateResult
from rstar_ray.chat.template import Reading
from rstar_ray.chat.tool_calls import parse_tool_calls
from rstar_ray.context import RunContext
from rstar_ray.errors import EngineError, RStarError, SandboxError
from rstar_ray.outcome import Outcome
from rstar_ray.reward.find import boxed_answer
from rstar_ray.reward.judge import Judgement
from rstar_ray.rollouts import DroppedRollout, FinishedRollout, TrainingRow, TrajectoryRef
from rstar_ray.run_dir.durable import read_json, write_json
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.run_dir.manifest import WrittenFile, own_file
from rstar_ray.run_dir.metrics import BalancerStats
from rstar_ray.telemetry.meter import Meter
from rstar_ray.telemetry.registry import Kind, Metric
from rstar_ray.tools.environment import Reply
from rstar_ray.trajectory import (
    UNMODIFIED,
    Completion,
    Problem,
    RolloutLimits,
    RolloutRequest,
    StopReason,
    ToolCall,
    ToolMemory,
    ToolResult,
    Trajectory,
)
from scheduler.balancer import Balancer
from scheduler.records import Cancel, Grant, Move, Registration, RolloutLoad, TurnReport

A = TypeVar("A")
END = 0  # the end-of-turn token


def registration(
    name: str, capacity: int, *, max_running: int = 8, block_tokens: int = 16, **rest: Any
) -> Registration:
    """The registration of a replica with this many KV tokens."""
    return Registration(
        replica_id=name, kv_capacity_tokens=capacity, max_running=max_running, block_tokens=block_tokens, **rest
    )


def load(
    name: str, *, group: str = "g", prompt: int = 16, most: int = 84, context: int = 0, made: int = 0
) -> RolloutLoad:
    """The load of a rollout that has sampled `made` tokens."""
    return RolloutLoad(
        rollout_id=name, group_id=group, prompt_tokens=prompt, max_response_tokens=most, max_turns=4,
        context_tokens=context, generated_tokens=made,
    )  # fmt: skip


def end(name: str, tokens: int = 50, *, truncated: bool = False) -> TurnReport:
    """The end of a rollout like `load`'s that has sampled so many tokens in its only turn."""
    return TurnReport(
        rollout_id=name, context_tokens=16 + tokens, generated_tokens=tokens, turn=1, truncated=truncated, ended=True
    )


def fleet(rule: str, *capacities: int, max_running: int = 64) -> Balancer:
    """A balancer with a replica for each of these numbers of KV tokens, named r0, r1, ..."""
    balancer = Balancer(rule)
    for number, capacity in enumerate(capacities):
        balancer.register(registration(f"r{number}", capacity, max_running=max_running))
    return balancer


def placements(balancer: Balancer) -> dict[str, str]:
    """The replicas of the rollouts that it admits now."""
    admissions, _ = balancer.decide()
    return {rollout.load.rollout_id: replica.replica_id for rollout, replica in admissions}


@dataclass(frozen=True)
class Orders:
    """One batch of orders that a replica received, by kind."""

    number: int
    admissions: tuple[Grant, ...]
    moves: tuple[Move, ...]
    cancels: tuple[str, ...]


async def next_orders(balancer: BalancerService, replica: str, acknowledged: int, wait_s: float) -> Orders:
    batch = await balancer.next_orders(replica, acknowledged, wait_s)
    return Orders(
        batch.number,
        tuple(order for order in batch.items if isinstance(order, Grant)),
        tuple(order for order in batch.items if isinstance(order, Move)),
        tuple(order.rollout_id for order in batch.items if isinstance(order, Cancel)),
    )


async def drained(balancer: BalancerService) -> None:
    """Wait until the balancer has received the end of every rollout."""
    async with asyncio.timeout(300):
        while (now := await balancer.snapshot()).waiting + now.in_flight:
            await asyncio.sleep(0.005)


class Local(Service[A]):
    """A `Service` for an object in this process."""

    def __init__(self, core: A, name: str = "balancer") -> None:
        super().__init__(core, name)

    def methods(self, **options: Any) -> A:
        return self.handle


class CharChat:
    """One token per character; token 0 ends a turn."""

    def prompt_ids(self, problem: Problem) -> list[int]:
        return [ord(c) for c in f"U:{problem.problem}\nA:"]

    def tool_answer_ids(self, results: Sequence[ToolResult]) -> list[int]:
        return [ord(c) for c in "\nT:" + "|".join(result.text for result in results) + "\nA:"]

    def read(self, token_ids: Sequence[int], *, after_tools: bool, own_tools: bool = False) -> Reading:
        text = self.decode(token_ids)
        return Reading(text=text, spoken=text, calls=tuple(parse_tool_calls(text)))

    def user_answer_ids(self, text: str) -> list[int]:
        return [ord(c) for c in f"\nU:{text}\nA:"]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids)).replace(chr(END), "")


def call(code: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code}})}\n</tool_call>"


def answer(text: str) -> str:
    return f"<answer>\\boxed{{{text}}}</answer>"


@dataclass
class ScriptedEngine:
    """Returns the script's completions in order."""

    completions: list[str]
    policy_version: int = 0
    prompts: list[list[int]] = field(default_factory=list)
    fails_at: int | None = None

    async def __call__(self, prompt_ids: Sequence[int], *, max_tokens: int, **asked: Any) -> Completion:
        if self.fails_at == len(self.prompts):
            raise EngineError("the engine died")
        self.prompts.append(list(prompt_ids))
        return as_completion(self.completions[len(self.prompts) - 1], max_tokens, self.policy_version)


def as_completion(text: str, max_tokens: int, policy_version: int = 0) -> Completion:
    ids = [*[ord(c) for c in text], END]
    ended = len(ids) <= max_tokens
    ids = ids[:max_tokens]
    versions = [policy_version] * len(ids)
    return Completion(token_ids=ids, logprobs=[-0.5] * len(ids), policy_versions=versions, ended=ended)


@dataclass
class SkilledPolicy:
    """Adds two numbers with the tool; with probability 1 - `skill` it subtracts, with `slip` its first call raises."""

    skill: float = 0.4
    slip: float = 0.3
    policy_version: int = 0

    async def __call__(self, prompt_ids: Sequence[int], *, max_tokens: int, seed: int, **asked: Any) -> Completion:
        text, rng = CharChat().decode(prompt_ids), random.Random(seed)
        await asyncio.sleep(0)
        answers = text.split("\nT:")[1:]
        if answers and "Error" not in answers[-1]:
            said = answer(answers[-1].split("\n")[0])
        elif not answers and rng.random() < self.slip:
            said = call("oops")
        else:
            a, b = text.split("U:")[1].split("\n")[0].split("+")
            said = call(f"{a}+{b}" if rng.random() < self.skill else f"{a}-{b}")
        return as_completion(said, max_tokens, self.policy_version)


class AddingSandbox:
    """Computes a+b and a-b; any other program is an error."""

    async def __call__(self, call: ToolCall) -> ToolResult:
        await asyncio.sleep(0)
        for sign in "+-":
            a, found, b = call.code.partition(sign)
            if found and a.isdigit() and b.isdigit():
                return ToolResult(outcome=Outcome.OK, text=str(int(a) + int(b) * (1 if sign == "+" else -1)))
        return ToolResult(outcome=Outcome.ERROR, text="NameError")


class UnreliableSandbox(AddingSandbox):
    """Every n-th call fails in the system, without a result."""

    def __init__(self, *, fails_every: int) -> None:
        self._fails_every = fails_every
        self._calls = 0

    async def __call__(self, call: ToolCall) -> ToolResult:
        self._calls += 1
        if self._calls % self._fails_every == 0:
            raise SandboxError("no executor left")
        return await super().__call__(call)


@dataclass
class PlainTools:
    """Tools of a worker that send all calls to one sandbox."""

    sandbox: AddingSandbox = field(default_factory=AddingSandbox)
    environment: str = ""
    closed: list[str] = field(default_factory=list)  # rollouts whose tools were closed
    turns: list[int] = field(default_factory=list)  # of all calls

    def open(self, state: RolloutState) -> "OpenTools":
        return OpenTools(self, state)


@dataclass
class OpenTools:
    """The tools of one rollout."""

    tools: PlainTools
    state: RolloutState

    async def execute(self, call: ToolCall, *, turn: int) -> ToolResult:
        self.tools.turns.append(turn)
        return await self.tools.sandbox(call)

    async def converse(self, said: str) -> tuple[Reply, ToolMemory]:
        raise AssertionError("there is no environment")

    async def ended(self, reason: StopReason) -> tuple[float | None, ToolMemory]:
        raise AssertionError("there is no environment")

    def close(self) -> None:
        self.tools.closed.append(self.state.request.rollout_id)


async def same_text(completion: str, problem: Problem) -> Judgement:
    said = boxed_answer(completion) or ""
    return Judgement(float(said == problem.answer), answer=said)


@dataclass
class LocalRollouts:
    """Runs the real agent loop on a fake engine and a fake sandbox, out of order, in this process."""

    policy: SkilledPolicy
    execute: AddingSandbox = field(default_factory=AddingSandbox)
    latest: frozenset[str] = frozenset()  # ids of the latest run, which the real class refuses to run again
    num_ended: int = 0
    num_abandoned: int = 0  # calls

    async def run(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[FinishedRollout | DroppedRollout]:
        ids = frozenset(request.rollout_id for request in requests)
        if again := ids & self.latest:
            raise ValueError(f"rollout {min(again)!r} was submitted before")
        self.latest = ids
        order = list(requests)
        random.Random(len(order)).shuffle(order)
        for request in order:
            state = RolloutState.start(request, CharChat().prompt_ids(request.problem))
            try:
                state = await run_rollout(state, generate=self.policy, execute=self.execute, chat=CharChat())
            except SandboxError as failed:
                yield DroppedRollout(rollout_id=request.rollout_id, group_id=request.group_id, reason=str(failed))
                continue
            trajectory = await score(state, same_text)
            self.num_ended += 1
            yield FinishedRollout(summary=trajectory.summary, ref=TrajectoryRef([trajectory], 0))

    async def abandon(self) -> None:
        self.num_abandoned += 1


@dataclass
class SkillLearner:
    """Its model is the policy's skill and slip, which change with the advantages of the trained actions."""

    policy: SkilledPolicy
    rate: float = 0.05
    steps: int = 0
    batches: list[list[TrainingRow]] = field(default_factory=list)
    wrote: list[Path] = field(default_factory=list)  # since the last call of `written`

    async def train_rl(self, rows: Sequence[TrainingRow], lr: float) -> UpdateResult:
        self.batches.append(list(rows))
        added = subtracted = slipped = 0.0
        for row in rows:
            trajectory: Trajectory = row.ref.batch[row.ref.index]
            text = CharChat().decode(trajectory.response_ids.tolist())
            added += row.advantage * ("+" in text.split("</tool_call>")[-2])
            subtracted += row.advantage * ("-" in text.split("</tool_call>")[-2])
            slipped += row.advantage * ("oops" in text)
        self.policy.skill = min(0.99, max(0.01, self.policy.skill + self.rate * (added - subtracted) / len(rows)))
        self.policy.slip = min(0.99, max(0.0, self.policy.slip + self.rate * slipped / len(rows)))
        self.steps += 1
        return update_result(self.steps, tokens=sum(row.num_sampled_tokens for row in rows), lr=lr)

    async def train_sft(self, examples: Sequence[SftExample], lr: float) -> UpdateResult:
        self.steps += 1
        return update_result(self.steps, tokens=sum(int(example.loss_mask.sum()) for example in examples), lr=lr)

    async def evaluate_sft(self, examples: Sequence[SftExample]) -> float:
        return 1.0 / (1 + self.steps)

    async def reset_optimizer(self) -> None: ...

    async def set_policy(self, folder: Path) -> None:
        await self.load_checkpoint(folder)

    async def save_checkpoint(self, folder: Path) -> None:
        write_json(folder / "skill.json", [self.policy.skill, self.policy.slip, self.steps])
        self.wrote.append(folder / "skill.json")

    async def load_checkpoint(self, folder: Path) -> None:
        self.policy.skill, self.policy.slip, self.steps = read_json(folder / "skill.json")

    async def export(self, folder: Path) -> None:
        folder.mkdir()
        write_json(folder / "config.json", {})
        self.wrote.append(folder / "config.json")

    async def written(self) -> dict[Path, WrittenFile]:
        wrote, self.wrote = self.wrote, []
        return {path: own_file(path) for path in wrote}


Published = tuple[int, float, float, int]
"""A version and its weights: skill, slip, and the number of updates."""


def update_result(step: int, *, tokens: int, lr: float, applied: bool = True) -> UpdateResult:
    metrics = {
        "loss": 0.1, "grad_norm": 0.2, "entropy": 0.3, "clip_frac": 0.0, "logprob_diff_mean": 0.0,
        "logprob_diff_max": 0.0, "lr": lr, "trained_tokens": tokens, "input_tokens": tokens, "update_s": 0.01,
    }  # fmt: skip
    return UpdateResult(applied=applied, reason="", step=step, metrics=metrics)


class FakeServices:
    """The `Services` of a run in one process; a test may replace methods."""

    def __init__(self, policy: SkilledPolicy, learner: SkillLearner, published: list[Published]) -> None:
        self._policy, self._learner, self._published = policy, learner, published
        self._version: int | None = None

    async def publish(self, policy_version: int) -> int:
        if policy_version != self._version:
            self._policy.policy_version = self._version = policy_version
            self._published.append((policy_version, self._policy.skill, self._policy.slip, self._learner.steps))
        return hash((self._policy.skill, self._policy.slip))

    async def record(
        self, refs: Sequence[TrajectoryRef], path: Path, *, stage: str, step: int, trained: bool = False
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{ref.batch[ref.index].summary.rollout_id}\n" for ref in refs))

    async def balancer_stats(self) -> BalancerStats | None:
        return None

    def publish_metrics(self) -> Mapping[str, float]:
        return {}

    async def balancer_state(self) -> Mapping[str, object] | None:
        return None

    async def load_balancer_state(self, saved: Mapping[str, object]) -> None:
        raise AssertionError("there is no state to load")

    def memory_bytes(self) -> Mapping[str, int]:
        return {}


def fake_context(
    policy: SkilledPolicy,
    *,
    run_dir: RunDir = RunDir(Path("no run directory")),  # noqa: B008  # it is frozen
    published: list[Published] | None = None,
    learner: SkillLearner | None = None,
    services: Mapping[str, Any] = MappingProxyType({}),
    **rollouts: object,
) -> RunContext:
    """A run in this process; the functions in `services` replace methods of `FakeServices`."""
    learner = learner or SkillLearner(policy)
    fake = FakeServices(policy, learner, [] if published is None else published)
    for name, function in services.items():
        setattr(fake, name, function)
    return RunContext(
        run_dir=run_dir,
        learner=learner,
        rollouts=LocalRollouts(policy, **rollouts),  # type: ignore[arg-type]
        services=fake,
    )


def in_run(context: RunContext, run_dir: RunDir | Path) -> RunContext:
    return replace(context, run_dir=run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir))


def adding_problems(count: int, seed: int = 0) -> list[Problem]:
    rng = random.Random(seed)
    drawn = [(rng.randint(1, 99), rng.randint(1, 99)) for _ in range(count)]
    return [Problem(id=f"add-{i}", problem=f"{a}+{b}", answer=str(a + b)) for i, (a, b) in enumerate(drawn)]


LIMITS = RolloutLimits(max_response_tokens=400, max_turns=4, max_context_tokens=1_000, max_calls_per_turn=16)


def request(problem: Problem | None = None, *, limits: RolloutLimits = LIMITS, rollout_id: str = "r") -> RolloutRequest:
    problem = problem or Problem(id="p", problem="1+2", answer="3")
    return RolloutRequest(
        rollout_id=rollout_id, group_id="g", problem=problem, seed=7, limits=limits, sampling=UNMODIFIED
    )


class InProcess:
    """Replaces the sandbox: runs the programs of scale tiny in this process."""

    def __init__(self) -> None:
        self.codes: list[str] = []
        self.in_flight = self.most_in_flight = 0

    async def __call__(self, call: ToolCall) -> ToolResult:
        self.codes.append(call.code)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        if "while 1:" in call.code:
            return ToolResult(outcome=Outcome.TIMEOUT, text="Execution timed out.")
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                exec(compile(call.code, "<tool>", "exec"), {})
        except Exception as error:
            lines = traceback.format_exception_only(error)
            return ToolResult(outcome=Outcome.ERROR, text="".join(lines).strip())
        return ToolResult(outcome=Outcome.OK, text=out.getvalue().strip())


class KeptMetrics:
    """Replaces Prometheus: the metrics of one meter, by name and labels in Prometheus's format."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.meter = Meter(lambda metric: _Kept(metric, self.values), run="kept")


@dataclass
class _Kept:
    metric: Metric
    values: dict[str, float]

    def __call__(self, value: float, labels: Mapping[str, str]) -> None:
        listed = ",".join(f"{key}={labels[key]}" for key in sorted(labels))
        name = f"{self.metric.exported_name}{{{listed}}}" if listed else self.metric.exported_name
        before = 0.0 if self.metric.kind is Kind.GAUGE else self.values.get(name, 0.0)
        counted = 1.0 if self.metric.kind is Kind.HISTOGRAM else value
        self.values[name] = before + counted


class Enough(RStarError): ...


def enough(*_: object, **__: object) -> None:
    """In place of what starts a run, where the test is about what is said before."""
    raise Enough("that will do")
