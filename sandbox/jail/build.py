"""Builds the jail of one worker; runs in the worker's process, before any program does.

`namespaces`: PID 1 of separate user, pid, mount, network, ipc and uts namespaces, with a private
root made of read-only trees and one small tmpfs. `landlock`: the host's namespaces, a separate uid
if the server is root, and Landlock rules. `process`: a separate session, nothing more.
"""

# Plain strings and descriptors, as the system calls take them.
# ruff: noqa: PTH103, PTH110, PTH112, PTH114, PTH115, PTH116, PTH120, PTH211
import contextlib
import errno
import os
import resource
import signal
import socket
import stat
from typing import Any, NamedTuple

from sandbox.jail import kernel, landlock
from sandbox.jail.control_group import ControlGroup

HOME = "/home/tool"
INSIDE_UID = 1000
_DEVICES = ("null", "zero", "full", "random", "urandom")
_SYSTEM_TREES = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
_PASSWD = f"tool:x:{INSIDE_UID}:{INSIDE_UID}::{HOME}:/bin/sh\n"
_HOST_NAME = "sandbox"
_NSSWITCH = "hosts: files dns\n"  # the default before glibc 2.35 stops at DNS and does not read /etc/hosts
_SKELETON_OPTIONS = "mode=755,size=1m,nr_inodes=2000"


class JailSpec(NamedTuple):
    """The settings that every worker of a pool is built from; sent to the warm server as JSON."""

    level: str
    trees: list[str]  # read-only: the interpreter, its libraries
    scratch_bytes: int
    scratch_files: int
    first_uid: int  # worker n runs as first_uid + n if the server is root
    max_threads: int
    loopback: bool = False  # the network namespace has 127.0.0.1; otherwise nothing


class Jail(NamedTuple):
    """The jail as its worker sees it."""

    home: str  # the program's working folder, the only writable one
    first_process: bool  # PID 1 of a separate pid namespace: may signal every visible process
    facts: dict[str, Any]  # what was achieved, for the report
    group: ControlGroup | None = None  # programs with processes join it


def enter(spec: JailSpec, number: int, home: str, group: str, channel: socket.socket) -> Jail:
    """Turn this freshly forked process (or a child of it) into worker `number`; the parent exits.

    `channel` gets a pidfd of the worker so that the pool can end it. Raises OSError.
    """
    uid = spec.first_uid + number
    joined = _group(group)  # its files are opened with the current user's rights
    if spec.level == "namespaces":
        facts = _enter_namespaces(spec, uid, channel, hide_groups=joined is None)
        home = HOME
    else:
        announce(channel, os.getpid())
        os.setsid()
        facts = _enter_landlock(spec, uid, home) if spec.level == "landlock" else {}
    os.chdir(home)
    if group and (joined is None or not joined.can_be_joined()):
        joined, facts["cgroup"] = None, "none: a process of a jail may not join one"
    _set_limits(spec, own_uid=bool(facts.get("own_uid") or facts.get("user_namespace")))
    return Jail(home, spec.level == "namespaces", facts, joined)


def _group(path: str) -> ControlGroup | None:
    try:
        return ControlGroup(path) if path else None
    except OSError:
        return None


def announce(channel: socket.socket, pid: int) -> None:
    """Send the pool a pidfd of process `pid`: it never refers to a later process with the same id."""
    descriptor = os.pidfd_open(pid)
    socket.send_fds(channel, [b"\0"], [descriptor])
    os.close(descriptor)


