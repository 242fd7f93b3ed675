"""Settings for tests, derived from `RunConfig` as in a run, with a test's changes."""

import sys
from dataclasses import replace
from typing import Any

from benchmarks.small import SMALL
from recipes.stage1 import STAGE_1
from rstar_ray.config import AlgorithmConfig, LearnerConfig, RunConfig, SandboxConfig, with_values
from rstar_ray.config.scales import at_scale
from sandbox.cgroups import Groups
from sandbox.isolation import IsolationLevel
from sandbox.limits import Limits, standard_limits
from sandbox.pool import SandboxPool
from scheduler.planner.capacity import Pools, pools_of


def small_config(**values: Any) -> RunConfig:
    """The small configuration with changes; `engine__replicas` means engine.replicas."""
    return with_values(SMALL, _with_dots(values))


def stage_1(scale: str, **values: Any) -> RunConfig:
    """Stage 1 at this scale, with changes named as for `small_config`."""
    return with_values(at_scale(STAGE_1.paper, scale, STAGE_1.tiny), _with_dots(values))


def _with_dots(values: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("__", "."): value for name, value in values.items()}


def loss(**changes: Any) -> AlgorithmConfig:
    """Settings of the loss without an importance correction."""
    return AlgorithmConfig(**{"correction": "none", "reference_model": "reference", **changes})


def limits(**changes: Any) -> LearnerConfig:
    """Settings of the learner with padded rows, as with `attention` sdpa."""
    return LearnerConfig(**{"attention": "sdpa", "micro_batch_tokens": 2_048, **changes})


def learner(**changes: Any) -> RunConfig:
    """A small run with changed settings, named without their branch; the learner's have precedence."""
    return _changed(changes, ("learner", "optimizer", "algorithm", "rollout", "engine"))


def _changed(changes: dict[str, Any], branches: tuple[str, ...], small: RunConfig = SMALL) -> RunConfig:
    def named(leaf: str) -> str:
        return next((f"{branch}.{leaf}" for branch in branches if hasattr(getattr(small, branch), leaf)), leaf)

    return with_values(small, {named(leaf): value for leaf, value in changes.items()})


def engine(**changes: Any) -> RunConfig:
    """As `learner`, for an engine with any context; the engine's settings have precedence."""
    budgets = {"rollout.max_response_tokens": 8, "evaluate.max_response_tokens": 8}
    return _changed(changes, ("engine", "detector"), with_values(SMALL, budgets))


def program(**changes: Any) -> Limits:
    return replace(standard_limits(), **changes)


def pool(groups: Groups | None = None, *, only: str = "", python: str = sys.executable, **changes: Any) -> SandboxPool:
    """A pool; `only`: the isolation level that it must reach."""
    levels = (IsolationLevel(only),) if only else ()
    return SandboxPool(SandboxConfig(**changes), groups, levels=levels, python=python)


def pools(**changes: Any) -> Pools:
    """GPUs that engines and ranks share; an engine takes all free memory."""
    found = pools_of(RunConfig(), engine_gpus=1, learner_gpus=1, colocated=True)
    return replace(found, takes_rest=True, **changes)
