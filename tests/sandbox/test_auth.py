"""Which requests are allowed, what a retry gets, and what the table of system calls says; without a pool."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar_ray.outcome import Outcome
from sandbox.http import auth
from sandbox.http.answers import AnswerCache, OtherCall
from sandbox.jail import seccomp, system_calls
from sandbox.request import ExecutionRequest, ExecutionResult

NAMES = auth.own_names(("node-7.cluster",))
GOOD = {"Host": "127.0.0.1:8088", "Content-Type": "application/json"}


def ask(method: str = "POST", path: str = "/run", token: str = "", **headers: str) -> int:
    sent = GOOD | {name.replace("_", "-"): value for name, value in headers.items()}
    refused = auth.refusal(method, path, sent, token=token, names=NAMES)
    return 200 if refused is None else refused.status


@pytest.mark.parametrize(
    "host, status",
    [
        ("127.0.0.1", 200),
        ("[::1]:8088", 200),
        ("10.1.2.3:8088", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("node-7.cluster", 200),
        ("node-7.cluster.", 200),
        ("node-7.cluster.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost@evil.example", 421),
        ("evil.example@localhost", 421),
        ("localhost#.evil.example", 421),
        ("127.1", 421),
        ("2130706433", 421),
        ("evil.example", 421),
        ("", 421),
        ("[", 421),
    ],
)
def test_a_request_is_addressed_to_a_name_of_ours(host: str, status: int):
    assert ask(Host=host) == status
    assert ask("GET", "/metrics", Host=host) == status


def test_an_origin_is_the_servers_own_or_none():
    assert ask(Origin="http://127.0.0.1:8088") == 200
    for origin in ("http://127.0.0.1", "http://127.0.0.1:8089", "https://evil.example", "null", "", "x", "http://["):
        assert ask(Origin=origin) == 403


def test_a_token_is_asked_for_first_and_of_everything_but_ping():
    assert ask(token="secret", Host="evil.example") == 401
    assert ask(token="secret", Authorization="Bearer secret") == 200
    assert ask(token="secret", Authorization="Bearer secretx") == 401
    assert ask("GET", "/ping", token="secret") == 200
    assert ask("GET", "/metrics", token="secret") == 401


def test_an_empty_post_is_not_a_cross_site_program():
    assert ask(Content_Type="", Content_Length="0") == 200
    assert ask(Content_Type="", Content_Length="0", Transfer_Encoding="chunked") == 415
    assert ask(Content_Type="") == 415
    assert ask(Content_Type="APPLICATION/MSGPACK") == 200


@given(
    st.dictionaries(st.sampled_from(["Host", "Origin", "Content-Type", "Authorization", "Sec-Fetch-Site"]), st.text())
)
def test_any_headers_are_judged(headers: dict[str, str]):
    refused = auth.refusal("POST", "/run", headers, token="t", names=NAMES)
    assert refused is not None and refused.status in (401, 403, 415, 421)


@pytest.mark.parametrize("host, ours", [("127.0.0.2", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)])
def test_loopback_is_what_only_this_machine_reaches(host: str, ours: bool):
    assert auth.is_loopback(host) is ours
    assert not auth.is_loopback("example.com")


# Answers


def request(call_id: str, code: str = "1") -> ExecutionRequest:
    return ExecutionRequest(code=code, call_id=call_id)


class Submitted:
    """A pool whose calls end when the test says so."""

    def __init__(self) -> None:
        self.futures: list[asyncio.Future[ExecutionResult]] = []

    def __call__(self) -> asyncio.Future[ExecutionResult]:
        self.futures.append(asyncio.get_running_loop().create_future())
        return self.futures[-1]

    def end(self, stdout: str = "") -> None:
        self.futures[-1].set_result(ExecutionResult(outcome=Outcome.OK, stdout=stdout))


async def test_an_id_is_run_once_and_for_one_program():
    answers, pool = AnswerCache(), Submitted()
    first = answers.get(request("a"), pool)
    assert answers.get(request("a"), pool) is first and len(pool.futures) == 1
    with pytest.raises(OtherCall, match="call_id"):
        answers.get(request("a", code="2"), pool)
    pool.end("x")
    await asyncio.sleep(0)
    assert answers.get(request("a"), pool) is first and len(pool.futures) == 1


async def test_answers_are_bounded_by_number_and_by_size():
    answers, pool = AnswerCache(max_answers=3, max_bytes=100_000), Submitted()
    for number in range(10):
        answers.get(request(str(number)), pool)
        pool.end()
        await asyncio.sleep(0)
        assert len(answers) <= 3
    for number in range(10):
        answers.get(request(f"big{number}"), pool)
        pool.end("x" * 20_000)
        await asyncio.sleep(0)
        assert answers.kept_bytes <= 100_000
    answers.get(request("big9"), pool)
    assert len(pool.futures) == 20  # the last is still known


async def test_our_failure_is_not_remembered():
    answers, pool = AnswerCache(), Submitted()
    failed = answers.get(request("a"), pool)
    pool.futures[-1].set_exception(RuntimeError("lost"))
    await asyncio.sleep(0)
    assert failed.exception() is not None
    answers.get(request("a"), pool)
    assert len(pool.futures) == 2


# System calls


def test_every_system_call_has_a_number_a_known_rule_and_a_reason():
    table = system_calls.table()
    rules = {
        system_calls.FREE,
        system_calls.NOTHING,
        system_calls.JUDGED,
        system_calls.OWNED,
        system_calls.PRIVATE,
        system_calls.WORKER,
        system_calls.PROCESSES,
        system_calls.COMMAND,
    }
    assert {call.rule for call in table} == rules and all(call.reason for call in table)
    assert len({call.name for call in table}) == len(table)
    numbers = [call.number for call in table if call.number is not None]
    assert len(set(numbers)) == len(numbers)


NOBODY = seccomp.Reach(processes=False, own_pids=False, own_uid=False, own_files=False)
PRIVATE = seccomp.Reach(processes=False, own_pids=True, own_uid=True, own_files=True)

COMMAND = PRIVATE._replace(processes=True, command=True)


def decide(program: list[seccomp.Instruction], nr: int, *arguments: int) -> int:
    """Run a filter as the kernel would."""
    record = [nr, seccomp._AUDIT_ARCH[seccomp.platform.machine()], 0, 0]
    for argument in (*arguments, *[0] * (6 - len(arguments))):
        record += [argument & 0xFFFFFFFF, argument >> 32]
    at = held = 0
    while True:
        code, jump, other, k = program[at]
        k = 4242 if k == seccomp.OWN_PID else k
        if code == seccomp._RET:
            return k
        if code == seccomp._LD_W_ABS:
            held = record[k // 4]
        elif code == seccomp._AND:
            held &= k
        else:
            holds = {seccomp._JEQ: held == k, seccomp._JGE: held >= k, seccomp._JSET: bool(held & k)}[code]
            at += jump if holds else other
        at += 1


def verdict(name: str, *arguments: int, reach: seccomp.Reach = PRIVATE) -> str:
    nr = system_calls.numbers(command=True).get(name, 100_000)
    programs = (seccomp.base_program(command=reach.command), seccomp.reach_program(reach))
    found = [decide(program, nr, *arguments) for program in programs]
    refused = [each for each in found if each != seccomp._ALLOW]
    return "allowed" if not refused else "nothing" if refused[0] == seccomp._ERRNO else "refused"


@pytest.mark.parametrize(
    "name, arguments, with_all, with_little",
    [
        ("read", (0, 0, 10), "allowed", "allowed"),
        ("fsync", (3,), "nothing", "nothing"),
        ("flock", (3, 2), "nothing", "nothing"),
        ("fcntl", (3, 6), "nothing", "nothing"),
        ("fcntl", (3, 38), "nothing", "nothing"),
        ("fcntl", (3, 0), "allowed", "allowed"),
        ("fcntl", (3, 1032), "allowed", "allowed"),
        ("fcntl", (3, 1026), "refused", "refused"),
        ("fcntl", (3, 1024), "refused", "refused"),
        ("fcntl", (3, 1031), "refused", "refused"),
        ("fcntl", (3, 8), "refused", "refused"),
        ("preadv2", (3, 0, 0, 0, 0, 0), "allowed", "allowed"),
        ("preadv2", (3, 0, 0, 0, 0, 8), "refused", "refused"),
        ("openat", (3, 0, 0x0), "allowed", "allowed"),
        ("openat", (3, 0, 0x241), "allowed", "allowed"),
        ("openat", (3, 0, 0x200), "refused", "refused"),
        ("openat", (3, 0, 0x203), "refused", "refused"),
        ("openat", (3, 0, 0x410002), "allowed", "refused"),
        ("mmap", (0, 4096, 3, 0x22), "allowed", "allowed"),
        ("mmap", (0, 4096, 3, 0x40022), "refused", "refused"),
        ("madvise", (0, 0, 4), "allowed", "allowed"),
        ("madvise", (0, 0, 12), "refused", "refused"),
        ("madvise", (0, 0, 21), "refused", "refused"),
        ("fchmod", (3, 0), "allowed", "refused"),
        ("utimensat", (3, 0), "allowed", "refused"),
        ("fallocate", (3, 0), "allowed", "refused"),
        ("getxattr", (), "allowed", "refused"),
        ("llistxattr", (), "allowed", "refused"),
        ("clock_gettime", (1,), "allowed", "allowed"),
        ("clock_gettime", (~4242 << 3 | 2,), "refused", "refused"),
        ("clock_nanosleep", (~4242 << 3 | 2,), "refused", "refused"),
        ("timer_create", (~4242 << 3 | 2,), "refused", "refused"),
        ("getpriority", (0, 0), "allowed", "allowed"),
        ("getpriority", (0, 4242), "allowed", "allowed"),
        ("getpriority", (0, 1), "refused", "refused"),
        ("getpriority", (2, 0), "refused", "refused"),
        ("futex", (0, 0x80 | 9), "allowed", "allowed"),
        ("futex", (0, 0x80 | 6), "refused", "refused"),
        ("futex", (0, 0x180 | 13), "refused", "refused"),
        ("kill", (4242, 9), "allowed", "allowed"),
        ("kill", (1, 9), "allowed", "refused"),
        ("tkill", (4242, 9), "allowed", "refused"),
        ("clone", (0x3D0F00,), "allowed", "allowed"),
        ("clone", (17,), "refused", "refused"),
        ("clone", (0x3D0F00 & ~0x400,), "refused", "refused"),
        ("clone", (0x10000000 | 0x10000,), "refused", "refused"),
        ("clone3", (), "refused", "refused"),
        ("execve", (), "refused", "refused"),
        ("sendmsg", (), "refused", "refused"),
        ("pidfd_open", (), "refused", "refused"),
        ("prctl", (15,), "allowed", "allowed"),
        ("prctl", (4,), "refused", "refused"),
        ("prctl", (22,), "refused", "refused"),
        ("prctl", (1,), "refused", "refused"),
        ("prlimit64", (0,), "allowed", "allowed"),
        ("prlimit64", (4242,), "allowed", "allowed"),
        ("prlimit64", (1,), "refused", "refused"),
        ("getpgid", (1,), "refused", "refused"),
        ("socketpair", (1, 0x80001), "allowed", "allowed"),
        ("socketpair", (1, 2), "refused", "refused"),
        ("socketpair", (2, 1), "refused", "refused"),
        ("ioctl", (1, 0x541B), "allowed", "allowed"),
        ("ioctl", (1, 0x5412), "refused", "refused"),
        ("membarrier", (8,), "allowed", "allowed"),
        ("membarrier", (1,), "refused", "refused"),
        ("no such call", (), "refused", "refused"),
    ],
)
def test_arguments_are_judged(name: str, arguments: tuple[int, ...], with_all: str, with_little: str):
    assert verdict(name, *arguments) == with_all
    assert verdict(name, *arguments, reach=NOBODY) == with_little


@pytest.mark.parametrize(
    "name, arguments, expected",
    [
        ("fchmod", (3, 0o755), "allowed"),
        ("fchmod", (3, 0o4755), "refused"),
        ("fchmodat", (3, 0, 0o2755), "refused"),
        ("openat", (3, 0, 0o101, 0o644), "allowed"),
        ("openat", (3, 0, 0o101, 0o2644), "refused"),
        ("openat", (3, 0, 0, 0o4755), "allowed"),  # without O_CREAT there is no mode
        ("openat", (3, 0, 0o20200002), "refused"),
    ],
)
def test_on_a_shared_disk_no_file_is_nameless_or_lends_its_uid(name: str, arguments: tuple[int, ...], expected: str):
    assert verdict(name, *arguments, reach=PRIVATE._replace(own_files=False)) == expected
    assert verdict(name, *arguments) == "allowed"


def test_a_program_with_processes_may_start_some_but_no_namespace():
    many = PRIVATE._replace(processes=True)
    assert verdict("clone", 17, reach=many) == verdict("execve", reach=many) == "allowed"
    assert verdict("clone", 17 | 0x20000000, reach=many) == "refused"


def test_a_command_has_streams_and_datagrams_of_two_families_and_a_program_none():
    inet, unix, netlink, stream, raw, cloexec = 2, 1, 16, 1, 3, 0o2000000
    allowed = [("socket", inet, stream | cloexec), ("socket", unix, 2), ("connect", 3), ("setsockopt", 3, 6, 1)]
    refused = [("socket", netlink, stream), ("socket", inet, raw), ("socket", 10, stream), ("setsockopt", 3, 41, 1)]
    for name, *arguments in [*allowed, ("setsid",)]:
        assert verdict(name, *arguments, reach=COMMAND) == "allowed", name
        assert verdict(name, *arguments) == "refused", name
    for name, *arguments in [*refused, ("clone", 17 | 0x20000000), ("ptrace",), ("io_uring_setup",)]:
        assert verdict(name, *arguments, reach=COMMAND) == "refused", (name, arguments)


def test_what_is_judged_is_judged_and_what_is_not_known_does_not_exist():
    for call in system_calls.table():
        if call.rule == system_calls.JUDGED and call.number is not None:
            outcomes = {
                verdict(call.name, *[value] * 6, reach=NOBODY) for value in (0, 1, 2, 6, 17, 0x203, 4242, 0xFFFF_FFFF)
            }
            assert outcomes - {"allowed"}, call
    assert decide(seccomp.base_program(), 5000) == seccomp._ERRNO | 38
    assert decide(seccomp.base_program(), 0x40000000 | 1) == seccomp._ERRNO | 1
