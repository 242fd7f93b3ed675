"""The Ray actor of one generation worker: builds its parts in the actor process, and serves the driver's calls."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from actors.agents.agent_client import Agents
from actors.agents.agent_host import AgentHostActor
from actors.balancer_service import BalancerService
from actors.cluster.devices import see_own_gpu_first
from actors.cluster.ray_metrics import ray_meter
from actors.generation.engine import Engine, EngineFacts
from actors.generation.outbox import Ended, JournalWriter, without_tokens
from actors.generation.replica_metrics import ReplicaMetrics
from actors.generation.rollout_traces import RolloutTraces
from actors.generation.served_adapter import adapter_to_serve
from actors.generation.vllm_calls import VllmCalls
from actors.generation.worker import GenerationWorker
from actors.health.heartbeat import Heartbeat, heartbeat, this_process
from actors.remote import Batch, Remote
from actors.sandbox_executor import SandboxClient, SandboxExecutor
from actors.service import ServiceActor
from actors.tool_client import Tools
from actors.tool_host import ToolHostActor
from actors.weights.buckets import BucketPlan
from actors.weights.transfer import LoadedWeights
from rstar_ray.agent.journal import TurnJournal
from rstar_ray.algorithm.update import SeenTokens
from rstar_ray.chat.load_chat import load_chat
from rstar_ray.config import RunConfig
from rstar_ray.deadline import within
from rstar_ray.reward.judge import make_judge
from rstar_ray.run_dir.best_effort import best_effort
from rstar_ray.run_dir.trajectory_log import write_trajectories
from rstar_ray.telemetry.traces import open_sink
from rstar_ray.tools.spec import ToolSpec
from rstar_ray.trajectory import Trajectory

FETCH_DEADLINE_S = 60.0
TO_OBJECT_STORE = {"RAY_max_direct_call_object_size": "1024"}
"""Environment of a worker's process: trajectories of any size go to its node's object store.

