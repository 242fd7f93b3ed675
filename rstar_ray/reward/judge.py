"""Who judges: `--reward.name` is a rule of this room, or a person's own `module:function`."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rstar_ray.config import RewardConfig
from rstar_ray.errors import ConfigError, JudgeError
from rstar_ray.reward.choice import chosen_letter
from rstar_ray.reward.find import Place, as_integer, find_answer, last_program
from rstar_ray.reward.maths import same_mathematics
from rstar_ray.reward.own import OwnReward
from rstar_ray.reward.programs import ProgramRun, read_cases, share_passed
from rstar_ray.trajectory import Problem

MAX_TRIES = 3
"""How often an answer is judged anew where judging failed; after that the rollout is dropped, and counted."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a completion is worth, in [0, 1], by which answer, and how often judging it had failed before."""

    reward: float
    retries: int = 0
    answer: str = field(default="", compare=False)  # as it was written; empty where there is none


class JudgeFn(Protocol):
    """Judges a final completion. Raises `JudgeError` or `SandboxError` where it cannot be; never a 0 in their place."""

    async def __call__(self, completion: str, problem: Problem) -> Judgement: ...


class JudgingTools(Protocol):
    """What rules ask of the sandbox."""

    async def compare(self, pairs: Sequence[tuple[str, str]]) -> Sequence[bool]: ...
    async def run_program(self, code: str, stdin: str) -> ProgramRun: ...


Rule = Callable[[str, Problem], Awaitable[float]]


def make_judge(config: RewardConfig, tools: JudgingTools, *, own_folder: str = "") -> JudgeFn:
    """The judge that the settings name; what fails is tried again."""
    return Retrying(OwnReward(config, own_folder) if ":" in config.name else _rule(config, tools), config.place)


class Retrying:
    """A rule, tried again where judging fails."""

    def __init__(self, rule: Rule, place: Place) -> None:
        self._rule = rule
        self._place: Place = place

    async def __call__(self, completion: str, problem: Problem) -> Judgement:
        for tried in range(MAX_TRIES):
            try:
                reward = await self._rule(completion, problem)
                return Judgement(reward, tried, find_answer(completion, self._place) or "")
            except JudgeError:
                if tried + 1 == MAX_TRIES:
                    raise
                await asyncio.sleep(0)
        raise AssertionError("the last try returns or raises")


def _rule(config: RewardConfig, tools: JudgingTools) -> Rule:
    place: Place = config.place

    async def math(completion: str, problem: Problem) -> float:
        return await math_reward(find_answer(completion, place), problem.answer, tools)

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
        return await share_passed(program, cases, tools.run_program, all_of_them=not config.partial)

    return {"math": math, "exact": exact, "choice": choice, "code": code}[config.name]


async def math_reward(answer: str | None, truth: str, tools: JudgingTools) -> float:
    """1.0 for an equal answer, else 0.0 (arXiv:2508.20722 section 2.2); two integers need no rules."""
    if answer is None:
        return 0.0
    ours, theirs = as_integer(answer), as_integer(truth)
    if ours is not None and theirs is not None:
        return float(ours == theirs)
    return float(await same_mathematics(answer, truth, tools.compare))


def refuse_truths(problems: Sequence[Problem], config: RewardConfig, option: str) -> None:
    """Raise `ConfigError` for the first truth that the reward cannot judge by, before anything starts."""
    for problem in problems:
        where = f"{option}, problem {problem.id!r}"
        if config.name == "choice" and chosen_letter(problem.answer) is None:
            mend = "write the letter of the right choice, or choose another --reward.name"
            raise ConfigError(where, f"answer {problem.answer[:60]!r} is no letter", mend)
        if config.name == "code":
            try:
                read_cases(problem.answer)
            except ValueError as wrong:
                mend = 'write [{"input": "...", "output": "..."}] as JSON text, or choose another --reward.name'
                raise ConfigError(where, f"answer {wrong}", mend) from None
