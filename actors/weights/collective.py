"""Weights from one learner rank to the ranks of many engines at once: a broadcast, by NCCL or RCCL, or gloo on a CPU.

The group is one of its own, made around a store: learner and vLLM both have their own default group already, which must
not know of it. Nothing here is vLLM's: the same code runs in a learner's rank and in an engine's worker.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]  # torch documents both

from rstar_ray.errors import DeadlineExceeded, TransferError

SENDER = 0  # its place in the group
POLL_S = 0.0005
SPARE = 4
"""Torch's own deadlines are so many times ours: NCCL's ends the process without a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the members of a group find each other. Plain values: it crosses processes as a dictionary."""

    host: str
    port: int
    place: int  # of the first rank of the engine that is told of it
    size: int  # of the group: the sender, and every rank of every engine
    deadline_s: float

    def payload(self) -> dict[str, Any]:
        """Undone by `Meeting(**payload)`."""
        return asdict(self)


def open_store(host: str, size: int, deadline_s: float) -> TCPStore:
    """At the sender: a port that listens from now on."""
    return TCPStore(host, 0, size, is_master=True, timeout=timedelta(seconds=deadline_s), wait_for_workers=False)


class Collective:
    """One member's end of the group."""

    def __init__(self, store: Any, place: int, size: int, device: torch.device, deadline_s: float) -> None:
        """Returns once all are there. Raises `TransferError` or `DeadlineExceeded` where they are not."""
        self._deadline_s = deadline_s
        self._device = device
        self._store = store  # a sender's listens as long as this lives
        try:
            self._group = _group(PrefixStore("weights", store), place, size, device, deadline_s)
        except RuntimeError as failed:
            raise TransferError(f"{size} processes did not meet for new weights: {_line(failed)}") from failed
        try:  # both connect with the first collective at the latest: what is wrong is then not a bucket's doing
            self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), "that all are there")
        except BaseException:
            self.leave()  # what nobody waits for any more, NCCL would end the process for
            raise

    @classmethod
    def join(cls, meeting: Meeting, rank: int, device: torch.device) -> "Collective":
        """As an engine's rank, by its number in the engine."""
        deadline = timedelta(seconds=meeting.deadline_s)
        try:
            store = TCPStore(meeting.host, meeting.port, meeting.size, is_master=False, timeout=deadline)
        except RuntimeError as failed:
            raise TransferError(f"nobody listens for engines at {meeting.host}: {_line(failed)}") from failed
        return cls(store, meeting.place + rank, meeting.size, device, meeting.deadline_s)

    def broadcast(self, data: Tensor, reason: str, check: Callable[[], None] = lambda: None) -> None:
        """The sender's bytes into everybody's `data`. Raises `DeadlineExceeded`, `TransferError`, or what `check` does.

        `check` is called again and again while others are waited for. After a failure the group is of no use.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        until = time.monotonic() + self._deadline_s
        try:
            work = self._group.broadcast([data], options)
            while not work.is_completed():
                check()
                if time.monotonic() > until:
                    raise DeadlineExceeded("weights", "the other end of a broadcast", reason, self._deadline_s)
                time.sleep(POLL_S)
            work.wait()
        except RuntimeError as failed:
            raise TransferError(f"a broadcast of {reason} broke off: {_line(failed)}") from failed
        if self._device.type != "cpu":
            torch.cuda.current_stream(self._device).synchronize()

    def leave(self) -> None:
        """Let the others fail at once where they wait for this one."""
        self._group.abort()


def _group(store: Any, place: int, size: int, device: torch.device, deadline_s: float) -> Any:
    spare = timedelta(seconds=SPARE * deadline_s)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, place, size, spare)
    options = dist.ProcessGroupNCCL.Options()  # ROCm's RCCL has NCCL's name in torch
    options._timeout = spare
    return dist.ProcessGroupNCCL(store, place, size, options)


def _line(failed: Exception) -> str:
    return " ".join(str(failed).split())[:200]
