"""A client of the HTTP server with the `run` method of a pool, for other machines and processes."""

import asyncio
import uuid
from dataclasses import replace
from types import TracebackType
from typing import Any

import aiohttp
import msgpack

from rstar_ray.errors import SandboxFull, SandboxLost
from sandbox.http.auth import MSGPACK
from sandbox.http.codec import request_to_data, result_from_data
from sandbox.limits import patience_s
from sandbox.request import ExecutionRequest, ExecutionResult

RETRY_S = 0.05


class HttpSandbox:
    """Runs programs on a sandbox server. Every call has an id, so that a retry never runs it twice."""

    def __init__(self, url: str, *, token: str = "", timeout_s: float = 120.0, attempts: int = 3) -> None:
        self._url = url.rstrip("/")
        headers = {"Content-Type": MSGPACK, "Accept": MSGPACK}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._headers = headers
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "HttpSandbox":
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._headers,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def run(self, request: ExecutionRequest, caller: str = "") -> ExecutionResult:
        """Run one program on the server. Raises SandboxFull, SandboxLost or, for a bad request, ValueError."""
        assert self._session is not None, "use it as an async context manager"
        call_id = request.call_id or uuid.uuid4().hex
        body: bytes = msgpack.packb(request_to_data(replace(request, call_id=call_id)), unicode_errors="surrogatepass")  # pyright: ignore[reportAssignmentType]
        timeout = aiohttp.ClientTimeout(total=patience_s(request.limits, self._timeout_s))
        trouble: Exception | None = None
        for attempt in range(self._attempts):
            try:
                status, data = await self._post(self._session, body, timeout)
            except (aiohttp.ClientError, TimeoutError) as error:
                trouble = error  # a keep-alive connection may close during a request
                await asyncio.sleep(RETRY_S * 2**attempt)
                continue
            if status == 200:
                return replace(result_from_data(data), call_id=request.call_id)
            detail = str(data.get("detail", data)) if isinstance(data, dict) else str(data)
            if status == 503 and isinstance(data, dict) and data.get("error") == "full":
                raise SandboxFull(detail)
            if status == 422:
                raise ValueError(detail)
            raise SandboxLost(f"{self._url} answered {status}: {detail}")
        raise SandboxLost(f"{self._url} did not answer {self._attempts} times") from trouble

    async def _post(
        self, session: aiohttp.ClientSession, body: bytes, timeout: aiohttp.ClientTimeout
    ) -> tuple[int, Any]:
        async with session.post(f"{self._url}/execute", data=body, timeout=timeout) as answer:
            raw = await answer.read()
            if answer.content_type == MSGPACK:
                return answer.status, msgpack.unpackb(raw, unicode_errors="surrogatepass")
            return answer.status, raw.decode("utf-8", "replace")
