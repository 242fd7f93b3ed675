"""What engines and learner ranks cannot share a GPU in which way."""

from rstar_ray.config.checks import require
from rstar_ray.config.machines import EngineConfig, LearnerConfig


def check_gpus(engine: EngineConfig, learner: LearnerConfig) -> None:
    """Refuse shares of GPUs that can be reserved, and then not be run on."""
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
        f"a rank that reserves {share:g} of a GPU has none of its own",
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
