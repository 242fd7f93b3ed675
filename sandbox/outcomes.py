"""Turns a worker's report into the caller's result, and into the text that the model reads."""

import os
import signal

from rstar_ray.outcome import Outcome
from sandbox.jail import cut, wire
from sandbox.request import ExecutionRequest, ExecutionResult

CPU_REASON = "used all of its CPU time"
_REASONS = {
    wire.CPU_TIME: (Outcome.TIMEOUT, CPU_REASON),
    wire.WALL_TIME: (Outcome.TIMEOUT, "ran for too long"),
    wire.OUTPUT: (Outcome.OUTPUT_LIMIT, "printed too much"),
    wire.STORAGE: (Outcome.OUT_OF_MEMORY, "left too many or too large files"),
    wire.THREADS: (Outcome.OUT_OF_MEMORY, "started too many threads"),
}

TREE_OUT_OF_MEMORY = "asked for more memory, with all its processes and files, than it may have"


def kept_bytes(chars: int, head_share: float) -> tuple[int, int]:
    """Bytes of both ends of a stream that contain `chars` characters in any encoding of them."""
    head, tail = cut.head_and_tail(chars, head_share)
    return 4 * head, 4 * tail


def read_result(request: ExecutionRequest, data: memoryview) -> ExecutionResult:
    """Decode a RESULT message. Raises struct.error or ValueError if it is malformed."""
    seen = wire.unpack_result(data)
    parts: list[bytes] = []
    at = wire.RESULT_BYTES
    for length in (seen.out_head, seen.out_tail, seen.err_head, seen.err_tail, seen.value):
        parts.append(bytes(data[at : at + length]))
        at += length
    if at != len(data):
        raise ValueError(f"a result of {len(data)} bytes claims {at}")
    limits = request.limits
    out, out_cut = _text(parts[0], parts[1], seen.out_chars, limits.stdout_chars, cut.STDOUT_HEAD_SHARE)
    err, err_cut = _text(parts[2], parts[3], seen.err_chars, limits.stderr_chars, cut.STDERR_HEAD_SHARE)
    outcome, reason = judge(seen, limits.cpu_s)
    value, value_cut = _value(parts[4], seen.value_cut, limits.stdout_chars) if seen.out_bytes == 0 else ("", 0)
    signaled = os.WIFSIGNALED(seen.wait_status)
    return ExecutionResult(
        outcome=outcome,
        stdout=out,
        stderr=err,
        value=value,
        exit_status=None if signaled else os.waitstatus_to_exitcode(seen.wait_status),
        signal=os.WTERMSIG(seen.wait_status) if signaled else None,
        reason=reason,
        wall_s=seen.wall_s,
        cpu_s=seen.cpu_s,
        peak_memory_bytes=seen.peak_memory_bytes,
        stdout_cut_chars=out_cut,
        stderr_cut_chars=err_cut,
        value_cut_chars=value_cut,
        call_id=request.call_id,
    )


def judge(seen: wire.Result, cpu_s: float) -> tuple[Outcome, str]:
    """The outcome and its reason, from the wait status and the exceeded limit; `cpu_s`: the CPU time limit."""
    if os.WIFSIGNALED(seen.wait_status):
        number = os.WTERMSIG(seen.wait_status)
        if number == signal.SIGKILL and seen.ended_for in _REASONS:
            return _REASONS[seen.ended_for]
        if number == signal.SIGXCPU and seen.cpu_s >= 0.9 * cpu_s:  # the program may also have sent it to itself
            return _REASONS[wire.CPU_TIME]
        return Outcome.KILLED, f"ended by {_signal_name(number)}"
    if os.waitstatus_to_exitcode(seen.wait_status) == 0:
        return Outcome.OK, ""
    if seen.flags & wire.MEMORY_ERROR:
        return Outcome.OUT_OF_MEMORY, "asked for more memory than it may have"
    return Outcome.ERROR, ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _value(data: bytes, claimed: int, limit: int) -> tuple[str, int]:
    """The last expression's text and its number of missing characters; a program may forge both."""
    text = data.decode("utf-8", "replace")
    mark = cut.mark(claimed)
    if mark in text and len(text) <= limit + len(mark):
        return text, claimed
    return cut.cut_text(text, limit, cut.STDOUT_HEAD_SHARE)


def _text(head: bytes, tail: bytes, total_chars: int, limit: int, head_share: float) -> tuple[str, int]:
    if total_chars:
        return cut.join_kept(head, tail, total_chars, limit, head_share)
    return cut.cut_text(head.decode("utf-8", "replace"), limit, head_share)


def tool_text(result: ExecutionResult) -> str:
    """The text of a result: its output, otherwise the last expression's value; errors with their traceback."""
    parts = [text for text in (result.stdout or result.value, _trouble(result)) if text]
    return "\n".join(part.strip("\n") for part in parts)


def _trouble(result: ExecutionResult) -> str:
    if result.outcome is Outcome.OK:
        return ""
    note = _NOTES.get(result.outcome, "")
    if result.outcome is Outcome.KILLED:
        note = f"The program was {result.reason or 'ended by a signal'}."
    elif result.outcome is Outcome.ERROR and not result.stderr:
        note = f"The program exited with status {result.exit_status}."
    return "\n".join(text for text in (result.stderr.strip("\n"), note) if text)


_NOTES = {
    Outcome.TIMEOUT: "Execution timed out.",
    Outcome.OUT_OF_MEMORY: "Out of memory.",
    Outcome.OUTPUT_LIMIT: "The program printed too much and was ended.",
    Outcome.INVALID: "The program could not be run.",
}
