"""The cause of an engine that does not start is read from what vLLM's processes wrote."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from actors.generation.start_log import StartLog

CORE_FAILS = """
(EngineCore pid=7) ERROR [core.py:1] EngineCore failed to start.
(EngineCore pid=7) ERROR [core.py:1] Traceback (most recent call last):
(EngineCore pid=7) ERROR [core.py:1]   File "x.py", line 1, in f
(EngineCore pid=7) ERROR [core.py:1] ValueError: No available memory for the cache blocks.
(EngineCore pid=7) ERROR [core.py:1] RuntimeError: WorkerProc initialization failed due to an exception
"""


def test_the_last_error_that_no_other_follows_from_is_the_cause(tmp_path: Path):
    with (tmp_path / "worker.out").open("w+") as out, (tmp_path / "worker.err").open("w+") as err:
        print("OSError: of an earlier start", file=out, flush=True)
        log = StartLog((out.fileno(), err.fileno()))
        assert log.wrote() is None
        print(CORE_FAILS, file=out, flush=True)
        print("a warning", file=err, flush=True)
        wrote = log.wrote()
    assert wrote is not None
    assert wrote.cause == "ValueError: No available memory for the cache blocks."
    assert wrote.path == str(tmp_path / "worker.out")
    assert any("EngineCore failed" in line for line in wrote.tail) and not any("earlier" in line for line in wrote.tail)


START = """
import asyncio, sys
from pathlib import Path
from actors.generation.vllm_process import VllmProcess
from tests import derived

async def start():
    config = derived.engine(kv_tokens=4_096, tensor_parallel=2, start_deadline_s=600)
    await VllmProcess(config, Path(sys.argv[1]), None).start(lambda *_: None)

try:
    asyncio.run(start())
except Exception as failed:
    Path(sys.argv[2]).write_text(f"{type(failed).__name__}: {failed}")
"""


@pytest.mark.real
def test_an_engine_of_several_processes_that_cannot_load_its_model_says_why(tmp_path: Path):
    """As an actor of Ray, whose output is files."""
    from rstar_ray.tiny.tiny_model import make_tiny_model

    make_tiny_model(tmp_path / "model", seed=0)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["num_hidden_layers"] += 1  # a layer that the file has no weights of
    config.pop("layer_types", None)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        command = [sys.executable, "-c", START, str(tmp_path / "model"), str(tmp_path / "error")]
        subprocess.run(command, stdout=out, stderr=err, timeout=660, check=True)
    error = (tmp_path / "error").read_text()
    assert error.startswith("EngineError: the engine for ")
    assert "not initialized from checkpoint" in error and "root cause" not in error, error
