"""A Python tool that always fails, to evaluate a policy without tool results.

python recipes/evaluate.py --model FOLDER --tools.use rstar_ray.tiny.broken_tool:python
"""

from rstar_ray.tools.spec import PYTHON_TOOL
from rstar_ray.tools.tool import Tool, ToolFailed


async def _refuse(code: str, input: str = "") -> str:
    raise ToolFailed("Error: the interpreter is out of order.")


python = Tool(
    name=PYTHON_TOOL.name, description=PYTHON_TOOL.description, parameters=PYTHON_TOOL.parameters, function=_refuse
)
