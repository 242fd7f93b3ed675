"""Starting a pool where containers and hosts refuse something: `python -m tests.sandbox.in_container WHAT LEVEL`.

Run in a separate process, as any user; prints one JSON object: the level that was reached and what it rests on, or
the refusal. `mask_proc` is for the process that starts it, which can mount.
"""

import asyncio
import ctypes
import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from rstar_ray.errors import SandboxError
from sandbox.isolation import read_host
from sandbox.jail import kernel
from sandbox.request import ExecutionRequest
from tests import derived

# Docker's default profile without CAP_SYS_ADMIN, as far as it concerns a jail; numbers of x86_64.
_REFUSED = {
    "mount": 165,
    "umount2": 166,
    "pivot_root": 155,
    "unshare": 272,
    "setns": 308,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "mount_setattr": 442,
    "bpf": 321,
    "keyctl": 250,
    "userfaultfd": 323,
}
_CLONE, _CLONE3, _NEW_ANY = 56, 435, 0x7E020000
_LOAD, _EQUAL, _ANY_OF, _RETURN, _ALLOW, _ERRNO = 0x20, 0x15, 0x45, 0x06, 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS = 1, 38
# chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap, net_bind_service, net_raw, sys_chroot, mknod,
# audit_write, setfcap: what Docker leaves to root
_DOCKERS = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31}
_MASKED = ("acpi", "asound", "interrupts", "kcore", "keys", "latency_stats", "sched_debug", "scsi", "timer_list")
_READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")


def mask_proc() -> None:
    """Cover what Docker covers of /proc, in separate mounts."""
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    for name in _MASKED:
        path = Path("/proc") / name
        if path.is_dir():
            kernel.mount("tmpfs", str(path), "tmpfs", kernel.MS_RDONLY)
        elif path.exists():
            kernel.mount("/dev/null", str(path), "", kernel.MS_BIND)
    for name in _READ_ONLY:
        path = f"/proc/{name}"
        if Path(path).exists():
            kernel.mount(path, path, "", kernel.MS_BIND | kernel.MS_REC)
            kernel.mount("none", path, "", kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY)


def as_docker() -> None:
    """Few capabilities, and a filter that refuses new namespaces."""
    for capability in range(41):
        if capability not in _DOCKERS and os.geteuid() == 0:
            kernel.prctl3(kernel.PR_CAPBSET_DROP, capability, 0)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    code = [(_LOAD, 0, 0, 0)]
    for number in _REFUSED.values():
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    code += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    code += [(_EQUAL, 0, 3, _CLONE), (_LOAD, 0, 0, 16), (_ANY_OF, 0, 1, _NEW_ANY), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    code += [(_RETURN, 0, 0, _ALLOW)]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *each) for each in code))
    program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(packed)))
    kernel.prctl(kernel.PR_SET_SECCOMP, 2, program)
    # root's capabilities follow from the bounding set at the next exec
    os.execv(sys.executable, [sys.executable, "-m", "tests.sandbox.in_container", "as we are", sys.argv[2]])


def without_user_namespaces() -> None:
    """As where the host's sysctl is 0: in a separate user namespace, whose limit we set."""
    if child := os.fork():  # who has threads can leave no namespace
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    user, group = os.getuid(), os.getgid()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    kernel.unshare(kernel.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    kernel.set_capabilities(0)


def few_uids() -> None:
    """As root of a container with a user namespace: 65,536 uids are mapped."""
    unshared, mapped = os.pipe(), os.pipe()
    if child := os.fork():
        os.read(unshared[0], 1)
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{name}").write_text("0 0 65536")
        os.write(mapped[1], b"!")
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    kernel.unshare(kernel.CLONE_NEWUSER)
    os.write(unshared[1], b"!")
    os.read(mapped[0], 1)


async def report(level: str) -> dict[str, object]:
    """What a pool reaches here."""
    try:
        async with derived.pool(only=level, slots=1, warm=("lean",)) as pool:
            ran = await pool.run(ExecutionRequest(code="print(6 * 7)"))
            found = pool.report
            return {"level": found.level, "contained": found.contained, "facts": found.facts, "ran": ran.stdout}
    except SandboxError as error:
        return {"refused": str(error), "seccomp": read_host().seccomp}


PLACES: dict[str, Callable[[], None]] = {
    "as we are": lambda: None,
    "docker": as_docker,
    "no user namespaces": without_user_namespaces,
    "few uids": few_uids,
}

if __name__ == "__main__":
    PLACES[sys.argv[1]]()
    print(json.dumps(asyncio.run(report(sys.argv[2]))))
