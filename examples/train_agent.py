"""An agent of your own in training: OpenAI's client, one tool, and the loop in between.

python recipes/stage1.py --agent.run examples.train_agent:solve --run-dir runs/example-agent

It does what the built-in loop does with the tool `python`, so the same seed trains the same tokens. Start from it: the
messages, the tools and the loop are yours; return a reward, or None for the configured one (docs/agents.md).
"""

import asyncio
import json
import ssl
import threading
from collections import Counter
from functools import cache
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from rstar_ray.agent.endpoint import Endpoint
from rstar_ray.config import SandboxConfig
from rstar_ray.seeds import derive_seed
from rstar_ray.tools.spec import PYTHON_TOOL
from rstar_ray.trajectory import Problem
from sandbox.limits import program_limits
from sandbox.outcomes import tool_text
from sandbox.pool import SandboxPool
from sandbox.request import ExecutionRequest, ExecutionResult

MAX_TURNS = 10
TLS = ssl.create_default_context()
"""Shared by all clients: each would otherwise read the certificates again, which takes 35 ms of CPU."""


async def solve(problem: Problem, endpoint: Endpoint) -> float | None:
    """One rollout. The configured reward judges the last answer."""
    messages: list[Any] = [{"role": "user", "content": problem.problem}]
    tools: Any = [PYTHON_TOOL.as_schema()]
    programs = Programs(endpoint.seed)
    http = DefaultAsyncHttpxClient(verify=TLS, timeout=3_600)
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=http) as client:
        for _ in range(MAX_TURNS):
            answer = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=tools)
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            unreadable = (said.model_extra or {}).get("rstar_unreadable", [])
            if not (said.tool_calls or unreadable):
                break
            messages += [await result_of(call, programs) for call in said.tool_calls or ()]
            messages += [error_of(problem) for problem in unreadable]
    return None


def error_of(problem: str) -> dict[str, Any]:
    """The reply to a call that could not be read; such a call counts as failed."""
    return {"role": "tool", "tool_call_id": "", "content": f"Error: the tool call could not be read: {problem}"}


async def result_of(call: Any, programs: "Programs") -> dict[str, Any]:
    """The message with the result of a call; `rstar_failed` tells Resample-on-Correct of a failure."""
    arguments = json.loads(call.function.arguments)
    message = {"role": "tool", "tool_call_id": call.id}
    if call.function.name != PYTHON_TOOL.name or not isinstance(arguments.get("code"), str):
        text = f"Error: the tool is {PYTHON_TOOL.name}, with a string named code"
        return message | {"content": text, "rstar_failed": True}
    result = await programs.run(arguments["code"], str(arguments.get("input", "")))
    return message | {"content": tool_text(result), "rstar_failed": result.outcome.failed}


class Programs:
    """The programs of one rollout, in a sandbox that all agents of this process share."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._num_runs: Counter[tuple[str, str]] = Counter()

    async def run(self, code: str, stdin: str) -> ExecutionResult:
        """On a separate event loop, because each agent has another. The program's random numbers are the same when
        the rollout is repeated, and others when the program runs again.
        """
        self._num_runs[code, stdin] += 1
        seed = derive_seed(self._seed, "program", code, stdin, self._num_runs[code, stdin]) >> 31
        request = ExecutionRequest(code=code, stdin=stdin, limits=program_limits(SandboxConfig()), seed=seed)
        loop, pool = sandbox()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(pool.run(request), loop))


@cache
def _started() -> tuple[asyncio.AbstractEventLoop, SandboxPool]:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    pool = SandboxPool(SandboxConfig())
    asyncio.run_coroutine_threadsafe(pool.start(), loop).result()
    return loop, pool


_LOCK = threading.Lock()


def sandbox() -> tuple[asyncio.AbstractEventLoop, SandboxPool]:
    """Its event loop and the pool; started by the first call."""
    with _LOCK:
        return _started()
