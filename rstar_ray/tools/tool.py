"""A tool: a name, a JSON schema and an async function. What does not fit together is refused when it is made."""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
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
    """What a stateful tool keeps for one rollout; made when the rollout first calls, closed when it ends.

    Two methods are optional: `snapshot(self) -> str`, from which `start` makes the same state again, and
    `async close(self)`. Without a snapshot a rollout whose state is lost starts again.
    """

    async def call(self, **arguments: Any) -> str: ...


StartState = Callable[[Problem, str | None], ToolState]
"""Makes the state of a rollout, from a snapshot where there is one; a class with such an `__init__` is one."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One tool. Give exactly one of `function` (no state), `state` (one per rollout) and `program` (in the sandbox).

    The model sees what is returned, or the text of a raised `ToolFailed`; anything else that is raised, an answer after
    the deadline and one that `failed` says so of count as failed too. A raised `ToolError` says that what the tool
    needs is gone: the call is made again, and never held against the policy.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    function: Callable[..., Awaitable[str]] | None = None
    state: StartState | None = None
    program: str | None = None  # Python source: arguments as JSON on its stdin, what it prints is the answer
    failed: Callable[[str], bool] | None = None  # which answers of a function or a state count as failed
    deadline_s: float = DEADLINE_S  # of one call [s]
    max_chars: int = MAX_CHARS  # of one answer; the middle of a longer one goes
    where: str = field(default="", compare=False)  # the module and object it came from

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
        if self.program is not None:
            if self.failed is not None:  # who reads the answer there has none of its maker's functions
                hint = "have the program exit with another status than 0 where it failed"
                raise ConfigError(name, "`failed` is not asked where a program answers", hint)
            _refuse_program(name, self.program)
            _refuse_limits(name, self.deadline_s, self.max_chars)
        if self.function is not None:
            _refuse_misfit(name, self.function, self.parameters)
        if isinstance(self.state, type):
            _refuse_misfit(name, getattr(self.state, "call", None), self.parameters, bound=True)


def _refuse_program(name: str, program: str) -> None:
    try:
        compile(program, name, "exec")
    except SyntaxError as error:
        raise ConfigError(name, f"its program cannot be read ({error})", "give Python source") from None


def _refuse_limits(name: str, deadline_s: float, max_chars: int) -> None:
    """The sandbox gives a program no others, and would say so at the first call only."""
    most_s = MOST_PROGRAM_S - TOOL_ROOM_S
    if not LEAST_PROGRAM_S <= deadline_s <= most_s or max_chars > MOST_OUTPUT_CHARS:
        hint = f"give deadline_s of {LEAST_PROGRAM_S:g} to {most_s:,.0f}, max_chars up to {MOST_OUTPUT_CHARS:,}"
        raise ConfigError(name, "its deadline or its cap is outside what the sandbox gives a program", hint)


def _refuse_misfit(name: str, function: Any, parameters: Mapping[str, Any], *, bound: bool = False) -> None:
    """Raise `ConfigError` where the function does not take a call that the schema allows."""
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
