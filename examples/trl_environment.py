"""A class in the shape of TRL's `environment_factory`, as an agent of a run: its public methods are the policy's tools.

rstar stage 1 --agent.run trl_environment:solve --own-folder examples --rollout.instruct --run-dir runs/trl

`reset` gets the columns of the problem's row (`problem.metadata`) and may add to the first message. Each method is a
tool, shown by its types and docstring. The reward is the attribute `reward` at the end; `done` ends the rollout early.
"""

import inspect
import json
from typing import Any

from openai import AsyncOpenAI, BadRequestError
from transformers.utils import get_json_schema

from rstar_ray.agent.endpoint import Endpoint
from rstar_ray.trajectory import Problem


class Number:
    """Guess a number below 100; a guess after the first costs a tenth."""

    def reset(self, *, secret: int = 42, **_: Any) -> str:
        self.secret, self.guesses, self.reward, self.done = secret, 0, 0.0, False
        return "The number is below 100."

    def guess(self, number: int) -> str:
        """Says whether the secret number is higher or lower.

        Args:
            number: The guess.
        """
        if not 0 <= number < 100:
            raise ValueError("guess a number from 0 to 99")
        self.guesses += 1
        if number == self.secret:
            self.reward, self.done = max(0.1, 1.1 - 0.1 * self.guesses), True
            return "Yes."
        return "Higher." if number < self.secret else "Lower."


async def solve(problem: Problem, endpoint: Endpoint) -> float:
    return await play(Number(), problem, endpoint)


async def play(environment: Any, problem: Problem, endpoint: Endpoint) -> float:
    first = environment.reset(**problem.metadata)
    methods = dict(inspect.getmembers(environment, inspect.ismethod))
    tools = {name: one for name, one in methods.items() if not name.startswith("_") and name != "reset"}
    schemas: Any = [get_json_schema(tool) for tool in tools.values()]
    messages: list[Any] = [{"role": "user", "content": f"{problem.problem}\n\n{first}" if first else problem.problem}]
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, timeout=3600) as client:
        while not getattr(environment, "done", False):
            try:
                given = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=schemas)
            except BadRequestError:  # turns or tokens have run out
                break
            said: Any = given.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                break
            messages += [answer_to(call, tools) for call in said.tool_calls]
    return float(environment.reward)


def answer_to(call: Any, tools: dict[str, Any]) -> dict[str, Any]:
    """What a method raises is read by the policy, and counts as a failed call."""
    message = {"role": "tool", "tool_call_id": call.id}
    try:
        return message | {"content": str(tools[call.function.name](**json.loads(call.function.arguments)))}
    except Exception as error:
        return message | {"content": f"Error: {error}", "rstar_failed": True}
