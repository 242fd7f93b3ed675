"""A real run on two Ray nodes of this machine, one of which is lost; five minutes each."""

from pathlib import Path

import pytest

from rstar_ray.tiny.tiny_model import make_tiny_model
from tests.chaos.nodes import play

pytestmark = [pytest.mark.real, pytest.mark.slow]
NOTICED_S = 20.0


@pytest.mark.parametrize(
    "ranks, smaller", [(1, False), (2, False), (2, True)], ids=["of a replica", "of a rank", "for good"]
)
def test_a_run_bears_the_loss_of_a_node_and_loses_nothing(tmp_path: Path, ranks: int, smaller: bool):
    policy = make_tiny_model(tmp_path / "policy", seed=0)
    cases, wrong = play(tmp_path, policy, ranks=ranks, seeds=1, smaller=smaller)
    assert not wrong
    assert cases and all(case.passed for case in cases), cases
    noticed = [case.notice_s for case in cases]
    assert all(seconds is not None and seconds < NOTICED_S for seconds in noticed), noticed
