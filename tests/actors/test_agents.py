"""Rollouts through an agent of the user, over HTTP by unmodified clients, beside the built-in loop; engine and sandbox
are fakes."""

import asyncio
import contextvars
import errno
import functools
import io
import json
import random
import resource
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from actors.agents.agent_client import Agents
from actors.agents.agent_host import AgentHost
from actors.balancer_service import BalancerService
from actors.generation.outbox import Outbox, rollout_load
from rstar_ray.agent import session
from rstar_ray.agent.agent_rollout import AgentEnd, run_agent_rollout
from rstar_ray.agent.chat_request import read_request
from rstar_ray.agent.endpoint import Endpoint
from rstar_ray.agent.journal import TurnJournal, journaled
from rstar_ray.agent.rollout import RolloutState, run_rollout, score
from rstar_ray.agent.session import AgentCall, AgentSession, Pending
from rstar_ray.algorithm.batch import rl_row
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.errors import ConfigError, SandboxError, ToolError, ToolStateLost
from rstar_ray.outcome import Outcome
from rstar_ray.report.trajectory_rows import NOTHING_KNOWN, Siblings
from rstar_ray.report.trajectory_text import texts_of
from rstar_ray.run_dir.recorded_trajectories import recorded_trajectory
from rstar_ray.run_dir.trajectory_log import readable
from rstar_ray.tools.loader import check_function
from rstar_ray.tools.spec import PYTHON_TOOL
from rstar_ray.trajectory import Completion, Problem, RolloutLimits, StopReason, ToolCall, Trajectory, TrajectorySummary
from scheduler.balancer import Balancer
from tests.actors.test_generation_worker import FakeEngine, collect, serving
from tests.fakes import AddingSandbox, Local, adding_problems, answer, call, drained, registration, request, same_text
from tests.rstar_ray.test_rollout import WholeRollouts
from tests.rstar_ray.test_token_lines import CHATS

FAMILY = CHATS["qwen3"]
CHAT = TokenizerChat(FAMILY.tokenizer, FAMILY.profile, tools=[PYTHON_TOOL])
LIMITS = RolloutLimits(max_response_tokens=600, max_turns=4, max_context_tokens=2_000, max_calls_per_turn=4)
SHORT_S = 5.0
UNREADABLE = '<tool_call>\n{"name": "python", "arguments": {"code": "1+'
THOUGHT = "<think>\n\n</think>\n\n"


class Policy:
    """Calls the tool, sometimes twice or wrongly, and answers what it read; by the seed alone."""

    def __init__(self, *said: str) -> None:
        self.said = list(said)
        self.prompts: list[list[int]] = []
        self.seeds: list[int] = []

    async def __call__(self, prompt_ids: Sequence[int], *, max_tokens: int, seed: int, **asked: Any) -> Completion:
        self.prompts.append(list(prompt_ids))
        self.seeds.append(seed)
        rng = random.Random(seed)
        calls = [call("1+2"), call("1-2"), call("oops"), call("1+2") + "\n" + call("3+4"), UNREADABLE]
        text = self.said.pop(0) if self.said else rng.choice([*calls, answer("3"), answer("4")])
        ids = CHAT.tokenizer.encode(text, add_special_tokens=False)
        ids = [*ids, CHAT.profile.stop_token_ids[0]][:max_tokens]
        ended = ids[-1] == CHAT.profile.stop_token_ids[0]
        logprobs = [rng.random() - 1 for _ in ids]
        return Completion(token_ids=ids, logprobs=logprobs, policy_versions=[0] * len(ids), ended=ended)


def client(endpoint: Endpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)


def unread(error: str) -> dict[str, Any]:
    """The built-in loop's reply to a call that could not be read."""
    return {"role": "tool", "tool_call_id": "", "content": f"Error: the tool call could not be read: {error}"}


async def with_python(problem: Problem, endpoint: Endpoint) -> None:
    """The built-in loop, written as an agent."""
    sandbox, messages = AddingSandbox(), list[Any]([{"role": "user", "content": problem.problem}])
    tools: Any = [PYTHON_TOOL.as_schema()]
    async with client(endpoint) as policy:
        for _ in range(10):  # more than the rollout may have
            reply = await policy.chat.completions.create(model=endpoint.model, messages=messages, tools=tools)
            said = reply.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            unreadable = (said.model_extra or {}).get("rstar_unreadable", [])
            messages += [unread(error) for error in unreadable]
            if not (said.tool_calls or unreadable):
                return
            for one in said.tool_calls or ():
                assert one.type == "function"
                result = await sandbox(ToolCall(code=json.loads(one.function.arguments)["code"]))
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": one.id,
                        "content": result.text,
                        "rstar_failed": result.outcome.failed,
                    }
                )


@asynccontextmanager
async def host_of(
    solve: Any, *, deadline_s: float = 300.0, failed: Any = None, **more: Any
) -> AsyncGenerator[AgentHost, None]:
    limits = {"context_tokens": LIMITS.max_context_tokens, "deadline_s": deadline_s, **more}
    host = AgentHost(solve, CHAT, failed=failed, **limits)
    try:
        yield host
    finally:
        await host.close()


async def timed(reply: Awaitable[Any]) -> Any:
    return await reply


def start(rollout_id: str = "r", seed: int = 7, limits: RolloutLimits = LIMITS) -> RolloutState:
    one = replace(request(adding_problems(1)[0], rollout_id=rollout_id, limits=limits), seed=seed)
    return RolloutState.start(one, CHAT.prompt_ids(one.problem))


