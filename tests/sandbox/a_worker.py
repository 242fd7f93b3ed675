"""A sandbox server in a separate process, with the leanest pool: `python -m tests.sandbox.a_worker SLOTS TOKEN`."""

import asyncio
import sys

from sandbox.http.server import ServerConfig, start_server
from tests import derived


async def serve(slots: int, token: str) -> None:
    """Print the port, and answer until killed."""
    async with derived.pool(slots=slots, warm=("lean",)) as pool:
        _, port = await start_server(pool, ServerConfig(port=0, token=token))
        print(port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2]))
