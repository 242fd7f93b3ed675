"""Rehearse the whole loop before the first real run, and compare measured figures with the plan.

python recipes/rehearse.py --scale tiny
python recipes/rehearse.py --scale gpu --model /shared/Qwen3-1.7B --data.train problems.jsonl --run-dir /shared/one

Three steps of stage 1 on random weights of the model's full size: their samples hardly ever end by themselves,
so that budgets decide every length. After the first step a worker is killed; at the end there are a checkpoint
and, with held-out problems, an evaluation. Only config.json, tokenizer and chat template of --model are used,
not its weights. All options of recipes/stage1.py hold. Exit status: 0 as planned, 1 different or failed, 2 refused.
"""

import logging
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.launch.checks import Phase, Start, check
from actors.launch.command_line import parse
from actors.launch.exit_status import status_of
from actors.launch.run import run
from actors.launch.run_paths import run_path
from actors.launch.start_model import start_folder
from recipes.stage1 import STAGE_1
from rstar_ray.config import RunConfig, with_values
from rstar_ray.config.recipe import Recipe
from rstar_ray.config.scales import MACHINES
from rstar_ray.errors import ConfigError
from rstar_ray.run_dir.durable import read_rows, write_json
from rstar_ray.run_dir.folder import RunDir
from scheduler.planner.model_shape import ModelShape, read_model
from scheduler.planner.rehearsal import Seen, as_table, compared

log = logging.getLogger(__name__)

STEPS = 3
CHANGED: dict[str, Any] = {
    "steps": STEPS,
    "checkpoint.every_steps": STEPS,
    "algorithm.reject_equal_reward": False,  # no answer is right, and the update is taken anyway
    "evaluate.samples": 1,
    "evaluate.num_problems": 8,
}
SMALLER: dict[str, Any] = {
    "prompts_per_step": 4,
    "learner.ranks": 1,
    "evaluate.max_response_tokens": 88,
    "sandbox.slots": 2,
}
"""At scale tiny: enough to see every part at work."""
REHEARSAL = Recipe(paper=with_values(STAGE_1.paper, CHANGED), tiny={**STAGE_1.tiny, **CHANGED, **SMALLER})
VICTIM = "generation/0"
BACK_WITHIN_S = 900.0
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf")


@dataclass(slots=True)
class Kill:
    """Kills a worker once the first step is done, in a thread beside the run, and records the result."""

    path: Path  # of the run directory
    back_s: float | None = None  # until its next process answered
    problem: str = "no step was done"
    over: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        while not self.over.wait(0.2):
            if any(row["stage"] == "stage1" for row in read_rows(self.path / "metrics.jsonl")):
                try:
                    self._kill()
                except Exception as failed:  # any exception: the table reports it
                    self.problem = f"{type(failed).__name__}: {failed}".splitlines()[0]
                return

    def _kill(self) -> None:
        import ray
        from ray.exceptions import RayError

        worker: Any = ray.get_actor(VICTIM)
        incarnation = _incarnation(worker)
        killed_s = time.monotonic()
        ray.kill(worker, no_restart=False)
        log.info(f"rehearsal: {VICTIM} was killed")
        self.problem = f"it did not come back within {BACK_WITHIN_S:g} s"
        while time.monotonic() < killed_s + BACK_WITHIN_S and not self.over.wait(0.2):
            try:
                if _incarnation(worker) != incarnation:
                    self.back_s, self.problem = time.monotonic() - killed_s, ""
                    return
            except RayError:
                continue


def _incarnation(worker: Any) -> str:
    import ray

    heartbeat: Any = ray.get(worker.probe.remote(), timeout=60)
    return heartbeat.incarnation


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    return status_of(lambda: rehearse(given), interrupted="stopped")


def rehearse(argv: Sequence[str]) -> int:
    """Run, then compare; the exit status."""
    (config,) = parse([REHEARSAL], argv)
    if not config.run_dir:
        beside = run_path(config)
        config = with_values(config, {"run_dir": str(beside.with_name(f"{beside.name}-rehearsal"))})
    path = run_path(config)
    if (path / "metrics.jsonl").exists():
        raise ConfigError("--run-dir", f"{path} holds a run already", "give a new one: a rehearsal starts from nothing")
    if config.model:
        start = Start(asked=[config], weights=False)
        check(start, Phase.MACHINE, Phase.FILES)  # before weights of the model's size are written
        config = with_values(config, {"model": str(random_model(start.configs[0], path))})
    kill = Kill(path)
    killing = threading.Thread(target=kill.watch, daemon=True)
    killing.start()
    try:
        run([config])
    finally:
        kill.over.set()
        killing.join(10)
    lines = compared(config, shape_of(config, path), MACHINES[config.scale].gpu_memory_gb, seen(path, kill))
    print(as_table(lines))
    write_json(path / "rehearsal.json", {"lines": [line.row() for line in lines]})
    return int(any(line.wrong for line in lines))


def random_model(config: RunConfig, path: Path) -> Path:
    """A folder beside the run directory, which every node sees: all of --model but its weights, and random ones."""
    import torch

    from actors.weights.random_weights import write_random_weights

    folder = path.with_name(f"{path.name}-random-model")
    whole, made_of = folder / "whole", f"{Path(config.model).absolute()} {config.learner.dtype} seed {config.seed}\n"
    if not whole.exists() or whole.read_text("utf-8") != made_of:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(config.model, folder, ignore=shutil.ignore_patterns(*WEIGHTS), dirs_exist_ok=True)
        count = write_random_weights(folder, getattr(torch, config.learner.dtype), seed=config.seed)
        log.info(f"rehearsal: {count:,} random weights in {folder}")
        whole.write_text(made_of, "utf-8")
    return folder


def shape_of(config: RunConfig, path: Path) -> ModelShape:
    return read_model(start_folder(config, path, None) / "config.json")


def seen(path: Path, kill: Kill) -> Seen:
    """The recorded figures of the run."""
    checkpoint = RunDir(path).finished_checkpoint("stage1")
    files = list(checkpoint.path.rglob("*.safetensors")) if checkpoint else []
    exported = [file for file in files if checkpoint and (checkpoint.path / "model") in file.parents]
    return Seen(
        steps=tuple(row for row in read_rows(path / "metrics.jsonl") if row["stage"] == "stage1"),
        evaluations=len(read_rows(RunDir(path).evaluations_path)),
        learner_bytes=sum(file.stat().st_size for file in files if file not in exported),
        model_bytes=sum(file.stat().st_size for file in exported),
        worker_back_s=kill.back_s,
        worker_problem=kill.problem,
    )


if __name__ == "__main__":
    sys.exit(main())
