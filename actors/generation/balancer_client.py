"""The balancer as a worker sees it: what it is told, and how it is asked while it restarts."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from ray.exceptions import ActorUnavailableError

from actors.mailbox import Grants
from rstar_ray.agent.rollout import RolloutState
from scheduler.cost import EngineCost
from scheduler.load import Finished, ReplicaLoad, RolloutLoad, TurnReport

ASK_AGAIN_S = 0.5
"""Of a balancer that restarts."""


class BalancerCalls(Protocol):
    """What a worker calls; see `actors.balancer.BalancerService`."""

    def register(
        self,
        replica_id: str,
        kv_capacity_tokens: int,
        *,
        max_running: int,
        block_tokens: int,
        policy_version: int,
        resident: Sequence[RolloutLoad],
        cost: EngineCost | None,
    ) -> Awaitable[Any]: ...
    def report(
        self, replica_id: str, turn_reports: Sequence[TurnReport], finished: Sequence[Finished], load: ReplicaLoad
    ) -> Awaitable[Any]: ...
    def next_grants(self, replica_id: str, ack: int, wait_s: float) -> Awaitable[Any]: ...
    def return_rollouts(self, replica_id: str, items: Sequence[tuple[RolloutLoad, Any]]) -> Awaitable[Any]: ...


class BalancerClient:
    """The balancer's address as `BalancerCalls`; while it restarts, calls are repeated: bound them with `within`."""

    def __init__(self, balancer: Any, granted: Callable[[Grants], None] = lambda grants: None) -> None:
        """`granted` hears of all grants, before the worker does."""
        self._balancer = balancer
        self._granted = granted

    async def register(
        self,
        replica_id: str,
        kv_capacity_tokens: int,
        *,
        max_running: int,
        block_tokens: int,
        policy_version: int,
        resident: Sequence[RolloutLoad],
        cost: EngineCost | None,
    ) -> Any:
        return await self._call(
            "register",
            replica_id,
            kv_capacity_tokens,
            max_running=max_running,
            block_tokens=block_tokens,
            policy_version=policy_version,
            resident=resident,
            cost=cost,
        )

    async def report(
        self, replica_id: str, turn_reports: Sequence[TurnReport], finished: Sequence[Finished], load: ReplicaLoad
    ) -> Any:
        return await self._call("report", replica_id, turn_reports, finished, load)

    async def next_grants(self, replica_id: str, ack: int, wait_s: float) -> Any:
        grants = await self._call("next_grants", replica_id, ack, wait_s)
        self._granted(grants)
        return grants

    async def return_rollouts(self, replica_id: str, items: Sequence[tuple[RolloutLoad, Any]]) -> Any:
        return await self._call("return_rollouts", replica_id, items)

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        while True:
            try:
                return await getattr(self._balancer, method).remote(*arguments, **named)
            except ActorUnavailableError:
                await asyncio.sleep(ASK_AGAIN_S)


def rollout_load(state: RolloutState) -> RolloutLoad:
    """A rollout as the scheduler sees it."""
    request, prompt = state.request, len(state.prompt_ids)
    begun = len(state.begun.token_ids) if state.begun else 0
    return RolloutLoad(
        rollout_id=request.rollout_id,
        group_id=request.group_id,
        prompt_tokens=prompt,
        max_response_tokens=max(1, min(request.limits.max_response_tokens, request.limits.max_context_tokens - prompt)),
        max_turns=request.limits.max_turns,
        context_tokens=prompt + len(state.response_ids) + begun,
        generated_tokens=sum(turn.num_tokens for turn in state.turns) + begun,
        turn=len(state.turns),
    )
