"""An agent of the OpenAI Agents SDK in training: the tool `python`, and the SDK's own loop.

pip install --target agents-sdk --no-deps openai-agents griffe griffelib
PYTHONPATH=agents-sdk python recipes/stage1.py --agent.run examples.openai_agents_sdk:solve \\
    --agent.failed examples.openai_agents_sdk:failed --run-dir runs/agents-sdk

It trains the tokens of the built-in loop.
"""

import contextlib
import json
from collections import deque
from typing import Any

import httpx
from agents import Agent, FunctionTool, MaxTurnsExceeded, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

from examples.train_agent import MAX_TURNS, TLS, Programs, error_of
from rstar_ray.agent.endpoint import Endpoint
from rstar_ray.tools.spec import PYTHON_TOOL
from rstar_ray.trajectory import Problem
from sandbox.outcomes import tool_text

_FAILED: deque[str] = deque(maxlen=10_000)
"""Results of failed programs that `failed` has not seen yet: the SDK's tools return only text. It is bounded because an
agent may end before it sends a result.
"""


async def _python(context: Any, arguments: str) -> str:
    given = json.loads(arguments)
    if not isinstance(given.get("code"), str):
        text = "Error: give a string named code"
        _FAILED.append(text)
        return text
    result = await context.context.run(given["code"], str(given.get("input", "")))
    text = tool_text(result)
    if result.outcome.failed:
        _FAILED.append(text)
    return text


def failed(text: str) -> bool:
    """True for the result of a program that failed, which Resample-on-Correct counts. Called once for each result."""
    try:
        _FAILED.remove(text)  # a later result with this text may be of a program that succeeded
    except ValueError:
        return False
    return True


PYTHON = FunctionTool(
    name=PYTHON_TOOL.name,
    description=PYTHON_TOOL.description,
    params_json_schema=dict(PYTHON_TOOL.parameters),
    on_invoke_tool=_python,
    strict_json_schema=False,
)


async def solve(problem: Problem, endpoint: Endpoint) -> float | None:
    """One rollout. The configured reward judges the last answer."""
    set_tracing_disabled(True)
    unreadable: list[str] = []
    programs = Programs(endpoint.seed)

    async def note(response: httpx.Response) -> None:
        """The SDK drops fields that it does not know."""
        await response.aread()
        if response.is_success:
            unreadable[:] = response.json()["choices"][0]["message"].get("rstar_unreadable", [])

    http = httpx.AsyncClient(verify=TLS, event_hooks={"response": [note]}, timeout=3_600)
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=http) as client:
        model = OpenAIChatCompletionsModel(model=endpoint.model, openai_client=client)
        agent = Agent(name="solver", model=model, tools=[PYTHON])
        messages: Any = problem.problem
        with contextlib.suppress(MaxTurnsExceeded):
            while True:
                ran = await Runner.run(agent, messages, context=programs, max_turns=MAX_TURNS)
                if not unreadable:
                    break
                replies = [error_of(error)["content"] for error in unreadable]
                outputs = [{"type": "function_call_output", "call_id": "", "output": text} for text in replies]
                messages = [*ran.to_input_list(), *outputs]
    return None