async def played(
    host: AgentHost, state: RolloutState, policy: Policy | None = None, *, turns: int = 100, worker: str = "worker"
) -> RolloutState:
    agents = Agents([Local(host, "agents/0")], caller=worker)  # pyright: ignore[reportArgumentType]
    until = len(state.turns) + turns
    return await run_agent_rollout(
        state,
        generate=policy or Policy(),
        agent=agents.open(state, timed),
        chat=CHAT,
        may_continue=lambda now: len(now.turns) < until,
    )


async def judged(state: RolloutState) -> Trajectory:
    return await score(state, same_text, CHAT)


async def test_an_agent_trains_the_tokens_of_the_built_in_loop():
    async with host_of(with_python) as host:
        for seed in range(60):
            limits = LIMITS if seed < 30 else replace(LIMITS, max_response_tokens=60 + 3 * (seed - 30))
            first = start(f"r{seed}", seed, limits)
            built_in = await judged(await run_rollout(first, generate=Policy(), execute=AddingSandbox(), chat=CHAT))
            agents = await judged(await played(host, first))
            for name in ("prompt_ids", "response_ids", "loss_mask", "rollout_logprobs", "policy_versions"):
                assert np.array_equal(getattr(agents, name), getattr(built_in, name)), (seed, name)
            assert agents.summary.outcomes == built_in.summary.outcomes, seed
            assert agents.summary.tools == built_in.summary.tools
            assert (agents.summary.reward, agents.summary.stop_reason) == (
                built_in.summary.reward,
                built_in.summary.stop_reason,
            )
            assert agents.summary.num_answers == built_in.summary.num_answers


PYTHON: Any = [PYTHON_TOOL.as_schema()]
BASH: Any = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


async def test_a_reward_of_whole_rollouts_reads_the_calls_of_an_agents_own_tools():
    async def solve(problem: Problem, endpoint: Endpoint) -> None:
        messages: list[Any] = [{"role": "user", "content": problem.problem}]
        async with client(endpoint) as policy:
            for _ in range(3):
                reply = await policy.chat.completions.create(model="policy", messages=messages, tools=[BASH, *PYTHON])
                said = reply.choices[0].message
                results = [{"role": "tool", "tool_call_id": one.id, "content": "3"} for one in said.tool_calls or ()]
                messages += [said.model_dump(exclude_none=True), *results]

    listing = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    policy = Policy(f"{listing}\n```\n{listing}\n```", call("1+2"), answer("3"))
    balancer, judge = BalancerService(), WholeRollouts()
    async with host_of(solve) as host:
        agents = Agents([Local(host, "agents/0")], caller="generation/0")  # pyright: ignore[reportArgumentType]
        engine = FakeEngine(policy)  # pyright: ignore[reportArgumentType]
        async with serving(balancer, engine=engine, agents=agents, chat=CHAT, judge=judge) as one:
            state = start()
            await balancer.submit([(rollout_load(state), state)])
            await collect(one, 1)
            await agents.settled()
    (seen,) = judge.seen
    listed = ToolCall(tool="bash", arguments={"command": "ls"})
    assert [turn.calls for turn in seen.turns] == [(listed, listed), (ToolCall(code="1+2"),), ()]


async def test_an_agents_requests_bypass_a_proxy_and_other_exceptions_of_the_environment_hold(
    monkeypatch: pytest.MonkeyPatch,
):
    for name, value in {"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "a.example", "no_proxy": ""}.items():
        monkeypatch.setenv(name, value)
    async with host_of(blocks) as host:
        assert (await played(host, start(), Policy(answer("3")))).reward == 1.0
        assert urllib.request.proxy_bypass("a.example")


async def raises(problem: Problem, endpoint: Endpoint) -> None:
    await ask(endpoint, problem.problem)
    raise KeyError("a bug")


async def ask(endpoint: Endpoint, *said: str, **options: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": text} for text in said]
    async with client(endpoint) as policy:
        return await policy.chat.completions.create(model=endpoint.model, messages=messages, **options)


async def said(policy: openai.AsyncOpenAI, *messages: Any, **options: Any) -> Any:
    """The message with the policy's answer."""
    reply = await policy.chat.completions.create(model="policy", messages=list(messages), **options)
    return {"role": "assistant", "content": reply.choices[0].message.content}


async def hangs(problem: Problem, endpoint: Endpoint) -> None:
    await ask(endpoint, problem.problem)
    await asyncio.sleep(3600)


async def exits(problem: Problem, endpoint: Endpoint) -> None:
    await ask(endpoint, problem.problem)
    sys.exit("enough")


async def leaves_a_thread_behind(problem: Problem, endpoint: Endpoint) -> float:
    await ask(endpoint, problem.problem)
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 2 * SHORT_S)
    return 1.0


async def stops_its_loop(problem: Problem, endpoint: Endpoint) -> None:
    await ask(endpoint, problem.problem)
    asyncio.get_running_loop().stop()
    await asyncio.sleep(3600)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise AttributeError("it is not complete")

    __repr__ = __str__


async def raises_an_unprintable_error(problem: Problem, endpoint: Endpoint) -> None:
    await ask(endpoint, problem.problem)
    raise Unprintable


def runs_a_loop(problem: Problem, endpoint: Endpoint) -> float:
    asyncio.run(ask(endpoint, problem.problem))
    return 1.0


def runs_the_loop_of_its_thread(problem: Problem, endpoint: Endpoint) -> float:
    asyncio.get_event_loop().run_until_complete(ask(endpoint, problem.problem))
    return 1.0


async def insists(problem: Problem, endpoint: Endpoint) -> None:
    while True:
        with suppress(openai.BadRequestError):
            await ask(endpoint, problem.problem)


def blocks(problem: Problem, endpoint: Endpoint) -> float:
    with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as policy:  # in its own thread
        message: Any = {"role": "user", "content": problem.problem}
        reply = policy.chat.completions.create(model=endpoint.model, messages=[message], stream=True)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in reply if chunk.choices)
    return 1.0 if said == answer("3") else -2.5


