"""All actors of one run: started together, used by the stages through a `RunContext`, closed together."""

import asyncio
import atexit
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import ray

from actors.agents.agent_host import AgentHostActor, start_agent_hosts
from actors.balancer_service import BalancerService, start_balancer
from actors.cluster.bundles import executor_nodes, nodes_in_order, on_node, seated
from actors.cluster.gpu_lock import ANYTIME, GpuTurns
from actors.cluster.placement import (
    Layout,
    fitted,
    in_bundle,
    larger_plan,
    place,
    plan_layout,
    refuse_small_cluster,
    sending_ranks,
)
from actors.cluster.ray_metrics import ray_meter
from actors.generation.generation_actor import TO_OBJECT_STORE, GenerationActor
from actors.generation.replicas import Replica, Replicas
from actors.generation.trajectory_recorder import record_trajectories
from actors.health.head import HeadProbe, exit_within
from actors.health.loop_watch import LoopWatch
from actors.health.lost_nodes import NodesSeen, until_placed
from actors.health.watchdog import Watchdog
from actors.learner.gang import Learner, first_start, with_restarts
from actors.learner.learner_actor import rank_name
from actors.preflight.required_paths import with_absolute_paths
from actors.sandbox_executor import SandboxClient, SandboxExecutor
from actors.service import Service
from actors.tool_client import host_silent_s
from actors.tool_host import ToolHostActor, entry_of, host_names, hosts_up, start_hosts
from actors.weights.transfer import Publication
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.config import RunConfig
from rstar_ray.config.gpus import WeightWay, shares_gpus
from rstar_ray.context import RunContext
from rstar_ray.deadline import in_thread
from rstar_ray.evaluation.request_digest import plugin_digest
from rstar_ray.rollouts import TrajectoryRef
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.run_dir.metrics import BalancerStats
from rstar_ray.tools.spec import PYTHON_TOOL, ToolSpec

log = logging.getLogger(__name__)

T = TypeVar("T")

