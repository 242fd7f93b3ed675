"""The learner in the driver: starts the ranks, sends each its share of the work, and collects the results.

Tokens and weights never pass through the driver. When one rank fails, all ranks are stopped.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from actors.cluster.gpu_lock import ANYTIME, Turn
from actors.health.watchdog import Watchdog
from actors.learner.learner_actor import LearnerActor, rank_name
from actors.learner.rank_client import Rank, RankDied, start_rank
from actors.learner.shares import rl_shares, rows_refused, sft_shares, usable_rows
from actors.service import LossBudget
from actors.weights.transfer import EngineSeat, Publication
from rstar_ray.algorithm.update import SftExample, UpdateResult
from rstar_ray.config import AlgorithmConfig, RunConfig, own_rules
from rstar_ray.config.gpus import WeightWay
from rstar_ray.deadline import fail, unless_failed, within
from rstar_ray.errors import ConfigError, DeadlineExceeded, LearnerError, RankLost, VersionGone
from rstar_ray.rollouts import TrainingRow
from rstar_ray.run_dir.manifest import WrittenFile
from rstar_ray.telemetry.meter import NO_METER, Meter

if TYPE_CHECKING:
    from actors.learner.policy import RankFacts  # imports torch

log = logging.getLogger(__name__)

FIRST_ANSWER_SHARE = 0.5
"""Fraction of the start deadline for a rank's first answer: on a busy machine its imports take minutes."""
MAX_LOSSES_IN_A_ROW = 3
"""Consecutive losses of the learner, without a new checkpoint in between, before the run ends."""
CLOSE_DEADLINE_S = 20.0
DEATH_NOTICE_S = 5.0
"""How long to wait, after one rank's failure, for the death of another rank to be noticed."""

R = TypeVar("R")
T = TypeVar("T")


def rank_environment(config: RunConfig) -> dict[str, str]:
    """Environment variables of a rank's process; cuBLAS, flash attention and DeepSpeed read them at start."""
    env = {"OMP_NUM_THREADS": str(config.learner.num_threads), "TOKENIZERS_PARALLELISM": "false"}
    if config.learner.device == "cpu":
        env["DS_ACCELERATOR"] = "cpu"
    if config.deterministic:
        env |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}
    return env


