"""Settings for tests, derived from `RunConfig` as a run's are, with what a test changes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.small import SMALL
from rstar_ray.algorithm.batch_plan import BatchLimits, batch_limits
from rstar_ray.algorithm.loss_settings import LossSettings, loss_settings
from rstar_ray.algorithm.lr_schedule import LrSchedule, rl_schedule
from rstar_ray.algorithm.resample import ResampleRule, resample_rule
from rstar_ray.config import AlgorithmConfig, LearnerConfig, RunConfig, SandboxConfig, with_values
from sandbox.limits import Limits, standard_limits
from sandbox.pool_config import PoolConfig, pool_config
from scheduler.planner.capacity import Pools, pools_of
from scheduler.traces.stage_traces import STAGES


def small_config(**values: Any) -> RunConfig:
    """`engine__replicas` is engine.replicas."""
    return with_values(SMALL, {name.replace("__", "."): value for name, value in values.items()})


def loss(**changes: Any) -> LossSettings:
    """Of a run without an importance correction."""
    return replace(loss_settings(with_values(RunConfig(), {"algorithm.correction": "none"})), **changes)


def limits(**changes: Any) -> BatchLimits:
    """Of padded rows, as with `attention` sdpa."""
    return replace(batch_limits(LearnerConfig(attention="sdpa", micro_batch_tokens=2_048)), **changes)


def schedule(**changes: Any) -> LrSchedule:
    return replace(rl_schedule(RunConfig(reset_optimizer=True)), **{"final_share": 0.0, "stable_share": 0.6} | changes)


def rule(**changes: Any) -> ResampleRule:
    return replace(resample_rule(AlgorithmConfig()), **changes)


def learner(folder: Path | str, **changes: Any) -> Any:
    """The learner's settings; `attention` decides whether rows are packed, as in a run."""
    from actors.learner.settings import learner_settings

    found = learner_settings(small_config(), Path(folder))
    packed = changes.get("attention", found.attention) != "sdpa"
    batch = replace(changes.pop("batch", found.batch), packed=packed)
    return replace(found, **{"batch": batch, **changes})


def engine(folder: Path | str, **changes: Any) -> Any:
    from actors.generation.settings import engine_settings

    return replace(engine_settings(small_config(), Path(folder)), **{"measure_cost": False, **changes})


def program(**changes: Any) -> Limits:
    return replace(standard_limits(), **changes)


def pool(**changes: Any) -> PoolConfig:
    return replace(pool_config(SandboxConfig()), **changes)


def pools(**changes: Any) -> Pools:
    """GPUs that engines and ranks share, where an engine takes all that is left."""
    found = pools_of(RunConfig(), STAGES["stage1"], engine_gpus=1, learner_gpus=1, colocated=True)
    return replace(found, **{"memory_share": 0.0, **changes})
