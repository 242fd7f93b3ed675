"""Sends requests of all forms to a real server: no 500, no hang, no growth. `make fuzz-sandbox ARGS="--http"`.

Hypothesis draws bodies (right and wrong types, JSON, msgpack, compressed, garbage), framing (length, chunks, both,
wrong) and delivery (whole, in parts, aborted). Between rounds there are tests of several requests: many connections,
slow and huge bodies, repeated ids.
"""

import argparse
import contextlib
import gzip
import itertools
import json
import math
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from rstar_ray.config import SandboxConfig

MIB = 1 << 20
REPOSITORY = Path(__file__).resolve().parents[2]
ANSWER_S = 60.0  # for a complete request
# All allowed statuses; any other, such as 500, is a finding.
STATUSES = {200, 400, 403, 404, 405, 408, 413, 415, 417, 421, 422, 503}
ROUTES = ("/run", "/run/batch", "/run/long-batch", "/judge", "/judge/batch", "/judge/long-batch", "/execute")
EXAMPLES = 200  # per round
MAX_GROWTH_BYTES = 300 * MIB  # of the server: 64 MiB of cached answers, and memory that malloc retains
MAX_NEW_DESCRIPTORS = 16
STOP_S = 120.0  # the server drains for 10 s, and closes connections for up to 60 s
QUIET_S = 120.0  # limit until workers have started, and until connections and programs of a round are gone


class Server:
    """`python -m sandbox serve` in a separate process."""

    def __init__(self, *options: str) -> None:
        config = SandboxConfig(slots=2)
        self.num_processes = len(config.warm) * (1 + config.slots + config.spare_workers)  # warm servers, workers
        command = [sys.executable, "-m", "sandbox", "serve", "--port", "0", "--workers", str(config.slots), *options]
        self._process = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+) ", line)
        assert found, f"the server did not start: {line!r}"
        self.port = int(found[1])

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def descriptors(self) -> list[str]:
        """The names of its open descriptors."""
        found: list[str] = []
        for descriptor in Path(f"/proc/{self._process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found.append(str(descriptor.readlink()))
        return found

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=ANSWER_S)

    def get(self, route: str) -> str:
        """The body of an answer to a plain GET."""
        with self.connect() as connection:
            connection.sendall(f"GET {route} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            head, _, body = read_all(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        return body.decode()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        finally:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()


# Requests

HEAD = "POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SMALL = {"cpu_s": 0.05, "wall_s": 1.0}
CODES = (
    "print(1)",
    "1 + 1",
    "",
    "print(input())",
    "1/0",
    "import os\nos._exit(7)",
    "def f(:",
    "print('x' * 5000)",
    "\0",
)
NAMES = (
    *("type", "solution", "input", "expected_output", "submissions", "sub_id", "code", "stdin", "limits", "call_id"),
    *("language", "seed", "trusted", "cpu_s", "wall_s", "memory_bytes", "stdout_chars", "output_bytes", ""),
)
NUMBERS = st.sampled_from([0, -1, 1, 0.0, 1e308, math.nan, math.inf, 1 << 31, 1 << 63, 10**400, True])
TEXTS = st.one_of(st.text(max_size=20), st.sampled_from(["\ud800", "\0", "x" * 5000, "python", "cpp", *CODES]))
VALUES = st.recursive(
    st.one_of(st.none(), NUMBERS, TEXTS, st.binary(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.sampled_from(NAMES), TEXTS), inner, max_size=5)
    ),
    max_leaves=12,
)


def mostly(right: "st.SearchStrategy[Any]") -> "st.SearchStrategy[Any]":
    """A value of the right kind nine times of ten."""
    return st.integers(0, 9).flatmap(lambda drawn: VALUES if drawn == 9 else right)


LIMITS = st.one_of(
    st.just(SMALL),
    st.dictionaries(st.sampled_from(NAMES[-6:]), NUMBERS, max_size=3),
    st.just({**SMALL, "memory_bytes": 64 * MIB}),
)
SUBMISSION = st.fixed_dictionaries(
    {"type": mostly(st.just("python")), "solution": mostly(st.sampled_from(CODES))},
    optional={"input": mostly(TEXTS), "expected_output": mostly(TEXTS), "sub_id": VALUES, "extra": VALUES},
)
BATCH = st.fixed_dictionaries(
    {"submissions": mostly(st.lists(mostly(SUBMISSION), max_size=6))}, optional={"type": VALUES, "sub_id": VALUES}
)
REQUEST = st.fixed_dictionaries(
    {"code": mostly(st.sampled_from(CODES)), "limits": mostly(LIMITS)},
    optional={
        "call_id": mostly(st.sampled_from(["a", "b", "", "\ud800", "x" * 3000])),
        "stdin": mostly(TEXTS),
        "seed": mostly(st.integers(0, 5)),
        "language": mostly(st.sampled_from(["python", "cpp"])),
    },
)
KINDS = (
    "application/json",
    "application/msgpack",
    "application/x-msgpack",
    "text/plain",
    "",
    "application/json;x=\xff",
)


