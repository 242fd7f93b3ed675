"""Broadcasts weights from one learner rank to the ranks of all engines, by NCCL or RCCL, or gloo on a CPU.

The group is separate from the default groups of learner and vLLM. `Collective` runs in a learner's rank, where
`CollectiveTransfer` sends with it, and in an engine's workers. It does not depend on vLLM.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]  # torch documents both

from actors.weights.buckets import BucketPlan, as_rows, size_of
from actors.weights.tensors import ServedWeights, add_checksum
from actors.weights.transfer import EngineLine, EngineSeat, LoadedWeights, Publication, answer, raise_failed
from rstar_ray.errors import DeadlineExceeded, RStarError, TransferError, one_line

BY_BROADCAST = "nccl"  # a parcel's way of transfer

SENDER = 0  # rank of the sender in the group
POLL_S = 0.0005
SPARE = 4
"""Torch's deadlines are this multiple of ours, because NCCL ends the process without a message at its deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Address and size of a group. It holds plain values, because it is sent between processes as a dictionary."""

    host: str
    port: int
    place: int  # group rank of the first rank of the engine that receives this
    size: int  # members: the sender, and every rank of every engine
    deadline_s: float

    def payload(self) -> dict[str, Any]:
        """Undone by `Meeting(**payload)`."""
        return asdict(self)


def open_store(host: str, size: int, deadline_s: float) -> TCPStore:
    """Open the sender's store, on any free port; does not wait for the other members."""
    return TCPStore(host, 0, size, is_master=True, timeout=timedelta(seconds=deadline_s), wait_for_workers=False)


