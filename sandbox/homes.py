"""The numbers of cells, and the working folders that belong to them where a cell has no file system of its own."""

import asyncio
import os
import tempfile
from pathlib import Path

from sandbox.cage.scratch import clear_away
from sandbox.isolation import FIRST_UID, IsolationLevel

_RESTING = 64  # numbers that went out of use last are not used again at once: a uid may have something left to do


class Homes:
    """One folder for one pool; below it one for each cell, owned by the cell's uid."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="sandbox-"))
        self._folder.chmod(0o711)
        self._free: list[int] = []
        self._next = 0
        self._clearing: set[asyncio.Future[bool]] = set()

    def take(self, level: IsolationLevel) -> tuple[int, str]:
        """A number that no cell has, and its folder."""
        if len(self._free) > _RESTING:
            number = self._free.pop(0)
        else:
            number, self._next = self._next, self._next + 1
        home = self._folder / str(number)
        if level is not IsolationLevel.NAMESPACES:
            home.mkdir(mode=0o700, exist_ok=True)
            if os.geteuid() == 0 and level is IsolationLevel.LANDLOCK:
                os.chown(home, FIRST_UID + number, FIRST_UID + number)
        return number, str(home)

    def give_back(self, number: int, level: IsolationLevel) -> None:
        """Forget a cell that has ended; what is in its folder goes, beside the event loop."""
        if level is IsolationLevel.NAMESPACES:
            self._free.append(number)
            return
        clearing = asyncio.get_running_loop().run_in_executor(None, clear_away, str(self._folder / str(number)))
        self._clearing.add(clearing)
        clearing.add_done_callback(self._clearing.discard)
        clearing.add_done_callback(lambda _: self._free.append(number))

    async def close(self) -> None:
        """Remove everything."""
        if self._clearing:
            await asyncio.wait(self._clearing)
        await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        for home in self._folder.iterdir():
            clear_away(str(home))
        self._folder.rmdir()
