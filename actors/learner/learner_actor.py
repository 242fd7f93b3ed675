"""The Ray actor of one `LearnerRank`: fetches training rows for the rank and sends the weights it publishes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from actors.cluster.devices import see_own_gpu_first
from actors.cluster.ray_metrics import ray_meter
from actors.health.heartbeat import Heartbeat, heartbeat
from actors.learner.shares import RlShare, RlWork, SftWork
from actors.remote import ReplyCache, in_group
from actors.service import ServiceActor
from actors.weights.engine_client import EngineClient
from actors.weights.transfer import EngineSeat, Publication, put_into_store
from rstar_ray.algorithm.update import SeenTokens, UpdateResult
from rstar_ray.config import RunConfig
from rstar_ray.config.gpus import WeightWay
from rstar_ray.errors import DeadlineExceeded, LearnerError, RankLost
from rstar_ray.run_dir.manifest import WrittenFile

if TYPE_CHECKING:
    from actors.weights.collective import CollectiveTransfer

FETCH_DEADLINE_S = 120.0  # for the trajectories of one update


def rank_name(rank: int) -> str:
    """A rank's name in Ray's dashboard and in messages."""
    return f"learner/rank-{rank}"


class LearnerActor(ServiceActor):
    """One rank; the logic is in actors/learner/rank.py."""

    def __init__(self, config: RunConfig, model: Path, rank: int, run: str = "") -> None:
        see_own_gpu_first()
        from actors.learner.rank import LearnerRank

        self._rank = LearnerRank(config, model, rank)
        super().__init__(rank_name(rank))
        self._replies, self._written = ReplyCache(), ReplyCache()  # of `call`; of `written`, which runs concurrently
        self._broadcast: CollectiveTransfer | None = None  # its process group is reused for every version
        self._meter = ray_meter(run)

    @in_group("probe")
    def probe(self) -> Heartbeat:
        """Heartbeat for the watchdog; in a separate thread, since other calls wait while the rank computes."""
        held = self._rank.memory_bytes()
        with self._meter.guarded():
            for kind, num_bytes in held.items():
                self._meter.set("rstar_learner_memory_bytes", num_bytes, rank=str(self._rank.rank), of=kind)
        return heartbeat(progress=self._rank.calls, device_bytes=held.get("device", 0))

    def call(self, number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        """The result of a method; a repeated call with the newest number returns the cached result."""
        return self._replies.of(number, lambda: getattr(self, method)(*arguments))

    def address(self) -> tuple[str, int]:
        """Open the store that the ranks connect to; returns this node's address and the port."""
        host = ray.util.get_node_ip_address()
        return host, self._rank.open_store(host)

    def start(self, master_address: str, master_port: int) -> Any:
        self._rank.start(master_address, master_port)
        return self._rank.facts()

    def train_rl(self, work: RlWork, lr: float) -> UpdateResult:
        batches = self._fetch([share.row.ref.batch for share in _all_shares(work)])
        updates = [[[_token_row(share, batches) for share in shares] for shares in update] for update in work]
        return self._rank.train_rl(updates, lr)

    def seen_tokens(self) -> dict[str, SeenTokens]:
        return self._rank.seen_tokens()

    def _fetch(self, refs: Sequence[Any]) -> dict[Any, Any]:
        """The batches of trajectories of these references, by `_key`; each is fetched once."""
        wanted = {_key(ref): ref for ref in refs}
        remote = {key: ref for key, ref in wanted.items() if isinstance(ref, ray.ObjectRef)}
        try:
            values = ray.get(list(remote.values()), timeout=FETCH_DEADLINE_S)
        except GetTimeoutError:
            reason = f"{len(remote)} batches of trajectories"
            raise DeadlineExceeded(self._name, "object store", reason, FETCH_DEADLINE_S) from None
        except ObjectLostError as gone:
            lost = "found no trajectories in the object store: the node that held them was lost"
            raise RankLost(f"{self._name} {lost}") from gone
        return {**wanted, **dict(zip(remote, values, strict=True))}

    def train_sft(self, work: SftWork, lr: float) -> UpdateResult:
        return self._rank.train_sft(_sft_rows(work), lr)

    def evaluate_sft(self, work: SftWork) -> float:
        return self._rank.evaluate_sft(_sft_rows(work))

    def publish(self, version: int, way: WeightWay, seats: Sequence[EngineSeat]) -> Publication:
        """This rank's part in publishing a version to the engines at `seats`, or into the object store."""
        from actors.weights.collective import CollectiveTransfer
        from actors.weights.ipc import CudaExporter, IpcTransfer

        weights, engines = self._rank.served_weights(), [EngineClient(seat) for seat in seats]
        deadline_s = self._rank.config.engine.answer_deadline_s
        if way == "ipc":
            return IpcTransfer(CudaExporter(), deadline_s).send(weights, version, engines)
        if self._rank.rank != 0:  # the first rank sends for all
            weights.take_part()
            return Publication(policy_version=version, way=way)
        if way == "nccl":
            host = ray.util.get_node_ip_address()
            self._broadcast = self._broadcast or CollectiveTransfer(host, self._rank.device, deadline_s)
            return self._broadcast.send(weights, version, engines)
        return put_into_store(weights, version, ray.put)

    def save_checkpoint(self, folder: str, extra: dict[str, Any]) -> None:
        self._rank.save_checkpoint(Path(folder), extra)

    @in_group("files")
    def written(self, number: int) -> dict[Path, WrittenFile]:
        """Runs in a separate thread, while the rank trains; a repeated number returns the cached result."""
        return self._written.of(number, self._rank.written)

    def load_checkpoint(self, folder: str) -> tuple[dict[str, Any], int]:
        return self._rank.load_checkpoint(Path(folder)), self._rank.step

    def export(self, folder: str) -> None:
        self._rank.export(Path(folder))

    def set_policy(self, folder: str) -> None:
        self._rank.set_policy(Path(folder))

    def reset_optimizer(self) -> None:
        self._rank.reset_optimizer()

    def close(self) -> None:
        self._rank.close()


def _all_shares(work: RlWork) -> Iterator[RlShare]:
    return (share for update in work for micro_batch in update for share in micro_batch)


def _key(batch: Any) -> Any:
    """Key of a batch: its object reference, or the id of a plain list."""
    return batch if isinstance(batch, ray.ObjectRef) else id(batch)


def _token_row(share: RlShare, batches: dict[Any, Any]) -> Any:
    from rstar_ray.algorithm.batch import rl_row

    row = share.row
    tokens = rl_row(batches[_key(row.ref.batch)][row.ref.index], row.advantage, share.token_weight, row.line)
    if tokens.num_sampled_tokens != row.num_sampled_tokens:
        raise LearnerError(
            f"{row.rollout_id} has {tokens.num_sampled_tokens} sampled tokens, expected {row.num_sampled_tokens}"
        )
    return tokens


def _sft_rows(work: SftWork) -> Any:
    from rstar_ray.algorithm.batch import sft_row

    return [[sft_row(share.example, share.token_weight) for share in shares] for shares in work]
