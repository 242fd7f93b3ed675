"""How one version of the weights gets from the learner's ranks to the engines: one Protocol, three ways.

`object_store`: the first rank puts buckets into Ray's object store, and engines fetch them when the driver says so.
`nccl`: the first rank broadcasts them to every rank of every engine (`collective_sender`).
`ipc`: every rank hands its own GPU's engine what it has gathered there (`ipc_sender`).

By the last two nothing is left behind for an engine that was not there: it takes them through the object store.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as OutOfTime
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from actors.weights.buckets import BucketPlan, WeightBucket, checksum
from rstar_ray.errors import DeadlineExceeded, TransferError

if TYPE_CHECKING:
    from actors.weights.tensors import TensorBucket

T = TypeVar("T")

BACKEND = "rstar_ray"
"""How vLLM's weight-transfer interface is told of the engines' end of all three (`actors.weights.sync`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """What a replica says of new weights."""

    checksum: int
    move_s: float  # from the publisher's node into this one's shared memory, while decoding went on
    load_s: float  # decoding stood still
    laid_out: bool  # by this replica; another of its node may have been first


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSeat:
    """An engine that is up when a version is published, and the learner's rank that sends it weights."""

    name: str  # of its actor
    life: str  # of its process: one that was started again is another member of a group
    ranks: int  # the processes that it is split over
    sender: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What became of a version at one of the learner's ranks."""

    checksum: int = 0  # of the weights as they were sent
    num_bytes: int = 0  # 0: this rank sent nothing
    refs: tuple[Any, ...] = ()  # of WeightBuckets in the object store, for whoever fetches them
    took: Mapping[str, Pulled] = field(default_factory=dict[str, Pulled])  # engines that serve them
    failed: Mapping[str, str] = field(default_factory=dict[str, str])  # engines that do not, and why


class Weights(Protocol):
    """The newest weights as one rank can have them; each of the ways is a collective of all ranks, gone to its end."""

    @property
    def plan(self) -> BucketPlan: ...

    def on_host(self) -> Iterator[WeightBucket]:
        """On the first rank; nothing elsewhere."""
        ...

    def on_device(self, data: Any) -> "Iterator[TensorBucket]":
        """Each laid out at the beginning of `data`, a uint8 tensor that holds the largest: valid until the next."""
        ...

    def take_part(self) -> None:
        """For a rank that sends nothing."""
        ...


class Transfer(Protocol):
    """One of the learner's ranks at one way of sending."""

    def send(self, weights: Weights, version: int, engines: Sequence["EngineLine"]) -> Sent:
        """Never raises for an engine's sake: every rank must have gathered to the end."""
        ...


class EngineLine(Protocol):
    """One engine as a sender reaches it. `join` once a group, then `begin`, every `take`, and `end`.

    The answers raise where the engine has failed. One that has begun and hears nothing more ends itself.
    """

    @property
    def seat(self) -> EngineSeat: ...
    def join(self, meeting: Mapping[str, Any]) -> "Future[None]": ...
    def begin(self, version: int, plan: BucketPlan) -> "Future[None]": ...
    def take(self, parcel: Mapping[str, Any]) -> "Future[None]": ...
    def end(self) -> "Future[Pulled]": ...


class StoreTransfer:
    """Through Ray's object store: on a CPU, and wherever an engine shares no GPU and no network with the learner."""

    def __init__(self, put: Callable[[WeightBucket], Any]) -> None:
        self._put = put

    def send(self, weights: Weights, version: int, engines: Sequence[EngineLine]) -> Sent:
        refs: list[Any] = []
        total = num_bytes = 0
        for bucket in weights.on_host():
            refs.append(self._put(bucket))
            total = checksum([bucket], total)
            num_bytes += bucket.num_bytes
        return Sent(checksum=total, num_bytes=num_bytes, refs=tuple(refs))


class NoTransfer:
    """Of a rank that others send for."""

    def send(self, weights: Weights, version: int, engines: Sequence[EngineLine]) -> Sent:
        weights.take_part()
        return Sent()


def answer(of: "Future[T]", seconds: float, *, owner: str, reason: str) -> T:
    """Wait for an engine. Raises `DeadlineExceeded`, or `TransferError` with what the engine raised."""
    try:
        return of.result(seconds)
    except Exception as failed:  # whatever became of it there, or of the way to it
        if isinstance(failed, OutOfTime) and not of.done():  # ours, and not one that the engine met
            raise DeadlineExceeded("learner", owner, reason, seconds) from None
        raise TransferError(f"{owner} failed in {reason}: {' '.join(str(failed).split())[:300]}") from failed


def raise_failed(answers: Mapping[str, "Future[Any]"], reason: str) -> None:
    """Raise what an engine has answered too early: nothing but a failure."""
    for name, of in answers.items():
        if of.done() and of.exception() is not None:
            answer(of, 0, owner=name, reason=reason)
