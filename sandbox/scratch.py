"""The working folder between two programs."""

# Plain strings: thousands of entries, in a process that is copied for every call.
# ruff: noqa: PTH101, PTH104, PTH106, PTH108, PTH112, PTH114, PTH208
import contextlib
import os

MAX_FILES = 4000
MAX_BYTES = 64 << 20


def too_much_in(home: str) -> bool:
    """True where a program without a file system of its own leaves more than it may."""
    count, blocks = 0, 0
    folders = [home]
    try:
        while folders:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    blocks += entry.stat(follow_symlinks=False).st_blocks
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    if count > MAX_FILES or blocks * 512 > MAX_BYTES:
                        return True
    except OSError:
        return count > MAX_FILES  # it changes under us; the next look decides
    return False


def leave_empty(home: str, most: int = 2 * MAX_FILES) -> bool:
    """Empty the working folder; False where that takes more than `most` steps, or is not possible.

    Never recursive, never follows a link: folders are moved up and emptied one level at a time.
    """
    try:
        os.chmod(home, 0o700)
        names = os.listdir(home)
        removed = 0
        while names:
            for number, name in enumerate(names):
                path = f"{home}/{name}"
                try:
                    os.unlink(path)
                except IsADirectoryError:
                    os.chmod(path, 0o700)
                    for inner, below in enumerate(os.listdir(path)):
                        inside = f"{path}/{below}"
                        if os.path.isdir(inside) and not os.path.islink(inside):
                            os.chmod(inside, 0o700)
                            os.rename(inside, f"{home}/.up-{removed}-{number}-{inner}")
                        else:
                            os.unlink(inside)
                        removed += 1
                    os.rmdir(path)
                removed += 1
                if removed > most:
                    return False
            names = os.listdir(home)
    except OSError:
        return False
    return True


def clear_away(home: str) -> None:
    """Remove a folder that a program may have left in any state."""
    leave_empty(home, most=10_000_000)
    with contextlib.suppress(OSError):
        os.rmdir(home)
