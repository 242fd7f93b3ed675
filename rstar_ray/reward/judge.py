"""Chooses the judge: `--reward.name` is a built-in rule, or the user's `module:function`."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

from rstar_ray.config import RewardConfig
from rstar_ray.config.own_code import READ_AT_PLACE, READ_LOOSELY, REWARDS, own_rewards
from rstar_ray.errors import ConfigError, JudgeError
from rstar_ray.reward.code_problems import RunProgramFn, read_cases, share_passed
from rstar_ray.reward.find import Place, as_integer, chosen_letter, find_answer, last_program, spoken
from rstar_ray.reward.maths import Compare, same_mathematics
from rstar_ray.reward.own_function import OwnReward
from rstar_ray.reward.reward_calls import read_wanted, same_calls
from rstar_ray.reward.value import Scored
from rstar_ray.reward.verifiable import read_instructions, share_followed
from rstar_ray.trajectory import Problem, Transcript

T = TypeVar("T")

MAX_TRIES = 3
"""Most tries to judge an answer; after that the rollout is dropped, and counted."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The reward of a rollout, the judged answer, and the number of failed tries before."""

    reward: float
    retries: int = 0
    answer: str = field(default="", compare=False)  # as written; empty without one
    loose: float | None = None  # what it is worth taken loosely, where the problem names a rule of `READ_LOOSELY`
    place: Place | None = field(default="answer", compare=False)  # where the rule reads the answer, see `answer_place`
    components: Mapping[str, float] = field(default_factory=dict[str, float])  # of a reward function that gave them


JudgeFn = Callable[[str, Problem], Awaitable[Judgement]]
"""Judges a final completion. Raises `JudgeError` or `SandboxError` where it cannot; never returns 0 instead."""


@runtime_checkable
class RolloutJudge(Protocol):
    """A judge with rules that read whole rollouts, also those that a limit ended."""

    async def __call__(self, completion: str, problem: Problem) -> Judgement: ...
    async def reads_rollouts(self, problem: Problem) -> bool: ...
    async def judge_rollout(self, completion: str, problem: Problem, rollout: Transcript) -> Judgement: ...


Rule = Callable[[str, Problem], Awaitable[float]]


def make_judge(
    config: RewardConfig, compare: Compare, run_program: RunProgramFn, *, own_folder: str = ""
) -> "Retrying":
    """The judge for the settings, over two functions of the sandbox. A failed call is retried."""
    rules = _rules(config, compare, run_program)
    rules |= {name: OwnReward(config, name, own_folder) for name in own_rewards(config)}
    loose: dict[str, Rule] = dict(zip(READ_LOOSELY, [_instructions(config, loosely=True)], strict=True))
    return Retrying({**rules, "": rules[config.name]}, config, loose=loose)


def answer_place(config: RewardConfig, problem: Problem) -> Place | None:
    """Where the problem's rule reads the final answer; None if the rule reads no marked answer, as code does not."""
    return config.place if (problem.reward or config.name) in READ_AT_PLACE else None


class Retrying:
    """Applies the rule that a problem names, or "" where it names none, and retries where judging fails."""

    def __init__(
        self, rules: Mapping[str, Rule], config: RewardConfig, *, loose: Mapping[str, Rule] | None = None
    ) -> None:
        self._rules = rules
        self._config = config
        self._loose = loose or {}

    async def __call__(self, completion: str, problem: Problem) -> Judgement:
        async def judge() -> tuple[float, float | None]:
            reward = await self._rules[problem.reward](completion, problem)
            loosely = self._loose.get(problem.reward)
            return reward, None if loosely is None else await loosely(completion, problem)

        (reward, loose), retries = await _retried(judge)
        return self._judgement(completion, problem, reward, retries, loose)

    async def close(self) -> None:
        """End the processes of the user's functions."""
        for rule in {id(rule): rule for rule in self._rules.values()}.values():
            if isinstance(rule, OwnReward):
                await rule.close()

    async def reads_rollouts(self, problem: Problem) -> bool:
        """Whether the problem's rule is a function of the user with a third argument."""
        rule = self._rules[problem.reward]
        return isinstance(rule, OwnReward) and (await _retried(rule.takes_rollout))[0]

    async def judge_rollout(self, completion: str, problem: Problem, rollout: Transcript) -> Judgement:
        own = self._rules[problem.reward]
        assert isinstance(own, OwnReward), f"{problem.reward!r} does not read rollouts"
        reward, retries = await _retried(lambda: own(completion, problem, rollout))
        return self._judgement(completion, problem, reward, retries)

    def _judgement(
        self, completion: str, problem: Problem, reward: float, retries: int, loose: float | None = None
    ) -> Judgement:
        answer = find_answer(completion, self._config.place) or ""
        components = reward.components if isinstance(reward, Scored) else {}
        return Judgement(float(reward), retries, answer, loose, answer_place(self._config, problem), components)


