"""All actors of a run, real: Ray, vLLM, two DeepSpeed ranks under ZeRO-3, the isolated sandbox, the balancer."""

import asyncio
import json
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import ray
from ray.experimental import get_object_locations

from actors.balancer_service import BalancerActor
from actors.launch.ray_connection import connect
from actors.remote import Remote
from actors.system import TrainingActors
from actors.tool_client import Tools
from actors.tool_host import ToolHostActor
from recipes.stage1 import STAGE_1
from rstar_ray.agent.rollout import RolloutState, ToolCall
from rstar_ray.chat.load_chat import load_chat
from rstar_ray.config import with_values
from rstar_ray.config.scales import at_scale
from rstar_ray.outcome import Outcome
from rstar_ray.rollouts import FinishedRollout, TrainingRow, rollout_requests
from rstar_ray.tiny.tiny_model import make_tiny_model
from rstar_ray.tiny.tiny_problems import Split, generate_problems
from rstar_ray.tools.loader import tool_specs
from rstar_ray.trajectory import RolloutRequest, StopReason, ToolResult, Trajectory
from tests.fakes import request
from tests.logged import logged_lines

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

CONFIG = with_values(
    at_scale(STAGE_1.paper, "tiny", STAGE_1.tiny),
    {
        "learner.ranks": 2,
        "learner.zero": 3,
        "engine.replicas": 2,
        "engine.cpus_per_replica": 0.5,
        "engine.kv_tokens": 8_192,
        "rollout.max_response_tokens": 96,
        "tools.use": ("python", "mine:tools"),
        "tools.environment": "mine:Half",
    },
)
OWN = """
import time
from rstar_ray.tools.environment import Reply
from rstar_ray.tools.tool import Tool

class Words:
    def __init__(self, problem, snapshot):
        self.words = snapshot or ""
    async def call(self, text):
        self.words += text
        return self.words
    def snapshot(self):
        return self.words

async def stall(text):
    time.sleep(60 if text == "block" else 0)
    return text.upper()

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
tools = [
    Tool(name="words", description="?", parameters=TEXT, state=Words),
    Tool(name="stall", description="?", parameters=TEXT, function=stall, deadline_s=0.5),
]

class Half:
    async def start(self, problem): ...
    async def reply(self, said):
        return Reply(reward=0.5)
    async def close(self): ...
"""


@pytest.fixture(scope="module")
def shown() -> Iterator[list[str]]:
    """The lines that a person sees."""
    with logged_lines() as lines:
        yield lines


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory, shown: list[str]) -> AsyncIterator[TrainingActors]:
    model = make_tiny_model(tmp_path_factory.mktemp("model"), seed=0)
    own = tmp_path_factory.mktemp("own")
    (own / "mine.py").write_text(OWN)
    config = with_values(CONFIG, {"own_folder": str(own)})
    specs = tool_specs(config.tools.use, str(own))
    connect()
    chat = load_chat(model, CONFIG.chat, instruct=False, tools=specs)
    actors = TrainingActors(config, model, chat=chat, run_dir=tmp_path_factory.mktemp("run"), tools=specs)
    try:
        await actors.start()
        await actors.serving()
        yield actors
    finally:
        await actors.close()
        ray.shutdown()


async def roll_out(system: TrainingActors, name: str, *, prompts: int = 6, siblings: int = 8) -> list[FinishedRollout]:
    requests = rollout_requests(generate_problems(0, Split.TRAIN, prompts), CONFIG, name=name, siblings=siblings)
    return await finish(system, requests)


async def finish(system: TrainingActors, requests: Sequence[RolloutRequest]) -> list[FinishedRollout]:
    found = [done async for done in system.replicas.rollouts.run(requests)]
    assert sorted(done.summary.rollout_id for done in found) == sorted(r.rollout_id for r in requests)  # type: ignore[union-attr]
    return found  # type: ignore[return-value]


