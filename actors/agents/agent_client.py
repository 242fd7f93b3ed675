"""A generation worker's client for the agents of its rollouts, which run in agent hosts."""

import asyncio
import contextlib
import zlib
from collections.abc import Awaitable, Callable, Sequence

from ray.exceptions import RayActorError

from actors.agents.agent_host import AgentHostActor
from actors.remote import MAX_TRIES, Remote, probe_of
from rstar_ray.agent.agent_rollout import AgentEnd, AgentRequest
from rstar_ray.agent.rollout import RolloutState
from rstar_ray.agent.session import AgentCall, AgentReply, Other, sampled_turns
from rstar_ray.errors import DeadlineExceeded, ToolError, ToolStateLost, first_line
from rstar_ray.trajectory import StopReason

WAIT_S = 20.0
"""Time that one call waits for a request of the agent before it returns."""
GRACE_S = 40.0
START_S = 300.0
"""Limit for a host that Ray restarts; importing the tokenizer takes minutes on a busy machine."""

Timed = Callable[[Awaitable[AgentReply]], Awaitable[AgentReply]]


class Agents:
    """Client of one generation worker. `hosts` must be the same for all workers."""

    def __init__(self, hosts: Sequence[Remote[AgentHostActor]], *, caller: str) -> None:
        self._hosts = hosts
        self._caller = caller
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, state: RolloutState, timed: Timed) -> "RolloutAgent":
        """The agent of one rollout; `timed` measures its calls."""
        host = self._hosts[zlib.crc32(state.request.rollout_id.encode()) % len(self._hosts)]
        return RolloutAgent(host, self._caller, timed)

    def close(self, state: RolloutState) -> None:
        """Stop the rollout's agent without waiting, unless another worker plays the rollout."""
        rollout_id = state.request.rollout_id
        host = self._hosts[zlib.crc32(rollout_id.encode()) % len(self._hosts)]
        task = asyncio.create_task(self._stop(host, rollout_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settled(self) -> None:
        """Wait until the hosts of all stopped agents have been notified."""
        await asyncio.gather(*self._tasks)

    async def _stop(self, host: Remote[AgentHostActor], rollout_id: str) -> None:
        with contextlib.suppress(RayActorError, DeadlineExceeded):  # a lost host runs no agents
            await host.call(lambda h: h.end(rollout_id, self._caller), deadline_s=START_S, reason="an agent's end")


class RolloutAgent:
    """`AgentLink` of one rollout."""

    def __init__(self, host: Remote[AgentHostActor], caller: str, timed: Timed) -> None:
        self._host = host
        self._caller = caller
        self._timed = timed
        self._opens = True
        self._refused: tuple[int, StopReason, str] | None = None

    async def next(self, state: RolloutState) -> AgentRequest | AgentEnd:
        """See `AgentLink`."""
        with_record, failures, reason = False, 0, ""
        while failures < MAX_TRIES:
            call = self._call(state, with_record=with_record)
            try:
                asking = self._host.call(
                    lambda h, call=call: h.next_request(call),
                    deadline_s=WAIT_S + GRACE_S,
                    reason="an agent's next request",
                    retry=True,
                    poll=True,
                )
                reply = await self._timed(asking)
            except (RayActorError, DeadlineExceeded) as lost:
                failures, reason = failures + 1, first_line(lost)
                with contextlib.suppress(RayActorError, DeadlineExceeded):
                    await self._host.call(probe_of, deadline_s=START_S, reason="an agent's host", retry=True)
                continue
            self._opens = False
            match reply:
                case Other.WAIT:
                    continue
                case Other.SEND_RECORD:
                    with_record = True
                case Other.LOST:
                    raise ToolStateLost("the agent did not repeat its requests")
                case AgentRequest() | AgentEnd():
                    self._refused = None
                    return reply
        raise ToolError(f"agent: its host failed {MAX_TRIES} times, last: {reason}")

    async def refuse(self, state: RolloutState, request: AgentRequest, reason: StopReason, text: str) -> None:
        """Refuse the request; sent to the host with the next call."""
        self._refused = request.number, reason, text

    def _call(self, state: RolloutState, *, with_record: bool) -> AgentCall:
        newest = sampled_turns(state, len(state.turns) - 1)
        return AgentCall(
            rollout_id=state.request.rollout_id,
            restarts=state.restarts,
            holder=self._caller,
            opens=self._opens,
            problem=state.request.problem,
            seed=state.request.seed,
            num_turns=len(state.turns),
            last=newest[0] if newest else None,
            record=sampled_turns(state) if with_record else None,
            refused=self._refused,
            wait_s=WAIT_S,
        )