@pytest.mark.parametrize(
    ("solve", "said", "reason", "reward"),
    [
        (raises, answer("3"), StopReason.AGENT_FAILED, 0.0),
        (exits, answer("3"), StopReason.AGENT_FAILED, 0.0),
        (stops_its_loop, answer("3"), StopReason.AGENT_FAILED, 0.0),
        (raises_an_unprintable_error, answer("3"), StopReason.AGENT_FAILED, 0.0),
        (runs_a_loop, answer("3"), StopReason.ANSWERED, 1.0),
        (runs_the_loop_of_its_thread, answer("3"), StopReason.ANSWERED, 1.0),
        (hangs, answer("3"), StopReason.AGENT_TIMEOUT, 0.0),
        (leaves_a_thread_behind, answer("3"), StopReason.ANSWERED, 1.0),
        (insists, answer("3"), StopReason.MAX_TURNS, 0.0),
        (blocks, answer("3"), StopReason.ANSWERED, 1.0),
        (blocks, answer("4"), StopReason.ANSWERED, -2.5),
        (with_python, answer("1"), StopReason.ANSWERED, None),
        (with_python, call("1+2"), StopReason.MAX_TURNS, 0.0),
        (with_python, "a" * 4_000, StopReason.TRUNCATED, 0.0),
    ],
)
async def test_every_end_of_an_agent_has_its_name_and_reward(solve: Any, said: str, reason: Any, reward: Any):
    deadline_s = SHORT_S if solve in (hangs, insists, leaves_a_thread_behind) else 300.0
    async with host_of(solve, deadline_s=deadline_s) as host:
        trajectory = await judged(await played(host, start(), Policy(*[said] * LIMITS.max_turns)))
    assert trajectory.summary.stop_reason is reason
    assert reward is None or trajectory.summary.reward == reward