def rows(rollouts: list[FinishedRollout]) -> list[TrainingRow]:
    return [
        TrainingRow(
            group_id="group",
            rollout_id=done.summary.rollout_id,
            ref=done.ref,
            advantage=1.0 if position % 2 else -1.0,
            num_tokens=done.summary.num_prompt_tokens + done.summary.num_response_tokens,
            num_sampled_tokens=done.summary.num_sampled_tokens,
        )
        for position, done in enumerate(rollouts)
    ]


async def test_actors_are_found_by_the_names_the_dashboard_shows(system: TrainingActors):
    names = set(ray.util.list_named_actors())
    assert names == {
        "balancer", "generation/0", "generation/1", "learner/rank-0", "learner/rank-1", "sandbox/0",
        "tools/mine:tools/0", "tools/mine:Half/0",
    }  # fmt: skip


async def test_custom_tools_run_beside_python_and_survive_a_death_and_a_call_that_blocks(system: TrainingActors):
    host = Remote[ToolHostActor].named("tools/mine:tools/0", caller="test")
    tools = Tools(system.specs, system.tools, {"mine:tools": [host]}, caller="test").open(
        RolloutState.start(request(), [1])
    )

    def words(text: str) -> Awaitable[ToolResult]:
        return tools.execute(ToolCall(tool="words", arguments={"text": text}))

    assert (await tools.execute(ToolCall(code="6*7"))).text == "42"
    assert (await words("a")).text == "a"
    heartbeat = await host.probe(60)
    assert heartbeat is not None
    os.kill(heartbeat.pid, signal.SIGKILL)
    assert (await words("b")).text == "ab"
    blocked = await tools.execute(ToolCall(tool="stall", arguments={"text": "block"}))
    assert (blocked.outcome, blocked.text) == (Outcome.TIMEOUT, "Error: no answer within 0.5 s.")
    assert (await tools.execute(ToolCall(tool="stall", arguments={"text": "on"}))).text == "ON"
    assert (await words("c")).text == "abc"
    tools.close()


async def test_an_environment_answers_rollouts_of_real_engines_and_rewards_them(system: TrainingActors):
    summaries = [done.summary for done in await roll_out(system, "environment", siblings=16)]
    answered = [summary for summary in summaries if summary.stop_reason is StopReason.ANSWERED]
    assert answered, Counter((summary.stop_reason, summary.num_turns) for summary in summaries)
    assert all((summary.reward, summary.num_turns) == (0.5, 1) for summary in answered)
    assert all(summary.reward == 0.0 for summary in summaries if summary not in answered)
    assert (await ray.get_actor("tools/mine:Half/0").probe.remote()).lost_with_it == ""


async def test_the_sandbox_runs_an_isolated_call(system: TrainingActors):
    result = await system.tools.execute(ToolCall(code="import os; print(6*7, os.getuid() != 0)"))
    assert (result.outcome, result.text) == (Outcome.OK, "42 True")
    assert (await system.tools.execute(ToolCall(code="1/0"))).outcome is Outcome.ERROR
    assert list(await system.tools.compare([("\\sqrt{12}", "2\\sqrt{3}"), ("\\sqrt{12}", "3")])) == [True, False]


async def test_engine_and_learner_agree_on_log_probs_over_several_publishes(system: TrainingActors):
    for version in range(1, 4):
        rollouts = await roll_out(system, f"agree-{version}")
        assert {done.summary.policy_version_max for done in rollouts} == {version - 1}
        update = await system.learner.train_rl(rows(rollouts), 1e-3)
        assert update.applied and update.metrics["grad_norm"] > 0
        assert update.metrics["logprob_diff_mean"] <= 1e-5 and update.metrics["logprob_diff_max"] <= 1e-4
        await system.publish(version)


async def test_trajectories_stay_behind_refs_and_are_whole(system: TrainingActors):
    rollouts = await roll_out(system, "refs", prompts=2)
    places = get_object_locations([done.ref.batch for done in rollouts])
    assert all(place["node_ids"] for place in places.values())  # in the object store, however small: not here
    batch: list[Trajectory] = await rollouts[0].ref.batch
    trajectory = batch[rollouts[0].ref.index]
    assert trajectory.summary == rollouts[0].summary
    assert trajectory.loss_mask.sum() == trajectory.summary.num_sampled_tokens


