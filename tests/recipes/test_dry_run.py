"""Who sits where on fake nodes: what would be wrong, what is shown; and once on a cluster that Ray started here."""

from dataclasses import replace

import pytest

from actors.cluster.bundles import Seat
from actors.cluster.placement import plan_layout
from actors.launch.placement_dry_run import Seating, as_text, dry_run, problems
from recipes.plan import parsed
from rstar_ray.config import with_values
from rstar_ray.config.scales import MACHINES, Machines
from rstar_ray.errors import ConfigError
from tests.derived import stage_1 as config

TWO_BY_TWO = Machines(nodes=2, gpus=2, cpus=16)


FOUR = config("gpu-8", engine__replicas=4, learner__ranks=4, sandbox__executors=2)


def seating(*, order: tuple[int, ...] = (0, 1, 2, 3)) -> Seating:
    """Four bundles on two nodes of two GPUs; bundle b is at seat `order[b]`."""
    seats = tuple(Seat(bundle=b, node=str(seat // 2), gpus=(seat % 2,)) for b, seat in enumerate(order))
    return Seating(
        machines=TWO_BY_TWO,
        layout=plan_layout(FOUR),
        seats=seats,
        sandboxes=(0, 1),
        balancer=0,
        driver=0,
        seconds=9.0,
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (seating(order=(2, 3, 0, 1)), "ranks are not in order of node and GPU"),
        (seating(order=(0, 0, 2, 3)), "two replicas on one GPU"),
        (replace(seating(), sandboxes=(1, 1)), "a node is without a sandbox"),
        (replace(seating(), balancer=1), "balancer on node 1 and driver on node 0, not on the head"),
    ],
)
def test_what_is_wrong_with_a_seating_is_said(wrong: Seating, said: str):
    assert said in problems(wrong)
    assert f"WRONG: {said}" in as_text(wrong, FOUR)


def test_a_missing_node_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="need 64 x 1 = 64 GPU, the cluster has 56"):
        dry_run(config("mi300x-64"), replace(MACHINES["mi300x-64"], nodes=7))


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("--scale gpu-8 --dry-run --gpus 4", "--gpus: the dry run places what scale gpu-8 has. Hint: leave it out"),
        ("--scale gpu-8 --dry-run --no-offload", "--no-offload: the dry run places what scale gpu-8 has"),
        ("--scale gpu-8 --dry-run --json", "--json: the dry run places what scale gpu-8 has"),
        ("--scale gpu-8 --nodes 2", "--nodes: it is for the dry run. Hint: give --dry-run too"),
    ],
)
def test_what_would_mean_nothing_to_a_plan_or_a_dry_run_is_refused(said: str, line: str):
    with pytest.raises(ConfigError) as refused:
        parsed(said.split())
    assert str(refused.value).startswith(line)


@pytest.mark.real
def test_ray_places_them_on_fake_nodes_as_they_should_be():
    wanted = with_values(FOUR, {"engine.replicas": 6, "learner.ranks": 6, "on_insufficient_resources": "scale-down"})
    seated = dry_run(wanted, TWO_BY_TWO)
    assert problems(seated) == []
    assert [seated.at(bundle) for bundle in seated.layout.rank_bundles] == [(0, (0,)), (0, (1,)), (1, (0,)), (1, (1,))]
    assert "a smaller plan: 6 replicas and 6 ranks do not fit" in as_text(seated, wanted)
