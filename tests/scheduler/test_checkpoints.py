"""What a checkpoint takes, on paper, and the line that a run shows of it."""

import json
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes import checkpoints as shown
from recipes.scales import at_scale
from recipes.sft import SFT
from recipes.stage1 import STAGE_1
from rstar_ray.errors import ConfigError
from scheduler.checkpoints import plan_checkpoint
from scheduler.plan import QWEN3_14B

PLAN = plan_checkpoint(QWEN3_14B, ranks=64, dtype="bfloat16", every_steps=10, keep=2, lora_rank=0)


def test_a_checkpoint_of_14b_over_64_ranks():
    assert (PLAN.rank_gb, PLAN.model_gb) == pytest.approx((14.8 * 12 / 64, 14.8 * 2))
    assert PLAN.total_gb == pytest.approx(14.8 * 14)
    assert PLAN.on_disk_gb == pytest.approx(3 * PLAN.total_gb)
    assert 20 < PLAN.blocking_s < 23 and 32 < PLAN.writing_s < 33
    assert PLAN.told() == (
        "a checkpoint every 10 steps: 2.8 GB by each of 64 ranks and 30 GB of the model, 207 GB in all; a step waits "
        "about 22 s for it, writing takes 32 s beside the next (computed); 2 kept and one being written take 622 GB, "
        "and what every finished stage leaves 414 GB more"
    )
    assert [round(PLAN.left_gb(steps) / PLAN.total_gb) for steps in (0, 10, 11, 300)] == [1, 1, 2, 2]


def test_the_file_system_bounds_many_ranks_and_adapters_write_less():
    many = plan_checkpoint(QWEN3_14B, ranks=1024, dtype="bfloat16", every_steps=10, keep=1, lora_rank=0)
    assert many.total_gb == pytest.approx(PLAN.total_gb) and many.writing_s < PLAN.writing_s
    adapters = plan_checkpoint(QWEN3_14B, ranks=64, dtype="bfloat16", every_steps=10, keep=2, lora_rank=32)
    assert 4 * 14.8 < adapters.rank_gb * 64 < 4 * 14.8 + 3  # frozen weights have no moments


@pytest.mark.parametrize(("scale", "most_tb"), [("mi300x-64", 7.0), ("gpu-8", 7.0), ("gpu", 7.0)])
def test_no_stage_writes_its_model_hundreds_of_times(scale: str, most_tb: float):
    for recipe, steps in ((SFT, SFT.paper.sft.steps), (STAGE_1, STAGE_1.paper.steps)):
        config = at_scale(recipe.paper, scale, recipe.tiny)
        assert replace(PLAN, every_steps=config.checkpoint.every_steps).written_gb(steps) / 1e3 < most_tb


def test_the_planner_shows_it():
    done = subprocess.run([sys.executable, "recipes/plan.py", "--json"], capture_output=True, check=True, text=True)
    checkpoint = json.loads(done.stdout)["checkpoint"]
    assert checkpoint["rank_gb"] == pytest.approx(PLAN.rank_gb)
    assert checkpoint["on_disk_gb"] == pytest.approx(PLAN.on_disk_gb)


def disk_has(free: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a model of the shape that `PLAN` has."""
    shape: dict[str, Any] = {
        "hidden_size": 5_120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 17_408,
        "vocab_size": 151_936,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shown.shutil, "disk_usage", lambda _: usage(0, 0, free))


def holds(path: Path, size: float) -> None:
    """A file with nothing in it that takes no room."""
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(int(size))


def test_a_run_shows_its_checkpoints_before_it_starts_and_refuses_a_disk_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = at_scale(STAGE_1.paper, "mi300x-64", {})
    assert shown.checkpoint_lines([config], tmp_path, tmp_path) == []  # no model yet
    disk_has(700e9, tmp_path, monkeypatch)
    (line,) = shown.checkpoint_lines([config], tmp_path, tmp_path)
    assert line.startswith("stage1: a checkpoint every 10 steps: 2.8 GB by each of 64 ranks")
    assert line.endswith("700 GB are free for them")
    disk_has(600e9, tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"room for 600\.0 GB .*--checkpoint\.keep 2 and one being written take 62\d"):
        shown.checkpoint_lines([config], tmp_path, tmp_path)


def test_only_a_stages_own_checkpoints_make_room_for_it_and_what_the_stages_before_leave_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = at_scale(STAGE_1.paper, "mi300x-64", {})
    disk_has(600e9, tmp_path, monkeypatch)
    holds(tmp_path / "checkpoints" / "sft-step-005200" / "state", 400e9)
    with pytest.raises(ConfigError, match=r"room for 600\.0 GB of checkpoints of stage1"):
        shown.checkpoint_lines([config], tmp_path, tmp_path)
    holds(tmp_path / "checkpoints" / "stage1-step-000010" / "model" / "state", 100e9)
    assert shown.checkpoint_lines([config], tmp_path, tmp_path)[0].endswith("700 GB are free for them")
    stages = [replace(config, stage=stage) for stage in ("stage1", "stage2")]
    disk_has(1_000e9, tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"room for 273\.\d GB of checkpoints of stage3"):
        shown.checkpoint_lines([*stages, replace(config, stage="stage3")], tmp_path, tmp_path)
