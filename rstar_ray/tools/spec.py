"""The description of a tool for all processes but its host: its schema for the model, and where it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from rstar_ray.tools.tool import Tool

PYTHON = "python"
"""The built-in tool: a program in the sandbox, with the sandbox's limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool. `runs`: where it runs: the built-in Python, a program in the sandbox, or a separate actor."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    runs: Literal["python", "sandbox", "actor", "actor with state"]
    entry: str = ""  # its entry in --tools.use
    program: str = ""
    deadline_s: float = 0.0  # per call [s]; 0 for Python, which has the sandbox's
    max_chars: int = 0
    schema: Mapping[str, Any] | None = None  # the exact schema for the model, if it is given

    def as_schema(self) -> dict[str, Any]:
        """The schema for the model, in the format of chat templates."""
        if self.schema is not None:
            return dict(self.schema)
        described = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": described}


PYTHON_TOOL = ToolSpec(
    name=PYTHON,
    description="Runs a Python program and returns what it prints, or the value of its last expression.",
    parameters={
        "type": "object",
        "properties": {
            "code": {"type": "string", "description": "the program"},
            "input": {"type": "string", "description": "its standard input"},
        },
        "required": ["code"],
    },
    runs="python",
)


def with_schema(tool: ToolSpec, schema: Mapping[str, Any]) -> ToolSpec:
    """The tool with `schema`, `{"type": "function", "function": {...}}`, as the schema for the model."""
    shown = schema["function"]
    names = ("name", "description", "parameters")
    return replace(tool, **{name: shown[name] for name in names}, schema=schema)


def spec_of(tool: Tool, entry: str) -> ToolSpec:
    """The description of a loaded tool."""
    runs: Literal["sandbox", "actor", "actor with state"] = "actor"
    if tool.program is not None:
        runs = "sandbox"
    elif tool.state is not None:
        runs = "actor with state"
    return ToolSpec(
        name=tool.name,
        description=tool.description,
        parameters=dict(tool.parameters),
        runs=runs,
        entry=entry,
        program=tool.program or "",
        deadline_s=tool.deadline_s,
        max_chars=tool.max_chars,
    )
