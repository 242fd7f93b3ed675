"""What `--deterministic` asks of engines on GPUs and of ranks; what it then does has not been run on a GPU."""

from pathlib import Path

import pytest

from actors.generation.settings import engine_settings
from actors.generation.vllm_start import engine_environment
from actors.learner.settings import learner_settings
from rstar_ray.config import RunConfig, with_values


@pytest.mark.parametrize("asked", [False, True])
def test_the_setting_reaches_engines_on_gpus_and_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool):
    config = with_values(RunConfig(), {"deterministic": asked})
    monkeypatch.setattr("actors.generation.vllm_start._on_cpu", lambda: False)
    assert ("VLLM_BATCH_INVARIANT" in engine_environment(engine_settings(config, tmp_path))) == asked
    ranks = learner_settings(config, tmp_path)
    assert ("CUBLAS_WORKSPACE_CONFIG" in ranks.environment) == asked == ranks.deterministic