class Learner:
    """Drives the ranks; the `Learner` of `rstar_ray.context`."""

    def __init__(
        self,
        config: RunConfig,
        model: Path,
        *,
        rank_options: Sequence[Mapping[str, Any]] = (),
        waiter: str = "driver",
        watchdog: Watchdog | None = None,
        silent_s: float = math.inf,
        meter: Meter = NO_METER,
        turn: Turn = ANYTIME,
        placed: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Trains the policy in the folder `model`.

        `rank_options`: Ray's actor options for each rank (placement, CPUs, GPUs); by default one CPU each. `watchdog`
        probes the ranks and kills one that is silent for longer than `silent_s`. The learner loads the model and
        updates while it holds its `turn` on shared GPUs. `placed` returns once every rank has a node; it is awaited
        before ranks are restarted.
        """
        self._turn = turn
        self._placed = placed
        self._meter = meter
        self.config = config
        self._model = model
        ranks = config.learner.ranks
        self._options = list(rank_options) or [{"num_cpus": 1}] * ranks
        if len(self._options) != ranks:
            raise ConfigError("learner.ranks", f"{ranks} ranks, but {len(self._options)} placements", f"give {ranks}")
        self._waiter = waiter
        self._watchdog = watchdog
        self._silent_s = silent_s
        self._lost: asyncio.Future[None] | None = None  # fails when one of these ranks is lost
        self._ranks: list[Rank] = []
        self._saved: list[Path] = []  # checkpoints that these ranks have not written yet
        self._facts: Any = None
        self._step = 0
        self._one_at_a_time = asyncio.Lock()  # a rank recognises only a repetition of its newest call
        self._version: int | None = None  # the newest published version, if the ranks still have its weights

    @property
    def facts(self) -> Any:
        """`RankFacts` of rank 0; available after `start`."""
        assert self._facts is not None, "the learner has not been started"
        return self._facts

    # ------------------------------------------------------------ start and end

    async def start(self) -> None:
        """Create the ranks, connect them, load the model. Raises `RankLost` if a restart may succeed."""
        self._saved, self._version = [], None
        env = {"env_vars": rank_environment(self.config)}
        self._ranks = [
            start_rank(
                self.config,
                self._model,
                number,
                run=self._meter.run,
                caller=self._waiter,
                silent_s=self._silent_s,
                runtime_env=env,
                **options,
            )
            for number, options in enumerate(self._options)
        ]
        seconds = self.config.learner.start_deadline_s
        await self._gathered([rank.first_heartbeat(FIRST_ANSWER_SHARE * seconds) for rank in self._ranks])
        self._follow()
        first = self._running()[0].call_once(lambda rank: rank.address(), deadline_s=seconds, reason="its address")
        ((host, port),) = await self._gathered([first])
        async with self._turn():
            facts = await self._everywhere(lambda rank: rank.start(host, port), "loading the model", seconds)
        refuse_differing_rules(facts, self.config.algorithm)
        if self._facts is not None:
            refuse_changed_rules(self._facts, facts[0], self.config.algorithm)
        self._facts = facts[0]
        self._lost = asyncio.get_running_loop().create_future()
        for rank in self._ranks:
            rank.on_death = partial(self._rank_died, rank.name)
            rank.serves()
        self._follow()

    def _follow(self) -> None:
        if self._watchdog is not None:
            for rank in self._ranks:
                self._watchdog.follow(rank)

    async def restart(self) -> None:
        """Replace all ranks by new ones, in the state after `start`; the caller then loads a checkpoint."""
        await self.clear()
        await self.start()

    async def clear(self) -> None:
        """Stop the ranks, and wait until new ones can be started."""
        self._end_ranks()
        if self._placed is not None:
            await self._placed()
        gone = _until_unnamed({rank_name(rank) for rank in range(self.config.learner.ranks)})
        try:
            await within(gone, CLOSE_DEADLINE_S, waiter=self._waiter, owner="learner", reason="the end of its ranks")
        except DeadlineExceeded as late:
            raise RankLost(str(late)) from late

    async def unless_lost(self, work: Awaitable[T]) -> T:
        """The result of `work`. Raises `RankLost` as soon as a rank is lost, even if no call of a rank is pending."""
        assert self._lost is not None, "start() comes first"
        return await unless_failed(work, self._lost, CLOSE_DEADLINE_S)

    def _rank_died(self, name: str, died: Exception) -> None:
        """Stop all ranks: the others wait for the dead one in a collective."""
        self._meter.add("rstar_losses_total", 1, part="learner")
        self._end_ranks()
        if self._lost is not None:
            fail(self._lost, RankLost(f"{name} died ({type(died).__name__})"))

    async def close(self) -> None:
        """Stop the ranks; safe to call twice, and after a failure."""
        await asyncio.gather(*(rank.close(CLOSE_DEADLINE_S) for rank in self._ranks))
        self._end_ranks()

    def _end_ranks(self) -> None:
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            if self._watchdog is not None:
                self._watchdog.leave(rank)
            rank.end()

    # ------------------------------------------------------------ training

    async def train_rl(self, rows: Sequence[TrainingRow], lr: float) -> UpdateResult:
        """The optimizer steps of one RL step on these rows.

        The result lists the excluded rows with the reasons. If no row is usable, nothing is updated, and the result
        has `applied=False` and a reason.
        """
        usable, left_out = usable_rows(rows, self.facts.max_context_tokens)
        for row in left_out:
            log.warning("%s is excluded from the update: %s", row.rollout_id, row.reason)
        if not usable:
            reason = f"all {len(rows)} rows are excluded: too long for the context, or no sampled token"
            return replace(self._nothing(reason, lr), left_out=left_out)
        work = rl_shares(usable, self.config, attention_tokens=self.facts.attention_tokens)
        result = await self._train(
            lambda rank, share: rank.train_rl(share, lr), work, f"an update of {len(usable)} rows"
        )
        refused = rows_refused(usable, self.config.optimizer.updates_per_step, result)
        return replace(result, left_out=(*left_out, *refused))

    def seen_tokens(self) -> list[Any]:
        """One object ref per rank: the `SeenTokens` of its rows in the newest `train_rl`, by rollout id."""
        return [rank.methods().seen_tokens() for rank in self._ranks]

    async def train_sft(self, examples: Sequence[SftExample], lr: float) -> UpdateResult:
        """One optimizer step of cross-entropy."""
        work = sft_shares(examples, self.config.learner, attention_tokens=self.facts.attention_tokens)
        if not work:
            return self._nothing(f"no token of {len(examples)} conversations has a loss", lr)
        return await self._train(lambda rank, share: rank.train_sft(share, lr), work, "an SFT update")

    async def evaluate_sft(self, examples: Sequence[SftExample]) -> float:
        """Mean cross-entropy per token with a loss; NaN if no token has one."""
        work = sft_shares(examples, self.config.learner, attention_tokens=self.facts.attention_tokens)
        if not work:
            return math.nan
        seconds = self.config.learner.step_deadline_s
        losses = await self._all(lambda rank, share: rank.evaluate_sft(share), work, seconds, "validation loss")
        return losses[0]

    async def _train(
        self, ask: Callable[[LearnerActor, T], UpdateResult], shares: Sequence[T], reason: str
    ) -> UpdateResult:
        async with self._turn():
            results = await self._all(ask, shares, self.config.learner.step_deadline_s, reason)
            if results[0].applied:
                self._version = None
        self._step = results[0].step
        if results[0].reason:
            log.warning("update not applied: %s", results[0].reason)
        return results[0]

    def _nothing(self, reason: str, lr: float) -> UpdateResult:
        log.warning("no update: %s", reason)
        return UpdateResult(applied=False, reason=reason, step=self._step, metrics={"lr": lr, "trained_tokens": 0})

    # ------------------------------------------------------------ weights out and in

    async def publish(self, policy_version: int, engines: Sequence[EngineSeat] = ()) -> Publication:
        """Send the weights to these engines; if there are none, put them into rank 0's object store."""
        async with self._one_at_a_time:
            self._version = policy_version
            return await self._publish(policy_version, engines)

    async def store_again(self, policy_version: int) -> Publication:
        """Put the weights of a published version into the object store. Raises `VersionGone` if they have changed."""
        async with self._one_at_a_time:
            if policy_version != self._version:
                raise VersionGone(f"the learner has trained since version {policy_version}")
            return await self._publish(policy_version, ())

    async def _publish(self, policy_version: int, engines: Sequence[EngineSeat]) -> Publication:
        started = time.perf_counter()
        way: WeightWay = self.config.weight_way if engines else "object_store"
        of_rank = [[seat for seat in engines if seat.sender == rank] for rank in range(len(self._ranks))]
        sent = await self._call_ranks(
            lambda rank, seats: rank.publish(policy_version, way, seats),
            of_rank,
            self.config.learner.step_deadline_s,
            "the weights",
        )
        seconds = time.perf_counter() - started
        return Publication.together(sent, seconds=seconds)

    async def save_checkpoint(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Copy the training state for a checkpoint; each rank writes its part while training continues.

        `written` waits until the files are on disk.
        """
        saved = dict(extra or {})
        await self._everywhere(lambda rank: rank.save_checkpoint(str(folder), saved), "a copy for a checkpoint")
        self._saved.append(folder)

    async def written(self) -> dict[Path, WrittenFile]:
        """The files of checkpoints and model folders that the ranks wrote since the last call; waits for all of them.

        Raises `LearnerError` if a rank could not write, or if this process does not see the files, and `RankLost` if
        the ranks that took the copies are gone. Ranks may train meanwhile, and a failure here does not stop them.
        """
        ranks, seconds = self._running(), self.config.learner.step_deadline_s
        folders, self._saved = self._saved, []
        waits = [rank.written(deadline_s=seconds, reason="writing a checkpoint") for rank in ranks]
        files: dict[Path, WrittenFile] = {}
        for of_rank in await asyncio.gather(*waits):
            files |= of_rank
        refuse_missing(files, folders, [rank.name for rank in ranks])
        refuse_unseen(files)
        return files

    async def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Resume from a checkpoint written by any number of ranks; returns the `extra` saved with it."""
        self._version = None
        loaded = await self._everywhere(lambda rank: rank.load_checkpoint(str(folder)), "loading a checkpoint")
        extra, self._step = loaded[0]
        return extra

    async def export(self, folder: Path) -> None:
        """Write a Hugging Face model folder that transformers and vLLM load; with LoRA, also a PEFT folder beside it.

        Rank 0 writes while training continues; `written` waits for the files.
        """
        await self._everywhere(lambda rank: rank.export(str(folder)), "a copy of the model")

    async def set_policy(self, folder: Path) -> None:
        """Load the weights of a Hugging Face folder; the optimizer state is unchanged."""
        self._version = None
        await self._everywhere(lambda rank: rank.set_policy(str(folder)), "loading weights")

    async def reset_optimizer(self) -> None:
        """Reset moments and step count; the policy is unchanged."""
        await self._everywhere(lambda rank: rank.reset_optimizer(), "a fresh optimizer")
        self._step = 0

    # ------------------------------------------------------------ calls

    async def _everywhere(
        self, ask: Callable[[LearnerActor], R], reason: str, deadline_s: float | None = None
    ) -> list[R]:
        deadline_s = self.config.learner.step_deadline_s if deadline_s is None else deadline_s
        return await self._all(lambda rank, _: ask(rank), [None] * len(self._ranks), deadline_s, reason)

    async def _all(
        self, ask: Callable[[LearnerActor, T], R], shares: Sequence[T], deadline_s: float, reason: str
    ) -> list[R]:
        """Call every rank with its share of the work, after the calls before it, and wait for all."""
        async with self._one_at_a_time:
            return await self._call_ranks(ask, shares, deadline_s, reason)

    async def _call_ranks(
        self, ask: Callable[[LearnerActor, T], R], shares: Sequence[T], deadline_s: float, reason: str
    ) -> list[R]:
        async def call(rank: Rank, share: T) -> R:
            return await rank.call_once(lambda methods: ask(methods, share), deadline_s=deadline_s, reason=reason)

        return await self._gathered([call(rank, share) for rank, share in zip(self._running(), shares, strict=True)])

    async def _gathered(self, asked: Sequence[Awaitable[R]]) -> list[R]:
        """The ranks' results. The first failure stops all ranks: the others wait for that rank in a collective."""
        calls, ranks = [asyncio.ensure_future(call) for call in asked], self._ranks
        try:
            return list(await asyncio.gather(*calls))
        except ConfigError:
            # Every rank raises the same error and remains usable.
            await asyncio.wait(calls, timeout=CLOSE_DEADLINE_S)
            raise
        except (LearnerError, DeadlineExceeded) as failed:
            lost = await _loss_behind(failed, calls)
            if self._ranks is ranks:  # a call that outlived its ranks does not stop those that were started since
                self._end_ranks()
            if lost is not None and lost is not failed:
                raise lost from failed
            raise
        finally:
            for call in calls:
                call.cancel()

    def _running(self) -> list[Rank]:
        """All ranks. Raises `RankLost` if they have been stopped."""
        if not self._ranks:
            why = f": {self._lost.exception()}" if self._lost is not None and self._lost.done() else ""
            raise RankLost(f"the learner is not running{why}")
        return self._ranks


async def with_restarts(
    work: Callable[[], Awaitable[T]],
    *,
    restart: Callable[[], Awaitable[None]],
    since: Callable[[], str],
    lost: type[RankLost] = RankLost,
) -> T:
    """The result of `work`. Whenever `work` raises `lost`, `restart` is awaited and `work` is called again.

    `since` names the state from which training resumes, such as the newest checkpoint. Raises `LearnerError` after
    more than `MAX_LOSSES_IN_A_ROW` losses since the same state.
    """
    losses = LossBudget(MAX_LOSSES_IN_A_ROW)
    while True:
        try:
            if losses.in_a_row:
                await restart()
            return await work()
        except lost as fault:
            state = since()
            losses.count(state)
            if losses.exceeded:
                raise LearnerError(f"{fault}; {losses.in_a_row} losses since {state}") from fault
            log.warning(f"{fault}; the learner starts again from {state}")


async def first_start(learner: Learner) -> None:
    """Start the learner at the start of a run; retry only if a rank dies or is silent.

    An error that a rank raises, or a start that takes too long, points to wrong settings and ends the run immediately.
    """
    await with_restarts(learner.start, restart=learner.clear, since=lambda: "the start of the run", lost=RankDied)


async def _loss_behind(failed: Exception, calls: "Sequence[asyncio.Future[Any]]") -> RankLost | None:
    """The loss that caused this failure, if any.

    When a rank dies, another rank may be the first to fail, with a connection closed by its peer.
    """
    if isinstance(failed, RankDied):
        return failed
    if isinstance(failed, DeadlineExceeded):
        return RankLost(str(failed))
    await asyncio.wait(calls, timeout=DEATH_NOTICE_S)
    ended = [call.exception() for call in calls if call.done() and not call.cancelled()]
    losses = [error for error in (failed, *ended) if isinstance(error, RankLost)]
    return next((lost for lost in losses if isinstance(lost, RankDied)), losses[0] if losses else None)


async def _until_unnamed(names: set[str]) -> None:
    """Wait until no actor has these names; Ray frees an actor's name after its process has ended."""
    while names & set(ray.util.list_named_actors()):
        await asyncio.sleep(0.1)


def refuse_missing(written: Mapping[Path, WrittenFile], folders: Sequence[Path], ranks: Sequence[str]) -> None:
    """Raises `RankLost` if a rank did not report its part of one of these checkpoints as written."""
    for folder in folders:
        writers = {file.by for path, file in written.items() if path.parent == folder}
        if missing := [name for name in ranks if name not in writers]:
            raise RankLost(f"{missing[0]} has not written its part of {folder.name}")


def refuse_unseen(written: Mapping[Path, WrittenFile]) -> None:
    """Raises `LearnerError` if a file that a rank wrote is missing here, or has another size.

    The rank then wrote to a folder that is local to its node.
    """
    for path, file in written.items():
        if not path.is_file() or path.stat().st_size != file.num_bytes:
            raise LearnerError(
                f"{file.by} wrote {path.name} to {path.parent}, but the driver does not see it: the run "
                "directory must be on a file system that every node sees"
            )


def refuse_differing_rules(facts: "Sequence[RankFacts]", algorithm: AlgorithmConfig) -> None:
    """Raises `ConfigError` if the digests of the user's rule modules differ between ranks."""
    for rank, of_rank in enumerate(facts):
        if of_rank.own_rules != facts[0].own_rules:
            modules = {name for name, _ in of_rank.own_rules.items() ^ facts[0].own_rules.items()}
            raise ConfigError(
                f"--algorithm: {', '.join(own_rules(algorithm))}",
                f"{min(modules)} differs between learner/rank-{rank} and learner/rank-0",
                "give every node the same --own-folder",
            )


def refuse_changed_rules(before: "RankFacts", now: "RankFacts", algorithm: AlgorithmConfig) -> None:
    """Raises `ConfigError` if a module of the user's rules has changed since the ranks were first started: the driver
    still has the other rules of the module as they were.
    """
    if changed := {name for name, _ in before.own_rules.items() ^ now.own_rules.items()}:
        raise ConfigError(
            f"--algorithm: {', '.join(own_rules(algorithm))}",
            f"{min(changed)} has changed since the run was started",
            "give the same command again to continue with the changed module",
        )