def _enter_namespaces(spec: JailSpec, uid: int, channel: socket.socket, *, hide_groups: bool) -> dict[str, Any]:
    apart = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    privileged = False
    if os.geteuid() == 0:
        try:
            kernel.unshare(apart)
            privileged = True
        except PermissionError:
            pass
    if not privileged:
        if os.geteuid() == 0:  # root without CAP_SYS_ADMIN, as in most containers: no program may run as root
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        _unshare_as_user(apart)
    if hide_groups:  # names describe the container; before Linux 5.16, no process in the namespace can join a group
        with contextlib.suppress(OSError):
            kernel.unshare(kernel.CLONE_NEWCGROUP)
    asks, answers = socket.socketpair()
    proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)  # the worker's pivot_root replaces the root of both processes
    pid = os.fork()
    if pid:
        announce(channel, pid)
        answers.send(b"!")
        asks.close()
        _map_ids_when_asked(answers, proc, pid, uid)
        os._exit(0)
    answers.close()
    if asks.recv(1) != b"!":  # the pool expects the pidfd before any other message
        raise OSError(errno.ECANCELED, "the worker was not announced")
    os.close(proc)
    os.setsid()  # else signals to the process group, kill(0, ...), reach the server and its other workers
    inside = uid if privileged else INSIDE_UID
    socket.sethostname(_HOST_NAME)
    if spec.loopback:
        kernel.raise_loopback()
    facts: dict[str, Any] = {"user_namespace": not privileged, "proc": _build_root(spec, inside)}
    if privileged:
        os.setgroups([])
        facts["user_namespace"] = _own_user_namespace(asks)
        facts["own_uid"] = True
        inside = INSIDE_UID if facts["user_namespace"] else uid
        os.setresgid(inside, inside, inside)
        os.setresuid(inside, inside, inside)
    asks.close()
    _give_up_privileges(0)
    return facts


def _unshare_as_user(apart: int) -> None:
    uid, gid = os.getuid(), os.getgid()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # an undumpable process cannot write its own map
    kernel.unshare(kernel.CLONE_NEWUSER | apart)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{INSIDE_UID} {uid} 1")
    _write("/proc/self/gid_map", f"{INSIDE_UID} {gid} 1")


def _own_user_namespace(asks: socket.socket) -> bool:
    """Enter a user namespace with one id; False if the kernel allows no user namespace."""
    try:
        kernel.unshare(kernel.CLONE_NEWUSER)
    except OSError:
        asks.send(b"-")
        return False
    asks.send(b"+")
    if asks.recv(1) != b"+":
        raise OSError(errno.EPERM, "the user namespace could not be given an id")
    return True


def _map_ids_when_asked(answers: socket.socket, proc: int, pid: int, uid: int) -> None:
    if answers.recv(1) != b"+":
        return
    try:
        _write(f"{pid}/uid_map", f"{INSIDE_UID} {uid} 1", folder=proc)
        _write(f"{pid}/gid_map", f"{INSIDE_UID} {uid} 1", folder=proc)
    except OSError:
        answers.send(b"-")
    else:
        answers.send(b"+")


def _build_root(spec: JailSpec, uid: int) -> bool:
    """Make the private root and move into it; True if it has a /proc (of this namespace)."""
    links = {path: os.readlink(path) for path in _SYSTEM_TREES if os.path.islink(path)}
    wanted = [*spec.trees, *_SYSTEM_TREES, *_SYSTEM_FILES]
    paths = outermost([path for path in wanted if path not in links and os.path.exists(path)])
    below_links = tuple(f"{link}/" for link in links)  # `outermost` adds the targets of links
    paths = [path for path in paths if not path.startswith(below_links)]
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    trees: list[tuple[str, int]] = []
    for path in paths:
        tree = kernel.clone_tree(path)
        kernel.seal_tree(tree, read_only=True, devices=False)
        trees.append((path, tree))
    for name in _DEVICES:
        tree = kernel.clone_tree(f"/dev/{name}")
        kernel.seal_tree(tree, read_only=True, devices=True)  # writable, but with fixed times and modes
        trees.append((f"/dev/{name}", tree))
    skeleton = next(path for path in ("/tmp", "/run", "/mnt", "/var") if os.path.isdir(path))
    plain = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", skeleton, "tmpfs", plain, _SKELETON_OPTIONS)
    kinds = [os.stat(tree).st_mode for _, tree in trees]
    for (path, tree), mode in zip(trees, kinds, strict=True):
        target = skeleton + path
        os.makedirs(target if stat.S_ISDIR(mode) else os.path.dirname(target), 0o755, exist_ok=True)
        if not stat.S_ISDIR(mode):
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        kernel.attach_tree(tree, target)
        os.close(tree)
    for path, aim in links.items():
        os.symlink(aim, skeleton + path)
    for folder in ("/etc", "/proc", HOME):
        os.makedirs(skeleton + folder, 0o755, exist_ok=True)
    _write(f"{skeleton}/etc/passwd", _PASSWD, os.O_CREAT)
    _write(f"{skeleton}/etc/group", f"tool:x:{INSIDE_UID}:\n", os.O_CREAT)
    if spec.loopback:
        _write(f"{skeleton}/etc/hosts", f"127.0.0.1 localhost {_HOST_NAME}\n", os.O_CREAT)
        _write(f"{skeleton}/etc/nsswitch.conf", _NSSWITCH, os.O_CREAT)
    streams = {name: f"/proc/self/fd/{descriptor}" for descriptor, name in enumerate(("stdin", "stdout", "stderr"))}
    for name, aim in {"shm": HOME, "fd": "/proc/self/fd", **streams}.items():
        os.symlink(aim, f"{skeleton}/dev/{name}")
    if not os.path.exists(f"{skeleton}/tmp"):
        os.symlink(HOME, f"{skeleton}/tmp")
    options = f"mode=700,size={spec.scratch_bytes},nr_inodes={spec.scratch_files},uid={uid},gid={uid}"
    kernel.mount("tmpfs", skeleton + HOME, "tmpfs", plain | kernel.MS_NOATIME, options)
    has_proc = _mount_proc(f"{skeleton}/proc")
    os.chdir(skeleton)
    kernel.pivot_root(".", ".")
    kernel.unmount(".", kernel.MNT_DETACH)
    os.chdir("/")
    kernel.mount("none", "/", "", kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | plain)
    return has_proc