class Collective:
    """One member of the group."""

    def __init__(self, store: Any, place: int, size: int, device: torch.device, deadline_s: float) -> None:
        """Returns when all members have joined. Raises `TransferError` or `DeadlineExceeded` if they do not."""
        self._deadline_s = deadline_s
        self._device = device
        self._store = store  # the sender's store listens as long as this reference exists
        try:
            self._group = _group(PrefixStore("weights", store), place, size, device, deadline_s)
        except RuntimeError as failed:
            problem = f"{size} processes did not form a group for new weights: {one_line(failed)}"
            raise TransferError(problem) from failed
        try:  # members connect at the first collective; an error here is not attributed to a bucket
            self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), "the connection test")
        except BaseException:
            self.leave()  # NCCL would end the process for a collective that is never finished
            raise

    @classmethod
    def join(cls, meeting: Meeting, rank: int, device: torch.device) -> "Collective":
        """Join as a rank of an engine; `rank`: its number in the engine."""
        deadline = timedelta(seconds=meeting.deadline_s)
        try:
            store = TCPStore(meeting.host, meeting.port, meeting.size, is_master=False, timeout=deadline)
        except RuntimeError as failed:
            raise TransferError(f"no learner listens for engines at {meeting.host}: {one_line(failed)}") from failed
        return cls(store, meeting.place + rank, meeting.size, device, meeting.deadline_s)

    def broadcast(self, data: Tensor, reason: str, check: Callable[[], None] = lambda: None) -> None:
        """Copy the sender's bytes into every member's `data`; `check` is called repeatedly while waiting.

        Raises `DeadlineExceeded`, `TransferError`, or an error of `check`. After a failure the group cannot be used.
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
            raise TransferError(f"a broadcast of {reason} failed: {one_line(failed)}") from failed
        if self._device.type != "cpu":
            torch.cuda.current_stream(self._device).synchronize()

    def leave(self) -> None:
        """Abort the group, so that members that wait for this one fail at once."""
        self._group.abort()


class CollectiveTransfer:
    """Sends from the learner's first rank to a group of all engines, which is formed again when the engines change."""

    def __init__(self, host: str, device: torch.device, deadline_s: float) -> None:
        """`host`: address of this rank for engines. `deadline_s`: limit for each answer and each bucket."""
        self._host = host
        self._device = device
        self._deadline_s = deadline_s
        self._group: Collective | None = None
        self._members: tuple[EngineSeat, ...] = ()

    def send(self, weights: ServedWeights, version: int, engines: Sequence[EngineLine]) -> Publication:
        """Send to all engines or none: a broadcast that loses a member fails for the others too."""
        plan = weights.plan
        room = torch.empty(max(map(size_of, plan)), dtype=torch.uint8, device=self._device)
        buckets = weights.on_device(room)
        total = 0
        try:
            self._meet(engines)
            self._begin(engines, version, plan)
            coming = {line.seat.name: line.take({"by": BY_BROADCAST, "buckets": as_rows(plan)}) for line in engines}
            for number, bucket in enumerate(buckets):
                total = add_checksum(bucket.weights(), total)
                self._broadcast(bucket.data, f"bucket {number + 1} of {len(plan)}", coming)
            self._all(coming, "loading new weights")
            took: dict[str, LoadedWeights] = self._all(
                {line.seat.name: line.end() for line in engines}, "ending an update"
            )
        except RStarError as failed:
            self.leave()
            for _ in buckets:  # the gathers are collectives: the other ranks run them to the end
                pass
            return Publication(
                policy_version=version, way="nccl", failed={line.seat.name: str(failed) for line in engines}
            )
        return Publication(
            policy_version=version, way="nccl", checksum=total, num_bytes=sum(map(size_of, plan)), took=took
        )

    def leave(self) -> None:
        """Leave the group, if there is one."""
        group, self._group, self._members = self._group, None, ()
        if group is not None:
            group.leave()

    def _meet(self, engines: Sequence[EngineLine]) -> None:
        seats = tuple(line.seat for line in engines)
        if self._group is not None and seats == self._members:
            return
        self.leave()
        size = SENDER + 1 + sum(seat.ranks for seat in seats)
        store = open_store(self._host, size, self._deadline_s)
        joining: dict[str, Future[None]] = {}
        place = SENDER + 1
        for line in engines:
            meeting = Meeting(host=self._host, port=store.port, place=place, size=size, deadline_s=self._deadline_s)
            joining[line.seat.name] = line.join(meeting.payload())
            place += line.seat.ranks
        self._group = Collective(store, SENDER, size, self._device, self._deadline_s)
        self._all(joining, "joining the learner's group")
        self._members = seats

    def _begin(self, engines: Sequence[EngineLine], version: int, plan: BucketPlan) -> None:
        """Begin on every engine. Raises `RStarError` if one fails, after ending the update on those that have begun."""
        beginning, reason = [(line, line.begin(version, plan)) for line in engines], "beginning an update"
        wait([future for _, future in beginning], self._deadline_s)  # an engine that is beginning cannot end yet
        begun, failures = list[EngineLine](), list[RStarError]()
        for line, future in beginning:
            try:
                if not future.done():
                    raise DeadlineExceeded("learner", line.seat.name, reason, self._deadline_s)
                answer(future, 0, owner=line.seat.name, reason=reason)
                begun.append(line)
            except RStarError as failed:
                failures.append(failed)
        if failures:
            for line in begun:
                line.end()
            raise failures[0]

    def _broadcast(self, data: torch.Tensor, reason: str, coming: Mapping[str, "Future[None]"]) -> None:
        assert self._group is not None
        self._group.broadcast(data, reason, lambda: raise_failed(coming, reason))

    def _all(self, answers: Mapping[str, "Future[Any]"], reason: str) -> dict[str, Any]:
        return {name: answer(of, self._deadline_s, owner=name, reason=reason) for name, of in answers.items()}


def _group(store: Any, place: int, size: int, device: torch.device, deadline_s: float) -> Any:
    spare = timedelta(seconds=SPARE * deadline_s)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, place, size, spare)
    options = dist.ProcessGroupNCCL.Options()  # torch calls ROCm's RCCL NCCL too
    options._timeout = spare
    return dist.ProcessGroupNCCL(store, place, size, options)
