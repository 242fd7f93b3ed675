"""The actor that runs agents of the user, with the HTTP endpoint through which they reach the policy."""

import asyncio
import inspect
import logging
import math
import os
import reprlib
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any

import ray

from actors.agents.agent_command import CommandAgent, command_of
from actors.agents.endpoint import AgentEndpoint
from actors.generation.vllm_calls import VllmCalls
from actors.health.heartbeat import Heartbeat, heartbeat
from actors.service import Service, ServiceActor
from actors.talk.http_listener import listening
from rstar_ray.agent.agent_rollout import AgentEnd
from rstar_ray.agent.endpoint import Endpoint
from rstar_ray.agent.session import AgentCall, AgentReply, AgentSession, Other
from rstar_ray.chat.load_chat import load_chat
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.config import RunConfig
from rstar_ray.errors import SandboxError, ToolError
from rstar_ray.reward.value import finite
from rstar_ray.seeds import derive_seed
from rstar_ray.tools.loader import load_object
from rstar_ray.trajectory import Problem
from sandbox.http.connections import room_for_connections

log = logging.getLogger(__name__)

MAX_ENDED = 1_000
"""Ended rollouts whose keys are kept, so that late requests get a clear error."""
LOOK_EVERY_S = 0.5
MAX_RESTARTS = 1_000
MAX_SHOWN = 50
"""Maximum agent failures that one host logs."""
MAX_LOSSES = 3
"""Restarts of one rollout's agent after losses of its process or its sandbox."""
CONCURRENCY = 10_000
"""Each rollout keeps one call open."""

Solve = Callable[[Problem, Endpoint], Any]


class AgentHost:
    """Runs one agent per rollout and serves its requests. The host has one event loop; each agent has a separate
    thread, so that an agent that blocks does not delay others.
    """

    def __init__(
        self,
        solve: Solve,
        chat: TokenizerChat,
        *,
        context_tokens: int,
        deadline_s: float,
        failed: Callable[[str], bool] | None = None,
        abandoned_after_s: float = math.inf,
    ) -> None:
        """`abandoned_after_s`: an agent is stopped if no worker has called for its rollout for this time."""
        self._solve = solve
        self._chat = chat
        self._context_tokens = context_tokens
        self._deadline_s = deadline_s
        self._failed = failed
        self._abandoned_after_s = abandoned_after_s
        self._running: dict[str, RunningAgent] = {}  # by rollout
        self._by_key: OrderedDict[str, AgentSession] = OrderedDict()
        self._open = AsyncExitStack()
        self._address = ""
        self._num_shown = 0
        self._starting = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None

    async def next_request(self, call: AgentCall) -> AgentReply:
        """See `AgentSession.next`; starts an agent if none runs, or if the running one does not match the rollout."""
        await self._listen()
        running = self._running.get(call.rollout_id)
        if running is not None and not call.opens and call.holder != running.holder:
            return Other.LOST
        if running is None or not running.session.fits(call):
            if call.num_turns and call.record is None:
                return Other.SEND_RECORD
            losses = 0
            if running is not None:
                losses = running.losses + running.session.lost
                running.stop()
                running.session.release()
            running = self._begin(call, losses)
        running.holder, running.called_s = call.holder, time.monotonic()
        return await running.session.next(call)

    async def end(self, rollout_id: str, holder: str) -> None:
        """Stop a rollout's agent, unless another worker plays the rollout now."""
        running = self._running.get(rollout_id)
        if running is not None and running.holder == holder:
            del self._running[rollout_id]
            running.stop()
            running.session.release()

    async def close(self) -> None:
        for running in self._running.values():
            running.stop()
        if self._watch is not None:
            self._watch.cancel()
        await self._open.aclose()

    @property
    def num_tokens(self) -> int:
        """Tokens held for all rollouts, including ended ones."""
        return sum(session.num_tokens for session in self._by_key.values())

    async def _listen(self) -> None:
        async with self._starting:
            if not self._address:
                room_for_connections()  # lifts the limit of open files: each agent has an event loop and connections
                os.environ.update(no_proxy_to_loopback(os.environ))  # for clients in this process and its commands
                app = AgentEndpoint(self._by_key.get).app()
                self._address = await self._open.enter_async_context(listening(app, "127.0.0.1", 0, cancels=True))
                self._watch = asyncio.create_task(self._time_out())

    def _begin(self, call: AgentCall, losses: int) -> "RunningAgent":
        session = AgentSession(self._chat, call, self._context_tokens, self._failed)
        self._by_key[session.key] = session
        while len(self._by_key) > MAX_ENDED + len(self._running):
            oldest = next((key for key, one in self._by_key.items() if one.over), None)
            if oldest is None:
                break
            del self._by_key[oldest]
        endpoint = Endpoint(
            base_url=f"{self._address}/v1",
            api_key=session.key,
            rollout_id=call.rollout_id,
            seed=derive_seed(call.seed, "agent"),
        )
        running = self._running[call.rollout_id] = RunningAgent(session, call.holder, losses)
        running.start(self._solve, call.problem, endpoint, self._show)
        return running

    def _show(self, rollout_id: str, text: str) -> None:
        self._num_shown += 1
        if self._num_shown <= MAX_SHOWN:
            more = "; further failures are not logged" if self._num_shown == MAX_SHOWN else ""
            log.warning(f"agent: rollout={rollout_id} {text}{more}")

    async def _time_out(self) -> None:
        while True:
            await asyncio.sleep(min(LOOK_EVERY_S, self._deadline_s / 4, self._abandoned_after_s / 4))
            for rollout_id, running in list(self._running.items()):
                if time.monotonic() - running.called_s > self._abandoned_after_s:
                    log.info(f"agent: rollout={rollout_id} stopped reason=no worker calls for it")
                    await self.end(rollout_id, running.holder)
                elif running.session.thinks_for_s() > self._deadline_s:
                    text = f"no request and no end for {self._deadline_s:g} s (--agent.deadline-s)"
                    running.session.end(AgentEnd(failure=text, timed_out=True))
                    running.stop()


