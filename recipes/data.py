"""What a run trains and is measured on: files the user names, or the tiny world's own, made from the seed."""

import random
from pathlib import Path
from typing import Any

from rstar_ray.agent.rollout import ExecuteFn
from rstar_ray.algorithm.update import SftExample
from rstar_ray.config import RunConfig
from rstar_ray.data.problems import load_problems
from rstar_ray.data.sft import load_conversations, to_example
from rstar_ray.errors import ConfigError
from rstar_ray.evaluation.run import HELD_OUT
from rstar_ray.reward.judge import refuse_truths
from rstar_ray.tiny.conversations import generate_conversations
from rstar_ray.tiny.problems import MAX_PROBLEMS, Split, generate_problems
from rstar_ray.trajectory import Problem

SFT_VALIDATION = 256
"""Conversations held back for the validation loss; at most a tenth of all."""


def training_problems(config: RunConfig) -> list[Problem]:
    if config.data.train:
        integers = config.data.integer_answers and config.reward.name == "math"
        return _from_file("--data.train", config.data.train, config, integer_answers=integers)
    refuse_without_tiny(config, "--data.train", "give a problem file")
    return _generated(config.seed, Split.TRAIN, config.data.num_train, "--data.num-train")


def heldout_problems(config: RunConfig) -> list[Problem]:
    """What is evaluated on during training. The tiny world's are the same for every seed, so that runs compare."""
    if config.data.heldout:
        return _asked_for(config, _from_file("--data.heldout", config.data.heldout, config))
    if config.scale != "tiny":
        return []
    return _asked_for(config, _generated(0, Split.HELD_OUT, config.data.num_heldout, "--data.num-heldout"))


def _asked_for(config: RunConfig, problems: list[Problem]) -> list[Problem]:
    """All of a set, or the first `evaluate.num_problems`."""
    return problems[: config.evaluate.num_problems or None]


def _from_file(option: str, path: str, config: RunConfig, *, integer_answers: bool = False) -> list[Problem]:
    try:
        problems = load_problems(path, integer_answers=integer_answers)
    except ConfigError as refused:
        raise ConfigError(f"{option} {refused.field}", refused.problem, refused.mend) from None
    refuse_truths(problems, config.reward, f"{option} {Path(path).name}")
    return problems


def _generated(seed: int, split: Split, count: int, option: str) -> list[Problem]:
    if count > MAX_PROBLEMS:
        raise ConfigError(option, f"{count} is more than the tiny world holds", f"give at most {MAX_PROBLEMS}")
    return generate_problems(seed, split, count)


def problem_sets(config: RunConfig) -> dict[str, list[Problem]]:
    """By name, for recipes/evaluate.py."""
    if not config.evaluate.files:
        return {HELD_OUT: heldout_problems(config)}
    stems = [Path(path).stem for path in config.evaluate.files]
    if twice := next((stem for stem in stems if stems.count(stem) > 1), None):
        raise ConfigError("--evaluate.files", f"two files are named {twice}", "rename one: results go by the name")
    return {
        Path(path).stem: _asked_for(config, _from_file("--evaluate.files", path, config))
        for path in config.evaluate.files
    }


async def sft_examples(
    config: RunConfig, tokenizer: Any, execute: ExecuteFn
) -> tuple[list[SftExample], list[SftExample]]:
    """(training, validation) conversations as tokens; in the tiny world their programs run in the sandbox."""
    if config.sft.data:
        conversations = load_conversations(config.sft.data)
    else:
        refuse_without_tiny(config, "--sft.data", "give a file of conversations")
        conversations = await generate_conversations(config.seed, config.sft.num_conversations, execute)
    context = config.engine.max_context_tokens
    examples = [
        to_example(conversation, tokenizer, row, max_tokens=context)
        for row, conversation in enumerate(conversations, 1)
    ]
    random.Random(f"{config.seed} sft split").shuffle(examples)
    held_back = min(SFT_VALIDATION, len(examples) // 10)
    return examples[held_back:], examples[:held_back]


def refuse_without_tiny(config: RunConfig, field: str, mend: str) -> None:
    """Raise `ConfigError` for a field left empty at a scale that has nothing of its own to put there."""
    if config.scale != "tiny":
        raise ConfigError(field, f"it is empty, and scale {config.scale} has none of its own", mend)
