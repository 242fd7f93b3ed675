"""Every setting of a run, in small frozen records. Defaults are defined only here.

Engines, learner, loss, sandbox and planner use these records directly. A value derived from several settings is a
property. Bounds are declared beside their fields (`checks.py`), constraints between fields in `__post_init__`; both
raise `ConfigError` with the option as the command line spells it. `recipes/` overrides defaults.
"""

from rstar_ray.config.agent import AgentConfig
from rstar_ray.config.algorithm import AlgorithmConfig, OptimizerConfig, SftConfig
from rstar_ray.config.chat import ChatConfig
from rstar_ray.config.detector import DetectorConfig
from rstar_ray.config.machines import BalancerConfig, EngineConfig, LearnerConfig, SandboxConfig
from rstar_ray.config.modes import Condition, conditions, idle
from rstar_ray.config.own_code import (
    REWARDS,
    RewardConfig,
    ToolsConfig,
    own_agent,
    own_entries,
    own_environments,
    own_rewards,
    own_rules,
)
from rstar_ray.config.rollout import DataConfig, EvaluationConfig, RolloutConfig
from rstar_ray.config.run import CheckpointConfig, RunConfig
from rstar_ray.config.telemetry import TelemetryConfig
from rstar_ray.config.tiny import TinyConfig
from rstar_ray.config.tree import (
    MayChange,
    SameAnswers,
    differences,
    leaves,
    may_change,
    same_answers,
    with_values,
)

__all__ = [
    "REWARDS",
    "AgentConfig",
    "AlgorithmConfig",
    "BalancerConfig",
    "ChatConfig",
    "CheckpointConfig",
    "Condition",
    "DataConfig",
    "DetectorConfig",
    "EngineConfig",
    "EvaluationConfig",
    "LearnerConfig",
    "MayChange",
    "OptimizerConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SameAnswers",
    "SandboxConfig",
    "SftConfig",
    "TelemetryConfig",
    "TinyConfig",
    "ToolsConfig",
    "conditions",
    "differences",
    "idle",
    "leaves",
    "may_change",
    "own_agent",
    "own_entries",
    "own_environments",
    "own_rewards",
    "own_rules",
    "same_answers",
    "with_values",
]
