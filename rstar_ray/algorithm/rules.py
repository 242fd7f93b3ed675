"""Rules of the algorithm by name: the built-in ones, and functions of the user as `module:function`.

A rule of the user has the signature of the built-in ones:
`resample(candidates, algorithm, rng)` gives the indices of the trajectories to train on;
`advantage(rewards, algorithm)` gives one number for each trajectory of a group, or an array with one for each of its
sampled tokens; a third positional parameter that has no default or is named `summaries` is given the trajectories'
`TrajectorySummary`s;
`loss(tokens, algorithm)` gives the loss of each token, a tensor [N] to minimise (`rstar_ray.algorithm.surrogate`).
A run gives `TrajectorySummary`s as candidates. A rule is a pure function: equal arguments, equal results.
"""

import asyncio
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial, wraps
from operator import index
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rstar_ray.algorithm.advantage import ADVANTAGES, Advantage
from rstar_ray.algorithm.resample import RESAMPLING
from rstar_ray.config import AlgorithmConfig
from rstar_ray.config.own_code import is_entry, is_missing, takes_third
from rstar_ray.deadline import in_thread
from rstar_ray.errors import ConfigError, DeadlineExceeded, RStarError, one_line
from rstar_ray.trajectory import StopReason, TrajectorySummary

Kind = Literal["resample", "advantage", "loss"]
KINDS: tuple[Kind, ...] = ("resample", "advantage", "loss")
TESTED_WITHIN_S = 300.0


def rule(kind: Kind, algorithm: AlgorithmConfig, own_folder: str) -> Callable[..., Any]:
    """The rule that a run's settings name; `own_folder` is searched first. Raises `ConfigError` where it does
    not exist.
    """
    name = getattr(algorithm, kind)
    known = _built_in(kind)
    if name in known:
        return known[name]
    if ":" not in name:
        hint = f"choose {', '.join(known)}, or give module:function"
        raise ConfigError(f"--algorithm.{kind}", f"not a rule (got {name!r})", hint)
    return _imported(kind, name, own_folder)


def _built_in(kind: Kind) -> Mapping[str, Callable[..., Any]]:
    if kind == "loss":
        from rstar_ray.algorithm.surrogate import LOSSES  # imports torch

        return LOSSES
    return RESAMPLING if kind == "resample" else ADVANTAGES


@cache
def _imported(kind: Kind, name: str, own_folder: str) -> Callable[..., Any]:
    option = f"--algorithm.{kind} {name}"
    if not is_entry(name):
        raise ConfigError(option, "it is not module:function", "write both with letters, digits, _ and . only")
    module, _, function = name.partition(":")
    folder = str(Path(own_folder).absolute())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as failed:  # any exception: it is the user's code
        hint = "give its folder as --own-folder" if is_missing(module, failed) else f"fix the module {module}"
        raise ConfigError(option, one_line(failed), hint) from failed
    found = getattr(imported, function, None)
    if not callable(found):
        where = getattr(imported, "__file__", None) or f"the module {module}"
        raise ConfigError(option, f"{function} is not a function there", f"name a function of {where}")

    @wraps(found)
    def named(*arguments: Any) -> Any:
        try:
            made: Any = found(*arguments)
            if kind == "advantage" and isinstance(made, Mapping | Set | str):
                raise TypeError(f"it returns {type(made).__name__}, not a list of numbers or arrays")
            if kind == "resample":
                return [index(i) for i in made]
            if kind == "advantage":
                return [np.asarray(one, np.float64) for one in made]
            from rstar_ray.algorithm.surrogate import as_surrogate

            return as_surrogate(made, arguments[0])
        except (Exception, SystemExit) as failed:  # of any kind: it is the user's code
            if _of_device(kind, failed):
                raise
            raise RStarError(f"--algorithm.{kind} {name}: {one_line(failed)}") from failed

    return named


def _of_device(kind: Kind, failed: BaseException) -> bool:
    """Whether the error is a fault of a device or a connection that surfaced in a user's loss."""
    if kind != "loss":
        return False
    from rstar_ray.algorithm.surrogate import DEVICE_FAULTS

    return isinstance(failed, DEVICE_FAULTS)


def _said(failed: BaseException, kind: Kind, algorithm: AlgorithmConfig) -> str:
    """What went wrong, without the rule's name."""
    if isinstance(failed, RStarError):
        return str(failed).removeprefix(f"--algorithm.{kind} {getattr(algorithm, kind)}: ")
    return one_line(failed)


def kept_indices(candidates: Any, algorithm: AlgorithmConfig, rng: np.random.Generator, own_folder: str) -> list[int]:
    """The trajectories of a group to train on. Raises `RStarError` for indices that are not of the group."""
    given = tuple(candidates)  # a rule cannot sort them in place, and return indices of the sorted ones
    kept = sorted(int(i) for i in rule("resample", algorithm, own_folder)(given, algorithm, rng))
    if len(kept) != len(set(kept)) or any(not 0 <= i < len(candidates) for i in kept):
        raise RStarError(f"--algorithm.resample {algorithm.resample}: {kept} are not indices of {len(candidates)}")
    return kept


