"""examples/minimal_loop.py: it samples and learns from the same distribution, and a step of it runs."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from examples.minimal_loop import Sampler, exact, sampled_logprobs, train
from rstar_ray.agent.rollout import RolloutState, run_rollout, score
from rstar_ray.chat.load_chat import load_chat
from rstar_ray.config import ChatConfig
from rstar_ray.outcome import Outcome
from rstar_ray.tiny.tiny_model import make_tiny_model
from rstar_ray.tiny.tiny_problems import generate_problems
from rstar_ray.trajectory import ToolCall, ToolResult
from tests.fakes import request

pytestmark = [pytest.mark.isolated, pytest.mark.long]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), 0)


async def test_the_sampler_and_the_learner_have_the_same_log_probs(model_folder: Path):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    chat = load_chat(model_folder, ChatConfig(), instruct=False)
    sampler = Sampler(model, chat.profile.stop_token_ids[0])
    states = [RolloutState.start(request(one), chat.prompt_ids(one)) for one in generate_problems(0, "train", 4)]
    played = (run_rollout(state, generate=sampler.generate, execute=refused, chat=chat) for state in states)
    for state in await asyncio.gather(*played):  # prompts of different lengths in one batch
        rollout = await score(state, exact)
        np.testing.assert_allclose(
            sampled_logprobs(model, rollout).detach(), rollout.rollout_logprobs[rollout.loss_mask], atol=1e-4
        )


async def refused(call: ToolCall) -> ToolResult:
    return ToolResult(outcome=Outcome.INVALID, text="Error: no tool.")


async def test_a_step_runs(model_folder: Path):
    assert await train(model_folder, steps=1, prompts=1) == [0.0]  # a model of random weights solves nothing
