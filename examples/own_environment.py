"""An environment of your own: Mastermind. The policy guesses digits and reads how close each guess is.

rstar stage 1 --data.train games.jsonl --data.heldout exam.jsonl --tools.environment own_environment:Mastermind \\
    --tools.max-environment-turns 8 --own-folder examples --run-dir runs/game

Rows of both files: {"id": "1", "problem": "Guess a number of 4 digits", "answer": "1234"}. The problem's text is the
first message, and its answer is the number to guess. Without the files, scale tiny would supply arithmetic problems.
Each turn without a tool call goes to `reply`, and a reply with a reward ends the rollout.
"""

import json
import re

from rstar_ray.tools.environment import Reply
from rstar_ray.trajectory import Problem


class Mastermind:
    async def start(self, problem: Problem) -> None:
        self.secret = problem.answer
        self.best = 0.0  # share of digits in place, of the best guess

    async def reply(self, said: str) -> Reply:
        """The last number in the message is the guess."""
        guesses = re.findall(r"\d+", said)
        if not guesses:
            return Reply(text="Write a number.")
        guess = guesses[-1]
        if guess == self.secret:
            return Reply(reward=1.0)
        if len(guess) != len(self.secret):
            return Reply(text=f"Write {len(self.secret)} digits.")
        placed = sum(mine == theirs for mine, theirs in zip(guess, self.secret, strict=True))
        self.best = max(self.best, placed / len(self.secret))
        common = sum(min(guess.count(digit), self.secret.count(digit)) for digit in set(guess))
        return Reply(text=f"{placed} in place, {common - placed} in the number but elsewhere.")

    async def ended(self, reason: str) -> float:
        """Turns or tokens ran out: up to half the reward for digits in place."""
        return 0.5 * self.best

    def snapshot(self) -> str:
        """With `restore`, the game survives the loss of its process."""
        return json.dumps([self.secret, self.best])

    async def restore(self, snapshot: str) -> None:
        self.secret, self.best = json.loads(snapshot)

    async def close(self) -> None: ...
