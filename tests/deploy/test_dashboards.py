"""Dashboards and alerts name what is exported, and `make dashboards` says what it wants."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from actors.cluster import __main__ as cluster
from actors.cluster import dashboards
from actors.cluster.recorded_processes import record
from rstar_ray.errors import ConfigError
from rstar_ray.telemetry.registry import BY_EXPORTED_NAME, METRICS, PROCESS_METRICS, Kind

DEPLOYED = Path(__file__).resolve().parents[2] / "deploy"
BOARDS = sorted((DEPLOYED / "grafana").glob("*.json"))
RAYS_OWN = {"run", "instance", "job", "WorkerId", "le"}


def panels(board: Path) -> list[dict[str, Any]]:
    return [panel for panel in json.loads(board.read_text())["panels"] if panel["type"] != "row"]


def queries(board: Path) -> list[str]:
    return [target["expr"] for panel in panels(board) for target in panel["targets"]]


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOYED / "prometheus/alerts.yml").read_text())["groups"]
    return group["rules"]


EVERYTHING = [query for board in BOARDS for query in queries(board)] + [rule["expr"] for rule in rules()]


def named(query: str) -> set[str]:
    """The declared names of the metrics in a query; a histogram's series are its own."""
    found = set(re.findall(r"\bray_(rstar_\w+)", query))
    histograms = {metric.exported_name for metric in METRICS if metric.kind is Kind.HISTOGRAM}
    return {
        next((name for name in histograms if series in (f"{name}_bucket", f"{name}_sum", f"{name}_count")), series)
        for series in found
    }


@pytest.mark.parametrize("query", EVERYTHING)
def test_what_a_panel_or_a_rule_asks_for_is_exported_with_these_labels(query: str):
    assert named(query) <= BY_EXPORTED_NAME.keys()
    assert named(query) or "ray_vllm_" in query or "up{" in query or "$metric" in query
    labels = {label for metric in named(query) for label in BY_EXPORTED_NAME[metric].labels}
    grouped = {label.strip() for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(",")}
    chosen = {label for inside in re.findall(r"{([^}]*)}", query) for label in re.findall(r"(\w+)=", inside)}
    labels |= {"stage", "type", "__name__"} if "$metric" in query else set()
    assert grouped | chosen <= labels | RAYS_OWN


def test_every_process_metric_is_on_a_dashboard():
    """Step metrics have a panel that shows any of them."""
    shown = {name for query in EVERYTHING for name in named(query)}
    assert shown >= {metric.exported_name for metric in PROCESS_METRICS}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_a_dashboard_can_be_imported_anywhere(board: Path):
    read = json.loads(board.read_text())
    assert {one["name"] for one in read["templating"]["list"]} <= {"datasource", "run", "metric"}
    assert "id" not in read  # a number of somebody's Grafana
    assert len({panel["id"] for panel in read["panels"]}) == len(read["panels"])
    for panel in panels(board):
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24, panel["title"]


def test_every_alert_says_what_happened_and_the_fix_and_has_a_story():
    stories = (DEPLOYED / "prometheus/alerts.test.yml").read_text()
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "fix"}, rule["alert"]
        assert rule["labels"]["severity"] in ("page", "warn")
        assert stories.count(rule["alert"]) >= 2, "one story in which it fires, and one in which it does not"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian's package prometheus)")
def test_alerts_fire_in_their_stories_alone():
    checked = subprocess.run(
        ["promtool", "test", "rules", "alerts.test.yml"],
        cwd=DEPLOYED / "prometheus",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_configuration_looks_where_the_command_writes():
    read = yaml.safe_load((DEPLOYED / "prometheus/prometheus.yml").read_text())
    assert read["scrape_configs"][0]["file_sd_configs"][0]["files"] == [dashboards.DISCOVERY]
    assert read["rule_files"] == ["alerts.yml"]
    assert read["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] == ["127.0.0.1:9093"]


# ---------------------------------------------------------------- make dashboards


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `prometheus` that says why it does not start, in a folder without a cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "prometheus").write_text("#!/bin/sh\necho the disk is full\nexit 1\n")
    (tmp_path / "prometheus").chmod(0o755)
    return tmp_path / "prometheus"


def test_without_a_cluster_one_line_says_so(program: Path):
    with pytest.raises(ConfigError, match=r"no cluster of this folder is up. Hint: run `make cluster-up` first"):
        dashboards.up()


@pytest.fixture
def head(program: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Stands for a head."""
    head = subprocess.Popen(["/bin/sleep", "60"])
    record(cluster.HEAD, head.pid)
    yield head
    head.kill()
    head.wait()


def test_a_prometheus_that_ends_is_reported_with_its_last_line(head: "subprocess.Popen[bytes]"):
    with pytest.raises(
        ConfigError, match=r"prometheus: it ended: .'the disk is full'.. Hint: see .cluster/prometheus/log"
    ):
        dashboards.up(cluster.free_port())


def test_one_that_runs_already_is_reported_at_the_port_that_it_has(
    head: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str]
):
    dashboards.CONFIG.parent.mkdir(parents=True)
    dashboards.CONFIG.write_text(f"files: [{dashboards.discovery_file(psutil.Process(head.pid))}]")
    stands_for_it = ["/bin/sh", "-c", "sleep 60; :", "prometheus", "--web.listen-address=127.0.0.1:9090"]
    with subprocess.Popen(stands_for_it) as running:
        record(cluster.PROMETHEUS, running.pid)
        dashboards.up(9_191)
        running.kill()
    printed = capsys.readouterr().out
    assert "http://127.0.0.1:9090 (scrapes" in printed and "9191" not in printed


def test_one_that_scrapes_an_earlier_head_is_ended(head: "subprocess.Popen[bytes]"):
    dashboards.CONFIG.parent.mkdir(parents=True)
    dashboards.CONFIG.write_text("files: [/tmp/ray-0/session_of_a_head_that_died/discovery.json]")
    port = cluster.free_port()
    with subprocess.Popen(["/bin/sleep", "60"]) as earlier:
        record(cluster.PROMETHEUS, earlier.pid)
        with pytest.raises(ConfigError, match="the disk is full"):  # so another was started
            dashboards.up(port)
        assert not psutil.pid_exists(earlier.pid)
