"""What the balancer has decided for each replica, numbered and delivered again until acknowledged."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rstar_ray.trajectory import Placement
from scheduler.load import Move, RolloutLoad, UnknownReplica


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Run this rollout: from its payload, at the lengths of its load."""

    load: RolloutLoad
    payload: Any
    waited_s: float = 0.0  # since it was submitted
    placement: Placement | None = None  # why it runs there


@dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """Everything decided for one replica since what it acknowledged; `number` is what to acknowledge next."""

    number: int
    epoch: str  # of the balancer's life
    admissions: tuple[Grant, ...] = ()
    moves: tuple[Move, ...] = ()  # hand these back at their next turn boundary
    cancels: tuple[str, ...] = ()  # stop these; nobody wants their result


@dataclass(slots=True)
class _Mailbox:
    """What a replica has not acknowledged yet."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    letters: deque[Grants] = field(default_factory=deque[Grants])
    number: int = 0


class Mailboxes:
    """One per registered replica."""

    def __init__(self, epoch: str) -> None:
        self._epoch = epoch
        self._boxes: dict[str, _Mailbox] = {}

    def open(self, replica_id: str) -> int:
        """A new, empty one; whoever still waits at the old one is told to register. Returns its first number."""
        self.close(replica_id)
        mailbox = self._boxes[replica_id] = _Mailbox()
        return mailbox.number

    def close(self, replica_id: str) -> None:
        """Wake whoever still waits for this replica's grants; it will be told to register."""
        mailbox = self._boxes.pop(replica_id, None)
        if mailbox is not None:
            mailbox.event.set()

    def post(
        self,
        replica_id: str,
        *,
        admissions: Sequence[Grant] = (),
        moves: Sequence[Move] = (),
        cancels: Sequence[str] = (),
    ) -> None:
        mailbox = self._boxes[replica_id]
        mailbox.number += 1
        mailbox.letters.append(
            Grants(
                number=mailbox.number,
                epoch=self._epoch,
                admissions=tuple(admissions),
                moves=tuple(moves),
                cancels=tuple(cancels),
            )
        )
        mailbox.event.set()

    async def next(self, replica_id: str, ack: int, wait_s: float) -> Grants:
        """Wait up to `wait_s` for what comes after number `ack`; empty when nothing came.

        Raises `UnknownReplica` when it must register (again).
        """
        mailbox = self._boxes.get(replica_id)
        if mailbox is None:
            raise UnknownReplica(f"replica {replica_id!r} is not registered; register it with what is resident")
        while mailbox.letters and mailbox.letters[0].number <= ack:
            mailbox.letters.popleft()
        if not mailbox.letters:
            mailbox.event.clear()
            try:
                await asyncio.wait_for(mailbox.event.wait(), wait_s)
            except TimeoutError:
                return Grants(number=ack, epoch=self._epoch)
            if self._boxes.get(replica_id) is not mailbox:
                raise UnknownReplica(f"replica {replica_id!r} was removed while it waited; register it again")
        return Grants(
            number=mailbox.letters[-1].number if mailbox.letters else ack,
            epoch=self._epoch,
            admissions=tuple(grant for letter in mailbox.letters for grant in letter.admissions),
            moves=tuple(move for letter in mailbox.letters for move in letter.moves),
            cancels=tuple(name for letter in mailbox.letters for name in letter.cancels),
        )
