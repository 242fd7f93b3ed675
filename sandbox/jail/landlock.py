"""Landlock: restricts which files a process may access; needs no privilege, cannot be undone.

Seccomp restricts what an old Landlock ABI cannot: sockets, signals.
"""

import ctypes
import os
import struct

from sandbox.jail import kernel

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
# Of bits 4 to 12 (remove dir and file, make char, dir, reg, sock, fifo, block, sym): remove dir, make dir, reg, sym.
# A removed file that is open or mapped would keep its disk space, and no scan of the folder could count it.
_MAKE = (1 << 4) | (1 << 7) | (1 << 8) | (1 << 12)
_REFER = 1 << 13
_FILE_ONLY = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV


def abi() -> int:
    """The kernel's Landlock version; 0 if it has no Landlock."""
    try:
        return kernel.syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION_FLAG, what="landlock")
    except OSError:
        return 0


def restrict(read_only: list[str], writable: list[str]) -> int:
    """Allow this process and its children only the given trees; needs no-new-privs.

    Returns the ABI used. Paths that do not exist are skipped. Raises OSError.
    """
    version = abi()
    handled = (1 << 13) - 1
    handled |= _REFER if version >= 2 else 0
    handled |= _TRUNCATE if version >= 3 else 0
    handled |= _IOCTL_DEV if version >= 5 else 0
    network = 3 if version >= 4 else 0  # bind and connect of TCP: none allowed
    scopes = 3 if version >= 6 else 0  # abstract sockets and signals to outside
    attributes = struct.pack("<QQQ", handled, network, scopes)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = kernel.syscall(
        _CREATE, ctypes.create_string_buffer(attributes, 24), ctypes.c_size_t(size), 0, what="landlock_create_ruleset"
    )
    try:
        for path in read_only:
            _allow(rules, path, _READ & handled)
        for path in writable:
            rights = _READ | _WRITE_FILE | _MAKE | _TRUNCATE | _REFER
            _allow(rules, path, rights & handled)
        kernel.syscall(_RESTRICT, rules, 0, what="landlock_restrict_self")
    finally:
        os.close(rules)
    return version


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        target = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):  # noqa: PTH112
            rights &= _FILE_ONLY
        rule = ctypes.create_string_buffer(struct.pack("<Qi", rights, target), 12)
        kernel.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0, what=f"landlock_add_rule {path}")
    finally:
        os.close(target)
