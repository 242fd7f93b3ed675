"""An environment behind an OpenEnv server, over its WebSocket: nothing of OpenEnv is needed here.

rstar stage 1 --data.train rows.jsonl --tools.environments openenv_remote:Remote --own-folder examples \\
    --run-dir runs/remote

A row has the server's `url`, the `field` of an action that takes the turn's text (`message`), and what its episode is
`reset` with: {"id": "1", "problem": "Say hello.", "environment": "openenv_remote:Remote", "url": "ws://127.0.0.1:8000",
"reset": {"seed": 1}}. The reward is the sum over the steps.
"""

import json
from typing import Any

import aiohttp

from rstar_ray.errors import ToolError
from rstar_ray.tools.environment import Reply
from rstar_ray.trajectory import Problem


class Remote:
    async def start(self, problem: Problem) -> None:
        given = problem.metadata
        self.field, self.total = given.get("field", "message"), 0.0
        self.session = aiohttp.ClientSession()
        try:
            self.socket = await self.session.ws_connect(f"{given['url']}/ws", max_msg_size=2**24)
        except aiohttp.ClientError as refused:
            raise ToolError(f"{given['url']} does not answer ({refused})") from refused
        await self._ask("reset", given.get("reset", {}))

    async def reply(self, said: str) -> Reply:
        found = await self._ask("step", {self.field: said})
        self.total += float(found.get("reward") or 0.0)
        return Reply(reward=self.total) if found.get("done") else Reply(text=text_of(found["observation"]))

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        await self.socket.send_json({"type": kind, "data": data})
        message = await self.socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:  # our side: the policy is not to blame
            raise ToolError(f"the OpenEnv server has closed the connection ({message.type.name})")
        answer = json.loads(message.data)
        if answer["type"] == "error":
            raise ToolError(f"the OpenEnv server failed: {answer['data'].get('message')}")
        return answer["data"]

    async def ended(self, reason: str) -> float:
        return self.total

    async def close(self) -> None:
        await self.session.close()


def text_of(observation: dict[str, Any]) -> str:
    """Its only text, or all of it as JSON."""
    texts = [value for name, value in observation.items() if isinstance(value, str) and name != "metadata"]
    return texts[0] if len(texts) == 1 else json.dumps(observation)
