"""Rollouts through an agent of the user, real: Ray, vLLM, the agent's host, and the client of OpenAI over HTTP."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import ray

from actors.agents.agent_host import AgentHostActor
from actors.launch.ray_connection import connect
from actors.remote import Remote
from actors.system import TrainingActors
from recipes.stage1 import STAGE_1
from rstar_ray.chat.load_chat import load_chat
from rstar_ray.config import with_values
from rstar_ray.config.scales import at_scale
from rstar_ray.rollouts import FinishedRollout, rollout_requests
from rstar_ray.tiny.tiny_model import make_tiny_model
from rstar_ray.tiny.tiny_problems import Split, generate_problems
from rstar_ray.trajectory import Trajectory

pytestmark = pytest.mark.real

CONFIG = with_values(
    at_scale(STAGE_1.paper, "tiny", STAGE_1.tiny), {"engine.replicas": 1, "rollout.max_response_tokens": 48}
)


@asynccontextmanager
async def running(model: Path, folder: Path, agent: str) -> AsyncGenerator[TrainingActors]:
    config = with_values(CONFIG, {"own_folder": str(folder), "agent.run": agent})
    connect()
    chat = load_chat(model, config.chat, instruct=False)
    actors = TrainingActors(config, model, chat=chat, run_dir=folder / (agent.replace(":", "-") or "built-in"))
    try:
        await actors.start(learner=False)
        await actors.serving()
        yield actors
    finally:
        await actors.close()
        ray.shutdown()


async def trajectories(actors: TrainingActors, *, kills: bool = False) -> dict[str, Trajectory]:
    requests = rollout_requests(generate_problems(0, Split.TRAIN, 4), CONFIG, name=1, siblings=6)
    found: dict[str, Trajectory] = {}
    async for done in actors.replicas.rollouts.run(requests):
        assert isinstance(done, FinishedRollout), done
        found[done.rollout_id] = (await done.ref.batch)[done.ref.index]
        if kills and len(found) == 3:
            heartbeat = await Remote[AgentHostActor].named("agents/0", caller="test").probe(60)
            assert heartbeat is not None
            os.kill(heartbeat.pid, signal.SIGKILL)
    assert len(found) == len(requests)
    return found


def test_an_agent_samples_the_tokens_of_the_built_in_loop_although_its_host_is_killed(tmp_path: Path):
    model = make_tiny_model(tmp_path / "model", seed=0)

    async def run() -> tuple[dict[str, Trajectory], ...]:
        async with running(model, tmp_path, "") as actors:
            built_in = await trajectories(actors)
        async with running(model, tmp_path, "examples.train_agent:solve") as actors:
            return built_in, await trajectories(actors, kills=True)

    built_in, killed = asyncio.run(run())
    assert killed.keys() == built_in.keys()
    for rollout_id, one in killed.items():
        other = built_in[rollout_id]
        assert one.prompt_ids.tolist() == other.prompt_ids.tolist()
        assert one.response_ids.tolist() == other.response_ids.tolist()
        assert one.rollout_logprobs.tolist() == pytest.approx(other.rollout_logprobs.tolist(), abs=1e-5)
        assert (one.summary.reward, one.summary.stop_reason) == (other.summary.reward, other.summary.stop_reason)
