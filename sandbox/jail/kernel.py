"""Linux calls that Python has no function for. They raise OSError on failure."""

import ctypes
import fcntl
import os
import platform
import socket
import struct
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWCGROUP = 0x10000000, 0x20000000, 0x40000000, 0x02000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_NOATIME, MS_REC, MS_PRIVATE = 1 << 10, 1 << 14, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 8, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
CAP_DAC_READ_SEARCH, CAP_SYS_RESOURCE = 2, 24

_libc = ctypes.CDLL(None, use_errno=True)
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = 1, 4
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: Any, what: str) -> int:
    """Make a system call by its number."""
    return _check(_libc.syscall(ctypes.c_long(number), *arguments), what)


_prctl = _libc.prctl
setrlimit = _libc.setrlimit
# fork(2) without what Python does after it: a worker has one thread, so no lock can be held, and
# the hooks that modules register would touch, and so copy, half of the interpreter's pages.
lean_fork = ctypes.PyDLL(None).fork


def prctl(option: int, argument: int, pointer: Any = 0) -> None:
    """prctl(2) with up to two arguments."""
    _check(_prctl(option, argument, pointer, 0, 0), "prctl")


def prctl3(option: int, first: int, second: int) -> int:
    """prctl(2) with three arguments; returns its result, -1 on failure."""
    return _prctl(option, ctypes.c_ulong(first), ctypes.c_ulong(second), 0, 0)


def unshare(flags: int) -> None:
    """Leave the namespaces named by `flags`."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2)."""
    done = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(done, f"mount {kind or source} on {target}")


def unmount(target: str, flags: int) -> None:
    """umount2(2)."""
    _check(_libc.umount2(target.encode(), flags), f"umount {target}")


def pivot_root(new_root: str, old_root: str) -> None:
    """Make `new_root` the root of this mount namespace."""
    syscall(_PIVOT_ROOT[platform.machine()], new_root.encode(), old_root.encode(), what="pivot_root")


def clone_tree(path: str) -> int:
    """Return a detached, recursive copy of the mounts at `path`, as a descriptor."""
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    return syscall(_OPEN_TREE, _AT_FDCWD, path.encode(), flags, what=f"open_tree {path}")


def seal_tree(tree: int, *, read_only: bool, devices: bool) -> None:
    """Make a detached tree nosuid, and optionally read-only or without devices."""
    attributes = _MOUNT_ATTR_NOSUID
    attributes |= _MOUNT_ATTR_RDONLY if read_only else 0
    attributes |= 0 if devices else _MOUNT_ATTR_NODEV
    record = ctypes.create_string_buffer(struct.pack("<QQQQ", attributes, 0, 0, 0), 32)
    flags = _AT_EMPTY_PATH | _AT_RECURSIVE
    syscall(_MOUNT_SETATTR, tree, b"", flags, record, ctypes.c_size_t(32), what="mount_setattr")


def attach_tree(tree: int, target: str) -> None:
    """Mount a detached tree on `target`."""
    flags = _MOVE_MOUNT_F_EMPTY_PATH
    syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, target.encode(), flags, what=f"move_mount {target}")


def set_capabilities(keep: int) -> None:
    """Make `keep` (a bit set) the permitted and effective set, and nothing inheritable."""
    header = ctypes.create_string_buffer(struct.pack("<Ii", 0x20080522, 0), 8)
    low, high = keep & 0xFFFFFFFF, keep >> 32
    data = ctypes.create_string_buffer(struct.pack("<IIIIII", low, low, 0, high, high, 0), 24)
    syscall(_CAPSET[platform.machine()], header, data, what="capset")


def empty_bounding_set() -> None:
    """Give up every capability that an exec could restore; without CAP_SETPCAP it does nothing."""
    for capability in range(64):
        if prctl3(PR_CAPBSET_DROP, capability, 0) < 0:
            break


_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1


def raise_loopback() -> None:
    """Give the network namespace its address 127.0.0.1; needs CAP_NET_ADMIN there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))


_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 << 20


def use_huge_pages() -> None:
    """Collapse this process's memory into huge pages if the kernel can (6.1 and newer).

    A fork then copies one page table entry per 2 MiB instead of 512, which are most of the cost of
    forking a process with large libraries. Programs still copy 4 KiB at a time when they write.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:  # noqa: PTH123
        regions = [line.split() for line in maps]
    for region in regions:
        name = region[5] if len(region) > 5 else ""
        if region[1] != "rw-p" or name not in ("", "[heap]"):
            continue
        low, high = (int(end, 16) for end in region[0].split("-"))
        for start in range(-(-low // _HUGE_PAGE) * _HUGE_PAGE, high - _HUGE_PAGE + 1, _HUGE_PAGE):
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(_HUGE_PAGE), _MADV_COLLAPSE)
