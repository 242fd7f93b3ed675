"""Published prompts and tool schemas by name (`--chat.protocol`), and the schema of the Python tool from a file."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from rstar_ray.config import ChatConfig
from rstar_ray.errors import ConfigError, one_line
from rstar_ray.tools.spec import PYTHON_TOOL, ToolSpec, with_schema

FILES = Path(__file__).with_name("protocols")
PROTOCOLS: dict[str, dict[str, str]] = {
    "own": {},
    "rstar2-agent-14b": {
        "template": str(FILES / "rstar2-agent-14b.jinja"),
        "system": "none",  # the template has the system text
        "before": "You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here </answer>. "
        "And your final answer will be extracted automatically by the \\boxed{} tag.\nThis is the problem:\n",
        "tool_schema": str(FILES / "rstar2-agent-14b.tool.json"),
    },
}
"""rstar2-agent-14b: the prompt of arXiv:2508.20722 Figure 3 in the wording of the released training code
(microsoft/rStar: rstar2_agent/config/rstar2_agent_trainer.yaml, examples/chat_with_tool_call.py), and its tool
(rstar2_agent/config/tool_config/python_tool_config.yaml). The figure names the tool
execute_python_code_with_standard_io and adds a "return" field; the released code does neither."""


def with_protocol(config: ChatConfig) -> ChatConfig:
    """The settings, with the protocol's values for unset ones."""
    chosen = PROTOCOLS[config.protocol]
    return replace(config, **{name: value for name, value in chosen.items() if not getattr(config, name)})


def python_tool(config: ChatConfig) -> ToolSpec:
    """The built-in tool with its schema for the model. Raises `ConfigError` for a schema file of another tool."""
    path = with_protocol(config).tool_schema
    return with_schema(PYTHON_TOOL, read_schema(path)) if path else PYTHON_TOOL


def read_schema(path: str) -> dict[str, Any]:
    """A tool in the format of chat templates, `{"type": "function", "function": {...}}`. Raises `ConfigError`."""
    hint = 'give JSON of {"type": "function", "function": {"name", "description", "parameters"}}'
    try:
        schema: Any = json.loads(Path(path).expanduser().read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("--chat.tool-schema", f"{path} cannot be read ({one_line(error)})", hint) from error
    function = _object(_object(schema).get("function"))
    parameters = _object(function.get("parameters"))
    for name, wrong in (
        ("name", not isinstance(function.get("name"), str) or not function["name"]),
        ("description", not isinstance(function.get("description"), str)),
        ("parameters", parameters.get("type") != "object"),
    ):
        if wrong:
            raise ConfigError("--chat.tool-schema", f"{path} has no valid function.{name}", hint)
    if _object(_object(parameters.get("properties")).get("code")).get("type") != "string":
        problem = f"{path} has no string parameter 'code', which holds the program"
        raise ConfigError("--chat.tool-schema", problem, "name it code; 'input' is its standard input")
    return cast(dict[str, Any], schema)


def _object(value: Any) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}
