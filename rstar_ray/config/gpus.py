"""How engines and learner ranks may share GPUs, and how weights get from ranks to engines."""

from typing import Literal

from rstar_ray.config.checks import require
from rstar_ray.config.machines import EngineConfig, LearnerConfig

WeightWay = Literal["object_store", "ipc", "nccl"]


def check_gpus(engine: EngineConfig, learner: LearnerConfig) -> None:
    """Raise `ConfigError` for GPU shares that Ray can reserve but the processes cannot use."""
    gpus, split = engine.gpus_per_replica, engine.tensor_parallel
    require(
        gpus == 0 or split == 1 or gpus == split,
        "--engine.tensor-parallel",
        f"a replica split over {split} GPUs needs {split} whole GPUs (got --engine.gpus-per-replica {gpus:g})",
        f"give --engine.gpus-per-replica {split}, or --engine.tensor-parallel 1",
    )
    require(
        gpus <= 1 or gpus == split,
        "--engine.gpus-per-replica",
        f"a replica that is not split uses one GPU (got {gpus:g})",
        f"give 1, or --engine.tensor-parallel {gpus:g}",
    )
    share = learner.gpus_per_rank
    require(
        share <= 1,
        "--learner.gpus-per-rank",
        f"a rank uses one GPU at most (got {share:g})",
        "give 1 or a share of one, and more --learner.ranks",
    )
    require(
        not learner.own_gpus or share in (0, 1),
        "--learner.own-gpus",
        f"separate GPUs need whole GPUs (got --learner.gpus-per-rank {share:g})",
        "give --learner.gpus-per-rank 1",
    )
    require(
        not 0 < share < 1 or learner.ranks <= engine.replicas,
        "--learner.ranks",
        f"ranks that share the replicas' GPUs cannot outnumber them, since collectives need one GPU per rank (got "
        f"{learner.ranks} ranks, {engine.replicas} replicas)",
        "give at most --engine.replicas, or --learner.gpus-per-rank 1",
    )
    require(
        not (0 < gpus < 1 and 0 < share < 1) or gpus + share <= 1,
        "--learner.gpus-per-rank",
        f"a rank and the replica beside it need more than one GPU (got {share:g} and {gpus:g})",
        "lower one of them, or give --learner.gpus-per-rank 1",
    )
    apart = 0 < gpus < 1 and gpus + share > 0.5
    require(
        not 0 < share < 1 or learner.ranks == 1 or apart,
        "--learner.gpus-per-rank",
        f"Ray may place two ranks on one GPU, but collectives need one GPU per rank (got {share:g} beside replicas of "
        f"{gpus:g})",
        "give 1, or a share that together with the replica's exceeds 0.5",
    )
    _check_weights_by(engine, learner)


def weight_way(engine: EngineConfig, learner: LearnerConfig) -> WeightWay:
    """The transfer of weights to engines, with `auto` resolved by the placement."""
    if learner.weights_by != "auto":
        return learner.weights_by
    if not _on_gpus(engine, learner) or learner.lora_rank:  # adapters are small
        return "object_store"
    if not _shared(engine, learner):
        return "nccl"
    return "ipc" if learner.ranks == engine.replicas else "object_store"


def shares_gpus(engine: EngineConfig, learner: LearnerConfig) -> bool:
    """Whether engines and ranks have GPUs in common."""
    return _on_gpus(engine, learner) and _shared(engine, learner)


def _on_gpus(engine: EngineConfig, learner: LearnerConfig) -> bool:
    return engine.gpus_per_replica > 0 and learner.gpus_per_rank > 0


def _shared(engine: EngineConfig, learner: LearnerConfig) -> bool:
    """Whether ranks reserve fractions of GPUs whose other fraction an engine reserves."""
    return not learner.own_gpus and learner.gpus_per_rank < 1 and engine.gpus_per_replica < 1


def _check_weights_by(engine: EngineConfig, learner: LearnerConfig) -> None:
    """Raise `ConfigError` for a transfer that the placement does not allow."""
    by, option, auto = learner.weights_by, "--learner.weights-by", "give auto"
    if by in ("auto", "object_store"):
        return
    require(
        _on_gpus(engine, learner),
        option,
        f"{by} needs GPUs on both sides (got {engine.gpus_per_replica:g} per replica, {learner.gpus_per_rank:g} per "
        "rank)",
        f"{auto}, or set --engine.gpus-per-replica and --learner.gpus-per-rank",
    )
    if by == "nccl":
        require(
            not _shared(engine, learner),
            option,
            "nccl needs one process per GPU, but ranks share GPUs with engines",
            f"{auto}, or give ranks separate GPUs (--learner.own-gpus --learner.gpus-per-rank 1)",
        )
        return
    require(
        _shared(engine, learner),
        option,
        "ipc needs both processes on one GPU, but ranks and engines have separate GPUs",
        f"{auto}, or share GPUs (--engine.gpus-per-replica 0.5 --learner.gpus-per-rank 0.5 --learner.no-own-gpus)",
    )
    require(
        learner.ranks == engine.replicas,
        option,
        f"ipc needs one rank on each engine's GPU (got {learner.ranks} ranks, {engine.replicas} engines)",
        f"{auto}, or --learner.ranks {engine.replicas}",
    )
