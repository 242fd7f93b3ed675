"""The data of a run: the user's files, or at scale tiny data generated from the seed."""

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
"""Number of conversations for the validation loss; at most a tenth of all."""
MOST_TOO_LONG = 0.05
"""Largest share of training problems that may be excluded because they do not fit the context."""


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
    """The problems evaluated during training; at scale tiny the same for every seed, so that runs can be compared."""
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
        raise ConfigError(option, f"{count} is more than scale tiny can generate", f"give at most {MAX_PROBLEMS}")
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
    """Training problems whose prompts fit the context; logs the number of the others.

    Raises `ConfigError` if more than `MOST_TOO_LONG` of them do not fit, because the context is then too short.
    """
    found = too_long(problems, chat, config.engine.max_context_tokens)
    if found is None:
        return problems
    if len(found.num_tokens) > MOST_TOO_LONG * len(problems):
        name = Path(config.data.train).name
        hint = "raise it, or remove them from the file"
        raise ConfigError("--engine.max-context-tokens", f"{found} in {name or 'the generated problems'}", hint)
    log.info(f"{config.stage}: {found}; they are excluded")
    return [problem for problem in problems if problem.id not in found.num_tokens]


def log_too_long(config: RunConfig, sets: Mapping[str, Sequence[Problem]], chat: ChatFormat) -> None:
    """Log each evaluated set with prompts that do not fit. They are not removed, so that results stay comparable."""
    for name, problems in sets.items():
        if found := too_long(problems, chat, config.engine.max_context_tokens):
            log.info(f"{name}: {found}; they count as wrong. Hint: raise --engine.max-context-tokens")


def sft_plan(config: RunConfig, folder: Path, *, steps_given: bool = True) -> SftPlan | None:
    """The file of conversations as tokens of the model in `folder`; None at scale tiny without a file.

    Raises `ConfigError` if too many conversations do not fit, or if `steps_given` is false and the default number of
    steps would repeat a small file too often.
    """
    if not config.sft.data:
        require_tiny(config, "--sft.data", "give a file of conversations")
        return None
    made = (folder / "config.json").is_file()  # at scale tiny the model is made later
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
    """(training, validation) rows; without a plan they are generated, and their programs run in the sandbox."""
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
    """Raise `ConfigError` for an empty field unless scale is tiny, which has a default."""
    if config.scale != "tiny":
        raise ConfigError(
            field, f"it is empty, and scale {config.scale} has no default", f"{hint}, or choose --scale tiny"
        )


MARGIN_TOKENS = 64
"""Generous estimate of the tokens beyond a text's bytes that normalisation and concatenation may add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLong:
    """The problems of a set whose prompts do not fit the context."""

    num_tokens: Mapping[str, int]  # of the prompt, by the problem's id
    num_problems: int  # of the whole set
    context_tokens: int

    def __str__(self) -> str:
        first = next(iter(self.num_tokens))
        return (
            f"{len(self.num_tokens)} of {self.num_problems} prompts do not fit into a context of {self.context_tokens} "
            f"tokens, such as that of problem {first!r} with {self.num_tokens[first]}"
        )


def too_long(problems: Sequence[Problem], chat: ChatFormat, context_tokens: int) -> TooLong | None:
    """Problems whose prompts leave no token to sample, in order; None if there are none."""
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
