"""Reads request bodies with bounds on size, total size and time."""

import asyncio
import itertools
import json
import re
from typing import Any

import msgpack
from aiohttp import web

from sandbox.http.auth import MSGPACK

MAX_BODY_BYTES = 256 * 1024 * 1024
MAX_BODIES_BYTES = 1024 * 1024 * 1024  # of all bodies that are being read
BODY_S = 60.0  # longest time for a whole body ...
PAUSE_S = 10.0  # ... and between two pieces of it
# One byte of a body may become an object of 72 bytes, and decoding blocks all other requests. The largest batch,
# 50,000 programs of five fields, has half a million values, names of fields included.
MAX_VALUES = 2_000_000  # of one body
MAX_MEMBERS = 65_536  # of one list or object in msgpack, whose decoder allocates as many as are announced
_PLAIN_CHARS = 1024 * 1024  # shorter JSON is decoded without counting its values
# Marks of JSON's values: strings, opening brackets, commas and colons. A string without an end is scanned only once.
_MARK = re.compile(r'"(?:[^"\\]++|\\.?)*+(?:"|\Z)|[\[{,:]', re.DOTALL)
_MAX_MARKS = 2 * MAX_VALUES  # about two marks per value


class Bodies:
    """The memory that the bodies of all requests share."""

    def __init__(self) -> None:
        self._held = 0

    async def read(self, request: web.Request, most: int = MAX_BODY_BYTES) -> object:
        """Decode a body as its Content-Type says.

        Raises ValueError with a readable message, or an HTTPException that closes the connection: later bytes on it
        cannot be distinguished from the body.
        """
        if (request.content_length or 0) > most:
            raise _closing(web.HTTPRequestEntityTooLarge(most, request.content_length or 0))
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                await self._fill(body, request, most)
        except TimeoutError:
            raise _closing(web.HTTPRequestTimeout(text="the body did not arrive in time")) from None
        except (web.HTTPException, ConnectionError):
            raise
        except Exception as error:  # from the decompressor or the HTTP parser
            raise _closing(web.HTTPBadRequest(text=f"the body cannot be read: {_text(error)}")) from error
        finally:
            self._held -= len(body)
        return _decoded(body, request.content_type)

    async def _fill(self, body: bytearray, request: web.Request, most: int) -> None:
        while chunk := await asyncio.wait_for(request.content.readany(), PAUSE_S):
            body += chunk
            self._held += len(chunk)
            if len(body) > most:
                raise _closing(web.HTTPRequestEntityTooLarge(most, len(body)))
            if self._held > MAX_BODIES_BYTES:
                raise _closing(web.HTTPServiceUnavailable(text="too many large bodies at once. Hint: retry later"))


def _decoded(body: bytearray, kind: str) -> object:
    try:
        if kind in (MSGPACK, "application/x-msgpack"):
            return _from_msgpack(body)
        return json.loads(body) if len(body) <= _PLAIN_CHARS else _from_long_json(body)
    except RecursionError as error:
        raise ValueError("the body is nested too deeply") from error
    except Exception as error:  # msgpack raises a dozen types
        raise ValueError(f"the body cannot be decoded: {_text(error)}") from error


def _from_long_json(body: bytearray) -> object:
    """Count the values by their marks before decoding any. Raises ValueError."""
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    if next(itertools.islice(_MARK.finditer(text), _MAX_MARKS, None), None) is not None:
        raise ValueError(f"more than {MAX_VALUES} values")
    return json.loads(text)


def _from_msgpack(body: bytearray) -> object:
    """Count the values while decoding them. Raises ValueError."""
    left = MAX_VALUES

    def counted(members: Any) -> Any:
        nonlocal left
        left -= 1 + len(members) * (2 if isinstance(members, dict) else 1)
        if left < 0:
            raise ValueError(f"more than {MAX_VALUES} values")
        return members

    most = min(len(body), MAX_MEMBERS)
    return msgpack.unpackb(
        body,
        unicode_errors="surrogatepass",
        list_hook=counted,
        object_hook=counted,
        max_array_len=most,
        max_map_len=most,
    )


def _closing(error: web.HTTPException) -> web.HTTPException:
    error.force_close()
    return error


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