By default Ray returns values below 100 KB with the reply, and they would stay in the driver's memory until the step
ends. Lists of trajectories are larger than 1 KB; few other replies are.
"""


class GenerationActor(ServiceActor):
    """The Ray actor of one `GenerationWorker`."""

    def __init__(
        self,
        name: str,
        config: RunConfig,
        model: Path,
        *,
        trained: bool,
        executors: Sequence[str],
        tools: Sequence[ToolSpec],
        hosts: Mapping[str, Sequence[str]],
        agents: Sequence[str] = (),
        run: str = "",
        journal: Path | None = None,
    ) -> None:
        """Serves the policy in the folder `model`; `trained`: a learner publishes newer weights.

        Paths in `config` are absolute. `executors`, `hosts` (by tool entry) and `agents` are actor names, so that a
        restarted actor can find them. `run`: label of metrics. `journal`: folder of finished turns.
        """
        see_own_gpu_first()
        super().__init__(name)
        sandboxes = [Remote[SandboxExecutor].named(one, caller=name) for one in executors]
        sandbox = SandboxClient(sandboxes, config.sandbox, caller=name)
        tool_hosts = {
            entry: [Remote[ToolHostActor].named(one, caller=name) for one in names] for entry, names in hosts.items()
        }
        agent_hosts = [Remote[AgentHostActor].named(one, caller=name) for one in agents]
        self._weights_deadline_s = config.learner.step_deadline_s
        traces = config.telemetry.traces
        self._traces = RolloutTraces(
            name,
            run=run,
            open_sink=(lambda: open_sink(traces, name)) if traces else None,
        )
        self._metrics = ReplicaMetrics(name, ray_meter(run), self._traces)
        self._kv_capacity_tokens = 0
        self._chat = load_chat(model, config.chat, instruct=config.rollout.instruct, tools=tools, syntax_of=VllmCalls)
        self._engine = Engine(
            config,
            model,
            adapter=adapter_to_serve(config, model, trained=trained),
            measures_cost=config.balancer.measured,
            stop_token_ids=self._chat.profile.stop_token_ids,
        )
        turns = TurnJournal(journal, f"{name}-{this_process().incarnation}") if journal is not None else None
        self._judge = make_judge(config.reward, sandbox.compare, sandbox.run_program, own_folder=config.own_folder)
        self._worker = GenerationWorker(
            name,
            engine=self._engine,
            max_running=config.engine.max_running,
            chat=self._chat,
            balancer=Remote[BalancerService].named("balancer", caller=name),
            tools=Tools(tools, sandbox, tool_hosts, caller=name, environment=config.tools.environment),
            agents=Agents(agent_hosts, caller=name) if agent_hosts else None,
            judge=self._judge,
            metrics=self._metrics,
            journal=JournalWriter(turns, where=str(journal or "")),
        )

    async def start(self) -> EngineFacts:
        facts = await self._worker.start()
        self._kv_capacity_tokens = facts.kv_capacity_tokens
        return facts

    async def serve(self) -> None:
        await self._worker.serve()

    def probe(self) -> Heartbeat:
        """For the watchdog. A stuck engine is found by the worker, which can kill the engine's processes."""
        load = self._worker.load()
        self._metrics.load(load, self._kv_capacity_tokens)
        return heartbeat(progress=load.steps, children=self._engine.process_ids)

    async def take_finished(self, wait_s: float, acknowledged: int) -> tuple[Batch[Ended] | list[Trajectory], ...]:
        """Call with `num_returns=1 + NUM_PARTS`: the driver reads the first value, and keeps refs of the others."""
        message, parts = without_tokens(await self._worker.take_finished(wait_s, acknowledged))
        return message, *parts

    async def pull(self, policy_version: int, refs: Sequence[Any]) -> LoadedWeights:
        """Fetch the published buckets and load them; each ref is in a list, so that Ray does not resolve it."""
        began_s = time.monotonic()
        buckets = await self._fetch(refs, "weight buckets", self._weights_deadline_s)
        fetched_s = time.monotonic() - began_s
        loaded = await self._worker.swap(self._engine.weights.update(policy_version, buckets, refs[0][0].hex()))
        return replace(loaded, move_s=fetched_s + loaded.move_s)

    async def sleep(self) -> None:
        """Free GPU memory for the learner until the next weights arrive; no effect before the engine has started."""
        if self._kv_capacity_tokens:
            await self._worker.swap(self._engine.weights.sleep())

    async def join_sender(self, meeting: Mapping[str, Any]) -> None:
        """Join the learner's group for broadcasts; after a failure the object store is used instead."""
        await self._engine.weights.join(meeting)

    async def begin_weights(self, policy_version: int, plan: BucketPlan) -> None:
        """Called by a learner's rank before it sends weights (`actors.weights.transfer.EngineLine`)."""
        await self._worker.swap(self._engine.weights.begin(policy_version, plan))

    async def take_weights(self, parcel: Mapping[str, Any]) -> None:
        await self._worker.swap(self._engine.weights.take(parcel))

    async def end_weights(self) -> LoadedWeights:
        return await self._worker.swap(self._engine.weights.end())

    async def record(
        self, refs: Sequence[Any], indices: Sequence[int], path: Path, stage: str, step: int, seen: Sequence[Any] = ()
    ) -> None:
        """Write the trajectories at these positions of the refs' lists (refs are in lists, as in `pull`).

        A thread writes, because decoding a large step takes minutes and probes must be answered meanwhile.
        `seen`: refs, also in lists, of the learner ranks' values for tokens; those of a lost rank are missing.
        """
        lists = await self._fetch(refs, "trajectories to record")
        chosen = [batch[index] for batch, index in zip(lists, indices, strict=True)]
        by_id: dict[str, SeenTokens] = {}
        with best_effort(f"the learner's values in {path.name}"):
            for of_rank in await self._fetch(seen, "the learner's values of their tokens"):
                by_id |= of_rank
        decode = self._chat.decode
        await asyncio.to_thread(write_trajectories, path, chosen, decode, seen=by_id, stage=stage, step=step)

    async def close(self) -> None:
        await self._worker.close()
        await self._judge.close()
        self._traces.close()

    async def _fetch(self, boxed: Sequence[Any], what: str, deadline_s: float = FETCH_DEADLINE_S) -> list[Any]:
        fetching = asyncio.gather(*(box[0] for box in boxed))
        return await within(fetching, deadline_s, waiter=self._name, owner="object store", reason=what)