async def _retried(judge: Callable[[], Awaitable[T]]) -> tuple[T, int]:
    """The result, and the number of failed tries before it. Raises the `JudgeError` of the last try."""
    for tried in range(MAX_TRIES):
        try:
            return await judge(), tried
        except JudgeError:
            if tried + 1 == MAX_TRIES:
                raise
            await asyncio.sleep(0)
    raise AssertionError("the last try returns or raises")


def _rules(config: RewardConfig, compare: Compare, run_program: RunProgramFn) -> dict[str, Rule]:
    place: Place = config.place

    async def math(completion: str, problem: Problem) -> float:
        return await math_reward(find_answer(completion, place), problem.answer, compare)

    async def exact(completion: str, problem: Problem) -> float:
        answer = find_answer(completion, place)
        return float(answer is not None and answer.split() == problem.answer.split())

    async def choice(completion: str, problem: Problem) -> float:
        letter = chosen_letter(find_answer(completion, place) or "")
        return float(letter is not None and letter == chosen_letter(problem.answer))

    async def code(completion: str, problem: Problem) -> float:
        program = last_program(completion)
        if program is None:
            return 0.0
        cases = read_cases(problem.answer)
        return await share_passed(program, cases, run_program, all_of_them=not config.partial)

    async def calls(completion: str, problem: Problem) -> float:
        return float(same_calls(completion, read_wanted(problem.answer)))

    return dict(zip(REWARDS, (math, exact, choice, code, _instructions(config), calls), strict=True))


def _instructions(config: RewardConfig, *, loosely: bool = False) -> Rule:
    async def instructions(completion: str, problem: Problem) -> float:
        share = share_followed(spoken(completion).strip(), read_instructions(problem.answer), loosely=loosely)
        return share if config.partial else float(share == 1.0)

    return instructions


async def math_reward(answer: str | None, truth: str, compare: Compare) -> float:
    """1.0 for an equal answer, else 0.0 (arXiv:2508.20722 section 2.2); two integers need no rules."""
    if answer is None:
        return 0.0
    ours, theirs = as_integer(answer), as_integer(truth)
    if ours is not None and theirs is not None:
        return float(ours == theirs)
    return float(await same_mathematics(answer, truth, compare))


TRUTHS: dict[str, tuple[Callable[[str], object], str]] = {
    "code": (read_cases, '[{"input": "...", "output": "..."}]'),
    "instructions": (read_instructions, '[{"name": "punctuation:no_comma", "kwargs": {}}]'),
    "calls": (read_wanted, '[{"name": "f", "arguments": {"a": [1]}}]'),
}
"""Rules with a JSON ground truth: the parser, and the form."""


def refuse_truths(problems: Sequence[Problem], config: RewardConfig, option: str) -> None:
    """Raise `ConfigError` for the first ground truth that its reward cannot use, before anything starts.

    Also for a row that names a function which the settings do not: a data file must not choose which code runs.
    A row that names an environment gets its reward from that.
    """
    allowed = own_rewards(config)
    for problem in problems:
        if problem.environment:
            continue
        where, rule = f"{option}, problem {problem.id!r}", problem.reward or config.name
        if ":" in rule and rule not in allowed:
            raise ConfigError(where, f"its reward {rule!r} is not among --reward.functions", "add it there")
        if rule == "choice" and chosen_letter(problem.answer) is None:
            hint = "write the letter of the right choice, or choose another --reward.name"
            raise ConfigError(where, f"answer {problem.answer[:60]!r} is not a letter", hint)
        if rule in TRUTHS:
            read, form = TRUTHS[rule]
            try:
                read(problem.answer)
            except ValueError as wrong:
                hint = f"write {form} as JSON text, or choose another --reward.name"
                raise ConfigError(where, f"answer {wrong}", hint) from None
