"""Injects a few faults into a real run, in a minute or two; `make chaos` has all of them."""

from dataclasses import replace
from pathlib import Path

import pytest

from rstar_ray.tiny.tiny_model import make_tiny_model
from tests.chaos.campaign import Campaign
from tests.chaos.faults import KINDS
from tests.chaos.run import Run

pytestmark = pytest.mark.real
SHORT = ("SIGKILL sandbox/0", "SIGKILL learner/rank-1", "SIGSTOP tools/own:echo/0")


def test_a_run_bears_deaths_and_a_wedge_and_loses_nothing(tmp_path: Path):
    """The policy is untrained and calls no tool."""
    run = Run(tmp_path, make_tiny_model(tmp_path / "policy", seed=0))
    campaign = Campaign(run, over_s=200)
    try:
        campaign.begin()
        cases = [campaign.play(KINDS[name], seed=0) for name in SHORT]
    finally:
        left = run.end()
    assert not left
    assert all(replace(case, late=False).passed for case in cases), cases
    assert all(case.notice_s is not None and case.notice_s < 60 for case in cases), cases  # however busy the machine is
