"""An agent of your own around a served policy: OpenAI's client, one tool, and the loop in between.

python recipes/serve.py --model MODEL
RSTAR_RAY_TOKEN=... python -m examples.tool_agent http://127.0.0.1:8000/v1 "What is 12 * 34?"

The program that the policy writes runs in the sandbox of this process. Nothing here is specific to rstar_ray but the
sandbox: point it at any server of chat completions.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from openai import AsyncOpenAI

from rstar_ray.config import SandboxConfig
from rstar_ray.tools.spec import PYTHON_TOOL
from sandbox.limits import program_limits
from sandbox.outcomes import tool_text
from sandbox.pool import SandboxPool
from sandbox.request import ExecutionRequest

MAX_TURNS = 8


async def solve(client: AsyncOpenAI, question: str, pool: SandboxPool) -> str:
    """The answer, after as many calls of the tool as the policy makes within `MAX_TURNS`."""
    messages: list[Any] = [{"role": "user", "content": question}]
    tools: Any = [PYTHON_TOOL.as_schema()]
    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return said.content or ""
        for call in said.tool_calls:
            result = await run(call, pool)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


async def run(call: Any, pool: SandboxPool) -> str:
    """What the policy reads of a call. Its mistakes are results too."""
    arguments = json.loads(call.function.arguments)
    code = arguments.get("code")
    if call.function.name != PYTHON_TOOL.name or not isinstance(code, str):
        return f"Error: the tool is {PYTHON_TOOL.name}, with a string named code"
    request = ExecutionRequest(code=code, stdin=str(arguments.get("input", "")), limits=program_limits(SandboxConfig()))
    return tool_text(await pool.run(request))


async def main(url: str, question: str) -> None:
    client = AsyncOpenAI(base_url=url, api_key=os.environ.get("RSTAR_RAY_TOKEN", ""))
    async with client, SandboxPool(SandboxConfig()) as pool:
        print(await solve(client, question, pool))


def arguments(argv: Sequence[str]) -> tuple[str, str]:
    if len(argv) != 2:
        raise SystemExit(f"give URL and QUESTION (got {len(argv)} arguments)")
    return argv[0], argv[1]


if __name__ == "__main__":
    asyncio.run(main(*arguments(sys.argv[1:])))
