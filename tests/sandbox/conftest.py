"""One pool at level `namespaces` for the tests that do not need their own."""

import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox.pool import PoolConfig, SandboxPool

SECRET = "hunter2"


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """One after another, where tests run in several processes: many of them measure time."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("sandbox"))


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def pool() -> AsyncIterator[SandboxPool]:
    os.environ["SANDBOX_TEST_SECRET"] = SECRET
    async with SandboxPool(PoolConfig()) as shared:
        yield shared
