"""The time that the endpoint for agents adds to a turn, measured with an engine that answers at once.

python -m benchmarks.agent_overhead --sessions 1 64 512 --rate 50 --seconds 60

One host with a number of open sessions, in this process without Ray. A client in another process sends conversations of
up to 16 turns, at random times. One JSON line for each number of sessions: p50 and p99 of a request in milliseconds,
and requests per second if every session sends its next request immediately (`saturated_per_s`).
"""

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from actors.agents.agent_client import Agents
from actors.agents.agent_host import AgentHost
from recipes.stage1 import STAGE_1
from rstar_ray.agent.agent_rollout import run_agent_rollout
from rstar_ray.agent.endpoint import MODEL, Endpoint
from rstar_ray.agent.rollout import RolloutState
from rstar_ray.chat.load_chat import load_chat
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.config.options import run_command
from rstar_ray.config.scales import at_scale
from rstar_ray.tiny.tiny_model import make_tiny_model
from rstar_ray.trajectory import Completion, Problem, RolloutLimits, RolloutRequest, Sampling

MAX_TURNS = 16
NO_LIMIT = RolloutLimits(max_response_tokens=10**9, max_turns=10**9, max_context_tokens=10**9, max_calls_per_turn=16)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured."""

    sessions: tuple[int, ...] = (1, 64, 512)
    """open rollouts, each with an agent"""
    rate: float = 50.0
    """requests per second of all sessions"""
    seconds: float = 30.0
    """of each measurement"""
    client: bool = False
    """used by this command itself"""


class Here:
    """Calls the host without Ray."""

    def __init__(self, host: AgentHost) -> None:
        self._host = host

    async def call(self, act: Callable[[AgentHost], Awaitable[Any]], **_: object) -> Any:
        return await act(self._host)


async def measured(chat: TokenizerChat, num_sessions: int, options: Options) -> dict[str, Any]:
    opened: asyncio.Queue[Endpoint] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    said = [*chat.encoder.encode("The answer is 42.", after=""), chat.profile.stop_token_ids[0]]

    async def solve(problem: Problem, endpoint: Endpoint) -> None:
        loop.call_soon_threadsafe(opened.put_nowait, endpoint)
        await asyncio.Event().wait()

    async def generate(prompt_ids: Sequence[int], **_: object) -> Completion:
        return Completion(token_ids=said, logprobs=[-1.0] * len(said), policy_versions=[0] * len(said), ended=True)

    host = AgentHost(solve, chat, context_tokens=10**9, deadline_s=3_600.0)
    agents = Agents([Here(host)], caller="benchmark")  # pyright: ignore[reportArgumentType]
    problem = Problem(id="p", problem="What is 6 * 7?", answer="42")

    async def play(number: int) -> None:
        request = RolloutRequest(
            rollout_id=f"r{number}",
            group_id="g",
            problem=problem,
            seed=number,
            limits=NO_LIMIT,
            sampling=Sampling(temperature=1.0, top_p=1.0),
        )
        state = RolloutState.start(request, chat.prompt_ids(problem))
        await run_agent_rollout(state, generate=generate, agent=agents.open(state, _as_it_is), chat=chat)

    playing = [asyncio.create_task(play(number)) for number in range(num_sessions)]
    try:
        endpoints = [await opened.get() for _ in playing]
        order = {"url": endpoints[0].base_url, "keys": [one.api_key for one in endpoints]}
        order |= {"rate": options.rate, "seconds": options.seconds}
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.agent_overhead", "--client"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        answer, _ = await client.communicate(json.dumps(order).encode())
        return {"sessions": num_sessions, "rate": options.rate} | json.loads(answer)
    finally:
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        await host.close()


async def _as_it_is(reply: Awaitable[Any]) -> Any:
    return await reply


class Client:
    """Sends the conversations of the sessions, one request per session at a time."""

    def __init__(self, http: aiohttp.ClientSession, url: str, keys: Sequence[str]) -> None:
        self._http, self._url = http, url
        self._messages: dict[str, list[Any]] = {key: [] for key in keys}
        self._count = 0

    async def ask(self, key: str) -> float:
        """Send the next turn of a session; returns its seconds."""
        messages = self._messages[key]
        if len(messages) >= 2 * MAX_TURNS:
            messages.clear()
        self._count += 1
        messages.append({"role": "user", "content": f"Question {self._count}: what is 6 * 7?"})
        body, headers = {"model": MODEL, "messages": messages}, {"Authorization": f"Bearer {key}"}
        began_s = time.perf_counter()
        async with self._http.post(f"{self._url}/chat/completions", json=body, headers=headers) as reply:
            reply.raise_for_status()
            answer = await reply.json()
        took_s = time.perf_counter() - began_s
        messages.append(answer["choices"][0]["message"])
        return took_s


async def as_client(order: dict[str, Any]) -> dict[str, Any]:
    keys, seconds, rng = order["keys"], order["seconds"], random.Random(0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        client = Client(http, order["url"], keys)
        idle: asyncio.Queue[str] = asyncio.Queue()
        for key in rng.sample(keys, len(keys)):
            idle.put_nowait(key)
        took: list[float] = []

        async def one() -> None:
            key = await idle.get()
            took.append(await client.ask(key))
            idle.put_nowait(key)

        end_s = time.monotonic() + seconds
        async with asyncio.TaskGroup() as sent:
            while time.monotonic() < end_s:
                sent.create_task(one())
                await asyncio.sleep(rng.expovariate(order["rate"]))
        count, began_s = len(took), time.monotonic()

        async def always(key: str) -> None:
            while time.monotonic() < began_s + seconds:
                took.append(await client.ask(key))

        await asyncio.gather(*(always(key) for key in keys))
        saturated = (len(took) - count) / (time.monotonic() - began_s)
    cuts = statistics.quantiles(took[:count], n=100)
    return {
        "requests": count,
        "p50_ms": round(1e3 * cuts[49], 2),
        "p99_ms": round(1e3 * cuts[98], 2),
        "saturated_per_s": round(saturated, 1),
    }


def run(options: Options) -> None:
    if options.client:
        print(json.dumps(asyncio.run(as_client(json.load(sys.stdin)))))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", seed=0)
        chat = load_chat(model, at_scale(STAGE_1.paper, "tiny", STAGE_1.tiny).chat, instruct=False)
        for num_sessions in options.sessions:
            print(json.dumps(asyncio.run(measured(chat, num_sessions, options))), flush=True)


if __name__ == "__main__":
    sys.exit(run_command(Options, run, None, description=__doc__))