class RunningAgent:
    """One call of the user's function, in a separate thread with a separate event loop."""

    def __init__(self, session: AgentSession, holder: str, losses: int) -> None:
        self.session = session
        self.holder = holder
        self.losses = losses  # earlier losses of this rollout's agent
        self.called_s = time.monotonic()  # by a worker
        self._task: asyncio.Task[Any] | None = None  # of an async agent
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, solve: Solve, problem: Problem, endpoint: Endpoint, show: Callable[[str, str], None]) -> None:
        """`show(rollout_id, text)` logs a failure."""
        host = asyncio.get_running_loop()

        def ended(end: AgentEnd) -> None:
            if (end.failure or end.fault) and not self.session.over:
                show(endpoint.rollout_id, end.failure or end.fault)
            self.session.end(end)

        def report(end: AgentEnd) -> None:
            with suppress(RuntimeError):  # the host is closed
                host.call_soon_threadsafe(ended, end)

        def run() -> None:
            try:
                with asyncio.Runner() as runner:
                    self._loop = runner.get_loop()
                    report(self._solved(runner, solve, problem, endpoint))  # before its remaining tasks are cancelled
            except BaseException as raised:  # without a report the host would wait until the deadline
                report(AgentEnd(fault=f"its thread failed: {_text_of(raised)}"))

        threading.Thread(target=run, name=f"agent {endpoint.rollout_id}", daemon=True).start()

    def stop(self) -> None:
        """Cancel the agent. An agent that blocks continues until it returns, but its requests are refused."""
        self.session.end(AgentEnd(failure="it was stopped"))
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._task.cancel)

    def _solved(self, runner: asyncio.Runner, solve: Solve, problem: Problem, endpoint: Endpoint) -> AgentEnd:
        """The loop runs only for an awaitable result: a function that is not async may use `asyncio.run`."""
        try:
            reward = solve(problem, endpoint)
            if inspect.isawaitable(reward):
                reward = runner.run(self._awaited(reward), context=copy_context())
        except ToolError as ours:
            return AgentEnd(fault=str(ours) or "the agent raised ToolError without a reason")
        except SandboxError as lost:
            if self.losses < MAX_LOSSES:
                return AgentEnd(lost=True, failure=f"it is restarted: {lost}")
            return AgentEnd(fault=f"it was lost {self.losses + 1} times, last: {lost}")
        except asyncio.CancelledError:
            return AgentEnd(failure="it was cancelled")
        except BaseException as raised:  # `SystemExit` too
            return AgentEnd(failure=_text_of(raised))
        if reward is None:
            return AgentEnd()
        number = finite(reward)
        if number is None:
            return AgentEnd(fault=f"its reward is {reprlib.repr(reward)}, not a finite number or None")
        return AgentEnd(reward=number)

    async def _awaited(self, given: Awaitable[Any]) -> Any:
        self._task = asyncio.current_task()
        if self._task is not None and self.session.over:  # stopped before there was a task to cancel
            self._task.cancel()
        return await given