def advantages(
    rewards: Sequence[float], algorithm: AlgorithmConfig, own_folder: str, summaries: Sequence[TrajectorySummary]
) -> list[Advantage]:
    """For each trajectory one number, or an array with one for each sampled token.

    Raises `RStarError` for numbers that are not finite, or are too many or too few.
    """
    estimate = rule("advantage", algorithm, own_folder)
    arguments = (list(rewards), algorithm, list(summaries))
    made = [np.asarray(one, np.float64) for one in estimate(*arguments[: 3 if _takes_summaries(estimate) else 2])]
    name = f"--algorithm.advantage {algorithm.advantage}"
    if len(made) != len(summaries):
        raise RStarError(f"{name}: {len(made)} advantages for {len(summaries)} trajectories")
    for one, summary in zip(made, summaries, strict=True):
        if one.shape not in ((), (summary.num_sampled_tokens,)):
            wanted = f"one number, or one for each of {summary.num_sampled_tokens} sampled tokens"
            raise RStarError(f"{name}: shape {list(one.shape)} for a trajectory; give {wanted}")
        if not (np.abs(one) <= np.finfo(np.float32).max).all():  # rows hold float32
            raise RStarError(f"{name}: not finite for rewards {list(rewards)}")
    return [one.astype(np.float32) if one.shape else float(one) for one in made]


@cache
def _takes_summaries(estimate: Callable[..., Any]) -> bool:
    try:
        return takes_third(inspect.signature(estimate), "summaries")
    except ValueError:  # of a built-in function
        return False


def check_rules(algorithm: AlgorithmConfig, own_folder: str, kinds: Sequence[Kind] = KINDS, device: Any = None) -> None:
    """Call the user's rules on made-up data: in a thread, so that none blocks the driver, or on a rank's `device`.

    Raises `ConfigError` that names the one that fails.
    """
    for kind in kinds:
        name = getattr(algorithm, kind)
        if name == getattr(AlgorithmConfig(), kind):  # the default exists, and its lookup may import torch
            continue
        rule(kind, algorithm, own_folder)
        if ":" not in name:
            continue
        try:
            if device is not None:  # the current GPU is set for this thread only
                _try(kind, algorithm, own_folder, device)
            else:
                test = partial(_try, kind, algorithm, own_folder)
                asyncio.run(in_thread(test, TESTED_WITHIN_S, waiter="the test", owner=name, reason="made-up data"))
        except (Exception, SystemExit) as failed:  # of any kind: it is the user's code
            if device is not None and _of_device(kind, failed):
                raise
            problem = f"it fails on made-up data ({_said(failed, kind, algorithm)})"
            late = isinstance(failed, DeadlineExceeded)
            hint = "a rule must return" if late else _advice(kind, algorithm, own_folder, device or "cpu")
            raise ConfigError(f"--algorithm.{kind} {name}", problem, hint) from failed


def _try(kind: Kind, algorithm: AlgorithmConfig, own_folder: str, device: Any = "cpu") -> None:
    if kind == "loss":
        from rstar_ray.algorithm.loss import try_rule

        try_rule(rule(kind, algorithm, own_folder), algorithm, device)
        return
    whole = algorithm.keep if kind == "advantage" else algorithm.num_rollouts
    mixed = [float(i % 2) for i in range(whole)]
    below = [[2 * one - 1 for one in mixed]] if algorithm.overlong_buffer else []  # the penalty makes rewards negative
    # Groups are smaller where rollouts were dropped.
    groups = (mixed, *below, [0.0] * whole, [1.0] * whole, mixed[: algorithm.keep - 1], mixed[:2], mixed[:1])
    for rewards in groups:
        if kind == "advantage" and algorithm.reject_equal_reward and len(set(rewards)) < 2:
            continue  # a run does not call it either
        try:
            _try_group(kind, algorithm, own_folder, rewards)
        except RStarError as failed:
            these = ", ".join(f"{one:g}" for one in rewards)
            raise RStarError(f"{_said(failed, kind, algorithm)}, with rewards {these}") from None


def _try_group(kind: Kind, algorithm: AlgorithmConfig, own_folder: str, rewards: Sequence[float]) -> None:
    """Call a rule twice for a made-up group. Raises `RStarError`."""
    group = [_made_up(i, one) for i, one in enumerate(rewards)]
    first, again = (_result(kind, algorithm, own_folder, group) for _ in range(2))
    if len(first) != len(again) or not all(map(np.array_equal, first, again)):
        raise RStarError("a second call with the same arguments gives another result: use `rng`, and no state")
    if kind == "resample" and not first and len(rewards) == algorithm.num_rollouts and len(set(rewards)) > 1:
        raise RStarError("it keeps no trajectory")
    whole = kind == "advantage" and len(rewards) == algorithm.keep and len(set(rewards)) > 1
    if whole and not any(np.any(one) for one in first):
        raise RStarError("every advantage is 0, from which nothing is learned")


def _advice(kind: Kind, algorithm: AlgorithmConfig, own_folder: str, device: Any) -> str:
    """A hint for a rule that fails."""
    if kind == "loss" and not algorithm.reference_model:
        with suppress(Exception, SystemExit):
            _try(kind, replace(algorithm, reference_model="made-up"), own_folder, device)
            return "`ref_logprobs_N` needs --algorithm.reference-model"
    return "docs/algorithm.md has its signature"


def _result(
    kind: Kind, algorithm: AlgorithmConfig, own_folder: str, group: Sequence[TrajectorySummary]
) -> Sequence[Advantage]:
    if kind == "advantage":
        return advantages([one.reward for one in group], algorithm, own_folder, group)
    return kept_indices(group, algorithm, np.random.default_rng(0), own_folder)


def _made_up(number: int, reward: float) -> TrajectorySummary:
    return TrajectorySummary(
        rollout_id=f"group/{number}",
        group_id="group",
        problem_id="problem",
        reward=reward,
        num_calls=number % 3,
        num_failed=number % 3 // 2,
        num_answers=(1, 0, None, 2)[number % 4],
        num_turns=3 + number % 3,
        num_prompt_tokens=16,
        num_response_tokens=24 + 3 * number,
        num_sampled_tokens=8 + number,
        stop_reason=StopReason.TRUNCATED if number % 5 == 4 else StopReason.ANSWERED,
    )
