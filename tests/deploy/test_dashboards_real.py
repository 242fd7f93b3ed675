"""A real run under a real Ray, scraped by a real Prometheus: every panel has something to show, and nobody is woken."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.cluster import __main__ as cluster
from actors.cluster import dashboards
from actors.cluster.recorded_processes import recorded
from tests.deploy.test_dashboards import BOARDS, queries

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus (Debian's package prometheus)"),
]

REPOSITORY = Path(__file__).resolve().parents[2]
OPTIONS = shlex.split("""
    --scale tiny --sft.steps 160 --sft.batch-size 32 --sft.num-conversations 400 --steps 5 --prompts-per-step 4
    --algorithm.rollouts-per-prompt 8 --algorithm.keep 4 --evaluate.num-problems 6 --evaluate.samples 2
    --rollout.max-response-tokens 128 --evaluate.max-response-tokens 128 --engine.vllm-metrics --learner.ranks 1
""")
RUN_DEADLINE_S = 900


def hasty(folder: Path) -> Path:
    """The same configuration for a run of a minute: scraped, and judged, every other second."""
    shutil.copytree(dashboards.DEPLOYED, folder, dirs_exist_ok=True)
    config = folder / "prometheus/prometheus.yml"
    config.write_text(config.read_text().replace("interval: 10s", "interval: 2s"))
    return folder


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, float]]:
    """The port of a Prometheus that has seen a whole run, and when it began."""
    began_s = time.time()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("cluster"))
        patch.setattr(cluster, "DASHBOARD_PORT", cluster.free_port())
        port = cluster.free_port()
        patch.setattr(cluster, "START_DEADLINE_S", 240.0)
        patch.setattr(dashboards, "DEPLOYED", hasty(tmp_path_factory.mktemp("deploy")))
        patch.setenv("RAY_metrics_report_interval_ms", "1000")
        cluster.up()
        try:
            dashboards.up(port)
            lines = [" ".join(one.cmdline()) for one in recorded(cluster.HEAD).children(recursive=True)]  # type: ignore[union-attr]
            (address,) = {found for line in lines for found in re.findall(r"--gcs[-_]address[= ]([\d.]+:\d+)", line)}
            ended = subprocess.run(
                [sys.executable, REPOSITORY / "recipes/stage1.py", "--run-dir", Path.cwd() / "tiny", *OPTIONS],
                env=os.environ | {"RAY_ADDRESS": address},
                capture_output=True,
                text=True,
                timeout=RUN_DEADLINE_S,
            )
            assert ended.returncode == 0, ended.stdout[-3_000:] + ended.stderr[-2_000:]
            yield port, began_s
        finally:
            cluster.down()


def ask(port: int, what: str, **given: Any) -> list[dict[str, Any]]:
    url = f"http://{cluster.HOST}:{port}/api/v1/{what}?{urllib.parse.urlencode(given)}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)["data"]["result"]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_every_query_of_a_dashboard_returns_data(board: Path, scraped: tuple[int, float]):
    port, began_s = scraped
    empty = [
        query
        for query in queries(board)
        if not ask(
            port,
            "query_range",
            query=query.replace("$run", ".*").replace("$metric", "ray_rstar_kl_sampler"),
            start=began_s,
            end=time.time(),
            step=1,
        )
    ]
    assert not empty


def test_a_run_that_ended_as_it_should_is_not_under_way(scraped: tuple[int, float]):
    port, _ = scraped
    last = ask(port, "query", query="min by (run, stage) (last_over_time(ray_rstar_run_active[15m]))")
    assert {one["metric"]["stage"]: float(one["value"][1]) for one in last} == {"sft": 0, "stage1": 0}
    assert {one["metric"]["run"] for one in last} == {"tiny"}


def test_nobody_is_woken_by_a_run_that_goes_well(scraped: tuple[int, float]):
    port, _ = scraped
    assert ask(port, "query", query='ALERTS{alertstate="firing"}') == []