def outermost(paths: list[str]) -> list[str]:
    """The paths and their targets that are below none of the others, parents first."""
    kept: list[str] = []
    for path in sorted({os.path.realpath(path) for path in paths} | set(paths)):
        if not any(path == other or path.startswith(other.rstrip("/") + "/") for other in kept):
            kept.append(path)
    return kept


def _mount_proc(target: str) -> bool:
    flags = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    for options in ("hidepid=2,subset=pid", "hidepid=2"):
        try:
            kernel.mount("proc", target, "proc", flags, options)
        except OSError:
            continue
        return True
    return False  # if /proc is masked, as in most containers, the program has none


def _enter_landlock(spec: JailSpec, uid: int, home: str) -> dict[str, Any]:
    keep = 0
    facts: dict[str, Any] = {"own_uid": os.geteuid() == 0}
    if facts["own_uid"]:
        keep = _become(uid, spec.trees)
        facts["reads_as_root"] = bool(keep)
    _give_up_privileges(keep)
    devices = [f"/dev/{name}" for name in _DEVICES]
    readable = [*spec.trees, *_SYSTEM_TREES, *_SYSTEM_FILES, *devices]
    facts["landlock_abi"] = landlock.restrict(readable, [home, "/dev/null"])
    return facts


def _become(uid: int, trees: list[str]) -> int:
    """Change from root to `uid`; returns the capability that must stay to read the interpreter.

    Only root can read a virtual environment below a 0700 home. CAP_DAC_READ_SEARCH allows reading it,
    and Landlock (set right after) confines that to the interpreter's read-only trees.
    """
    kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if all(os.access(tree, os.R_OK | os.X_OK) for tree in trees):
        return 0
    keep = 1 << kernel.CAP_DAC_READ_SEARCH
    try:
        kernel.set_capabilities(keep)
    except OSError as error:
        blind = next(tree for tree in trees if not os.access(tree, os.R_OK | os.X_OK))
        raise OSError(
            errno.EACCES,
            f"uid {uid} cannot read {blind}; move the environment out of the private home, or run as who owns it",
        ) from error
    return keep


def _give_up_privileges(keep: int) -> None:
    kernel.empty_bounding_set()
    kernel.set_capabilities(keep)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)


def _set_limits(spec: JailSpec, *, own_uid: bool) -> None:
    """The limits that are the same for every program; a program can only lower them."""
    files = spec.scratch_bytes
    bounds = [
        (resource.RLIMIT_CORE, 1),  # no core dumps; 0 is ignored if core_pattern is a pipe, 1 is not
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_FSIZE, files),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 256),
        (resource.RLIMIT_RTPRIO, 0),
    ]
    if own_uid:  # counted per uid: a shared uid has other processes too
        bounds.append((resource.RLIMIT_NPROC, spec.max_threads))
    for name, bound in bounds:
        _, hard = resource.getrlimit(name)
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(name, (bound, bound))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # PID 1 does not receive signals that it has no handler for


def _write(path: str, text: str, flags: int = 0, folder: int | None = None) -> None:
    descriptor = os.open(path, os.O_WRONLY | flags, 0o644, dir_fd=folder)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
