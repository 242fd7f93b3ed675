"""Which bundles a run asks for, and what is refused before anything starts; no Ray but in the last test."""

from typing import Any

import pytest
import ray
from ray.util import placement_group, remove_placement_group

from actors.cluster.bundles import HEAD, StandIn, nodes_in_order, seated
from actors.cluster.placement import (
    Layout,
    fitted,
    in_bundle,
    place,
    plan_layout,
    refuse_small_cluster,
)
from rstar_ray.config import with_values
from rstar_ray.config.gpus import weight_way
from rstar_ray.errors import ConfigError
from tests.derived import stage_1 as config

MI300X_NODE = {"GPU": 8.0, "CPU": 96.0, "memory": 1e12, "node:10.0.0.1": 1.0}


APART = {"learner__own_gpus": True, "learner__gpus_per_rank": 1}


@pytest.mark.parametrize(
    ("scale", "values", "way"),
    [
        ("tiny", {}, "object_store"),
        ("gpu", {}, "ipc"),
        ("mi300x-64", {}, "ipc"),
        ("mi300x-64", {"learner__weights_by": "object_store"}, "object_store"),
        ("gpu", {"engine__replicas": 3, "learner__ranks": 2}, "object_store"),  # one engine has no rank on its GPU
        ("gpu", APART, "nccl"),
        ("gpu", {"engine__gpus_per_replica": 1, "learner__gpus_per_rank": 1}, "nccl"),  # one bundle, two GPUs
        ("gpu", {"learner__gpus_per_rank": 0}, "object_store"),
        ("gpu", {"learner__lora_rank": 8}, "object_store"),
    ],
)
def test_weights_go_the_way_that_the_placement_allows(scale: str, values: dict[str, Any], way: str):
    one = config(scale, **values)
    assert weight_way(one.engine, one.learner) == way


@pytest.mark.parametrize(
    ("scale", "values", "said"),
    [
        ("tiny", {"learner__weights_by": "nccl"},
         "nccl needs GPUs on both sides .* Hint: give auto, or set --engine.gpus-per-replica"),
        ("tiny", {"learner__weights_by": "ipc"}, "ipc needs GPUs on both sides .* Hint: give auto"),
        ("gpu", {"learner__weights_by": "nccl"},
         r"nccl needs one process per GPU, but ranks share GPUs with engines. Hint: give auto"),
        ("gpu", {"learner__weights_by": "ipc", **APART},
         "ipc needs both processes on one GPU, .* Hint: give auto, or share GPUs"),
        ("gpu", {"learner__weights_by": "ipc", "engine__replicas": 3, "learner__ranks": 2},
         r"ipc needs one rank on each engine's GPU .got 2 ranks, 3 engines.. Hint: give auto"),
    ],
)  # fmt: skip
def test_a_way_for_weights_that_the_placement_does_not_allow_is_refused_with_the_fix(
    scale: str, values: dict[str, Any], said: str
):
    with pytest.raises(ConfigError, match=rf"--learner\.weights-by: {said}"):
        config(scale, **values)


def refusal(layout: Layout, nodes: list[dict[str, float]]) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        refuse_small_cluster(layout, nodes)
    return refused.value


def test_a_bundle_larger_than_any_node_is_refused():
    layout = plan_layout(config("gpu", engine__tensor_parallel=8, engine__gpus_per_replica=8, learner__gpus_per_rank=1))
    refused = refusal(layout, [MI300X_NODE] * 2)
    assert refused.field == "--engine.gpus-per-replica"
    assert "need 9 GPU and 3.5 CPU on one node, the largest has 8 GPU and 96 CPU" in refused.problem
    refused = refusal(plan_layout(config("gpu", engine__cpus_per_replica=100)), [MI300X_NODE] * 2)
    assert refused.field == "--engine.cpus-per-replica"


def test_enough_in_all_but_in_pieces_too_small_is_refused():
    layout = plan_layout(
        config(
            "gpu", engine__replicas=3, engine__tensor_parallel=3, engine__gpus_per_replica=3, learner__gpus_per_rank=0
        )
    )
    refused = refusal(layout, [{"GPU": 5.0, "CPU": 64.0}] * 2)
    assert "3 bundles of 3 GPU and 2 CPU or more are needed, the nodes have room for 2" in refused.problem
    refuse_small_cluster(layout, [{"GPU": 6.0, "CPU": 64.0}, {"GPU": 3.0, "CPU": 64.0}])