async def test_what_the_balancer_has_learned_is_saved_in_a_checkpoint_and_loaded_again(system: TrainingActors):
    await roll_out(system, "learned", prompts=2, siblings=2)
    saved = json.loads(json.dumps(await system.balancer_state()))
    assert saved["admissions"] >= 4 and all(sum(one["past"]["tokens_B"]) > 0 for one in saved["lengths"])
    await roll_out(system, "forgotten", prompts=2, siblings=2)
    assert json.loads(json.dumps(await system.balancer_state())) != saved
    balancer = Remote[BalancerActor].named("balancer", caller="test")
    async with asyncio.timeout(60):  # a replica reports ends apart from results, and a moment later
        while (await balancer.call(lambda b: b.snapshot(), deadline_s=60, reason="its rollouts")).in_flight:
            await asyncio.sleep(0.05)
    await system.load_balancer_state(saved)
    assert json.loads(json.dumps(await system.balancer_state())) == saved
    with pytest.raises(ValueError, match=r"lengths.* is missing"):
        await system.load_balancer_state({name: value for name, value in saved.items() if name != "lengths"})


async def test_the_same_seeds_sample_the_same_tokens(system: TrainingActors):
    requests = rollout_requests(generate_problems(0, Split.TRAIN, 2), CONFIG, name="same", siblings=8)

    async def tokens(time: str) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for done in await finish(system, [replace(r, rollout_id=f"{r.rollout_id}/{time}") for r in requests]):
            drawn = (await done.ref.batch)[done.ref.index].response_ids.tolist()
            found[done.summary.rollout_id.removesuffix(f"/{time}")] = drawn
        return found

    assert await tokens("first") == await tokens("second")


async def takes_steps(worker: Any) -> None:
    """Wait until the worker's engine samples."""
    before = (await worker.probe.remote()).progress
    async with asyncio.timeout(600):
        while (await worker.probe.remote()).progress == before:
            await asyncio.sleep(0.01)


async def test_what_is_stopped_is_noticed_killed_and_lost_nothing_two_at_once(system: TrainingActors, shown: list[str]):
    """An engine and the sandbox; then a worker and the balancer."""
    for number, names in enumerate((("generation/0", "sandbox/0"), ("generation/1", "balancer"))):
        rollouts = asyncio.create_task(roll_out(system, f"stopped-{number}", prompts=12, siblings=16))
        worker, other = (ray.get_actor(name) for name in names)
        await takes_steps(worker)
        sign = await worker.probe.remote()
        stopped = sign.children[:1] if number == 0 else (sign.pid,)
        for pid in (*stopped, (await other.probe.remote()).pid):
            os.kill(pid, signal.SIGSTOP)
        found = await asyncio.wait_for(rollouts, 600)
        assert len(found) == 12 * 16
    lines = "\n".join(shown)
    for name in ("sandbox/0", "generation/1", "balancer"):
        assert f"{name} was silent for" in lines
    assert re.search(r"generation/0 was lost \(.*engine process was stuck", lines)  # its engine, not it
    async with asyncio.timeout(600):
        while system.replicas.available.keys() != {"generation/0", "generation/1"}:
            await asyncio.sleep(0.1)


async def test_a_generation_worker_that_dies_loses_no_rollout_and_comes_back_with_todays_weights(
    system: TrainingActors, tmp_path: Path
):
    worker = system.replicas.workers["generation/1"].handle
    pid = (await worker.probe.remote()).pid
    rollouts = asyncio.create_task(roll_out(system, "death", prompts=12, siblings=16))
    await takes_steps(worker)
    os.kill(pid, signal.SIGKILL)
    found = await asyncio.wait_for(rollouts, 600)
    assert len(found) == 12 * 16
    await system.publish(9)
    after = await roll_out(system, "after")
    assert {done.summary.policy_version_min for done in after} == {9}
