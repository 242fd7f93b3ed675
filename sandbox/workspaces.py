"""Numbers of workers with their resources: a control group, and a folder if a worker has no private file system."""

import asyncio
import os
import time
from pathlib import Path

from rstar_ray.temporary_folder import LockedFolder, insides
from sandbox.cgroups import Groups, find_groups
from sandbox.isolation import MAX_THREADS, IsolationLevel, choose_first_uid
from sandbox.jail.scratch import clear_away

GROUPS_S = 2.0  # wait for the processes of the last groups to end
_RESTING = 64  # recently used numbers that are not reused, because their uid may still have processes


class Workspaces:
    """A pool's folder, with one folder per worker, owned by the worker's uid."""

    def __init__(self, groups: Groups | None = None) -> None:
        self._own = LockedFolder("sandbox-", clear=_clear)
        self._folder = self._own.path
        self._folder.chmod(0o711)
        self._free: list[int] = []
        self._next = 0
        self.first_uid = choose_first_uid()  # of worker 0, if this process is root
        self.groups = groups or find_groups(self._folder.name)
        self._clearing: set[asyncio.Future[bool]] = set()

    def take(self, level: IsolationLevel) -> tuple[int, str, str]:
        """A free number, its folder, and its control group (empty if there is none). Raises OSError."""
        if len(self._free) > _RESTING:
            number = self._free.pop(0)
        else:
            number, self._next = self._next, self._next + 1
        home = self._folder / str(number)
        try:
            if level is not IsolationLevel.NAMESPACES:
                home.mkdir(mode=0o700, exist_ok=True)
                if os.geteuid() == 0 and level is IsolationLevel.LANDLOCK:
                    os.chown(home, self.first_uid + number, self.first_uid + number)
            # At level landlock programs cannot start processes.
            group = "" if level is IsolationLevel.LANDLOCK else self.groups.make(number, MAX_THREADS)
        except OSError:
            self.give_back(number, level)
            raise
        return number, str(home), group

    def give_back(self, number: int, level: IsolationLevel) -> None:
        """Release a worker that has ended; its folder is emptied in a thread."""
        self.groups.remove(number)
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
        self.groups.remove_all()
        end = time.monotonic() + GROUPS_S
        while not self.groups.sweep() and time.monotonic() < end:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self._own.remove)


def _clear(folder: Path) -> None:
    """Remove the content of a pool's folder, including files that programs left."""
    for home in insides(folder):
        if home.is_dir() and not home.is_symlink():
            clear_away(str(home))
        else:
            home.unlink()