class Waits:
    """Agents that ask once and then wait, in each form that a user may write."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    async def __call__(self, problem: Problem, endpoint: Endpoint) -> None:
        await ask(endpoint, problem.problem)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def not_async(self, problem: Problem, endpoint: Endpoint) -> Awaitable[None]:
        return self(problem, endpoint)


@pytest.mark.parametrize("form", ["callable", "partial", "not async"])
async def test_an_agent_is_cancelled_at_the_deadline(form: str):
    agent = Waits()
    solve = {"callable": agent, "partial": functools.partial(agent), "not async": agent.not_async}[form]
    async with host_of(solve, deadline_s=SHORT_S) as host:
        state = await played(host, start(), Policy(answer("3")))
    assert state.stop_reason is StopReason.AGENT_TIMEOUT
    assert await asyncio.to_thread(agent.cancelled.wait, 20)


async def test_what_an_agent_sets_before_its_awaitable_holds_inside():
    name = contextvars.ContextVar("name", default="")

    def solve(problem: Problem, endpoint: Endpoint) -> Awaitable[float]:
        async def inner() -> float:
            await ask(endpoint, problem.problem)
            return float(name.get())

        name.set("0.5")
        return inner()

    async with host_of(solve) as host:
        assert (await played(host, start(), Policy(answer("3")))).reward == 0.5


async def test_an_agent_whose_thread_gets_no_loop_is_reported_at_once_and_not_trained_on(
    monkeypatch: pytest.MonkeyPatch,
):
    def full(runner: asyncio.Runner) -> asyncio.AbstractEventLoop:
        raise OSError(errno.EMFILE, "Too many open files")

    async with host_of(with_python) as host:
        with monkeypatch.context() as patched, pytest.raises(ToolError, match=r"OSError.*Too many open files"):
            patched.setattr(asyncio.Runner, "get_loop", full)
            await played(host, start())


async def test_a_host_lifts_the_limit_of_open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 100, hard))
    try:
        async with host_of(with_python) as host:
            await played(host, start(), Policy(answer("3")))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def with_a_failed_result(policy: openai.AsyncOpenAI, problem: Problem, result: str) -> list[Any]:
    """The messages of a rollout whose first turn called Python."""
    messages: list[Any] = [{"role": "user", "content": problem.problem}]
    reply = await policy.chat.completions.create(model="policy", messages=messages, tools=PYTHON)
    said = reply.choices[0].message
    assert said.tool_calls
    failed = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": result, "rstar_failed": True}
    return [*messages, said.model_dump(exclude_none=True), failed]


async def test_a_failed_call_counts_although_a_reminder_follows_its_result():
    async def solve(problem: Problem, endpoint: Endpoint) -> float:
        async with client(endpoint) as policy:
            messages = await with_a_failed_result(policy, problem, "no")
            messages.append({"role": "user", "content": "One turn is left."})
            await policy.chat.completions.create(model="policy", messages=messages, tools=PYTHON)
        return 1.0

    async with host_of(solve) as host:
        state = await played(host, start(), Policy(call("1+2"), answer("3")))
    assert [[result.outcome for result in turn.tool_results] for turn in state.turns] == [[Outcome.ERROR], []]


@pytest.mark.parametrize(("has_id", "tool"), [(True, "search"), (False, "python")])
async def test_a_result_belongs_to_the_call_with_its_id_or_else_to_the_call_at_its_position(has_id: bool, tool: str):
    search: Any = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}

    async def solve(problem: Problem, endpoint: Endpoint) -> float:
        async with client(endpoint) as policy:
            messages: list[Any] = [{"role": "user", "content": problem.problem}]
            reply = await policy.chat.completions.create(model="policy", messages=messages, tools=[*PYTHON, search])
            said = reply.choices[0].message
            assert said.tool_calls and len(said.tool_calls) == 2
            result = {"role": "tool", "content": "no", "rstar_failed": True}
            result |= {"tool_call_id": said.tool_calls[1].id} if has_id else {}
            messages += [said.model_dump(exclude_none=True), result]  # without a result of the first call
            await policy.chat.completions.create(model="policy", messages=messages, tools=[*PYTHON, search])
        return 1.0

    calls = call("1+2") + '\n<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'
    async with host_of(solve) as host:
        state = await played(host, start(), Policy(calls, answer("3")))
    (result,) = state.turns[0].tool_results
    assert (result.tool, result.outcome) == (tool, Outcome.ERROR)


@pytest.mark.parametrize(("keeps_id", "credited"), [(True, [1, 0]), (False, [0, 0])])
async def test_a_result_in_a_shortened_history_belongs_to_the_turn_that_made_its_call(
    keeps_id: bool, credited: list[int]
):
    async def solve(problem: Problem, endpoint: Endpoint) -> float:
        async with client(endpoint) as policy:
            messages = await with_a_failed_result(policy, problem, "no")
            await said(policy, {"role": "user", "content": "a task of another agent"})
            if not keeps_id:
                messages[1]["tool_calls"][0]["id"] = messages[2]["tool_call_id"] = "call_0"
            await said(policy, {"role": "system", "content": "A summary."}, *messages)  # without tools
        return 1.0

    async with host_of(solve) as host:
        state = await played(host, start(), Policy(call("1+2"), "done", answer("3")))
    assert [len(turn.tool_results) for turn in state.turns] == [*credited, 0]
    assert {result.tool for turn in state.turns for result in turn.tool_results} <= {"python"}


@pytest.mark.parametrize("words", [3_000, 500_000])
async def test_a_result_that_exceeds_the_budget_counts_however_long_it_is(words: int):
    async def solve(problem: Problem, endpoint: Endpoint) -> None:
        async with client(endpoint) as policy:
            messages = await with_a_failed_result(policy, problem, "word " * words)
            with pytest.raises(openai.BadRequestError):
                await policy.chat.completions.create(model="policy", messages=messages, tools=PYTHON)

    async with host_of(solve) as host:
        state = await played(host, start(), Policy(call("1+2")))
    assert [[result.outcome for result in turn.tool_results] for turn in state.turns] == [[Outcome.ERROR]]
    assert (await judged(state)).summary.stop_reason is StopReason.TRUNCATED


async def test_a_function_of_failed_results_that_raises_is_named():
    def failed(text: str) -> bool:
        raise AttributeError(text)

    async with host_of(with_python, failed=failed) as host:
        with pytest.raises(ToolError, match=r"--agent\.failed: AttributeError: 3"):
            await played(host, start(), Policy(call("1+2"), answer("3")))


@pytest.mark.parametrize("cause", ["a function that raises", "an empty completion"])
async def test_a_request_whose_processing_raises_is_refused_so_that_no_client_blocks(cause: str):
    refused: list[int] = []
    tools: Any = [PYTHON_TOOL.as_schema()]

    def solve(problem: Problem, endpoint: Endpoint) -> None:
        messages: list[Any] = [{"role": "user", "content": problem.problem}]
        options: Any = {"timeout": 10.0, "max_retries": 0}
        with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, **options) as policy:
            try:
                reply = policy.chat.completions.create(model="policy", messages=messages, tools=tools)
                said = reply.choices[0].message
                assert said.tool_calls
                result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "3"}
                messages += [said.model_dump(exclude_none=True), result]
                policy.chat.completions.create(model="policy", messages=messages, tools=tools)
            except openai.APIStatusError as ended:
                refused.append(ended.status_code)

    def failed(text: str) -> bool:
        raise AttributeError(text)

    class Empty(Policy):
        async def __call__(self, prompt_ids: Sequence[int], **asked: Any) -> Completion:
            return Completion(token_ids=[], logprobs=[], policy_versions=[], ended=True)

    policy = Empty() if cause == "an empty completion" else Policy(call("1+2"))
    async with host_of(solve, failed=failed) as host:
        with pytest.raises((ToolError, IndexError)):
            await played(host, start(), policy)
        await host.end("r", "worker")
        async with asyncio.timeout(20):
            while not refused:
                await asyncio.sleep(0.01)
    assert refused == [410]


def test_an_async_function_of_failed_results_is_refused(tmp_path: Path):
    (tmp_path / "answers.py").write_text("async def failed(text):\n    return False\n")
    with pytest.raises(ConfigError, match=r"--agent\.failed answers:failed: must not be async"):
        check_function("answers:failed", 1, str(tmp_path), option="--agent.failed")


async def test_a_sandbox_that_fails_under_an_agent_starts_the_agent_again_and_samples_nothing_again():
    lives: list[int] = []

    async def solve(problem: Problem, endpoint: Endpoint) -> float:
        lives.append(1)
        await ask(endpoint, problem.problem)
        if len(lives) < 3:
            raise SandboxError("the pool is gone")
        await ask(endpoint, "more")
        return 1.0

    policy = Policy("one", "two")
    async with host_of(solve) as host:
        state = await played(host, start(), policy)
    assert len(lives) == 3 and len(policy.prompts) == len(state.turns) == 2 and state.reward == 1.0

    async def always(problem: Problem, endpoint: Endpoint) -> float:
        raise SandboxError("the pool is gone")

    async with host_of(always) as host:
        with pytest.raises(ToolError, match="lost 4 times"):
            await played(host, start(), policy)


async def never_asks(problem: Problem, endpoint: Endpoint) -> float:
    return 1.0


async def lacks_its_server(problem: Problem, endpoint: Endpoint) -> None:
    await ask(endpoint, problem.problem)
    raise ToolError("the search server is away")


async def returns_text(problem: Problem, endpoint: Endpoint) -> Any:
    await ask(endpoint, problem.problem)
    return "good"


async def returns_an_unprintable_object(problem: Problem, endpoint: Endpoint) -> Any:
    await ask(endpoint, problem.problem)
    return Unprintable()


@pytest.mark.parametrize("solve", [never_asks, lacks_its_server, returns_text, returns_an_unprintable_object])
async def test_an_end_that_says_nothing_about_the_policy_is_not_trained_on(solve: Any):
    async with host_of(solve) as host:
        with pytest.raises(ToolError):
            await played(host, start())


async def test_an_agent_whose_first_request_exceeds_the_budget_is_dropped_with_the_budgets_option():
    async def solve(problem: Problem, endpoint: Endpoint) -> None:
        await ask(endpoint, "word " * 3_000)

    async with host_of(solve) as host:
        with pytest.raises(ToolError, match=r"its first request was refused.*--rollout\.max-response-tokens"):
            await played(host, start())


async def test_what_an_agent_may_not_ask_is_a_clear_client_error_and_the_rollout_continues():
    statuses: dict[str, int] = {}
    kept: list[Endpoint] = []

    async def solve(problem: Problem, endpoint: Endpoint) -> float:
        kept.append(endpoint)
        good = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        image = [{"type": "image_url", "image_url": {"url": "data:"}}]
        bodies: dict[str, Any] = {
            "no JSON": b"{",
            "big": b"[" + b" " * 10 * 2**20,
            "model": good | {"model": "gpt-4o"},
            "n": good | {"n": 2},
            "image": good | {"messages": [{"role": "user", "content": image}]},
            "context": good | {"messages": [{"role": "user", "content": "word " * 3_000}]},
            "far beyond the context": good | {"messages": [{"role": "user", "content": "word " * 500_000}]},
        }
        async with aiohttp.ClientSession(base_url=endpoint.base_url + "/") as http:
            for name, body in bodies.items():
                data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
                headers = {"Authorization": f"Bearer {endpoint.api_key}"}
                async with http.post("chat/completions", data=data, headers=headers) as reply:
                    statuses[name] = reply.status
                    error = (await reply.json())["error"]
                    assert error["message"] and isinstance(error["code"], str | None)
            async with http.get("models", headers=headers) as reply:
                (model,) = (await reply.json())["data"]
                assert openai.types.Model.model_validate(model, strict=True).id == "policy"
            async with http.post("chat/completions", json=good, headers={"Authorization": "Bearer x"}) as reply:
                statuses["key"] = reply.status
            encoded = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Encoding": "gzip"}
            async with http.post("chat/completions", data=io.BytesIO(b"no gzip"), headers=encoded) as reply:
                statuses["gzip"] = reply.status
                assert (await reply.json())["error"]["message"]
        many = await asyncio.gather(*(ask(endpoint, f"{number}") for number in range(3)))
        assert len({one.id for one in many}) == 3
        return 1.0

    async with host_of(solve) as host:
        state = await played(host, start(), Policy(*[answer("3")] * 3))
        assert len(state.turns) == 3 and state.reward == 1.0
        with pytest.raises(openai.APIStatusError) as late:
            await ask(kept[0], "after the end")
    bad = dict.fromkeys(("no JSON", "n", "image", "context", "far beyond the context", "gzip"), 400)
    assert statuses == {**bad, "big": 413, "model": 404, "key": 401}
    assert late.value.status_code == 410


async def test_tools_that_change_midway_begin_a_line_and_a_stream_closed_early_harms_nothing():
    async def solve(problem: Problem, endpoint: Endpoint) -> float:
        user: Any = {"role": "user", "content": problem.problem}
        other: Any = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
        async with client(endpoint) as policy:
            first = await said(policy, user, tools=[PYTHON_TOOL.as_schema()])
            await said(policy, user, first, {"role": "user", "content": "more"}, tools=[other])
            stream = await policy.chat.completions.create(model="policy", messages=[user], stream=True)
            await stream.__anext__()
            await stream.close()
            await ask(endpoint, "afterwards")
        return 1.0

    async with host_of(solve) as host:
        state = await played(host, start(), Policy("one", "two", "three", "four"))
    whys = ["", "the tools differ", "the tools differ", "message 1 (user) differs"]
    assert [turn.why_new for turn in state.turns] == whys and state.reward == 1.0


async def test_no_more_requests_of_a_rollout_wait_than_its_limit():
    codes: list[int] = []

    async def solve(problem: Problem, endpoint: Endpoint) -> float:
        async def one(number: int) -> None:
            try:
                async with client(endpoint).with_options(max_retries=0) as policy:
                    message: Any = {"role": "user", "content": str(number)}
                    await policy.chat.completions.create(model="policy", messages=[message])
            except openai.APIStatusError as refused:
                codes.append(refused.status_code)

        await asyncio.gather(*(one(number) for number in range(100)))
        return 1.0

    async with host_of(solve) as host:
        state = await played(host, start())
    assert len(state.turns) == LIMITS.max_turns
    assert len(codes) == 100 - LIMITS.max_turns and set(codes) <= {400, 429}


async def test_a_retry_of_a_request_above_the_limit_is_a_new_sample(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session, "MAX_WAITING", 1)
    begun, released = threading.Event(), threading.Event()
    answers: list[str] = []

    class Held(Policy):
        async def __call__(self, prompt_ids: Sequence[int], **asked: Any) -> Completion:
            begun.set()
            await asyncio.to_thread(released.wait, 20)
            return await super().__call__(prompt_ids, **asked)

    async def solve(problem: Problem, endpoint: Endpoint) -> float:
        body = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}

        async def one(http: aiohttp.ClientSession) -> None:
            headers, reply = {"x-api-key": endpoint.api_key}, {"type": "error"}
            while reply["type"] == "error":
                async with http.post("messages", json=body, headers=headers) as response:
                    reply = await response.json()
                if reply["type"] == "error":
                    assert (response.status, reply["error"]["type"]) == (429, "rate_limit_error")
                    released.set()
                    headers["x-stainless-retry-count"] = "1"
            answers.append(reply["content"][0]["text"])

        async with aiohttp.ClientSession(base_url=endpoint.base_url + "/") as http:
            first = asyncio.create_task(one(http))
            await asyncio.to_thread(begun.wait, 20)
            await asyncio.gather(first, one(http), one(http))
        return 1.0

    async with host_of(solve) as host:
        state = await played(host, start(), Held("one", "two", "three"))
    assert sorted(answers) == ["one", "three", "two"] and len(state.turns) == 3


async def test_retries_of_identical_requests_join_one_request_each():
    problem = adding_problems(1)[0]
    opening: dict[str, Any] = {"restarts": 0, "holder": "worker", "opens": True, "seed": 1, "num_turns": 0}
    one = AgentSession(
        CHAT, AgentCall(rollout_id="r", problem=problem, last=None, wait_s=0.0, **opening), LIMITS.max_context_tokens
    )
    asked = read_request(json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode())

    async def sent(*, retry: bool) -> tuple[Pending, asyncio.Task[Any]]:
        pending = one.ask(asked, retry=retry)
        waiting = asyncio.create_task(one.answer_of(pending))
        await asyncio.sleep(0)
        return pending, waiting

    lost = [await sent(retry=False) for _ in range(3)]
    for _, waiting in lost:
        waiting.cancel()
    await asyncio.wait([waiting for _, waiting in lost])
    retries = [await sent(retry=True) for _ in range(3)]
    assert [pending for pending, _ in retries] == [pending for pending, _ in lost]
    assert len({id(pending) for pending, _ in retries}) == 3
    one.end(AgentEnd())
    await asyncio.wait([waiting for _, waiting in retries])


async def test_the_same_request_after_a_lost_answer_has_the_same_answer_and_after_a_received_one_another():
    said: list[str] = []

    async def solve(problem: Problem, endpoint: Endpoint) -> float:
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with aiohttp.ClientSession(base_url=endpoint.base_url + "/") as http:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(http.post("chat/completions", json=body, headers=headers), 0.3)
            for retry in ("1", "0", "1"):
                again = headers | {"x-stainless-retry-count": retry}
                async with http.post("chat/completions", json=body, headers=again) as reply:
                    said.append((await reply.json())["choices"][0]["message"]["content"])
        return 1.0

    class Slow(Policy):
        async def __call__(self, prompt_ids: Sequence[int], **asked: Any) -> Completion:
            await asyncio.sleep(0.0 if self.prompts else 1.0)
            return await super().__call__(prompt_ids, **asked)

    async with host_of(solve) as host:
        state = await played(host, start(), Slow("one", "two"))
    assert said == ["one", "two", "two"] and len(state.turns) == 2


# ---------------------------------------------------------------- several lines


async def test_each_sampled_token_has_its_loss_in_one_line_and_prefixes_are_context():
    async def solve(problem: Problem, endpoint: Endpoint) -> float:
        user: Any = {"role": "user", "content": problem.problem}
        async with client(endpoint) as policy:
            first = await said(policy, user)
            await said(policy, user, first, {"role": "user", "content": "more"})
            await said(policy, {"role": "system", "content": "You help."}, user)  # another agent
            await said(policy, user, first, {"role": "user", "content": "differently"})
        return 1.0

    policy = Policy("one", "two", "three", "four")
    async with host_of(solve) as host:
        trajectory = await judged(await played(host, start(), policy))
    assert [turn.continues for turn in trajectory.turns] == [None, None, -1, 0]
    whys = ["", "", "message 1 (system) differs", "an earlier turn is continued in another way"]
    assert [turn.why_new for turn in trajectory.turns] == whys
    sampled = trajectory.response_ids[trajectory.loss_mask].tolist()
    rows = [rl_row(trajectory, 1.0, 1.0, line) for line in range(3)]
    assert [(len(row.token_ids), row.num_sampled_tokens) for row in rows] == list(trajectory.summary.lines)
    trained = [token for row in rows for token in row.token_ids[row.loss_mask].tolist()]
    assert sorted(trained) == sorted(sampled)
    for row, turn in zip(rows, (1, 2, 3), strict=True):
        num_last = trajectory.turns[turn].num_tokens
        assert row.token_ids[:-num_last].tolist() == policy.prompts[turn]
    assert policy.prompts[3][: len(policy.prompts[0])] == policy.prompts[0]
    row = json.loads(json.dumps(readable(trajectory, CHAT.decode, stage="stage1", step=1)))
    shown = texts_of(Siblings(0, "g", [row], [0]), NOTHING_KNOWN, "paper")[0]["turns"]
    assert [(one.get("continues"), one.get("why_new", "")) for one in shown] == [
        (None, ""),
        (None, ""),
        *zip((-1, 0), whys[2:], strict=True),
    ]
    assert "You help." in shown[2]["messages"] and "differently" in shown[3]["messages"]
    assert [len(one["results"]) for one in shown] == [1, 0, 0, 0]
    again = recorded_trajectory(row)
    assert again.summary.lines == trajectory.summary.lines
    for line, row in enumerate(rows):
        recorded = rl_row(again, 1.0, 1.0, line)
        assert np.array_equal(recorded.token_ids, row.token_ids) and np.array_equal(recorded.loss_mask, row.loss_mask)
    per_token = np.arange(len(sampled), dtype=np.float32)
    spread = [rl_row(trajectory, per_token, 1.0, line).advantage for line in range(3)]
    assert sorted(np.concatenate(spread).tolist()) == per_token.tolist()


@pytest.mark.parametrize(
    ("task", "text", "limits"),
    [
        ("word " * 16, "x" * 40, replace(LIMITS, max_turns=100, max_context_tokens=200)),
        ("hi", "x y " * 400, replace(LIMITS, max_response_tokens=100)),
    ],
    ids=["the tokens of its lines add up", "its prompt is shorter than the problem's"],
)
async def test_an_agent_with_more_tokens_than_its_rollout_was_admitted_with_has_a_possible_load(
    task: str, text: str, limits: RolloutLimits
):
    async def solve(problem: Problem, endpoint: Endpoint) -> float:
        with suppress(openai.BadRequestError):
            while True:
                await ask(endpoint, task)
        return 1.0

    first, balancer, outbox = start(limits=limits), Balancer("least_requests"), Outbox()
    balancer.register(registration("generation/0", 100_000))
    balancer.submit([rollout_load(first)], [first])
    balancer.issue_orders(10)

    def reported(state: RolloutState) -> bool:
        outbox.turn_ended(state)
        balancer.report("generation/0", outbox.turns[-1:])
        return True

    async with host_of(solve) as host:
        agents = Agents([Local(host, "agents/0")], caller="generation/0")  # pyright: ignore[reportArgumentType]
        agent, policy = agents.open(first, timed), Policy(*[text] * 100)
        state = await run_agent_rollout(first, generate=policy, agent=agent, chat=CHAT, may_continue=reported)
    admitted, load = rollout_load(first), rollout_load(state)
    num_tokens = len(state.prompt_ids) + len(state.response_ids)
    assert num_tokens > admitted.worst_case_tokens or sum(state.loss_mask) > admitted.max_response_tokens
    assert [one.quarantine for one in balancer.state.replicas.values()] == [None]
    assert (load.prompt_tokens, load.max_response_tokens) == (admitted.prompt_tokens, admitted.max_response_tokens)
    assert admitted.context_tokens < load.context_tokens <= admitted.worst_case_tokens


# ---------------------------------------------------------------- survival


async def test_an_agent_whose_rollout_nobody_calls_for_is_stopped_and_begins_again_if_it_continues():
    ended = threading.Event()

    async def solve(problem: Problem, endpoint: Endpoint) -> float:
        try:
            await ask(endpoint, "first")
            await ask(endpoint, "second")
        finally:
            ended.set()
        return 1.0

    async with host_of(solve, abandoned_after_s=SHORT_S) as host:
        state = await played(host, start(), Policy("one"), turns=1)
        assert await asyncio.to_thread(ended.wait, 20)
        state = await played(host, state, Policy("two"))
    assert len(state.turns) == 2 and state.stop_reason is StopReason.ANSWERED


async def test_a_rollout_whose_host_is_lost_is_replayed_without_sampling_a_turn_again():
    state, policy = start(seed=3), Policy(call("1+2"), call("oops"), call("3-4"))
    async with host_of(with_python) as first:
        state = await played(first, state, policy, turns=3)
    last = Policy(answer("3"))
    async with host_of(with_python) as second:
        state = await played(second, state, last)
    assert len(last.prompts) == 1 and len(state.turns) == 4
    one_host = Policy(call("1+2"), call("oops"), call("3-4"), answer("3"))
    async with host_of(with_python) as host:
        whole = await judged(await played(host, start(seed=3), one_host))
    resumed = await judged(state)
    assert resumed.response_ids.tolist() == whole.response_ids.tolist()
    assert resumed.summary.outcomes == whole.summary.outcomes


async def test_the_journal_brings_an_agents_turns_back(tmp_path: Path):
    """With a prompt of the agent's own, several lines, and a result that came after its turn had been recorded."""

    async def solve(problem: Problem, endpoint: Endpoint) -> None:
        await ask(endpoint, "Another prompt, which is longer than the problem's", "of two messages")
        await with_python(problem, endpoint)

    first = start("stage1/1/0-a/0")
    journal, before = TurnJournal(tmp_path, "worker"), first
    policy = Policy("one", call("1+2"), call("oops"))
    async with host_of(solve) as host:
        for _ in range(3):
            after = await played(host, before, policy, turns=1)
            journal.add(before, after, weights=5)
            before = after
    journal.close()
    found = journaled(tmp_path, [first], {0: 5})["stage1/1/0-a/0"]
    assert found == replace(before, logprobs=found.logprobs)  # which it keeps in float32
    assert found.prompt_ids != first.prompt_ids and found.turns[1].tool_results
    async with host_of(solve) as host:
        state = await played(host, found, Policy(answer("3")))
    assert len(state.turns) == 4 and state.stop_reason is StopReason.ANSWERED


