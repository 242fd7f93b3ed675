"""All actors of one run: started together, seen by the stages as one `Crew`, closed together."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.balancer import BalancerActor
from actors.generation.engine import EngineSettings
from actors.generation.rollout_client import RolloutClient, when_available
from actors.generation.worker import GenerationActor, WorkerSettings
from actors.learner.gang import Learner
from actors.learner.settings import LearnerSettings
from actors.placement import Layout, place, plan_layout, refuse_misfit
from actors.sandbox_executor import SandboxClient, SandboxExecutor
from rstar_ray.algorithm.batch_plan import BatchLimits
from rstar_ray.algorithm.loss_settings import LossSettings, Normalisation
from rstar_ray.chat.template import ChatFormat
from rstar_ray.config import RunConfig
from rstar_ray.crew import Crew
from rstar_ray.deadline import within
from rstar_ray.errors import RStarError
from rstar_ray.rollouts import TrajectoryRef
from sandbox.pool import PoolConfig
from scheduler.picture import draw_step

CALL_DEADLINE_S = 120.0
CLOSE_DEADLINE_S = 30.0
MAX_WORKER_RESTARTS = 3
NO_GPU = {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": ""}
"""For actors that need none: Ray hides GPUs from nobody by itself."""


@dataclass(frozen=True, slots=True)
class Published:
    """The weights that every replica must serve."""

    policy_version: int
    refs: list[Any]
    checksum: int


class TrainingActors:
    """Handles to the actors of a run, and what the driver does with them."""

    def __init__(self, config: RunConfig, model: Path, chat: ChatFormat, show: Callable[[str], None] = print) -> None:
        self._config = config
        self._model = model
        self._chat = chat
        self._show = show
        self._layout: Layout = plan_layout(config)
        self._group: Any = None
        self._executors: dict[str, Any] = {}
        self._balancer: Any = None
        self._workers: dict[str, Any] = {}
        self._restarts: dict[str, int] = {}
        self._coming_back: set[str] = set()  # lost workers; they take the newest weights before they serve
        self._engines_up: asyncio.Task[None] | None = None
        self._published: Published | None = None
        self.learner: Learner
        self.tools: SandboxClient
        self.rollouts: RolloutClient

    async def start(self, *, learner: bool = True) -> None:
        """Start everything; returns once learner and sandbox are up, while the engines may still be coming.

        Without a learner the engines serve the model folder's own weights.
        """
        refuse_misfit(self._layout, ray.cluster_resources())
        self._group = await place(self._layout)
        self._start_executors()
        self._balancer = BalancerActor.options(name="balancer", runtime_env={"env_vars": NO_GPU}).remote()  # type: ignore[attr-defined]
        self.tools = SandboxClient(self._executors, self._config.sandbox, caller="driver")
        self.rollouts = RolloutClient(self._balancer, self._chat, on_worker_lost=self._worker_lost)
        levels = asyncio.gather(
            *(
                within(handle.start.remote(), CALL_DEADLINE_S, waiter="driver", owner=name, reason="its warm servers")
                for name, handle in self._executors.items()
            )
        )
        if learner:
            options = [self._in_bundle(bundle) | self._rank_share() for bundle in self._layout.rank_bundles]
            self.learner = Learner(learner_settings(self._config, self._model), rank_options=options)
            started, _ = await asyncio.gather(levels, self.learner.start())
        else:
            started = await levels
        self._show(f"sandbox: isolation level {started[0]}, {len(started)} executors")
        for replica in range(self._config.engine.replicas):
            self._create_worker(replica)
        self._engines_up = asyncio.create_task(self._start_workers(list(self._workers)))

    def crew(self) -> Crew:
        return Crew(
            learner=getattr(self, "learner", None),  # type: ignore[arg-type]  # an evaluation trains nothing
            rollouts=self.rollouts,
            publish=self.publish,
            record=self.record,
            show=self._show,
        )

    async def serving(self) -> None:
        """Wait until every engine is up; raises what kept one from it."""
        assert self._engines_up is not None
        await self._engines_up

    async def publish(self, policy_version: int) -> None:
        """Learner to engines, by refs: the driver never holds a weight. Returns when all replicas serve them."""
        await self.serving()
        weights = await self.learner.publish(policy_version)
        self._published = Published(policy_version, list(weights.refs), weights.checksum)
        serving = [name for name in self._workers if name not in self._coming_back]
        await asyncio.gather(*(self._pull_unless_lost(name, self._published) for name in serving))
        told = when_available(lambda: self._balancer.set_policy_version.remote(policy_version))
        await self._ask(told, "balancer", "the policy version")

    async def record(self, refs: Sequence[TrajectoryRef], path: Path, *, stage: str, step: int) -> None:
        """Have a worker write these trajectories: the driver never holds their tokens."""
        worker = next(iter(self._workers.values()))
        lists, indices = [[ref.batch] for ref in refs], [ref.index for ref in refs]
        recorded = worker.record.remote(lists, indices, path, stage, step)
        await self._ask(recorded, "generation/0", f"recording {len(refs)} trajectories")

    async def draw_step(self, path: Path, *, rollouts: str, title: str) -> None:
        """The picture of the rollouts whose ids begin so: what each replica did, and its KV."""
        asked = [
            self._ask(worker.timeline.remote(rollouts), name, "its timeline") for name, worker in self._workers.items()
        ]
        timelines = await asyncio.gather(*asked)
        began_s = min((span.start_s for timeline in timelines for span in timeline.spans), default=None)
        if began_s is None:
            return
        timelines = [timeline.since(began_s) for timeline in timelines]
        path.parent.mkdir(parents=True, exist_ok=True)
        draw_step(
            path,
            [span for timeline in timelines for span in timeline.spans],
            [sample for timeline in timelines for sample in timeline.kv_samples],
            kv_capacity_tokens=max(timeline.kv_capacity_tokens for timeline in timelines),
            title=title,
        )

    async def close(self) -> None:
        """End every actor this run started."""
        if self._engines_up is not None and not self._engines_up.done():
            self._engines_up.cancel()
        closing: list[Awaitable[Any]] = []
        if hasattr(self, "rollouts"):
            await self.rollouts.close()
        for name, handle in [*self._workers.items(), *self._executors.items()]:
            closing.append(
                within(handle.close.remote(), CLOSE_DEADLINE_S, waiter="driver", owner=name, reason="its end")
            )
        if hasattr(self, "learner"):
            closing.append(self.learner.close())
        await asyncio.gather(*closing, return_exceptions=True)
        for handle in [*self._workers.values(), *self._executors.values(), self._balancer]:
            if handle is not None:
                ray.kill(handle)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)

    # -- starting ---------------------------------------------------------------------------------------------------
    def _in_bundle(self, bundle: int) -> dict[str, Any]:
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, bundle)}

    def _rank_share(self) -> dict[str, float]:
        return {"num_cpus": self._config.learner.cpus_per_rank, "num_gpus": self._config.learner.gpus_per_rank}

    def _start_executors(self) -> None:
        sandbox = self._config.sandbox
        executor = ray.remote(SandboxExecutor)
        for number in range(sandbox.executors):
            name = f"sandbox/{number}"
            self._executors[name] = executor.options(
                name=name,
                num_cpus=self._layout.executor_cpus,
                max_restarts=MAX_WORKER_RESTARTS,
                max_concurrency=1_000,
                scheduling_strategy="SPREAD",
                runtime_env={"env_vars": NO_GPU},
            ).remote(name, pool_config(self._config))

    def _create_worker(self, replica: int) -> None:
        name, engine = f"generation/{replica}", self._config.engine
        settings = WorkerSettings(
            replica_id=name,
            engine=engine_settings(self._config, self._model),
            instruct=self._config.rollout.instruct,
            sandbox=self._config.sandbox,
            executors=tuple(self._executors),
        )
        bundle = self._layout.replica_bundles[replica]
        self._workers[name] = (
            ray.remote(GenerationActor)
            .options(
                name=name,
                num_cpus=engine.cpus_per_replica,
                num_gpus=engine.gpus_per_replica,
                max_restarts=MAX_WORKER_RESTARTS,
                max_task_retries=0,
                max_concurrency=1_000,
                **self._in_bundle(bundle),
            )
            .remote(settings)
        )

    async def _start_workers(self, names: Sequence[str]) -> None:
        """Engines up, then the current weights, then work."""

        async def start(name: str) -> None:
            worker = self._workers[name]
            deadline_s = self._config.engine.start_deadline_s
            facts = await within(
                when_available(worker.start.remote), deadline_s, waiter="driver", owner=name, reason="its engine"
            )
            pulled: Published | None = None
            while self._published is not None and pulled is not self._published:
                pulled = self._published
                await self._pull(name, pulled)
            self._coming_back.discard(name)
            await self._ask(worker.serve.remote(), name, "its loops")
            self.rollouts.follow(name, worker)
            self._show(f"{name}: {facts.kv_capacity_tokens:,} KV tokens")

        await asyncio.gather(*(start(name) for name in names))

    async def _worker_lost(self, name: str, lost: Exception) -> None:
        """Its rollouts go on elsewhere; Ray has started the actor again and it gets today's weights."""
        self._coming_back.add(name)
        self._restarts[name] = self._restarts.get(name, 0) + 1
        self._show(f"{name} was lost ({type(lost).__name__}); start {self._restarts[name] + 1}")
        if self._restarts[name] > MAX_WORKER_RESTARTS:
            raise RStarError(f"{name} was lost {self._restarts[name]} times, last: {lost}")
        told = when_available(lambda: self._balancer.replica_lost.remote(name))
        await self._ask(told, "balancer", f"the rollouts of {name}")
        await self.rollouts.resubmit()
        await self._start_workers([name])

    async def _pull_unless_lost(self, name: str, published: Published) -> None:
        """A worker that dies meanwhile takes the newest weights when it comes back."""
        try:
            await self._pull(name, published)
        except ray.exceptions.RayActorError as lost:
            self._show(f"{name} did not take version {published.policy_version}: {type(lost).__name__}")

    async def _pull(self, name: str, published: Published) -> None:
        checksum = await self._ask(
            self._workers[name].pull.remote(published.policy_version, [[ref] for ref in published.refs]),
            name,
            f"policy version {published.policy_version}",
        )
        if checksum != published.checksum:
            raise RStarError(
                f"{name} holds other weights than the learner published as version {published.policy_version}: "
                f"checksum {checksum:08x} for {published.checksum:08x}"
            )

    async def _ask(self, answer: Awaitable[Any], owner: str, reason: str) -> Any:
        return await within(answer, CALL_DEADLINE_S, waiter="driver", owner=owner, reason=reason)