@dataclass(frozen=True, slots=True)
class Sent:
    """One request as bytes, in the parts in which it is sent."""

    parts: tuple[bytes, ...]
    whole: bool  # it is complete by its framing, so it must be answered


@st.composite
def requests(draw: Any) -> Sent:
    """A random request, usually almost valid."""
    route = draw(st.sampled_from(ROUTES))
    data = draw(BATCH if "batch" in route else REQUEST if route == "/execute" else SUBMISSION)
    kind = draw(st.sampled_from(KINDS if draw(st.integers(0, 9)) == 9 else KINDS[:2]))
    body = _encoded(data, kind) if draw(st.integers(0, 9)) < 9 else draw(st.binary(max_size=300))
    coding, body = draw(_codings(body))
    framing, framed, whole = draw(_framings(body))
    method = draw(st.sampled_from(["POST"] * 9 + ["GET", "PUT", "OPTIONS", "HEAD", "DELETE", "X", "post"]))
    path = draw(st.sampled_from([route] * 9 + ["/", "/none", "/run/", "/%00", "/run?x=" + "y" * 500, "*", "//run"]))
    accept = draw(st.sampled_from(["", "Accept: application/msgpack\r\n", "Accept: \xff\r\n"]))
    extra = draw(st.sampled_from(["", "", "", "Expect: 100-continue\r\n", "X: " + "y" * 2000 + "\r\n", "Range: x\r\n"]))
    lines = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{accept}{extra}{coding}{framing}"
    raw = (lines + "Connection: close\r\n\r\n").encode("latin-1") + framed
    if draw(st.integers(0, 7)) == 7:
        raw, whole = raw[: draw(st.integers(0, len(raw)))], False
    cuts = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=4)))
    ends = [0, *cuts, len(raw)]
    return Sent(tuple(raw[a:b] for a, b in itertools.pairwise(ends)), whole)


def _encoded(data: Any, kind: str) -> bytes:
    try:
        if "msgpack" in kind:
            packed = msgpack.packb(data, unicode_errors="surrogatepass")
            assert isinstance(packed, bytes)
            return packed
        return json.dumps(data, default=repr).encode()
    except (OverflowError, ValueError, TypeError):
        return repr(data).encode("utf-8", "replace")


@st.composite
def _codings(draw: Any, body: bytes) -> tuple[str, bytes]:
    sort = draw(st.integers(0, 15))
    if sort == 12:
        return "Content-Encoding: gzip\r\n", gzip.compress(body)
    if sort == 13:
        return "Content-Encoding: deflate\r\n", zlib.compress(body)
    if sort == 14:
        return "Content-Encoding: gzip\r\n", gzip.compress(b"[" * 3_000_000)
    if sort == 15:
        return f"Content-Encoding: {draw(st.sampled_from(['gzip', 'deflate', 'br', 'zstd', 'x', '']))}\r\n", body
    return "", body


@st.composite
def _framings(draw: Any, body: bytes) -> tuple[str, bytes, bool]:
    sort = draw(st.integers(0, 15))
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:7], body[7:]) if part) + b"0\r\n\r\n"
    if sort < 8:
        return f"Content-Length: {len(body)}\r\n", body, True
    if sort < 12:
        return "Transfer-Encoding: chunked\r\n", chunked, True
    if sort == 12:
        return f"Content-Length: {len(body)}\r\nTransfer-Encoding: chunked\r\n", chunked, True
    if sort == 13:
        wrong = draw(
            st.sampled_from([b"zz\r\n", b"-1\r\n", b"ffffffffffffffffff\r\n", b"1;x=y\r\nab\r\n", b"\r\n\r\n"])
        )
        return "Transfer-Encoding: chunked\r\n", wrong + chunked, False
    if sort == 14:
        length = draw(st.sampled_from(["-1", "x", "1e3", str(len(body) + 5), "1" * 30, str(1 << 30), "0, 1"]))
        return f"Content-Length: {length}\r\n", body, False
    return "", body, True


