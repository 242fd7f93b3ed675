"""A headless Chromium, driven over its own protocol: pages, scripts, what the console said, pictures."""

import asyncio
import base64
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""None where this machine has none: `apt install chromium`."""
START_S, ANSWER_S = 120.0, 120.0


class Tab:
    """One page. What its console complained of is in `complaints`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.create_task(self._read())
        self.complaints: list[str] = []

    async def call(self, method: str, **parameters: Any) -> Any:
        """One command of the protocol; raises `RuntimeError` where it is refused."""
        number = len(self._answers) + 1
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(self._answers[number], ANSWER_S)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    async def open(self, url: str) -> None:
        """Until the page says that it is ready."""
        await self.call("Page.navigate", url=url)
        await self.until("document.documentElement.dataset.ready === 'true'")

    async def evaluate(self, script: str) -> Any:
        """The value of an expression, awaited where it is a promise; raises `RuntimeError` where it throws."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            thrown = answer["exceptionDetails"]
            raise RuntimeError(thrown.get("exception", {}).get("description") or thrown["text"])
        return answer["result"].get("value")

    async def until(self, script: str, limit_s: float = 120.0) -> None:
        """Until the expression is true; raises `TimeoutError` naming it."""
        for _ in range(int(limit_s / 0.05)):
            with contextlib.suppress(RuntimeError):  # between two pages
                if await self.evaluate(f"!!({script})"):
                    return
            await asyncio.sleep(0.05)
        raise TimeoutError(f"{script} did not become true in {limit_s:g} s; the console said {self.complaints}")

    async def click(self, element: str) -> None:
        """With the mouse, on the middle of the element that the expression gives; it must be the one that is hit."""
        place = await self.evaluate(f"""(() => {{
            const element = {element};
            element.scrollIntoView({{ block: "center" }});
            const box = element.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
            const hit = document.elementFromPoint(x, y);
            return hit && (element === hit || element.contains(hit)) ? [x, y] : null;
        }})()""")
        assert place is not None, f"{element} is covered or out of sight"
        for kind in ("mousePressed", "mouseReleased"):
            x, y = place
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def picture(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """What is seen of the page, as PNG."""
        await self.sized(width, height, dark=dark)
        shot = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    async def sized(self, width: int, height: int, *, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def _read(self) -> None:
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                self._answers[said["id"]].set_result(said)
            elif said["method"] == "Runtime.exceptionThrown":
                details = said["params"]["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description") or details["text"])
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.complaints.append(said["params"]["entry"]["text"])
            elif said["method"] == "Runtime.consoleAPICalled" and said["params"]["type"] in ("error", "warning"):
                self.complaints.append(str([argument.get("value") for argument in said["params"]["args"]]))

    async def close(self) -> None:
        self._reader.cancel()
        await self._socket.close()


class Pages:
    """One browser for several tests, each of which walks through it in a coroutine."""

    def __init__(self, profile: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._opened = tab(profile)
        self._tab = self._loop.run_until_complete(self._opened.__aenter__())

    def walk(self, through: Callable[[Tab], Awaitable[None]]) -> None:
        """Fails where the console complained."""

        async def walked() -> None:
            self._tab.complaints.clear()
            await self._tab.call("Page.navigate", url="about:blank")
            await self._tab.sized(1280, 900)
            await through(self._tab)
            assert self._tab.complaints == []

        self._loop.run_until_complete(walked())

    def close(self) -> None:
        self._loop.run_until_complete(self._opened.__aexit__(None, None, None))
        self._loop.close()


@contextlib.asynccontextmanager
async def tab(profile: Path) -> AsyncIterator[Tab]:
    """A fresh browser with one empty page; `profile` is a separate folder."""
    assert CHROMIUM is not None
    left = tempfile.mkdtemp(prefix="chromium-")  # what it leaves lies there, by a path short enough for its socket
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}", "--no-first-run",
        "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking",
        *(["--no-sandbox"] if os.geteuid() == 0 else []), "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": left},
    )  # fmt: skip
    try:
        port = await _port(profile / "DevToolsActivePort", process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as listed:
                pages = [one for one in await listed.json() if one["type"] == "page"]
            socket = await session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)
            opened = Tab(socket)
            for domain in ("Page", "Runtime", "Log"):
                await opened.call(f"{domain}.enable")
            yield opened
            await opened.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        shutil.rmtree(left, ignore_errors=True)


async def _port(said: Path, process: asyncio.subprocess.Process) -> int:
    for _ in range(int(START_S / 0.1)):
        if process.returncode is not None:
            raise RuntimeError(f"{CHROMIUM} ended with status {process.returncode}")
        if said.exists() and (text := said.read_text()).count("\n"):
            return int(text.split("\n")[0])
        await asyncio.sleep(0.1)
    raise TimeoutError(f"{CHROMIUM} did not open its port in {START_S:g} s")
