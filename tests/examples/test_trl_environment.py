"""The adapter of TRL-shaped classes plays a game through the endpoint, with the unmodified `openai` client."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.test_utils import TestServer

from actors.talk.policy_answers import PolicyAnswers
from examples.trl_environment import solve
from recipes.serve import ServeOptions, Server
from rstar_ray.trajectory import UNMODIFIED, Problem
from tests.actors.test_policy_answers import Script
from tests.rstar_ray.test_token_lines import CHATS


def guesses(*numbers: int) -> str:
    calls = [{"name": "guess", "arguments": {"number": number}} for number in numbers]
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls) + "<|im_end|>"


@pytest.mark.parametrize(
    ("turns", "context", "reward"),
    [
        ([guesses(50), guesses(-1, 7)], 9_000, 1.0 - 0.1),
        ([guesses(50), "I give up.<|im_end|>"], 9_000, 0.0),
        ([guesses(50)], 750, 0.0),
    ],
    ids=["solved", "given up", "context full"],
)
async def test_a_class_is_played_by_its_methods(turns: list[str], context: int, reward: float):
    chat = CHATS["qwen3"]
    script = Script(chat, *turns)
    answers = PolicyAnswers(chat, script, sampling=UNMODIFIED, max_tokens=400, context_tokens=context)
    async with TestServer(Server(answers, ServeOptions(model="policy"), "key").app()) as server:
        endpoint: Any = SimpleNamespace(base_url=str(server.make_url("/v1")), api_key="key", model="policy")
        problem = Problem(id="1", problem="Find it.", answer="", metadata={"secret": 7, "source": "made up"})
        assert await solve(problem, endpoint) == pytest.approx(reward)
    read = [chat.decode(prompt) for prompt in script.prompts]
    assert "Find it.\n\nThe number is below 100." in read[0] and "Says whether the secret number" in read[0]
    if len(read) > 1:
        assert "Lower." in read[1]