START_DEADLINE_S = 120.0
"""For the start of an executor's warm servers."""
CLOSE_DEADLINE_S = 30.0
HEADLESS_EXIT_S = 10.0
"""Where Ray's head did not answer at the end of the run, Ray would wait for it when the process exits."""
NO_GPU = {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": ""}
"""For actors without GPUs: Ray does not hide GPUs by itself."""


class TrainingActors:
    """Handles to the actors of a run, and what the driver does with them."""

    def __init__(
        self,
        config: RunConfig,
        model: Path,
        *,
        chat: TokenizerChat,
        tools: Sequence[ToolSpec] = (PYTHON_TOOL,),
        run_dir: Path | None = None,
        journal: Path | None = None,
    ) -> None:
        """`run_dir`: a folder that every node sees; it gets which processes are the run's and, unless a folder for it
        is given with `journal`, what was sampled."""
        self._config = config = with_absolute_paths(config)
        self._model = model.absolute()
        self._chat = chat
        self.meter = ray_meter(run_dir.name if run_dir else config.stage)
        self._journal = journal or (RunDir(run_dir).journal_path if run_dir else None)
        self._layout: Layout = plan_layout(config)
        record = RunDir(run_dir).processes_path if run_dir else None
        head = HeadProbe(ray.nodes)
        nodes = NodesSeen()
        self._head = head
        self.watchdog = Watchdog(config.detector, record=record, meter=self.meter, head=head, nodes=nodes)
        detector = config.detector
        self._loop_watch = LoopWatch(
            silent_s=detector.silent_s, still_s=detector.still_s, every_s=detector.probe_every_s
        )
        self._group: Any = None
        self._executors: dict[str, Service[SandboxExecutor]] = {}
        self.specs = tuple(tools)
        self._plugin_digest = plugin_digest(config, self.specs)
        self._hosts: dict[str, Service[ToolHostActor]] = {}
        self._agents: Mapping[str, Service[AgentHostActor]] = {}
        self._balancer: Service[BalancerService] | None = None
        self._learner: Learner | None = None
        self._replicas: Replicas | None = None
        self._turns = gpu_turns(config)
        self._served: Publication | None = None  # by all replicas
        self.tools: SandboxClient

    async def start(self, *, learner: bool = True) -> None:
        """Start everything; returns once learner and sandbox are up, while the engines may still be coming.

        Without a learner the engines serve the model folder's own weights.
        """
        resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._fit(resources)
        refuse_small_cluster(self._layout, resources)
        if learner and (line := larger_plan(self._config, resources)):
            log.info(line)
        self._loop_watch.start()
        self.watchdog.start()
        self._group = await place(self._layout)
        self._layout = await seated(self._group, self._layout)
        self._start_executors()
        self._hosts = start_hosts(
            self._config.tools, self.specs, self._config.own_folder, runtime_env={"env_vars": NO_GPU}
        )
        self._agents = start_agent_hosts(self._config, self._model, self.specs, runtime_env={"env_vars": NO_GPU})
        head = on_node(nodes_in_order(ray.nodes())[0], or_elsewhere=False)  # without its head there is no cluster
        balancer = self._balancer = start_balancer(
            self._config.balancer, run=self.meter.run, runtime_env={"env_vars": NO_GPU}, **head
        )
        for service in self._services():
            service.silent_s = self._silent_s(service.name)
            self.watchdog.follow(service)
        self.tools = SandboxClient([*self._executors.values()], self._config.sandbox, caller="driver")
        self._replicas = Replicas(
            balancer,
            self._chat,
            watchdog=self.watchdog,
            silent_s=self._config.detector.silent_s,
            node_away_s=self._config.detector.node_away_s,
            weights_deadline_s=self._config.learner.step_deadline_s,
            journal=self._journal,
            several_versions=self._config.staleness > 0,
            meter=self.meter,
            store_again=lambda version: self.learner.store_again(version),
            turn=self._turns.engine if self._turns else ANYTIME,
        )
        started = self._start_learner() if learner else _nothing()
        levels, *_ = await asyncio.gather(self._executors_up(), hosts_up({**self._hosts, **self._agents}), started)
        log.info(f"sandbox: isolation level {levels[0]}, {len(levels)} executors")
        for service in self._services():
            service.serves()
            self.watchdog.follow(service)
        self._create_workers(self._replicas)
        self._replicas.start()

    def _fit(self, nodes: list[dict[str, float]]) -> None:
        """Fewer replicas and ranks, where the settings ask for that; logged."""
        smaller = fitted(self._config, nodes)
        if smaller is not self._config:
            wanted, self._config = self._config, smaller
            self._layout = plan_layout(smaller)
            if smaller != wanted:
                log.info(
                    f"smaller plan: {smaller.engine.replicas} replicas and {smaller.learner.ranks} ranks fit, "
                    f"instead of {wanted.engine.replicas} and {wanted.learner.ranks}"
                )

    def _services(self) -> list[Service[Any]]:
        """The actors that are started, besides replicas and learner ranks."""
        return [
            *([self._balancer] if self._balancer else []),
            *self._executors.values(),
            *self._hosts.values(),
            *self._agents.values(),
        ]

    def _silent_s(self, name: str) -> float:
        silent_s = self._config.detector.silent_s
        return host_silent_s(entry_of(name), self.specs, silent_s) if name in self._hosts else silent_s

    @property
    def chat(self) -> TokenizerChat:
        return self._chat

    @property
    def learner(self) -> Learner:
        assert self._learner is not None, "started without a learner, or not started"
        return self._learner

    @property
    def replicas(self) -> Replicas:
        assert self._replicas is not None, "not started"
        return self._replicas

    def context(self, run_dir: RunDir, stop_requested: Callable[[], bool]) -> RunContext:
        """For the stages of the run, or for an evaluation, which has no learner."""
        return RunContext(
            run_dir=run_dir,
            learner=cast(Learner, self._learner),
            rollouts=self.replicas.rollouts,
            services=self,
            chat=self._chat,
            plugin_digest=self._plugin_digest,
            stop_requested=stop_requested,
            meter=self.meter,
        )

    async def serving(self) -> None:
        """Wait until every engine is up; raises the error of one that is not."""
        await self.replicas.serving()

    async def publish(self, policy_version: int) -> int:
        """Send weights from learner to engines; they never pass the driver. Returns their checksum once all
        replicas serve them.
        """
        if self._served is not None and self._served.policy_version == policy_version:
            return self._served.checksum
        self._served = None
        await self.replicas.serving()
        way = self._config.weight_way
        ranks = self._config.engine.tensor_parallel
        seats = self.replicas.seats(sending_ranks(self._layout, way), ranks=ranks)
        weights = await self.learner.publish(policy_version, seats)
        if not weights.num_bytes:
            log.info(f"weights by {way} reached no replica; using the object store: {_reasons(weights.failed)}")
            weights = await self.learner.publish(policy_version)
        await self.replicas.publish(weights)
        self._served = weights
        return weights.checksum

    def publish_metrics(self) -> Mapping[str, float]:
        return self.replicas.publish_metrics

    async def balancer_stats(self) -> BalancerStats:
        return await self.replicas.balancer_stats()

    async def balancer_state(self) -> Mapping[str, object] | None:
        return await self.replicas.rollouts.learned()

    async def load_balancer_state(self, saved: Mapping[str, object]) -> None:
        await self.replicas.rollouts.load_learned(saved)

    def memory_bytes(self) -> Mapping[str, int]:
        return self.watchdog.memory_bytes()

    async def repeat(self, stage: Callable[[], Awaitable[T]], steps_saved: Callable[[], int]) -> T:
        """Run a stage, which restarts from its newest checkpoint when the learner is lost.

        Raises `RStarError` with the pending wait where there is no more progress.
        """
        run = with_restarts(
            lambda: self.learner.unless_lost(stage()),
            restart=self._restart_learner,
            since=lambda: f"the checkpoint of step {steps_saved()}",
        )
        return await self.watchdog.guard(run)

    async def _restart_learner(self) -> None:
        await self.replicas.rollouts.abandon()  # they began after the checkpoint
        self._served = None  # weights that only the lost learner held are gone
        await self.learner.restart()

    async def record(
        self, refs: Sequence[TrajectoryRef], path: Path, *, stage: str, step: int, trained: bool = False
    ) -> None:
        """Have a worker write these trajectories; where none can, that is logged."""
        seen = self.learner.seen_tokens() if trained else ()
        await record_trajectories(self.replicas.available, refs, path=path, seen=seen, stage=stage, step=step)

    async def close(self) -> None:
        """End every actor of this run; where Ray's head does not answer, those of this node: the others end
        with their raylets.
        """
        heartbeats = self.watchdog.heartbeats()
        await self.watchdog.close()
        self._loop_watch.close()
        services = self._services()
        if self._replicas is not None:
            await self._replicas.close()
            services += self._replicas.workers.values()
        closing: list[Awaitable[Any]] = [service.close(CLOSE_DEADLINE_S) for service in services]
        if self._learner is not None:
            closing.append(self._learner.close())
        await asyncio.gather(*closing, return_exceptions=True)
        for service in services:
            service.end()
        if self._head.silent:
            for heartbeat in heartbeats:
                if heartbeat.is_here:
                    heartbeat.kill()
            atexit.register(exit_within, HEADLESS_EXIT_S)
        elif self._group is not None:
            removing = partial(ray.util.remove_placement_group, self._group)  # blocks without a head
            with suppress(Exception):
                await in_thread(
                    removing,
                    CLOSE_DEADLINE_S,
                    waiter="driver",
                    owner="Ray's head",
                    reason="removal of a group",
                )

    # -- starting ---------------------------------------------------------------------------------------------------
    async def _start_learner(self) -> None:
        share = {"num_cpus": self._config.learner.cpus_per_rank, "num_gpus": self._config.learner.gpus_per_rank}
        options = [in_bundle(self._group, bundle) | share for bundle in self._layout.rank_bundles]
        self._learner = Learner(
            self._config,
            self._model,
            rank_options=options,
            watchdog=self.watchdog,
            silent_s=self._config.detector.learner_silent_s,
            meter=self.meter,
            turn=self._learner_turn if self._turns else ANYTIME,
            placed=self._ranks_placed,
        )
        await first_start(self._learner)
        log.info(f"weights: {WAYS[self._config.weight_way]}")

    @asynccontextmanager
    async def _learner_turn(self) -> AsyncGenerator[None]:
        """No engine starts meanwhile; engines that can sleep do so until the next publish."""
        assert self._turns is not None
        async with self._turns.learner():
            if self._config.sleeps:
                self._served = None  # the engines drop it
                await self.replicas.sleep()
            yield

    async def _ranks_placed(self) -> None:
        """After the loss of a node, wait until its ranks have another one."""
        of_bundle: dict[int, list[str]] = {}
        for rank, bundle in enumerate(self._layout.rank_bundles):
            of_bundle.setdefault(bundle, []).append(rank_name(rank))
        named = {bundle: ", ".join(names) for bundle, names in of_bundle.items()}
        await until_placed(self._group, named, away_s=self._config.detector.node_away_s)

    def _start_executors(self) -> None:
        sandbox = self._config.sandbox
        executor = ray.remote(SandboxExecutor)
        for number, node in enumerate(executor_nodes(nodes_in_order(ray.nodes()), sandbox.executors)):
            name = f"sandbox/{number}"
            handle = executor.options(
                name=name,
                num_cpus=self._layout.executor_cpus,
                max_restarts=-1,
                max_concurrency=1_000,
                runtime_env={"env_vars": NO_GPU},
                **on_node(node, or_elsewhere=True),
            ).remote(name, sandbox, self.meter.run)
            self._executors[name] = Service(handle, name)

    def _host_names(self) -> dict[str, tuple[str, ...]]:
        entries = {entry_of(name) for name in self._hosts}
        return {entry: host_names(entry, self._config.tools.hosts) for entry in entries}

    async def _executors_up(self) -> list[str]:
        """The isolation level that each executor achieved."""
        starting = (
            one.first_answer(lambda e: e.start(), deadline_s=START_DEADLINE_S, reason="its warm servers")
            for one in self._executors.values()
        )
        return await asyncio.gather(*starting)

    def _create_workers(self, replicas: Replicas) -> None:
        engine = self._config.engine
        for replica, bundle in enumerate(self._layout.replica_bundles):
            name = f"generation/{replica}"
            actor = ray.remote(GenerationActor).options(
                name=name,
                num_cpus=engine.cpus_per_replica,
                num_gpus=engine.gpus_per_replica,
                max_restarts=-1,
                max_task_retries=0,
                max_concurrency=1_000,
                runtime_env={"env_vars": TO_OBJECT_STORE},
                **in_bundle(self._group, bundle),
            )
            handle = actor.remote(
                name,
                self._config,
                self._model,
                trained=self._learner is not None,
                executors=tuple(self._executors),
                tools=self.specs,
                hosts=self._host_names(),
                agents=tuple(self._agents),
                run=self.meter.run,
                journal=self._journal,
            )
            silent_s = self._config.detector.silent_s
            replicas.add(Replica(handle, name, start_deadline_s=engine.start_deadline_s, silent_s=silent_s))


def gpu_turns(config: RunConfig) -> GpuTurns | None:
    """Turns for shared GPUs; None where engines and ranks share no GPU."""
    if not shares_gpus(config.engine, config.learner):
        return None
    step_s = config.learner.step_deadline_s
    # An engine also loads weights in its turn: the learner may have to store them first, and each has this deadline.
    return GpuTurns(start_deadline_s=max(config.engine.start_deadline_s, 2.0 * step_s), step_deadline_s=step_s)


WAYS: dict[WeightWay, str] = {
    "object_store": "through Ray's object store",
    "ipc": "every rank hands them to the engine on its GPU (ipc)",
    "nccl": "broadcast by the learner's first rank (nccl)",
}


def _reasons(failed: Mapping[str, str]) -> str:
    return "; ".join(dict.fromkeys(failed.values())) or "no engine was up"


async def _nothing() -> None: ...


def quiet_environment() -> dict[str, str]:
    """For every worker process of the run: no telemetry, no look-ups on a hub, one thread unless set otherwise."""
    return {
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
    }
