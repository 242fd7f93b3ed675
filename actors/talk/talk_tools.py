"""Tools of a conversation: programs run in a sandbox of this process, custom tools in actors of a Ray started for them.

An answer takes the place of a rollout: a tool with state has one state per answer.
"""

import secrets
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rstar_ray.agent.rollout import RolloutState
from rstar_ray.chat.protocol import python_tool
from rstar_ray.config import ChatConfig, RunConfig, ToolsConfig
from rstar_ray.tools.loader import tool_specs
from rstar_ray.tools.spec import ToolSpec
from rstar_ray.trajectory import UNMODIFIED, Problem, RolloutLimits, RolloutRequest, ToolCall, ToolResult
from sandbox.limits import Limits, program_limits, tool_limits
from sandbox.outcomes import tool_text
from sandbox.pool import SandboxPool
from sandbox.request import ExecutionRequest

Message = Mapping[str, Any]


class AnswerTools(Protocol):
    """The tools of one answer."""

    async def execute(self, call: ToolCall) -> ToolResult: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TalkTools:
    """The tools of a conversation; `open` returns those of one answer."""

    specs: Sequence[ToolSpec]
    open: Callable[[RolloutState], AnswerTools]


def specs_of(config: ToolsConfig, folder: str, chat: ChatConfig) -> list[ToolSpec]:
    """The tools as in a training run. Raises `ConfigError` for an entry that is not a tool."""
    specs = tool_specs(config.use, str(Path(folder).absolute()))
    return [python_tool(chat) if spec.runs == "python" else spec for spec in specs]


@asynccontextmanager
async def talk_tools(specs: Sequence[ToolSpec], config: ToolsConfig, folder: str) -> AsyncGenerator[TalkTools, None]:
    """Starts the tools, and stops them on exit; programs are isolated as in training."""
    from actors.tool_client import Tools
    from actors.tool_host import planned_hosts

    sandbox = RunConfig().sandbox
    async with SandboxPool(sandbox) as pool:
        programs = Programs(pool, program_limits(sandbox))
        if not planned_hosts(config, specs):
            yield TalkTools(specs=specs, open=Tools(specs, programs, {}, caller="talk").open)
            return
        with _hosts(config, specs, str(Path(folder).absolute())) as handles:
            tools = Tools(specs, programs, handles, caller="talk")
            try:
                yield TalkTools(specs=specs, open=tools.open)
            finally:
                await tools.settled()


@contextmanager
def _hosts(config: ToolsConfig, specs: Sequence[ToolSpec], folder: str) -> Generator[dict[str, list[Any]], None, None]:
    """Starts Ray and the tool hosts; yields actor handles by entry."""
    import ray

    from actors.launch.ray_connection import connect
    from actors.tool_host import host_names, start_hosts

    connect()
    try:
        hosts = start_hosts(config, specs, folder)
        entries = {spec.entry for spec in specs if spec.runs in ("actor", "actor with state")}
        yield {entry: [hosts[name] for name in host_names(entry, config.hosts)] for entry in entries}
    finally:
        ray.shutdown()


class Programs:
    """Runs programs of the policy and of tools in a sandbox pool."""

    def __init__(self, pool: SandboxPool, limits: Limits) -> None:
        self._pool = pool
        self._limits = limits

    async def execute(self, call: ToolCall, *, seed: int) -> ToolResult:
        """Run the policy's program."""
        return await self._run(call.code, call.stdin, self._limits, seed)

    async def run_tool(self, program: str, stdin: str, *, deadline_s: float, max_chars: int, seed: int) -> ToolResult:
        """Run a tool's program."""
        return await self._run(program, stdin, tool_limits(self._limits, deadline_s, max_chars), seed)

    async def _run(self, code: str, stdin: str, limits: Limits, seed: int) -> ToolResult:
        result = await self._pool.run(ExecutionRequest(code=code, stdin=stdin, limits=limits, seed=seed))
        return ToolResult(outcome=result.outcome, text=tool_text(result), wall_s=result.wall_s)


def begun(name: str, messages: Sequence[Message]) -> RolloutState:
    """The state that tools receive: the answer's name and the last question."""
    question = next((str(one["content"]) for one in reversed(messages) if one["role"] == "user"), "")
    request = RolloutRequest(
        rollout_id=name,
        group_id=name,
        problem=Problem(id=name, problem=question, answer=""),
        seed=secrets.randbits(62),
        limits=RolloutLimits(max_response_tokens=1, max_turns=1, max_context_tokens=1, max_calls_per_turn=1),
        sampling=UNMODIFIED,
    )
    return RolloutState.start(request, [])