def engine_settings(config: RunConfig, model: Path) -> EngineSettings:
    engine = config.engine
    return EngineSettings(
        model=str(model),
        dtype=engine.dtype,
        max_model_len=engine.max_context_tokens,
        kv_tokens=engine.kv_tokens or None,
        max_num_seqs=engine.max_running,
        enforce_eager=engine.gpus_per_replica == 0,
        tensor_parallel_size=engine.tensor_parallel,
        gpu_memory_utilization=engine.gpu_memory_share,
        seed=config.seed,
        start_deadline_s=engine.start_deadline_s,
    )


def learner_settings(config: RunConfig, model: Path) -> LearnerSettings:
    learner, algorithm = config.learner, config.algorithm
    return LearnerSettings(
        model=str(model),
        world_size=learner.ranks,
        device="cuda" if learner.gpus_per_rank else "cpu",
        dtype=learner.dtype,
        zero_stage=learner.zero_stage,
        activation_checkpointing=learner.activation_checkpointing,
        num_threads=learner.num_threads,
        seed=config.seed,
        betas=(0.9, config.optimizer.beta2),
        weight_decay=config.optimizer.weight_decay,
        grad_clip=config.optimizer.grad_clip,
        loss=LossSettings(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            normalisation=Normalisation(algorithm.normalisation),
            constant_tokens=config.engine.max_context_tokens,  # one constant for all stages
            temperature=config.rollout.temperature or 1.0,
        ),
        batch=BatchLimits(micro_batch_tokens=learner.micro_batch_tokens),
        step_deadline_s=learner.step_deadline_s,
    )


def pool_config(config: RunConfig) -> PoolConfig:
    sandbox = config.sandbox
    level = "process" if sandbox.level == "process" else "namespaces"
    return PoolConfig(level=level, allow_landlock=sandbox.level == "landlock", slots=sandbox.slots)


def quiet_environment() -> dict[str, str]:
    """For every worker process of the run: no telemetry, no look-ups on a hub, one thread unless told otherwise."""
    return {
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
    }
