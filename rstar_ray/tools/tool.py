"""A tool: a name, a JSON schema and an async function. Mismatches are refused when it is created."""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from rstar_ray.config.machines import LEAST_PROGRAM_S, MOST_OUTPUT_CHARS, MOST_PROGRAM_S, TOOL_ROOM_S
from rstar_ray.errors import ConfigError
from rstar_ray.tools.schema import schema_faults
from rstar_ray.trajectory import Problem

DEADLINE_S = 10.0
MAX_CHARS = 2_000
NAME = re.compile(r"[A-Za-z_][\w-]{0,63}")


class ToolFailed(Exception):
    """Raised by a tool whose call failed: the model reads the text, and Resample-on-Correct counts the failure."""


class ToolState(Protocol):
    """The state of a tool for one rollout; created at the rollout's first call, closed when the rollout ends.

    Two methods are optional: `snapshot(self) -> str`, from which `StartState` restores the state, and
    `async close(self)`. Without a snapshot, a rollout whose state is lost restarts.
    """

    async def call(self, **arguments: Any) -> str: ...


StartState = Callable[[Problem, str | None], ToolState]
"""Creates the state of a rollout, from a snapshot if there is one; a class with such an `__init__` qualifies."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One tool. Give exactly one of `function` (no state), `state` (one per rollout) and `program` (in the sandbox).

    The model reads the returned text, or the text of a raised `ToolFailed`. A call has failed if it raises, exceeds the
    deadline, or returns an answer for which `failed` is true. `ToolError` means that a resource of the tool is
    unavailable: the call is repeated, and does not count as the policy's failure.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    function: Callable[..., Awaitable[str]] | None = None
    state: StartState | None = None
    program: str | None = None  # Python source: reads arguments as JSON from stdin and prints the answer
    failed: Callable[[str], bool] | None = None  # whether an answer of a function or a state counts as failed
    deadline_s: float = DEADLINE_S  # of one call [s]
    max_chars: int = MAX_CHARS  # of one answer; the middle of a longer one is removed

    def __post_init__(self) -> None:
        name = f"tool {self.name!r}"
        if not NAME.fullmatch(self.name):
            raise ConfigError(name, "it is not a name", "take letters, digits and _")
        if faults := schema_faults(self.parameters):
            raise ConfigError(f"{name}, parameters", faults[0], 'write {"type": "object", "properties": {...}}')
        if (self.function is None) + (self.state is None) + (self.program is None) != 2:
            raise ConfigError(name, "it has not exactly one of function, state and program", "give one of them")
        if not self.deadline_s > 0 or self.max_chars < 16:
            raise ConfigError(
                name, "its deadline or its cap is too small", "give deadline_s above 0, max_chars from 16"
            )
        if inspect.iscoroutinefunction(self.failed):  # a coroutine is always true
            raise ConfigError(name, "its `failed` is async", "write `def`")
        for part, arguments in (("failed", ("answer",)), ("state", ("problem", "snapshot"))):
            if (function := getattr(self, part)) is not None and (wrong := misfit(function, *arguments)):
                problem = f"its `{part}` cannot be called with ({', '.join(arguments)}): {wrong}"
                raise ConfigError(name, problem, f"take {len(arguments)} positional arguments")
        if inspect.iscoroutinefunction(getattr(self.state, "snapshot", None)):
            raise ConfigError(name, "its state's `snapshot` is async", "write `def`")
        if self.program is not None:
            if self.failed is not None:  # the sandbox reads the answer, without the user's functions
                hint = "exit with a status other than 0 if the program failed"
                raise ConfigError(name, "`failed` is not used for a program", hint)
            _refuse_program(name, self.program)
            _refuse_limits(name, self.deadline_s, self.max_chars)
        if self.function is not None:
            _refuse_misfit(name, self.function, self.parameters)
        if isinstance(self.state, type):
            _refuse_misfit(name, getattr(self.state, "call", None), self.parameters, bound=True)


def misfit(function: Any, *arguments: str) -> str:
    """Why it cannot be called with these positional arguments; empty if it can, or has no signature."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as wrong:
        return str(wrong)
    except ValueError:
        return ""
    return ""


def _refuse_program(name: str, program: str) -> None:
    try:
        compile(program, name, "exec")
    except SyntaxError as error:
        raise ConfigError(name, f"its program cannot be read ({error})", "give Python source") from None


def _refuse_limits(name: str, deadline_s: float, max_chars: int) -> None:
    """Refuse limits that the sandbox does not support, which it would refuse only at the first call."""
    most_s = MOST_PROGRAM_S - TOOL_ROOM_S
    if not LEAST_PROGRAM_S <= deadline_s <= most_s or max_chars > MOST_OUTPUT_CHARS:
        hint = f"give deadline_s of {LEAST_PROGRAM_S:g} to {most_s:,.0f}, max_chars up to {MOST_OUTPUT_CHARS:,}"
        raise ConfigError(name, "its deadline or its cap is outside the sandbox's range", hint)


def _refuse_misfit(name: str, function: Any, parameters: Mapping[str, Any], *, bound: bool = False) -> None:
    """Raise `ConfigError` if the schema allows a call that the function does not accept."""
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(name, "its function is not async", "write `async def`")
    takes = list(inspect.signature(function).parameters.values())[bound:]
    properties = set(cast(Mapping[str, Any], parameters.get("properties", {})))
    required = set(cast(list[str], parameters.get("required", [])))
    named = {one.name for one in takes if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    needed = {one.name for one in takes if one.name in named and one.default is one.empty}
    anything = any(one.kind is one.VAR_KEYWORD for one in takes)
    if unknown := sorted(properties - named) if not anything else []:
        raise ConfigError(name, f"its function takes no {unknown[0]!r}", "name it so in the schema, or take it")
    if absent := sorted(needed - properties):
        raise ConfigError(name, f"its schema has no {absent[0]!r}", "add it to properties, or give it a default")
    if open_ := sorted(needed - required):
        raise ConfigError(name, f"{open_[0]!r} may be omitted, but the function needs it", "add it to required")
