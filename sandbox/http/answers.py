"""Caches answers for retries: one run per `call_id`, bound to the program of its first request."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgpack

from sandbox.http.codec import request_to_data
from sandbox.limits import MIB
from sandbox.request import ExecutionRequest, ExecutionResult

MAX_ANSWERS = 4096
MAX_BYTES = 64 * MIB
_OVERHEAD_BYTES = 1024  # of an answer, besides its texts


class OtherCall(ValueError):
    """The id belongs to another program."""


@dataclass(slots=True)
class _Answer:
    """One call: its program, its future result, and the memory it holds."""

    digest: bytes
    result: asyncio.Future[ExecutionResult]
    kept_bytes: int = field(default=0)


class AnswerCache:
    """Recent calls, the oldest evicted first; calls that still run are never evicted."""

    def __init__(self, max_answers: int = MAX_ANSWERS, max_bytes: int = MAX_BYTES) -> None:
        self._max_answers = max_answers
        self._max_bytes = max_bytes
        self._known: OrderedDict[str, _Answer] = OrderedDict()
        self.kept_bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(
        self, request: ExecutionRequest, submit: Callable[[], asyncio.Future[ExecutionResult]]
    ) -> asyncio.Future[ExecutionResult]:
        """The future result of the call with the request's id; submits the request only if the id is new.

        Raises OtherCall if the id belongs to another request.
        """
        digest = _digest(request)
        known = self._known.get(request.call_id)
        if known is None:
            known = self._known[request.call_id] = _Answer(digest, submit())
            known.result.add_done_callback(lambda _: self._finished(request.call_id, known))
        elif known.digest != digest:
            raise OtherCall("call_id: already used by another program. Hint: use a new id for each program")
        return known.result

    def _finished(self, call_id: str, answer: _Answer) -> None:
        if self._known.get(call_id) is not answer:
            return
        if answer.result.cancelled() or answer.result.exception() is not None:
            del self._known[call_id]  # a failure of the system: a retry runs the program again
            return
        result = answer.result.result()
        texts = (result.stdout, result.stderr, result.value, call_id)
        answer.kept_bytes = _OVERHEAD_BYTES + 4 * sum(len(text) for text in texts)
        self.kept_bytes += answer.kept_bytes
        for oldest, held in list(self._known.items()):
            if self.kept_bytes <= self._max_bytes and len(self._known) <= self._max_answers:
                return
            if held.result.done():
                del self._known[oldest]
                self.kept_bytes -= held.kept_bytes


def _digest(request: ExecutionRequest) -> bytes:
    packed = msgpack.packb(request_to_data(request), unicode_errors="surrogatepass")
    assert isinstance(packed, bytes)
    return hashlib.sha256(packed).digest()
