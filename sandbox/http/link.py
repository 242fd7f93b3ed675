"""The way from a front to one worker, a sandbox server on another host: its answers are bounded and read by a schema.

A worker is trusted with the programs that it is given and with what became of them. It is not trusted with the front:
no answer of it is larger than what was asked for, or unpacked, followed elsewhere or kept as a cookie.
"""

import asyncio
import json
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import aiohttp
import msgpack

from sandbox.http.codec import result_from_data
from sandbox.http.door import JSON, MSGPACK
from sandbox.isolation import IsolationLevel
from sandbox.limits import MIB, Limits
from sandbox.request import ExecutionResult

MARK_CHARS = 100  # what a cut text may have beside the characters kept
REASON_CHARS = 1000  # of what a result says of itself
OTHER_BYTES = 64 * 1024  # an answer's names and numbers, and the whole of one that is no result
TEXT_CHARS = 300  # of what a worker says that is shown to people
MAX_ANSWERS_BYTES = 1024 * MIB  # that are being read
CONNECT_S = 5.0


class LinkTrouble(Exception):
    """A worker has not answered a call; `str()` says why, for people."""


class Silent(LinkTrouble):
    """Nothing came, or the connection broke: the worker may be there all the same, and run the program."""


class Gone(LinkTrouble):
    """The worker is not there, or is not one that programs may be given to."""


class Busy(LinkTrouble):
    """The worker has no room just now."""


class Refused(LinkTrouble):
    """This call is not for this worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """What a worker says of itself."""

    slots: int
    level: IsolationLevel


class Inbox:
    """The room that the answers of all workers share."""

    def __init__(self) -> None:
        self.held = 0

    async def read(self, answer: aiohttp.ClientResponse, most: int) -> bytes:
        """The body of an answer. Raises Gone for more than `most` bytes, and Silent where there is no room."""
        raw = bytearray()
        try:
            async for chunk in answer.content.iter_any():
                raw += chunk
                self.held += len(chunk)
                if len(raw) > most:
                    raise Gone("its answer is larger than was asked for")
                if self.held > MAX_ANSWERS_BYTES:
                    raise Silent("too many large answers come at once")
        finally:
            self.held -= len(raw)
        return bytes(raw)


class Link:
    """One worker's address, token and connections."""

    def __init__(self, address: str, token: str, inbox: Inbox) -> None:
        self._address = address
        self._inbox = inbox
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # calls are bounded, and each has one
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Authorization": f"Bearer {token}"} if token else {},
            skip_auto_headers=("Accept-Encoding",),
            auto_decompress=False,
        )

    async def __aenter__(self) -> "Link":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def status(self, timeout_s: float) -> WorkerStatus:
        """Ask how many programs it runs at once, and at which level. Raises LinkTrouble."""
        code, data = await self._ask("GET", "/status", None, OTHER_BYTES, timeout_s)
        if code != 200:
            raise Gone(f"it answers {code}: {_detail(data)}")
        given = cast(dict[str, Any], data) if isinstance(data, dict) else {}
        slots, level = given.get("num_workers"), given.get("level")
        if type(slots) is not int or slots < 1 or level not in tuple(IsolationLevel):
            raise Gone("its status is not that of a sandbox server")
        return WorkerStatus(slots=slots, level=IsolationLevel(cast(str, level)))

    async def execute(self, body: bytes, call_id: str, limits: Limits, timeout_s: float) -> ExecutionResult:
        """Run a packed request that has `call_id` and `limits`. Raises LinkTrouble."""
        code, data = await self._ask("POST", "/execute", body, most_bytes(limits), timeout_s)
        if code == 200:
            return believed(data, call_id, limits)
        given = cast(dict[str, Any], data) if isinstance(data, dict) else {}
        kind, detail = given.get("error"), _detail(data)
        if code == 503 and kind in ("full", None):
            raise Busy(detail)
        if code == 503 and kind == "SandboxClosed":
            raise Gone("it closes")
        if code in (408, 413, 422, 503):
            raise Refused(detail)
        raise Gone(f"it answers {code}: {detail}")

    async def _ask(self, method: str, path: str, body: bytes | None, most: int, timeout_s: float) -> tuple[int, object]:
        headers = {"Accept": MSGPACK} | ({"Content-Type": MSGPACK} if body is not None else {})
        try:
            async with asyncio.timeout(timeout_s):
                url = f"{self._address}{path}"
                async with self._session.request(
                    method, url, data=body, headers=headers, allow_redirects=False
                ) as answer:
                    if answer.headers.get("Content-Encoding", "identity") != "identity":
                        raise Gone("it packs its answers, though nobody asked it to")
                    return answer.status, _decoded(await self._inbox.read(answer, most), answer.content_type)
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, ConnectionRefusedError):
                raise Gone("nobody listens there") from error
            raise Silent(_text(error)) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise Silent(_text(error)) from error
        except aiohttp.ClientError as error:
            raise Gone(f"it does not speak HTTP: {_text(error)}") from error
        except TimeoutError as error:
            raise Silent(f"no answer within {timeout_s:.3g} s") from error


def most_bytes(limits: Limits) -> int:
    """No answer to a call is larger; four bytes a character."""
    shown = 2 * limits.stdout_chars + limits.stderr_chars + 3 * MARK_CHARS + REASON_CHARS
    return 4 * shown + OTHER_BYTES


def believed(data: object, call_id: str, limits: Limits) -> ExecutionResult:
    """A result as one of this call can be. Raises Gone for what is none."""
    try:
        result = result_from_data(data)
    except ValueError as error:
        raise Gone(f"its answer is no result: {_text(error)}") from error
    if result.call_id != call_id:
        raise Gone("its answer is to another call")
    kept = {"stdout": limits.stdout_chars, "value": limits.stdout_chars, "stderr": limits.stderr_chars}
    for name, chars in kept.items():
        least = REASON_CHARS if name == "stderr" else 0  # a refusal says why there, whatever is kept of a program's
        if len(getattr(result, name)) > max(chars, least) + MARK_CHARS:
            raise Gone(f"its answer's {name} is longer than was asked for")
    if len(result.reason) > REASON_CHARS:
        raise Gone("its answer's reason is too long")
    return result


def _decoded(raw: bytes, kind: str) -> object:
    """Plain data; nothing in it is nested, but what JSON nests."""
    try:
        if kind == MSGPACK:
            return msgpack.unpackb(
                raw, unicode_errors="surrogatepass", max_map_len=64, max_array_len=0, max_ext_len=0, max_bin_len=0
            )
        if kind == JSON:
            return json.loads(raw[: OTHER_BYTES + 1])
        return raw[:TEXT_CHARS].decode("utf-8", "replace")
    except Exception as error:  # msgpack raises a dozen kinds, and what is nested too deeply is a RecursionError
        raise Gone("its answer cannot be decoded") from error


def _detail(data: object) -> str:
    told = cast(dict[str, Any], data).get("detail") if isinstance(data, dict) else data
    text = told if isinstance(told, str) else ""
    return "".join(each if each.isprintable() else " " for each in text[:TEXT_CHARS]) or "nothing more"


def _text(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:TEXT_CHARS]
