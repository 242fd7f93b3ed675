"""How one version of the weights gets from the learner's ranks to the engines, by one of three ways.

`object_store`: the first rank puts buckets into Ray's object store, and engines fetch them when the driver says so.
`nccl`: the first rank broadcasts them to every rank of every engine (`collective`).
`ipc`: every rank hands what it has gathered on its GPU to the engine of that GPU (`ipc`).

By the last two an engine that was not there finds nothing later: it takes the version through the object store.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as OutOfTime
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from actors.weights.buckets import BucketPlan, WeightBucket, checksum
from rstar_ray.config.gpus import WeightWay
from rstar_ray.errors import DeadlineExceeded, LearnerError, TransferError

if TYPE_CHECKING:
    from actors.weights.tensors import ServedWeights

T = TypeVar("T")

BACKEND = "rstar_ray"
"""The name of our backend of vLLM's weight-transfer interface (`actors.weights.vllm_worker`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    """One engine's report of a version that it serves."""

    checksum: int  # of the weights as its workers loaded them (actors.weights.buckets.checksum)
    move_s: float = 0.0  # from the publisher's node into this node's shared memory, while decoding continued
    load_s: float = 0.0  # decoding was paused
    laid_out: bool = False  # in shared memory by this engine; another of its node may have been first


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSeat:
    """An engine that is up when a version is published, and the learner's rank that sends it weights."""

    name: str  # of its actor
    incarnation: str  # of its process: a restarted one is another member of a group
    ranks: int  # the processes that it is split over
    sender: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """One version of the weights on its way to the replicas: one rank's part, or all ranks' together."""

    policy_version: int
    way: WeightWay = "object_store"
    checksum: int = 0
    num_bytes: int = 0  # 0: this rank sent nothing
    seconds: float = 0.0  # until all ranks had sent it
    refs: tuple[Any, ...] = ()  # ObjectRefs of WeightBuckets, which die with the first rank
    took: Mapping[str, LoadedWeights] = field(default_factory=dict[str, LoadedWeights])  # engines that serve it
    failed: Mapping[str, str] = field(default_factory=dict[str, str])  # engines that do not, and why

    @classmethod
    def together(cls, parts: "Sequence[Publication]", *, seconds: float) -> "Publication":
        """All ranks' parts. Raises `LearnerError` where two of them sent different weights."""
        whole = [one for one in parts if one.num_bytes]
        version = parts[0].policy_version
        if len({one.checksum for one in whole}) > 1:
            raise LearnerError(f"ranks sent different weights as version {version}: {[w.checksum for w in whole]}")
        return cls(
            policy_version=version,
            way=parts[0].way,
            checksum=whole[0].checksum if whole else 0,
            num_bytes=whole[0].num_bytes if whole else 0,
            seconds=seconds,
            refs=tuple(ref for one in whole for ref in one.refs),
            took={name: loaded for one in parts for name, loaded in one.took.items()},
            failed={name: reason for one in parts for name, reason in one.failed.items()},
        )


class EngineLine(Protocol):
    """One engine as a sender reaches it. `join` once a group, then `begin`, every `take`, and `end`.

    The answers raise where the engine has failed. An engine that has begun and receives nothing more ends itself.
    """

    @property
    def seat(self) -> EngineSeat: ...
    def join(self, meeting: Mapping[str, Any]) -> "Future[None]": ...
    def begin(self, version: int, plan: BucketPlan) -> "Future[None]": ...
    def take(self, parcel: Mapping[str, Any]) -> "Future[None]": ...
    def end(self) -> "Future[LoadedWeights]": ...


def put_into_store(weights: "ServedWeights", version: int, put: Callable[[WeightBucket], Any]) -> Publication:
    """Through Ray's object store: on a CPU, and wherever an engine shares no GPU and no network with the learner."""
    refs: list[Any] = []
    total = num_bytes = 0
    for bucket in weights.on_host():
        refs.append(put(bucket))
        total = checksum([bucket], total)
        num_bytes += bucket.num_bytes
    return Publication(policy_version=version, checksum=total, num_bytes=num_bytes, refs=tuple(refs))


def answer(of: "Future[T]", seconds: float, *, owner: str, reason: str) -> T:
    """Wait for an engine. Raises `DeadlineExceeded`, or `TransferError` with what the engine raised."""
    try:
        return of.result(seconds)
    except Exception as failed:  # whatever became of it there, or of the way to it
        if isinstance(failed, OutOfTime) and not of.done():  # ours, and not one that the engine met
            raise DeadlineExceeded("learner", owner, reason, seconds) from None
        raise TransferError(f"{owner} failed in {reason}: {' '.join(str(failed).split())[:300]}") from failed


def raise_failed(answers: Mapping[str, "Future[Any]"], reason: str) -> None:
    """Raise an answer that came too early: it is a failure."""
    for name, of in answers.items():
        if of.done() and of.exception() is not None:
            answer(of, 0, owner=name, reason=reason)
