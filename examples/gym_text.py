"""A Gymnasium environment that renders text and takes numbered actions, such as FrozenLake-v1.

python examples/gym_text.py FrozenLake-v1 200 > lake.jsonl
rstar stage 1 --data.train lake.jsonl --tools.environments gym_text:Gym --own-folder examples --run-dir runs/lake

The first command writes a problem for each seed, whose text is the first observation. `gymnasium` (here 1.4) has to be
installed beside rstar_ray. The reward of a rollout is the sum of the rewards of its steps.
"""

import json
import re
import sys
from typing import Any

from rstar_ray.tools.environment import Reply
from rstar_ray.trajectory import Problem


class Gym:
    async def start(self, problem: Problem) -> None:
        """`metadata` has the columns `game` and `seed`."""
        self.env = made(problem.metadata["game"], problem.metadata["seed"])
        self.actions, self.total, self.over = list[int](), 0.0, False

    async def reply(self, said: str) -> Reply:
        """The last number in the turn is the action."""
        numbers, space = re.findall(r"\d+", said), self.env.action_space
        if not numbers or not space.contains(int(numbers[-1])):
            return Reply(text=f"Write the number of an action: {space}.")
        self._step(int(numbers[-1]))
        return Reply(reward=self.total) if self.over else Reply(text=text_of(self.env))

    def _step(self, action: int) -> None:
        _, reward, terminated, truncated, _ = self.env.step(action)
        self.actions.append(action)
        self.total, self.over = self.total + float(reward), terminated or truncated

    async def ended(self, reason: str) -> float:
        return self.total

    def snapshot(self) -> str:
        return json.dumps(self.actions)

    async def restore(self, snapshot: str) -> None:
        for action in json.loads(snapshot):
            self._step(action)

    async def close(self) -> None:
        self.env.close()


def made(game: str, seed: int) -> Any:
    import gymnasium

    env = gymnasium.make(game, render_mode="ansi")
    env.reset(seed=seed)
    return env


def text_of(env: Any) -> str:
    return re.sub("\x1b\\[[0-9;]*m", "", str(env.render())).strip()  # without colours


if __name__ == "__main__":
    for seed in range(int(sys.argv[2])):
        row = {"id": f"{sys.argv[1]}-{seed}", "environment": "gym_text:Gym", "game": sys.argv[1], "seed": seed}
        env = made(sys.argv[1], seed)
        print(json.dumps(row | {"problem": f"{text_of(env)}\n\nWrite the number of an action: {env.action_space}."}))
