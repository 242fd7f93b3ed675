"""Sends one version of the weights from the learner's ranks to the engines, in one of three ways.

`object_store`: the first rank puts buckets into Ray's object store, and engines fetch them when the driver requests it.
`nccl`: the first rank broadcasts them to every rank of every engine (`collective`).
`ipc`: every rank shares the buckets gathered on its GPU with the engine of that GPU (`ipc`).

An engine that was absent from a transfer by `nccl` or `ipc` loads the version through the object store.
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
"""Name of our backend for vLLM's weight-transfer interface (`actors.weights.vllm_worker`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    """One engine's report of a version that it has loaded."""

    checksum: int  # of the weights as its workers loaded them (actors.weights.buckets.checksum)
    move_s: float = 0.0  # from the publisher's node into this node's shared memory, while decoding continued
    load_s: float = 0.0  # while decoding was paused
    laid_out: bool = False  # this engine wrote shared memory; False: another engine of its node did


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSeat:
    """An engine that runs when a version is published, and the learner's rank that sends to it."""

    name: str  # actor name
    incarnation: str  # of its process; a restarted process must join the group again
    ranks: int  # processes of the engine
    sender: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """One published version of the weights: one rank's part, or the parts of all ranks combined."""

    policy_version: int
    way: WeightWay = "object_store"
    checksum: int = 0
    num_bytes: int = 0  # 0: this rank sent nothing
    seconds: float = 0.0  # until all ranks had sent it
    refs: tuple[Any, ...] = ()  # ObjectRefs of WeightBuckets, owned by the first rank
    took: Mapping[str, LoadedWeights] = field(default_factory=dict[str, LoadedWeights])  # engines that loaded it
    failed: Mapping[str, str] = field(default_factory=dict[str, str])  # reason, by engine that did not

    @classmethod
    def together(cls, parts: "Sequence[Publication]", *, seconds: float) -> "Publication":
        """Combine all ranks' parts. Raises `LearnerError` if two ranks sent different weights."""
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
    """A sender's connection to one engine. `join` once per group, then per version `begin`, each `take`, and `end`.

    The futures raise if the engine fails. `end` without `take` raises `TransferError`, and the engine keeps serving the
    old weights. An engine that receives no call after `begin` dies.
    """

    @property
    def seat(self) -> EngineSeat: ...
    def join(self, meeting: Mapping[str, Any]) -> "Future[None]": ...
    def begin(self, version: int, plan: BucketPlan) -> "Future[None]": ...
    def take(self, parcel: Mapping[str, Any]) -> "Future[None]": ...
    def end(self) -> "Future[LoadedWeights]": ...


def put_into_store(weights: "ServedWeights", version: int, put: Callable[[WeightBucket], Any]) -> Publication:
    """Put the weights into Ray's object store: for a CPU, or engines that share no GPU or network with the learner."""
    refs: list[Any] = []
    total = num_bytes = 0
    for bucket in weights.on_host():
        refs.append(put(bucket))
        total = checksum([bucket], total)
        num_bytes += bucket.num_bytes
    return Publication(policy_version=version, checksum=total, num_bytes=num_bytes, refs=tuple(refs))


def answer(of: "Future[T]", seconds: float, *, owner: str, reason: str) -> T:
    """Wait for an engine's answer. Raises `DeadlineExceeded`, or `TransferError` with the engine's error."""
    try:
        return of.result(seconds)
    except Exception as failed:  # any error of the engine, or of the call to it
        if isinstance(failed, OutOfTime) and not of.done():  # our deadline, and not a timeout inside the engine
            raise DeadlineExceeded("learner", owner, reason, seconds) from None
        raise TransferError(f"{owner} failed in {reason}: {' '.join(str(failed).split())[:300]}") from failed


def raise_failed(answers: Mapping[str, "Future[Any]"], reason: str) -> None:
    """Raise `TransferError` if one of the pending answers has failed."""
    for name, of in answers.items():
        if of.done() and of.exception() is not None:
            answer(of, 0, owner=name, reason=reason)
