"""The data of a run: files that the user names, or the tiny world's, made from the seed."""

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rstar_ray.agent.rollout import ExecuteFn
from rstar_ray.algorithm.update import SftExample
from rstar_ray.chat.template import ChatFormat, TokenizerChat
from rstar_ray.config import RunConfig, own_environments
from rstar_ray.data.conversation import Conversation
from rstar_ray.data.order import present
from rstar_ray.data.problems import load_problems, random_subset
from rstar_ray.data.sft import encode
from rstar_ray.data.sft_plan import ChatSource, SftPlan, plan_sft, refuse_many_epochs
from rstar_ray.errors import ConfigError
from rstar_ray.evaluation.evaluator import HELD_OUT
from rstar_ray.reward.judge import refuse_truths
from rstar_ray.tiny.conversations import generate_conversations
from rstar_ray.tiny.tiny_problems import MAX_PROBLEMS, Split, generate_problems
from rstar_ray.trajectory import Problem

log = logging.getLogger(__name__)

SFT_VALIDATION = 256
"""Conversations held back for the validation loss; at most a tenth of all."""
MOST_TOO_LONG = 0.05
"""Share of the training problems that may not fit the context and are left out."""


def training_problems(config: RunConfig) -> list[Problem]:
    """Raises `ConfigError` for a file that cannot be used, or has no problem of a source in `--data.mix`."""
    problems = _training_problems(config)
    weights = config.data.weights
    if missing := weights.keys() - present(weights, problems).keys():
        families = ", ".join(sorted({problem.family for problem in problems} - {""})[:20]) or "none"
        problem = f"no problem has the family {min(missing)!r}, only {families}"
        raise ConfigError("--data.mix", problem, "name families of the training problems")
    return problems


def _training_problems(config: RunConfig) -> list[Problem]:
    if config.data.train:
        integers = config.data.integer_answers and config.reward.name == "math"
        return _from_file("--data.train", config.data.train, config, integer_answers=integers)
    require_tiny(config, "--data.train", "give a problem file")
    return _generated(config.seed, Split.TRAIN, config.data.num_train, "--data.num-train")


def heldout_problems(config: RunConfig) -> list[Problem]:
    """The problems evaluated during training. The tiny world's are the same for every seed, so that runs can be
    compared.
    """
    if config.data.heldout:
        return _evaluated(config, _from_file("--data.heldout", config.data.heldout, config))
    if config.scale != "tiny":
        return []
    generated = _generated(0, Split.HELD_OUT, config.data.num_heldout, "--data.num-heldout")
    return generated[: config.evaluate.num_problems or None]  # in random order, with the families in turn


def _evaluated(config: RunConfig, problems: list[Problem]) -> list[Problem]:
    """`--evaluate.num-problems` problems of a file; the same for every seed of a run, so that runs can be compared."""
    return random_subset(problems, config.evaluate.num_problems, seed=0, name="evaluation")


def _from_file(option: str, path: str, config: RunConfig, *, integer_answers: bool = False) -> list[Problem]:
    try:
        problems = load_problems(path, integer_answers=integer_answers)
    except ConfigError as refused:
        raise ConfigError(f"{option} {refused.field}", refused.problem, refused.hint) from None
    refuse_truths(problems, config.reward, f"{option} {Path(path).name}")
    allowed = own_environments(config.tools)
    for problem in problems:
        if problem.environment and problem.environment not in allowed:
            raise ConfigError(
                f"{option} {Path(path).name}, problem {problem.id!r}",
                f"its environment {problem.environment!r} is not among --tools.environments",
                "add it there",
            )
    return problems


def _generated(seed: int, split: Split, count: int, option: str) -> list[Problem]:
    if count > MAX_PROBLEMS:
        raise ConfigError(option, f"{count} is more than the tiny world holds", f"give at most {MAX_PROBLEMS}")
    return generate_problems(seed, split, count)


def problem_sets(config: RunConfig) -> dict[str, list[Problem]]:
    """The sets of recipes/evaluate.py, by name."""
    if not config.evaluate.files:
        heldout = heldout_problems(config)
        if not heldout:
            require_tiny(config, "--evaluate.files", "name problem files, or give --data.heldout")
        return {HELD_OUT: heldout}
    stems = [Path(path).stem for path in config.evaluate.files]
    if twice := next((stem for stem in stems if stems.count(stem) > 1), None):
        raise ConfigError("--evaluate.files", f"two files are named {twice}", "rename one: results go by the name")
    return {
        Path(path).stem: _evaluated(config, _from_file("--evaluate.files", path, config))
        for path in config.evaluate.files
    }


