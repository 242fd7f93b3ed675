"""One pool at level `namespaces` for the tests that do not need their own."""

import os
from collections.abc import AsyncIterator

import pytest_asyncio

from sandbox.pool import SandboxPool
from tests import derived

SECRET = "hunter2"


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def pool() -> AsyncIterator[SandboxPool]:
    os.environ["SANDBOX_TEST_SECRET"] = SECRET
    async with derived.pool() as shared:
        yield shared
