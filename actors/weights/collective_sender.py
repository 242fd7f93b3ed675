"""The sending end of a broadcast: the learner's first rank, which tells the engines what to join and what comes."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from actors.weights.buckets import BucketPlan, size_of
from actors.weights.collective import SENDER, Collective, Meeting, open_store
from actors.weights.tensors import add_checksum
from actors.weights.transfer import EngineLine, EngineSeat, Pulled, Sent, Weights, answer, raise_failed
from rstar_ray.errors import RStarError

BY_BROADCAST = "nccl"  # what a parcel says of how its weights come


class CollectiveTransfer:
    """One group for all engines, made anew where they are not the same as the last time."""

    def __init__(self, host: str, device: torch.device, deadline_s: float) -> None:
        """`host`: where engines find this rank. `deadline_s`: for any one answer, and for any one bucket."""
        self._host = host
        self._device = device
        self._deadline_s = deadline_s
        self._group: Collective | None = None
        self._members: tuple[EngineSeat, ...] = ()

    def send(self, weights: Weights, version: int, engines: Sequence[EngineLine]) -> Sent:
        """All engines or none: a broadcast that has lost a member is over for the others."""
        if not engines:
            weights.take_part()
            return Sent()
        plan = weights.plan
        room = torch.empty(max(map(size_of, plan)), dtype=torch.uint8, device=self._device)
        buckets = weights.on_device(room)
        total = 0
        try:
            self._meet(engines)
            self._begin(engines, version, plan)
            coming = {line.seat.name: line.take(parcel(plan)) for line in engines}
            for number, bucket in enumerate(buckets):
                total = add_checksum(bucket, total)
                self._broadcast(bucket.data, f"bucket {number + 1} of {len(plan)}", coming)
            self._all(coming, "loading new weights")
            took: dict[str, Pulled] = self._all({line.seat.name: line.end() for line in engines}, "ending an update")
        except RStarError as failed:
            self.leave()
            for _ in buckets:  # the other ranks gather to the end
                pass
            return Sent(failed={line.seat.name: str(failed) for line in engines})
        return Sent(checksum=total, num_bytes=sum(map(size_of, plan)), took=took)

    def leave(self) -> None:
        """Let go of the group."""
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
        """All of them. Raises `RStarError` where one does not; the others then end at once, and do not stand still."""
        try:
            self._all({line.seat.name: line.begin(version, plan) for line in engines}, "beginning an update")
        except RStarError:
            for line in engines:
                line.end()
            raise

    def _broadcast(self, data: torch.Tensor, reason: str, coming: Mapping[str, "Future[None]"]) -> None:
        assert self._group is not None
        self._group.broadcast(data, reason, lambda: raise_failed(coming, reason))

    def _all(self, answers: Mapping[str, "Future[Any]"], reason: str) -> dict[str, Any]:
        return {name: answer(of, self._deadline_s, owner=name, reason=reason) for name, of in answers.items()}


def parcel(plan: BucketPlan) -> dict[str, Any]:
    """All buckets at once: they come one after the other."""
    return {"by": BY_BROADCAST, "buckets": plain(plan)}


def plain(plan: BucketPlan) -> list[list[list[Any]]]:
    """Values that survive msgpack."""
    return [[[e.name, list(e.shape), e.dtype, e.offset_bytes] for e in entries] for entries in plan]