# Answers


def read_all(connection: socket.socket) -> bytes:
    """All bytes until the server closes. Raises TimeoutError."""
    data = bytearray()
    try:
        while part := connection.recv(65536):
            data += part
    except ConnectionError:
        pass
    return bytes(data)


def statuses(data: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.[01] (\d{3}) ", data)]


def exchange(server: Server, sent: Sent, seen: "Counter[int]") -> None:
    """Send one request and check the answer. Raises AssertionError."""
    with server.connect() as connection:
        try:
            for part in sent.parts:
                connection.sendall(part)
            if not sent.whole:
                connection.shutdown(socket.SHUT_WR)  # end before the framing's end
        except OSError:
            pass  # refused before all of it was sent
        try:
            data = read_all(connection)
        except TimeoutError as error:
            raise AssertionError(f"no end within {ANSWER_S:g} s") from error
    found = [status for status in statuses(data[:4096]) if status != 100]
    assert set(found) <= STATUSES, f"{found}: {data[:500]!r}"
    assert found or not sent.whole, "no answer"
    seen.update(found or [0])


@dataclass
class Round:
    """One round with one server: random requests, then tests of several requests."""

    server: Server
    seen: "Counter[int]" = field(default_factory=lambda: Counter[int]())

    def random(self, number: int, examples: int) -> None:
        """Requests drawn by hypothesis from seed `number`."""

        @seed(number)
        @settings(max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(requests())
        def every_request_is_answered(sent: Sent) -> None:
            exchange(self.server, sent, self.seen)

        every_request_is_answered()

    def crowd(self, connections: int) -> None:
        """Many connections without a request, or with an incomplete one; others are served meanwhile."""
        held: list[socket.socket] = []
        try:
            for number in range(connections):
                held.append(self.server.connect())
                if number % 2:
                    held[-1].sendall(b"POST /run HTTP/1.1\r\nHost: localhost\r\nContent-Ty")
            self.answers()
        finally:
            for each in held:
                each.close()

    def ids(self, number: int) -> None:
        """One id from many clients: one run and one answer, and an error for another program with the same id."""
        answers: list[tuple[str, int, bytes]] = []

        def ask(code: str) -> None:
            body = json.dumps({"code": code, "call_id": f"shared-{number}"}).encode()
            head = HEAD.format(route="/execute") + f"Content-Length: {len(body)}"
            with self.server.connect() as connection:
                connection.sendall(head.encode() + b"\r\nConnection: close\r\n\r\n" + body)
                data = read_all(connection)
            answers.append((code, statuses(data)[0], data.rpartition(b"\r\n\r\n")[2]))

        mine, other = "import os\nprint(os.urandom(8).hex())", "print('other')"
        first = threading.Thread(target=ask, args=(mine,))
        first.start()
        first.join()
        rest = [threading.Thread(target=ask, args=(code,)) for code in [mine, other] * 10]
        for thread in rest:
            thread.start()
        for thread in rest:
            thread.join()
        assert {status for code, status, _ in answers if code == mine} == {200}, answers
        assert len({json.loads(data)["stdout"] for code, _, data in answers if code == mine}) == 1, answers
        assert {status for code, status, _ in answers if code == other} == {422}, answers

    def huge(self, size: int, at_once: int) -> None:
        """Bodies of `size` bytes in chunks, several at once: refused or read, never retained."""
        failed: list[str] = []

        def send() -> None:
            head = (HEAD.format(route="/run") + "Transfer-Encoding: chunked\r\n\r\n").encode()
            chunk = b"100000\r\n" + b" " * MIB + b"\r\n"
            with self.server.connect() as connection:
                try:
                    connection.sendall(head)
                    for _ in range(size // MIB):
                        connection.sendall(chunk)
                        if select.select([connection], [], [], 0)[0]:
                            break
                    else:
                        connection.sendall(b"0\r\n\r\n")
                except OSError:
                    pass
                try:
                    found = statuses(read_all(connection)[:200])
                except TimeoutError:  # nothing would catch an exception in a thread
                    failed.append(f"no end within {ANSWER_S:g} s")
                    return
            self.seen.update(found or [0])
            if not set(found) <= STATUSES:
                failed.append(f"{found}")

        threads = [threading.Thread(target=send) for _ in range(at_once)]
        for thread in threads:
            thread.start()
        self.answers()
        for thread in threads:
            thread.join()
        assert not failed, failed

    def slow(self, clients: int, seconds: float) -> None:
        """Bodies that arrive byte by byte; others are served meanwhile."""
        held = [self.server.connect() for _ in range(clients)]
        try:
            for each in held:
                each.sendall((HEAD.format(route="/run") + "Content-Length: 100000\r\n\r\n").encode())
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                for each in held:
                    try:
                        each.sendall(b" ")
                    except OSError:
                        continue
                time.sleep(0.5)
                self.answers()
        finally:
            for each in held:
                each.close()

    def together(self, number: int) -> None:
        """One kind of test with many clients, by the round's number."""
        if number % 4 == 0:
            self.crowd(1500)
        elif number % 4 == 1:
            self.slow(20, 5.0 if number % 8 == 1 else 65.0)
        else:
            self.huge(*((1024 * MIB, 2) if number % 4 == 2 else (200 * MIB, 6)))

    def answers(self) -> None:
        """Check that a valid request is answered."""
        started = time.monotonic()
        assert json.loads(self.server.get("/ping")) == "pong"
        assert time.monotonic() - started < ANSWER_S / 2


def fuzz(options: argparse.Namespace) -> int:
    """Run rounds until the time limit; prints a JSON line, returns 1 if there is a finding."""
    server = Server()
    started = time.monotonic()
    seen: Counter[int] = Counter()
    findings: list[str] = []
    rounds = 0
    try:
        settled_at = settled(server)
        while not findings and rounds < (options.rounds or rounds + (time.monotonic() - started < options.seconds)):
            number = options.seed + options.first + rounds
            one = Round(server, seen)
            try:
                one.random(number, EXAMPLES)
                one.ids(number)
                one.together(options.first + rounds)
                check(server, settled_at)
            except Exception as error:
                again = f"--http --seed {options.seed} --first {options.first + rounds} --rounds 1"
                findings.append(f'{type(error).__name__}: {error}; make fuzz-sandbox ARGS="{again}"')
            rounds += 1
        grown = server.resident_bytes() - settled_at[1] if server.alive else 0
    finally:
        server.stop()
    print(
        json.dumps(
            {
                "fuzz": "http",
                "seed": options.seed,
                "rounds": rounds,
                "requests": sum(seen.values()),
                "statuses": {str(status): count for status, count in sorted(seen.items())},
                "seconds": round(time.monotonic() - started, 1),
                "grown_mib": grown // MIB,
                "findings": findings,
            }
        ),
        flush=True,
    )
    return 1 if findings else 0


def settled(server: Server) -> tuple[int, int]:
    """Descriptors and resident bytes of an idle server, all of whose processes have started."""
    end = time.monotonic() + QUIET_S
    while sum("pidfd" in name for name in server.descriptors()) < server.num_processes:  # one of each process
        assert time.monotonic() < end, f"processes are missing after {QUIET_S:g} s: {server.descriptors()}"
        time.sleep(0.1)
    return len(server.descriptors()), server.resident_bytes()


def check(server: Server, before: tuple[int, int]) -> None:
    """Wait until nothing runs, waits, is open or has grown. Raises AssertionError."""
    end = time.monotonic() + QUIET_S
    while True:
        assert server.alive, "the server ended"
        queue = json.loads(server.get("/status"))["queue"]
        metrics = dict(line.rsplit(" ", 1) for line in server.get("/metrics").splitlines() if line[:1] != "#")
        outcomes = sum(float(value) for name, value in metrics.items() if name.startswith("sandbox_calls_total"))
        left = float(metrics["sandbox_accepted_total"]) - outcomes - float(metrics["sandbox_failed_total"])
        descriptors, resident = len(server.descriptors()), server.resident_bytes()
        wrong = {
            "waiting": queue,
            "running": float(metrics["sandbox_running"]),
            "descriptors": max(0, descriptors - before[0] - MAX_NEW_DESCRIPTORS),
            "bytes": max(0, resident - before[1] - MAX_GROWTH_BYTES),
            "workers lost": float(metrics["sandbox_workers_lost_total"]),
        }
        if not any(wrong.values()):
            return
        assert time.monotonic() < end, f"{wrong} after {QUIET_S:g} s; {left:g} calls have no end in /metrics"
        time.sleep(0.5)
