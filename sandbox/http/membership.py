"""A worker's side of a front: it joins by its address, says again that it is there, and leaves when it has finished."""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

_log = logging.getLogger(__name__)

ASK_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Which front to join, and what it is told."""

    front: str  # its address
    join_token: str
    address: str  # of this worker, as the front reaches it
    token: str  # that this worker wants of its clients
    again_s: float = 10.0  # a front that was started anew learns of its workers so soon


class Membership:
    """Keeps one worker known to its front."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._told = ""
        self._keeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Membership":
        self._keeping = asyncio.create_task(self._keep(), name="membership")
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stop()

    async def leave(self, drain_s: float) -> bool:
        """Ask for no more calls, and wait so long for those under way; true where none is left."""
        await self._stop()
        end = time.monotonic() + drain_s
        while time.monotonic() < end:
            answer = await self._say("/workers/leave", {"address": self._member.address})
            if answer is None or not isinstance(answer.get("under_way"), int) or not answer["under_way"]:
                return answer is not None
            await asyncio.sleep(0.1)
        return False

    async def _stop(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeping
            self._keeping = None

    async def _keep(self) -> None:
        while True:
            told = {"address": self._member.address, "token": self._member.token}
            joined = await self._say("/workers/join", told)
            await asyncio.sleep(self._member.again_s if joined is not None else 1.0)

    async def _say(self, path: str, data: dict[str, str]) -> dict[str, Any] | None:
        """The front's answer; None where it has none to give, which is logged once for each reason."""
        headers = {"Authorization": f"Bearer {self._member.join_token}"}
        url = f"{self._member.front.rstrip('/')}{path}"
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S), headers=headers) as session,
                session.post(url, json=data, allow_redirects=False) as answer,
            ):
                found = await answer.json()
                refused = "" if answer.status == 200 else f"{answer.status}: {str(found.get('detail'))[:300]}"
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, AttributeError) as error:
            found, refused = None, str(error) or type(error).__name__
        if refused != self._told:
            _log.info("front %s: %s", self._member.front, refused or "it knows this worker")
            self._told = refused
        return None if refused else found