@pytest.mark.parametrize("turns", [1, 2])
async def test_a_call_that_could_not_be_read_counts_once_although_its_host_was_lost(turns: int):
    texts = [UNREADABLE, call("1+2"), answer("3")]
    async with host_of(with_python) as host:
        whole = await judged(await played(host, start(), Policy(*texts)))
    async with host_of(with_python) as first:
        state = await played(first, start(), Policy(*texts), turns=turns)
    async with host_of(with_python) as second:
        resumed = await judged(await played(second, state, Policy(*texts[turns:])))
    assert whole.summary.outcomes == resumed.summary.outcomes == (Outcome.INVALID, Outcome.OK)
    assert resumed.response_ids.tolist() == whole.response_ids.tolist()


async def test_the_journal_has_the_turns_of_an_agent_that_began_again(tmp_path: Path):
    async def solve(problem: Problem, endpoint: Endpoint) -> None:
        await ask(endpoint, "Another prompt, which is longer than the problem's", "of two messages")
        await with_python(problem, endpoint)

    first, journal = start("stage1/1/0-a/0"), TurnJournal(tmp_path, "worker")
    async with host_of(solve) as host:
        after = await played(host, first, Policy("one"), turns=1)
        journal.add(first, after, weights=5)
        before = after.restarted()
        assert before == replace(first, restarts=1)
        journal.restart(before, weights=5)
        for text in ("two", call("1+2")):
            after = await played(host, before, Policy(text), turns=1)
            journal.add(before, after, weights=5)
            before = after
    journal.close()
    for known in (first, before):  # of a resumed run, and of a driver that has the state with the agent's prompt
        found = journaled(tmp_path, [known], {0: 5})["stage1/1/0-a/0"]
        assert len(found.turns) == 2 and found.restarts == 1
        assert found.response_ids == before.response_ids and found.request == before.request


