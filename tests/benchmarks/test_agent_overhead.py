"""The benchmark of the endpoint for agents answers every request and says what each took."""

from pathlib import Path

import pytest

from benchmarks.agent_overhead import Options, measured
from recipes.stage1 import STAGE_1
from rstar_ray.chat.load_chat import load_chat
from rstar_ray.config.scales import at_scale
from rstar_ray.tiny.tiny_model import make_tiny_model


@pytest.mark.long
async def test_requests_of_several_sessions_are_measured(tmp_path: Path):
    model = make_tiny_model(tmp_path / "model", seed=0)
    chat = load_chat(model, at_scale(STAGE_1.paper, "tiny", STAGE_1.tiny).chat, instruct=False)
    row = await measured(chat, 3, Options(rate=20.0, seconds=2.0))
    assert row["sessions"] == 3 and row["requests"] >= 2 and row["saturated_per_s"] > 0
    assert 0 < row["p50_ms"] <= row["p99_ms"]
