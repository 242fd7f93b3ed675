"""Serves the report page of a running run; the figures update as steps end.

python recipes/watch.py runs/tiny

It only reads the run directory, so it works for runs that are active, have ended or have crashed, on any
machine that sees the directory. It listens on the loopback; the address it shows holds the token that every
figure needs: the one in the environment variable RSTAR_RAY_TOKEN, or a new one.
"""

import asyncio
import gzip
import secrets
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from aiohttp import web

from actors.launch.exit_status import status_of
from actors.talk.http_listener import given_token, listening, refuse_port, until_interrupted
from rstar_ray.config.options import options_of
from rstar_ray.errors import ConfigError
from rstar_ray.report.live import LiveRun
from rstar_ray.report.page import whole_page
from rstar_ray.report.trajectory_text import json_bytes
from sandbox.http import auth

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN = ("/", "/ping")
"""The response without a token: the page without figures."""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """The shown run, and access to it."""

    run: Annotated[Path, tyro.conf.Positional]
    """a run directory"""
    host: str = "127.0.0.1"
    """address to listen on; beyond the loopback, figures travel unencrypted"""
    port: int = 8001
    """port to listen on; 0 takes any free one"""
    allow_host: tuple[str, ...] = ()
    """host names of this server besides localhost, the machine's own name, and plain addresses"""


class Watcher:
    """Routes over one run. Its files are read in a thread, one request after the other."""

    def __init__(self, run: LiveRun, options: WatchOptions, token: str) -> None:
        self._run = run
        self._token = token
        self._names = auth.own_names(options.allow_host)
        self._one = asyncio.Lock()
        self._packed = b""

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[self._let_in])
        app.add_routes(
            [
                web.get("/", self._page),
                web.get("/ping", self._ping),
                web.get("/data", self._data),
                web.get("/block/{kind:texts|figures|ids}/{where}/{place:[0-9]{1,9}}", self._block),
            ]
        )
        return app

    @web.middleware
    async def _let_in(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        token = "" if request.path in OPEN else self._token
        refused = auth.refusal(request.method, request.path, request.headers, token=token, names=self._names)
        if refused is not None:
            answer: web.StreamResponse = web.Response(status=refused.status, text=refused.text)
            answer.force_close()  # its body is not read
            return answer
        answer = await handler(request)
        answer.headers["Cache-Control"] = "no-store"
        answer.headers["X-Content-Type-Options"] = "nosniff"
        answer.headers["Referrer-Policy"] = "no-referrer"
        answer.headers["X-Frame-Options"] = "DENY"
        return answer

    async def _ping(self, request: web.Request) -> web.Response:
        return web.json_response("pong")

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=whole_page(self._run.name, "", ""), content_type="text/html")

    async def _data(self, request: web.Request) -> web.Response:
        """204 where the page is up to date."""
        try:
            async with self._one:
                if await asyncio.to_thread(self._run.changed):
                    self._packed = await asyncio.to_thread(self._pack)
                version, state, packed = str(self._run.version), self._run.state(), self._packed
        except ConfigError as gone:
            return web.Response(status=410, text=str(gone))
        except (OSError, ValueError, KeyError) as half_written:
            return web.Response(status=503, text=f"the run's files cannot be read just now: {half_written!r}")
        headers = {"X-Version": version, "X-State": state}
        if request.query.get("have") == version:
            return web.Response(status=204, headers=headers)
        headers |= {"Content-Encoding": "gzip"}
        return web.Response(body=packed, headers=headers, content_type="application/json")

    def _pack(self) -> bytes:
        return gzip.compress(json_bytes(self._run.data()), 1)

    async def _block(self, request: web.Request) -> web.Response:
        kind, where, place = (request.match_info[name] for name in ("kind", "where", "place"))
        async with self._one:
            found = await asyncio.to_thread(self._run.block, kind, where, int(place))
        if found is None:
            return web.Response(status=404, text="there is no such block")
        return web.Response(body=found, content_type="application/octet-stream")


async def watch(options: WatchOptions) -> None:
    """Until it is interrupted. Raises `ConfigError` for what is not a run, and for an address that cannot be used."""
    refuse_port(options.port)
    run, token = LiveRun(options.run), given_token() or secrets.token_urlsafe(24)
    async with listening(Watcher(run, options, token).app(), options.host, options.port) as address:
        print(f"{address}/#token={token} shows {options.run}", flush=True)
        await until_interrupted()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 ended by a person, 2 refused before anything started."""

    def act() -> None:
        options = options_of(WatchOptions, argv, description=__doc__)
        with suppress(KeyboardInterrupt):
            asyncio.run(watch(options))

    return status_of(act)


if __name__ == "__main__":
    sys.exit(main())