async def test_a_rollout_moves_to_another_worker_and_its_agent_stays_where_it_is():
    started: list[str] = []

    async def solve(problem: Problem, endpoint: Endpoint) -> None:
        started.append(endpoint.rollout_id)
        await with_python(problem, endpoint)

    async with host_of(solve) as host:
        state = await played(host, start(), Policy(call("1+2")), turns=1, worker="generation/0")
        state = await played(host, state, Policy(answer("3")), worker="generation/1")
    assert started == ["r"] and len(state.turns) == 2 and state.stop_reason is StopReason.ANSWERED


async def test_an_agent_that_asks_something_else_when_started_again_begins_the_rollout_again():
    lives: list[int] = []

    async def solve(problem: Problem, endpoint: Endpoint) -> None:
        lives.append(1)
        await ask(endpoint, f"{problem.problem} {len(lives)}")
        await ask(endpoint, "another")

    async with host_of(solve) as first:
        state = await played(first, start(), Policy("one"), turns=1)
    async with host_of(solve) as second:
        with pytest.raises(ToolStateLost):
            await played(second, state, Policy("two", "three", "four"))
        again = await played(second, state.restarted(), Policy("five", "six"))
    assert again.restarts == 1 and len(again.turns) == 2


async def test_a_request_under_way_is_refused_when_its_rollout_is_taken_away():
    refused: list[int] = []
    asks = asyncio.Event()

    def solve(problem: Problem, endpoint: Endpoint) -> None:
        with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as policy:
            try:
                policy.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
            except openai.APIStatusError as ended:
                refused.append(ended.status_code)

    class Endless(Policy):
        async def __call__(self, prompt_ids: Sequence[int], **asked: Any) -> Completion:
            asks.set()
            await asyncio.sleep(3600)
            raise AssertionError

    async with host_of(solve) as host:
        playing = asyncio.create_task(played(host, start(), Endless()))
        await asyncio.wait_for(asks.wait(), 20)
        playing.cancel()
        await host.end("r", "worker")
        async with asyncio.timeout(20):
            while not refused:
                await asyncio.sleep(0.01)
    assert refused == [410]


