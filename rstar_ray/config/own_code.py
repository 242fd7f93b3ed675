"""Settings of the user's code: rewards, tools, environments."""

import re
from dataclasses import dataclass
from inspect import Signature
from typing import Annotated, Any, Literal

from rstar_ray.config.checks import at_least, check_bounds, require
from rstar_ray.config.modes import where
from rstar_ray.config.tree import MayChange

REWARDS = ("math", "exact", "choice", "code", "instructions", "calls")
"""Built-in reward rules; any other name is the user's `module:function`."""
Place = Literal["answer", "boxed", "anywhere"]
READ_AT_PLACE = ("math", "exact", "choice")
"""The rules that read the final answer at `--reward.place`."""
READ_LOOSELY = ("instructions",)
"""The rules with a second, loose score in evaluations."""
_ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_reward(name: str) -> bool:
    """Whether this names a built-in rule, or has the form of a user's function, `module:function`."""
    return name in REWARDS or is_entry(name)


def is_entry(name: str) -> bool:
    """Whether this has the form of a user's object, `module:object`."""
    return _ENTRY.fullmatch(name) is not None


def is_missing(module: str, failed: BaseException) -> bool:
    """Whether an import failed because there is no such module, and not because of one that it imports."""
    name = failed.name if isinstance(failed, ModuleNotFoundError) else None
    return bool(name) and f"{module}.".startswith(f"{name}.")


def takes_third(signature: Signature, name: str) -> bool:
    """Whether a user's function receives its third argument, which is optional.

    It does if its third positional parameter has no default or this name. `*args` does not count as one: it may be that
    of a wrapper around a function with two. Raises `TypeError` where this name can only be given as a keyword.
    """
    parameters = signature.parameters.values()
    if any(one.name == name and one.kind is one.KEYWORD_ONLY for one in parameters):
        raise TypeError(f"`{name}` must be its third positional parameter")
    third = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)][2:3]
    return any(one.default is one.empty or one.name == name for one in third)


def own_entries(config: Any) -> tuple[str, ...]:
    """Every `module:object` of the user that a run's settings name."""
    named = (
        *own_rewards(config.reward),
        *own_rules(config.algorithm),
        *own_environments(config.tools),
        *own_agent(config.agent),
        *config.tools.use,
    )
    return tuple(entry for entry in named if ":" in entry)


def has_own(config: Any) -> bool:
    """Whether a run uses the user's code."""
    return bool(own_entries(config))


def own_agent(agent: Any) -> tuple[str, ...]:
    """The user's agent, and its function that detects failed calls."""
    return tuple(name for name in (agent.run, agent.failed) if name)


def own_rules(algorithm: Any) -> tuple[str, ...]:
    """The rules of the algorithm that are functions of the user, each once."""
    named = (algorithm.resample, algorithm.advantage, algorithm.loss)
    return tuple(dict.fromkeys(name for name in named if ":" in name))


def own_rewards(reward: "RewardConfig") -> tuple[str, ...]:
    """The user's reward functions that the settings name, each once."""
    return tuple(dict.fromkeys(name for name in (reward.name, *reward.functions) if ":" in name))


def own_environments(tools: "ToolsConfig") -> tuple[str, ...]:
    """The environments that the settings name, each once."""
    return tuple(dict.fromkeys(name for name in (tools.environment, *tools.environments) if name))


def has_own_tools(config: Any) -> bool:
    return bool(own_environments(config.tools)) or any(":" in entry for entry in config.tools.use)


OWN_REWARD = where(
    "reward.name", lambda config: bool(own_rewards(config.reward)), "give module:function", warn_only=True
)
OWN_ENVIRONMENT = where(
    "tools.environment", lambda config: bool(own_environments(config.tools)), "give module:object", warn_only=True
)
OWN_TOOL = where("tools.use", has_own_tools, "give module:object", warn_only=True)


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How an answer is scored (docs/rewards.md)."""

    name: str = "math"
    """math: mathematically equal to the truth (arXiv:2508.20722 section 2.2); exact: the same words; choice: the same
    letter; code: a program that passes the truth's test cases; instructions: an answer that follows the truth's
    verifiable instructions (IFEval); calls: the truth's function calls, as text (BFCL); module:function: your own
    function. A problem that names a rule is judged by that rule"""
    functions: tuple[str, ...] = ()
    """your own functions, module:function, that a problem may name as its reward in addition to the rules above"""
    place: Place = "answer"
    """where the final answer is read. answer: the last boxed in the last <answer>; boxed: the last boxed after the
    thinking; anywhere: as boxed, else the last <answer>, else the text that is declared as the answer"""
    partial: bool = False
    """for code and instructions: the reward is the share of cases that passed, instead of 0 or 1"""
    deadline_s: Annotated[MayChange[float], OWN_REWARD, at_least(0.01)] = 10.0
    """longest time your own function may take for one completion; after that its process is killed [s]"""
    processes: Annotated[MayChange[int], OWN_REWARD, at_least(1)] = 2
    """processes per generation worker that run your own function"""
    concurrency: Annotated[MayChange[int], OWN_REWARD, at_least(1)] = 64
    """rollouts that each of these processes judges concurrently if the function is async; other functions judge one at
    a time"""

    def __post_init__(self) -> None:
        check_bounds("reward", self)
        for name in self.functions:
            named = _ENTRY.fullmatch(name) is not None and self.functions.count(name) == 1
            require(named, "--reward.functions", f"{name!r} is not module:function, or is given twice",
                    "give each module:function once")  # fmt: skip
        require(
            is_reward(self.name),
            "--reward.name",
            f"{self.name!r} is not a reward",
            f"give {', '.join(REWARDS)}, or module:function",
        )


@dataclass(frozen=True, kw_only=True)
class ToolsConfig:
    """The tools that the policy may call, and environments that answer it (docs/tools.md)."""

    use: tuple[str, ...] = ("python",)
    """tools: python (programs in the sandbox), or your own, module:object; several are allowed"""
    environment: str = ""
    """module:object that answers every turn without a tool call, such as a dialogue partner or a game; empty: such a
    turn ends the rollout"""
    environments: tuple[str, ...] = ()
    """environments, module:object, that a problem may select in its column `environment`, in place of the one above"""
    max_calls_per_turn: Annotated[int, at_least(1)] = 16
    """largest number of calls of one turn that are run; further calls get an error message and count as failed"""
    max_environment_turns: Annotated[int, OWN_ENVIRONMENT, at_least(1)] = 30
    """largest number of environment replies in one rollout; with an environment, --rollout.max-turns counts only turns
    that call a tool"""
    hosts: Annotated[MayChange[int], OWN_TOOL, at_least(1)] = 1
    """actors for each of your own tools"""

    def __post_init__(self) -> None:
        check_bounds("tools", self)
        for entry in self.use:
            named = entry == "python" or _ENTRY.fullmatch(entry) is not None
            require(named, "--tools.use", f"{entry!r} is not a tool", "give python, or module:object")
            require(self.use.count(entry) == 1, "--tools.use", f"{entry} is given twice", "give it once")
        for option, entry in [
            ("environment", self.environment or "a:b"),
            *(("environments", one) for one in self.environments),
        ]:
            require(is_entry(entry), f"--tools.{option}", f"{entry!r} is not an environment", "give module:object")