def test_large_bundles_count_apart_from_small_ones():
    four = {"engine__tensor_parallel": 4, "engine__gpus_per_replica": 4, "learner__gpus_per_rank": 1}
    asked = config("gpu", engine__replicas=4, learner__ranks=2, learner__own_gpus=True, **four)
    nodes = [{"GPU": 6.0, "CPU": 64.0}] * 3
    refused = refusal(plan_layout(asked), nodes)
    assert "4 bundles of 4 GPU and 2 CPU or more are needed, the nodes have room for 3" in refused.problem
    smaller = fitted(with_values(asked, {"on_insufficient_resources": "scale-down"}), nodes)
    assert (smaller.engine.replicas, smaller.learner.ranks) == (3, 1)


def test_with_a_node_missing_the_run_is_refused_or_smaller_as_the_settings_say():
    there = [MI300X_NODE] * 7
    whole = config("mi300x-64")
    assert fitted(whole, there) is whole
    with pytest.raises(ConfigError, match="need 64 x 1 = 64 GPU, the cluster has 56"):
        refuse_small_cluster(plan_layout(whole), there)
    smaller = fitted(config("mi300x-64", on_insufficient_resources="scale-down"), there)
    assert (smaller.engine.replicas, smaller.learner.ranks) == (56, 56)
    assert fitted(config("mi300x-64", on_insufficient_resources="scale-down"), [MI300X_NODE] * 8).engine.replicas == 64
    hopeless = config("gpu", on_insufficient_resources="scale-down")
    assert fitted(hopeless, [{"CPU": 4.0}]) is hopeless


def test_the_head_comes_first_and_nodes_go_by_address():
    def node(number: int, address: str, alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"NodeID": f"id{number}", "NodeManagerAddress": address, "Alive": alive, "Resources": resources}

    nodes = [node(1, "10.0.0.10"), node(2, "10.0.0.9"), node(3, "10.0.0.11", **{HEAD: 1.0}), node(4, "10.0.0.1", False)]
    assert nodes_in_order(nodes) == ["id3", "id2", "id1"]


@pytest.mark.real
async def test_bundles_that_others_hold_are_waited_for_and_then_refused():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        layout = plan_layout(config("tiny"))
        refuse_small_cluster(layout, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        others = placement_group([{"CPU": 2}])
        with pytest.raises(
            ConfigError, match=r"placement: no room for 1.6 CPU after 3 s \(\w+\). Hint: wait until other"
        ):
            await place(layout, deadline_s=3)
        remove_placement_group(others)
        group = await place(layout)
        assert [bundle["CPU"] for bundle in group.bundle_specs] == [1.6]
    finally:
        ray.shutdown()


@pytest.mark.real
async def test_a_replica_and_its_rank_get_the_same_gpu_and_neighbours_follow_each_other():
    ray.init(address="local", num_cpus=2, num_gpus=5, include_dashboard=False, log_to_driver=False)
    try:
        few = {"engine__cpus_per_replica": 0.1, "learner__cpus_per_rank": 0.1}  # Ray starts a process for every core
        layout = plan_layout(config("gpu", engine__replicas=3, learner__ranks=3, **few))
        group = await place(layout)
        ordered = await seated(group, layout)
        actor: Any = ray.remote(StandIn)
        half = [
            actor.options(num_cpus=0, num_gpus=0.5, **in_bundle(group, bundle)).remote()
            for bundle in (*ordered.replica_bundles, *ordered.rank_bundles)
        ]
        gpus = [gpu for _, (gpu,) in ray.get([each.where.remote() for each in half], timeout=600)]
        for each in half:
            ray.kill(each)
        remove_placement_group(group)
        split = {"engine__replicas": 2, "engine__tensor_parallel": 2, "engine__gpus_per_replica": 2}
        layout = plan_layout(config("gpu", **split, **few))
        assert [bundle["GPU"] for bundle in layout.bundles] == [2.5, 2.0]
        larger = await seated(await place(layout), layout)
    finally:
        ray.shutdown()
    assert gpus == [0, 1, 2, 0, 1, 2]
    assert (larger.replica_bundles, larger.rank_bundles) == ((0, 1), (0,))