async def test_a_worker_plays_a_granted_rollout_through_its_agent_and_stops_the_agent_at_its_end():
    balancer, begun, ended_agents = BalancerService(), 0, 0

    async def counted(problem: Problem, endpoint: Endpoint) -> None:
        nonlocal begun, ended_agents
        begun += 1
        try:
            await with_python(problem, endpoint)
        finally:
            ended_agents += 1

    async with host_of(counted) as host:
        agents = Agents([Local(host, "agents/0")], caller="generation/0")  # pyright: ignore[reportArgumentType]
        engine = FakeEngine(Policy())  # pyright: ignore[reportArgumentType]
        async with serving(balancer, engine=engine, agents=agents, chat=CHAT) as one:
            states = [start(f"r{number}", number) for number in range(20)]
            await balancer.submit([(rollout_load(state), state) for state in states])
            found = await collect(one, 20)
            await drained(balancer)
            await agents.settled()
            assert host.num_tokens == 0
            assert ended_agents == begun == 20
    for seed, state in enumerate(states):
        alone = await judged(await run_rollout(state, generate=Policy(), execute=AddingSandbox(), chat=CHAT))
        ended = found[f"r{seed}"]
        assert isinstance(ended, TrajectorySummary)
        assert (ended.reward, ended.num_sampled_tokens) == (alone.summary.reward, alone.summary.num_sampled_tokens)
