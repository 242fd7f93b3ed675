"""What a checkpoint takes, on paper, and the line that a run shows of it."""

import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from actors.launch import checkpoint_space as shown
from recipes.stage1 import STAGE_1
from rstar_ray.config import CheckpointConfig, LearnerConfig, with_values
from rstar_ray.config.scales import at_scale
from rstar_ray.errors import ConfigError
from scheduler.planner.checkpoint_cost import plan_checkpoint
from scheduler.planner.model_shape import QWEN3_14B

PLAN = plan_checkpoint(QWEN3_14B, LearnerConfig(ranks=64, dtype="bfloat16", lora_rank=0), CheckpointConfig())


def disk_has(free: float, folder: Path, monkeypatch: pytest.MonkeyPatch, disk: Path | None = None) -> None:
    """Room at `disk`, or at `folder`, where the config of a model of `PLAN` is written."""
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
    monkeypatch.setattr(
        shown.shutil, "disk_usage", lambda path: usage(0, 0, free if Path(path).samefile(disk or folder) else 0)
    )


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
    (tmp_path / "other").mkdir()
    (tmp_path / "checkpoints").symlink_to("other")
    disk_has(700e9, tmp_path, monkeypatch, disk=tmp_path / "other")
    assert shown.checkpoint_lines([config], tmp_path, tmp_path)


def test_a_run_that_is_evaluated_between_its_steps_needs_room_for_its_best_checkpoint_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = with_values(at_scale(STAGE_1.paper, "mi300x-64", {}), {"evaluate.every_steps": 20})
    disk_has(700e9, tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"--checkpoint\.keep 2, the best one and one being written take 8[23]\d"):
        shown.checkpoint_lines([config], tmp_path, tmp_path)
