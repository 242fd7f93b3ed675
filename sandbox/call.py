"""Accepted calls, the fair queue in which they wait, and the message that a worker receives."""

import asyncio
import sys
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from sandbox.isolation import IsolationLevel
from sandbox.jail import cpp_program, cut, preload, wire
from sandbox.outcomes import kept_bytes
from sandbox.processes import WorkerHandle
from sandbox.request import MAX_CODE_CHARS, ExecutionRequest, ExecutionResult

T = TypeVar("T")


class FairQueue(Generic[T]):
    """First in, first out per caller; round-robin between callers, so that no caller starves another."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}
        self._turns: deque[str] = deque()

    def __bool__(self) -> bool:
        return bool(self._turns)

    def push(self, caller: str, item: T) -> None:
        """Append an item to the caller's items."""
        self._of(caller).append(item)

    def push_front(self, caller: str, item: T) -> None:
        """Queue an item that has already waited, before all others."""
        self._of(caller).appendleft(item)
        self._turns.remove(caller)
        self._turns.appendleft(caller)

    def first(self) -> T:
        """The item that `pop` would return."""
        return self._waiting[self._turns[0]][0]

    def pop(self) -> T:
        """Remove and return the next item of the caller whose turn it is."""
        caller = self._turns.popleft()
        own = self._waiting[caller]
        item = own.popleft()
        if own:
            self._turns.append(caller)
        else:
            del self._waiting[caller]
        return item

    def _of(self, caller: str) -> deque[T]:
        own = self._waiting.get(caller)
        if own is None:
            own = self._waiting[caller] = deque()
            self._turns.append(caller)
        return own


MAX_TEXT_BYTES = 1024 * 1024 * 1024  # limit for the text of all waiting calls, as one call may have 64 MiB
NOTHING = ExecutionRequest(code="")


@dataclass(slots=True, eq=False)
class Call:
    """One accepted call."""

    request: ExecutionRequest  # NOTHING after the call has ended
    caller: str
    number: int
    answer: asyncio.Future[ExecutionResult]
    waiting_since: float  # its acceptance, or the loss of its worker
    started_at: float = 0.0  # 0.0: still waiting
    attempts: int = 0
    worker: WorkerHandle | None = None
    text_bytes: int = 0  # while waiting


@dataclass(slots=True)
class Waiting:
    """Number of waiting calls, and the memory of their texts."""

    calls: int = 0
    text_bytes: int = 0

    def refusal(self, request: ExecutionRequest, most: int) -> str:
        """Why another call is refused; empty if it is accepted."""
        if self.calls >= most:
            return f"{self.calls} calls wait already; the queue holds no more"
        if self.calls and self.text_bytes + _text_bytes(request) > MAX_TEXT_BYTES:
            return f"waiting calls have {self.text_bytes >> 20} MiB of text; the queue holds no more"
        return ""

    def enter(self, call: Call) -> None:
        call.text_bytes = _text_bytes(call.request)
        self.calls += 1
        self.text_bytes += call.text_bytes

    def leave(self, call: Call) -> None:
        self.calls -= 1
        self.text_bytes -= call.text_bytes


def _text_bytes(request: ExecutionRequest) -> int:
    return sys.getsizeof(request.code) + sys.getsizeof(request.stdin)


def refusal(request: ExecutionRequest, level: IsolationLevel) -> str:
    """Why a program cannot be run at all; empty if it can."""
    if len(request.code) > MAX_CODE_CHARS:
        return f"The source has {len(request.code)} characters; at most {MAX_CODE_CHARS} are run."
    if request.language == "cpp" and level is not IsolationLevel.NAMESPACES:
        return f"C++ needs processes, which level {level} cannot contain."
    if request.language == "cpp" and cpp_program.compiler() is None:
        return "g++ is not installed."
    return ""


def preload_set_for(request: ExecutionRequest) -> str:
    """The preload set of the warm server for a request."""
    if request.trusted:
        return preload.VERIFY
    return preload.choose(request.code) if request.language == "python" else preload.LEAN


def message_for(request: ExecutionRequest, number: int) -> tuple[wire.CallHeader, bytes, bytes]:
    """Header, source and input that a worker receives for call `number`."""
    limits = request.limits
    source = request.code
    if request.language == "cpp":
        source = cpp_program.wrap(source, cpp_program.compiler() or "g++")
    code = source.encode("utf-8", "surrogatepass")
    stdin = request.stdin if isinstance(request.stdin, bytes) else request.stdin.encode("utf-8", "surrogatepass")
    out_head, out_tail = kept_bytes(limits.stdout_chars, cut.STDOUT_HEAD_SHARE)
    err_head, err_tail = kept_bytes(limits.stderr_chars, cut.STDERR_HEAD_SHARE)
    header = wire.CallHeader(
        kind=wire.CALL,
        flags=wire.PROCESSES_ALLOWED if request.language == "cpp" else 0,
        call_id=number,
        wall_s=limits.wall_s,
        cpu_s=limits.cpu_s,
        memory_bytes=limits.memory_bytes,
        output_bytes=limits.output_bytes,
        seed=-1 if request.seed is None else request.seed,
        code_bytes=len(code),
        stdin_bytes=len(stdin),
        out_head=out_head,
        out_tail=out_tail,
        err_head=err_head,
        err_tail=err_tail,
    )
    return header, code, stdin