def that_fit(config: RunConfig, problems: list[Problem], chat: ChatFormat) -> list[Problem]:
    """Training problems without those whose prompts do not fit the context; a line counts these.

    Raises `ConfigError` where they are more than a small share: the context is too short then, not a prompt too long.
    """
    found = too_long(problems, chat, config.engine.max_context_tokens)
    if found is None:
        return problems
    if len(found.num_tokens) > MOST_TOO_LONG * len(problems):
        name = Path(config.data.train).name
        hint = "raise it, or take them out of the file"
        raise ConfigError("--engine.max-context-tokens", f"{found} in {name or 'the tiny world'}", hint)
    log.info(f"{config.stage}: {found}; they are left out")
    return [problem for problem in problems if problem.id not in found.num_tokens]


def tell_too_long(config: RunConfig, sets: Mapping[str, Sequence[Problem]], chat: ChatFormat) -> None:
    """A message for each evaluated set that has such prompts: the set stays whole, so that figures can be compared."""
    for name, problems in sets.items():
        if found := too_long(problems, chat, config.engine.max_context_tokens):
            log.info(f"{name}: {found}; they count as wrong; a larger --engine.max-context-tokens asks them too")


def sft_plan(config: RunConfig, folder: Path, *, steps_given: bool = True) -> SftPlan | None:
    """The file of conversations as tokens of the model in `folder`; None where the tiny world makes its own.

    Raises `ConfigError` for a file of which too much does not fit, and for one that is small beside a number of steps
    that was not given, before anything starts.
    """
    if not config.sft.data:
        require_tiny(config, "--sft.data", "give a file of conversations")
        return None
    made = (folder / "config.json").is_file()  # the tiny world's model is made later
    plan = plan_sft(
        config.sft.data,
        ChatSource(str(folder) if made else None, config.chat),
        max_tokens=config.engine.max_context_tokens,
        max_left_out=config.sft.max_left_out,
    )
    num_rows = len(split(plan.examples, config.seed)[0])
    if not steps_given:
        refuse_many_epochs(config.sft, num_rows)
    for line in plan.lines(config.sft, num_rows):
        log.info(line)
    return plan


async def sft_examples(
    config: RunConfig, plan: SftPlan | None, chat: TokenizerChat, execute: ExecuteFn
) -> tuple[list[SftExample], list[SftExample]]:
    """(training, validation) rows; the tiny world's are made here, their programs run in the sandbox."""
    if plan is not None:
        return split(plan.examples, config.seed)
    generated = await generate_conversations(config.seed, config.sft.num_conversations, execute, teacher=config.tiny)
    conversations = [
        Conversation(name=f"conversation {number}", messages=messages) for number, messages in enumerate(generated, 1)
    ]
    examples, problems = encode(chat, conversations, max_tokens=config.engine.max_context_tokens)
    if problems:
        raise ConfigError("--engine.max-context-tokens", str(problems[0]), "raise it")
    return split(examples, config.seed)


def split(examples: Sequence[SftExample], seed: int) -> tuple[list[SftExample], list[SftExample]]:
    """(training, validation); the rows of one conversation stay together."""
    names = list(dict.fromkeys(example.name for example in examples))
    random.Random(f"{seed} sft split").shuffle(names)
    order = {name: place for place, name in enumerate(names)}
    held_back = min(SFT_VALIDATION, len(names) // 10)
    shuffled = sorted(examples, key=lambda example: order[example.name])
    validation = [example for example in shuffled if order[example.name] < held_back]
    return shuffled[len(validation) :], validation


def require_tiny(config: RunConfig, field: str, hint: str) -> None:
    """Raise `ConfigError` for a field left empty at a scale that has no default to put there."""
    if config.scale != "tiny":
        raise ConfigError(field, f"it is empty, and scale {config.scale} has no default", hint)


MARGIN_TOKENS = 64
"""What normalisation and the borders of parts may add to the bytes of a text; a guess on the safe side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLong:
    """Of a set of problems, those that cannot be asked."""

    num_tokens: Mapping[str, int]  # of each one's prompt, by the problem's id
    num_problems: int  # of the whole set
    context_tokens: int

    def __str__(self) -> str:
        first = next(iter(self.num_tokens))
        return (
            f"{len(self.num_tokens)} of {self.num_problems} prompts do not fit into a context of {self.context_tokens} "
            f"tokens, such as that of problem {first!r} with {self.num_tokens[first]}"
        )


def too_long(problems: Sequence[Problem], chat: ChatFormat, context_tokens: int) -> TooLong | None:
    """Those whose prompts leave no token to sample, in their order; None where there is none."""
    if not problems:
        return None
    around = len(chat.prompt_ids(replace(problems[0], problem="")))
    most_bytes = context_tokens - around - MARGIN_TOKENS
    counted = {
        problem.id: len(chat.prompt_ids(problem))
        for problem in problems
        if len(problem.problem.encode("utf-8")) > most_bytes
    }
    long = {name: count for name, count in counted.items() if count >= context_tokens}
    return TooLong(num_tokens=long, num_problems=len(problems), context_tokens=context_tokens) if long else None
