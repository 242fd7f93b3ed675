"""Reading bodies: bounded each, bounded together, and in time."""

import asyncio
import json

import msgpack
from aiohttp import web

from sandbox.http.door import MSGPACK

MAX_BODY_BYTES = 256 * 1024 * 1024
MAX_BODIES_BYTES = 1024 * 1024 * 1024  # of all requests that are being read
BODY_S = 60.0  # a body without an end by then is given up ...
PAUSE_S = 10.0  # ... and sooner where nothing comes at all


class Bodies:
    """The room that the bodies of all requests share."""

    def __init__(self) -> None:
        self._held = 0

    async def read(self, request: web.Request, most: int = MAX_BODY_BYTES) -> object:
        """Decode a body as its Content-Type says.

        Raises ValueError with a text for people, or an HTTPException that closes the connection: what follows on it
        cannot be told from the body.
        """
        if (request.content_length or 0) > most:
            raise _closing(web.HTTPRequestEntityTooLarge(most, request.content_length or 0))
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                await self._fill(body, request, most)
        except TimeoutError:
            raise _closing(web.HTTPRequestTimeout(text="the body does not come")) from None
        except (web.HTTPException, ConnectionError):
            raise
        except Exception as error:  # of the decompressor, or of the HTTP parser
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
                raise _closing(web.HTTPServiceUnavailable(text="too many large bodies at once: come again"))


def _decoded(body: bytearray, kind: str) -> object:
    try:
        if kind in (MSGPACK, "application/x-msgpack"):
            return msgpack.unpackb(body, unicode_errors="surrogatepass")
        return json.loads(body)
    except RecursionError as error:
        raise ValueError("the body is nested too deeply") from error
    except Exception as error:  # msgpack raises a dozen kinds
        raise ValueError(f"the body cannot be decoded: {_text(error)}") from error


def _closing(error: web.HTTPException) -> web.HTTPException:
    error.force_close()
    return error


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
