"""What a container without new namespaces, and with a masked /proc, refuses: said with the flags that hint it."""

import json
import os
import platform
from typing import Any

import pytest

from sandbox.isolation import Host, IsolationLevel, fix_for, obstacles
from tests.sandbox.as_user import USERS, folders_opened, start
from tests.sandbox.in_container import mask_proc

ROOT = os.geteuid() == 0
pytestmark = [
    pytest.mark.isolated,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="its filters have the numbers of x86_64"),
]
masked = pytest.mark.skipif(not ROOT, reason="only root can cover parts of /proc")


def reached(user: str, place: str, level: str, *, covered: bool = True) -> dict[str, Any]:
    """What a pool in that place says; with /proc masked where we can."""
    open_folders = folders_opened()  # an image's environment may be read by everybody

    def first() -> None:
        if ROOT and user == "root":
            open_folders()
        if ROOT and covered:
            mask_proc()

    process = start(user, "tests.sandbox.in_container", place, level, first=first)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err[-2000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("user", USERS)
def test_where_a_container_refuses_namespaces_the_flags_that_fix_it_are_named(user: str):
    found = reached(user, "docker", "namespaces")
    assert found["seccomp"] == "2"
    assert "namespaces: PermissionError: [Errno 1] unshare: Operation not permitted" in found["refused"]
    for flag in ("--security-opt seccomp=unconfined", "seccompProfile.type: Unconfined", "--level landlock"):
        assert flag in found["refused"]
    assert found["refused"].endswith("The best level that works here is landlock.")


@pytest.mark.parametrize("user", USERS)
def test_landlock_holds_in_a_container_that_refuses_namespaces(user: str):
    found = reached(user, "docker", "landlock")
    assert (found["level"], found["contained"], found["ran"]) == ("landlock", 24, "42\n")


@masked
@pytest.mark.parametrize("user", USERS)
def test_with_a_masked_proc_namespaces_hold_and_programs_have_none_or_their_own(user: str):
    found = reached(user, "as we are", "namespaces")
    assert (found["level"], found["contained"], found["ran"]) == ("namespaces", 24, "42\n")
    assert found["facts"]["proc"] is (user == "root")  # the kernel shows others no /proc that is hidden from them


@pytest.mark.skipif(not ROOT, reason="only root can map many uids")
@pytest.mark.parametrize("level", ["namespaces", "landlock"])
def test_root_of_a_container_with_65536_uids_runs_programs(level: str):
    found = reached("root", "few uids", level, covered=False)
    assert (found.get("level"), found.get("ran")) == (level, "42\n"), found


@pytest.mark.skipif(not ROOT, reason="its limit is set by who is root in a namespace")
def test_where_the_host_allows_no_user_namespaces_its_switch_is_named():
    found = reached("other", "no user namespaces", "namespaces", covered=False)
    assert "No space left on device" in found["refused"]
    assert "sysctl -w user.max_user_namespaces=15000" in found["refused"]


@pytest.mark.parametrize(
    "host, flag",
    [
        (Host(seccomp="2"), "--security-opt seccomp=unconfined"),
        (Host(apparmor="docker-default (enforce)"), "--security-opt apparmor=unconfined"),
        (Host(most_user_namespaces="0"), "user.max_user_namespaces"),
        (Host(restricted_by_apparmor="1"), "kernel.apparmor_restrict_unprivileged_userns=0"),
        (Host(unprivileged="0"), "kernel.unprivileged_userns_clone=1"),
    ],
)
def test_each_obstacle_has_its_fix(host: Host, flag: str):
    (obstacle,) = obstacles(host)
    assert flag in obstacle and obstacle in fix_for(IsolationLevel.NAMESPACES, host)
