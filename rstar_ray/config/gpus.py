"""How engines and learner ranks may share GPUs, and how weights get from ranks to engines."""

from typing import Literal

from rstar_ray.config.checks import require
from rstar_ray.config.machines import EngineConfig, LearnerConfig

WeightWay = Literal["object_store", "ipc", "nccl"]


def check_gpus(engine: EngineConfig, learner: LearnerConfig) -> None:
    """Refuse GPU shares that can be reserved but not used."""
    gpus, split = engine.gpus_per_replica, engine.tensor_parallel
    require(
        gpus == 0 or split == 1 or gpus == split,
        "--engine.tensor-parallel",
        f"a replica split over {split} GPUs cannot have {gpus:g}: each of its parts needs a whole one",
        f"give --engine.gpus-per-replica {split}, or --engine.tensor-parallel 1",
    )
    require(
        gpus <= 1 or gpus == split,
        "--engine.gpus-per-replica",
        f"a replica that is not split uses one GPU of {gpus:g}",
        f"give 1, or --engine.tensor-parallel {gpus:g}",
    )
    share = learner.gpus_per_rank
    require(
        share <= 1,
        "--learner.gpus-per-rank",
        f"a rank uses one GPU of {share:g}",
        "give 1 or a share of one, and more --learner.ranks",
    )
    require(
        not learner.own_gpus or share in (0, 1),
        "--learner.own-gpus",
        f"a rank that reserves {share:g} of a GPU shares one",
        "give --learner.gpus-per-rank 1",
    )
    require(
        not 0 < share < 1 or learner.ranks <= engine.replicas,
        "--learner.ranks",
        f"{learner.ranks} ranks beside {engine.replicas} replicas would have to share GPUs with each other, which "
        "their collectives refuse",
        "give at most --engine.replicas, or --learner.gpus-per-rank 1",
    )
    require(
        not (0 < gpus < 1 and 0 < share < 1) or gpus + share <= 1,
        "--learner.gpus-per-rank",
        f"{share:g} of a GPU for a rank and {gpus:g} for the replica beside it are more than one",
        "lower one of them, or give --learner.gpus-per-rank 1",
    )
    apart = 0 < gpus < 1 and gpus + share > 0.5
    require(
        not 0 < share < 1 or learner.ranks == 1 or apart,
        "--learner.gpus-per-rank",
        f"two ranks of {share:g} of a GPU each, beside replicas of {gpus:g}, may come to lie on one GPU, which their "
        "collectives refuse",
        "give 1, or a share that with its replica's is more than half a GPU",
    )
    _check_weights_by(engine, learner)


def weight_way(engine: EngineConfig, learner: LearnerConfig) -> WeightWay:
    """How weights reach the engines, with `auto` resolved by the placement."""
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
    """Whether ranks have parts of GPUs whose other parts belong to engines."""
    return not learner.own_gpus and learner.gpus_per_rank < 1 and engine.gpus_per_replica < 1


def _check_weights_by(engine: EngineConfig, learner: LearnerConfig) -> None:
    """Refuse a transfer that the placement does not allow."""
    by, option, auto = learner.weights_by, "--learner.weights-by", "give auto"
    if by in ("auto", "object_store"):
        return
    require(
        _on_gpus(engine, learner),
        option,
        f"{by} is for GPUs, and a replica has {engine.gpus_per_replica:g}, a rank {learner.gpus_per_rank:g}",
        f"{auto}, or GPUs to both (--engine.gpus-per-replica, --learner.gpus-per-rank)",
    )
    if by == "nccl":
        require(
            not _shared(engine, learner),
            option,
            "nccl has one process to a GPU, and ranks share the engines'",
            f"{auto}, or give ranks their own GPUs (--learner.own-gpus --learner.gpus-per-rank 1)",
        )
        return
    require(
        _shared(engine, learner),
        option,
        "ipc is between processes of one GPU, and ranks have GPUs apart from the engines'",
        f"{auto}, or let both share (--engine.gpus-per-replica 0.5 --learner.gpus-per-rank 0.5 --learner.no-own-gpus)",
    )
    require(
        learner.ranks == engine.replicas,
        option,
        f"ipc wants a rank on the GPU of every engine, and {learner.ranks} ranks sit beside {engine.replicas} engines",
        f"{auto}, or --learner.ranks {engine.replicas}",
    )