def no_proxy_to_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep requests to this machine's loopback from a proxy, in both spellings that clients read.

    >>> no_proxy_to_loopback({"NO_PROXY": "a.example"})["no_proxy"]
    'a.example,127.0.0.1,localhost'
    """
    names = ("NO_PROXY", "no_proxy")
    listed = [host.strip() for name in names for host in environment.get(name, "").split(",")]
    hosts = ["*"] if "*" in listed else [*filter(None, listed), "127.0.0.1", "localhost"]
    return dict.fromkeys(names, ",".join(dict.fromkeys(hosts)))


def _text_of(raised: BaseException) -> str:
    """Type and message, also if `__str__` of the user's exception raises."""
    return "".join(traceback.format_exception_only(raised)).strip()[:500]


class AgentHostActor(ServiceActor):
    """The Ray actor of an `AgentHost`."""

    def __init__(self, name: str, config: RunConfig, model: Path, tools: Any) -> None:
        super().__init__(name)
        sys.path.insert(0, config.own_folder)
        failed = config.agent.failed
        self._host = AgentHost(
            CommandAgent(command_of(config)) if config.agent.command else load_object(config.agent.run),
            load_chat(model, config.chat, instruct=config.rollout.instruct, tools=tools, syntax_of=VllmCalls),
            context_tokens=config.engine.max_context_tokens,
            deadline_s=config.agent.deadline_s,
            failed=load_object(failed) if failed else None,
            # No worker calls while a turn is sampled, or while the rollout waits in the queue. One that waits longer is
            # replayed from its record.
            abandoned_after_s=config.rollout.deadline_s + config.engine.completion_deadline_s,
        )
        self._num_answered = 0

    async def next_request(self, call: AgentCall) -> AgentReply:
        reply = await self._host.next_request(call)
        self._num_answered += not isinstance(reply, Other)
        return reply

    async def end(self, rollout_id: str, holder: str) -> None:
        await self._host.end(rollout_id, holder)

    async def close(self) -> None:
        await self._host.close()

    def probe(self) -> Heartbeat:
        """For the watchdog."""
        return heartbeat(progress=self._num_answered)


def agent_host_names(config: RunConfig) -> tuple[str, ...]:
    """The actor names of the hosts; empty without an agent."""
    return tuple(f"agents/{number}" for number in range(config.agent.hosts if config.agent.used else 0))


def start_agent_hosts(
    config: RunConfig, model: Path, tools: Any, **options: Any
) -> Mapping[str, Service[AgentHostActor]]:
    """Start the hosts; returns them by name."""
    actor: Any = ray.remote(AgentHostActor)
    shared = {"num_cpus": 0, "max_restarts": MAX_RESTARTS, "max_concurrency": CONCURRENCY} | options
    return {
        name: Service(
            actor.options(name=name, scheduling_strategy="SPREAD", **shared).remote(name, config, model, tools), name
        )
        for name in agent_host_names(config)
    }
