"""Who judges: `--reward.name` is a rule of this room, or a person's own `module:function`."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rstar_ray.config import RewardConfig
from rstar_ray.config.own import READ_AT_PLACE, READ_LOOSELY, REWARDS
from rstar_ray.errors import ConfigError, JudgeError
from rstar_ray.reward.calls import read_wanted, same_calls
from rstar_ray.reward.choice import chosen_letter
from rstar_ray.reward.find import Place, as_integer, find_answer, last_program, spoken
from rstar_ray.reward.maths import same_mathematics
from rstar_ray.reward.own import OwnReward
from rstar_ray.reward.programs import ProgramRun, read_cases, share_passed
from rstar_ray.reward.verifiable import read_instructions, share_followed
from rstar_ray.trajectory import Problem

MAX_TRIES = 3
"""How often an answer is judged anew where judging failed; after that the rollout is dropped, and counted."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a completion is worth, in [0, 1], by which answer, and how often judging it had failed before."""

    reward: float
    retries: int = 0
    answer: str = field(default="", compare=False)  # as it was written; empty where there is none
    loose: float | None = None  # what it is worth taken loosely, where the problem names a rule of `READ_LOOSELY`
    place: Place | None = field(default="answer", compare=False)  # where the rule reads the answer, see `answer_place`


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
    rules = _rules(config, tools)
    asked = OwnReward(config, own_folder) if ":" in config.name else rules[config.name]
    loose: dict[str, Rule] = dict(zip(READ_LOOSELY, [_instructions(config, loosely=True)], strict=True))
    return Retrying({**rules, "": asked}, config, loose=loose)


def answer_place(config: RewardConfig, problem: Problem) -> Place | None:
    """Where the problem's rule reads the final answer; None if the rule reads no marked answer, as code does not."""
    return config.place if (problem.reward or config.name) in READ_AT_PLACE else None


class Retrying:
    """The rule that a problem names, or "" where it names none; tried again where judging fails."""

    def __init__(
        self, rules: Mapping[str, Rule], config: RewardConfig, *, loose: Mapping[str, Rule] | None = None
    ) -> None:
        self._rules = rules
        self._config = config
        self._loose = loose or {}

    async def __call__(self, completion: str, problem: Problem) -> Judgement:
        for tried in range(MAX_TRIES):
            try:
                reward = await self._rules[problem.reward](completion, problem)
                loosely = self._loose.get(problem.reward)
                loose = None if loosely is None else await loosely(completion, problem)
                answer = find_answer(completion, self._config.place) or ""
                return Judgement(reward, tried, answer, loose, answer_place(self._config, problem))
            except JudgeError:
                if tried + 1 == MAX_TRIES:
                    raise
                await asyncio.sleep(0)
        raise AssertionError("the last try returns or raises")


def _rules(config: RewardConfig, tools: JudgingTools) -> dict[str, Rule]:
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

    async def calls(completion: str, problem: Problem) -> float:
        return float(same_calls(completion, read_wanted(problem.answer)))

    return dict(zip(REWARDS, (math, exact, choice, code, _instructions(config), calls), strict=True))


def _instructions(config: RewardConfig, *, loosely: bool = False) -> Rule:
    async def instructions(completion: str, problem: Problem) -> float:
        share = share_followed(spoken(completion).strip(), read_instructions(problem.answer), loosely=loosely)
        return share if config.partial else float(share == 1.0)

    return instructions


async def math_reward(answer: str | None, truth: str, tools: JudgingTools) -> float:
    """1.0 for an equal answer, else 0.0 (arXiv:2508.20722 section 2.2); two integers need no rules."""
    if answer is None:
        return 0.0
    ours, theirs = as_integer(answer), as_integer(truth)
    if ours is not None and theirs is not None:
        return float(ours == theirs)
    return float(await same_mathematics(answer, truth, tools.compare))


TRUTHS: dict[str, tuple[Callable[[str], object], str]] = {
    "code": (read_cases, '[{"input": "...", "output": "..."}]'),
    "instructions": (read_instructions, '[{"name": "punctuation:no_comma", "asked": {}}]'),
    "calls": (read_wanted, '[{"name": "f", "arguments": {"a": [1]}}]'),
}
"""Rules whose truth is JSON text: its reader, and its form."""


def refuse_truths(problems: Sequence[Problem], config: RewardConfig, option: str) -> None:
    """Raise `ConfigError` for the first truth that its reward cannot judge by, before anything starts."""
    for problem in problems:
        where, rule = f"{option}, problem {problem.id!r}", problem.reward or config.name
        if rule == "choice" and chosen_letter(problem.answer) is None:
            mend = "write the letter of the right choice, or choose another --reward.name"
            raise ConfigError(where, f"answer {problem.answer[:60]!r} is no letter", mend)
        if rule in TRUTHS:
            read, form = TRUTHS[rule]
            try:
                read(problem.answer)
            except ValueError as wrong:
                mend = f"write {form} as JSON text, or choose another --reward.name"
                raise ConfigError(where, f"answer {wrong}", mend) from None
