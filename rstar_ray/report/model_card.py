"""The model card of a checkpoint: a Hugging Face README.md made from the run directory."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rstar_ray.config import RunConfig, leaves
from rstar_ray.evaluation.evaluator import HELD_OUT, best_checkpoint, heldout_scores
from rstar_ray.report.findings import EVALUATION_HEAD, evaluation_cells
from rstar_ray.report.markdown import table
from rstar_ray.report.run_record import Row, RunRecord, stage_title
from rstar_ray.run_dir.durable import read_object
from rstar_ray.run_dir.folder import Checkpoint, RunDir, flatten
from rstar_ray.stages import STAGES

LICENCE = "unknown"
"""A placeholder that the hub accepts; the publisher of the weights chooses the license."""
OF_THE_MACHINE = ("stage", "run_dir", "own_folder", "model", "telemetry.", "detector.", "checkpoint.")
"""Prefixes of settings that do not affect the weights."""


def model_card(run: RunRecord, checkpoint: Checkpoint) -> str:
    """Front matter, then scores, training, data, settings, versions and licence."""
    stages = _stages(run, checkpoint)
    base = _base_model(run, stages)
    front = ["library_name: transformers", "pipeline_tag: text-generation"]
    front += [f"license: {LICENCE}", *([f"base_model: {base}"] if "/" in base else [])]
    front += ["tags:", "- rstar_ray", "- reinforcement-learning"]
    versions = _versions(run, checkpoint)
    parts = [
        "\n".join(["---", *front, "---"]),
        f"# {run.name}",
        f"The policy after step {checkpoint.step} of {checkpoint.stage} of the run {run.name}, trained by "
        f"{' '.join(['rstar_ray', *versions.get('rstar_ray', '').split()])} ({run.algorithm if run.steps else 'SFT'}, "
        f"arXiv:2508.20722). It started from {base or 'a model with random weights'}.",
        "## Scores",
        *_scores(run, checkpoint),
        "## Training",
        table(
            ["stage", "steps", "seed", "learning rate", "algorithm", "data", "held-out problems"],
            _training(run, stages, checkpoint),
        ),
        "## Settings",
        "Those that differ from the defaults of rstar_ray. Paths are shortened to their last name.",
        *(f"{stage}:\n\n```toml\n{_settings(run.config[stage])}\n```" for stage in stages),
        "## Versions",
        ", ".join(f"{package} {version}" for package, version in versions.items()) or "Not recorded.",
        "## Licence",
        "Not stated yet: replace this section and `license` at the top before publishing. The licences of the base "
        "model and of the data decide what is allowed.",
    ]
    return "\n\n".join(parts) + "\n"


def _stages(run: RunRecord, checkpoint: Checkpoint) -> list[str]:
    """The stages that trained these weights: up to the checkpoint's, from the newest stage that sets --model."""
    before = [stage for stage in STAGES if stage in run.config]
    chain = before[: before.index(checkpoint.stage) + 1] if checkpoint.stage in before else [checkpoint.stage]
    starts = [position for position, stage in enumerate(chain) if run.config[stage].get("model")]
    return chain[starts[-1] if starts else 0 :]


def _base_model(run: RunRecord, stages: list[str]) -> str:
    """The hub's id of a model from its cache, else the name of the folder; empty for the tiny world's model."""
    model = str(run.config[stages[0]].get("model") or "")
    return hub_id(model) or Path(model).name


def hub_id(path: str) -> str:
    """The hub's id of a folder in the hub's cache; empty for any other folder.

    >>> hub_id("/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-1.7B/snapshots/0123")
    'Qwen/Qwen3-1.7B'
    """
    found = re.search(r"models--([^/]+)--([^/]+)/snapshots/", path)
    return f"{found[1]}/{found[2]}" if found else ""


def _scores(run: RunRecord, checkpoint: Checkpoint) -> Iterator[str]:
    """Evaluations of exactly these weights, by the run itself or by `rstar evaluate`."""
    folder = checkpoint.path / "model"
    rows = [
        row
        for row in run.evaluations
        if (row["model"] and Path(row["model"]).absolute() == folder)
        or (not row["model"] and (row["stage"], row["step"]) == (checkpoint.stage, checkpoint.step))
    ]
    if not rows:
        yield "These weights were not evaluated."
        return
    head = ["problems", *EVALUATION_HEAD[1:]]
    yield table(head, [[f"{row['set']} ({row['num_problems']})", *evaluation_cells(row)[1:]] for row in rows])
    yield "k is the number of rollouts of each problem. Intervals are 95 % bootstrap intervals over problems."
    scores = heldout_scores(RunDir(run.path), checkpoint.stage)
    best = best_checkpoint(RunDir(run.path), checkpoint.stage)
    if len(scores) > 1 and best is not None and best.step == checkpoint.step:
        yield (
            f"This checkpoint has the best {HELD_OUT} pass@1 of those kept of {checkpoint.stage}, of which "
            f"{len(scores)} steps were evaluated. A score that was chosen so is optimistic."
        )


def _training(run: RunRecord, stages: list[str], checkpoint: Checkpoint) -> Iterator[list[str]]:
    for stage in stages:
        values = flatten(run.config[stage])
        rows = [row for row in (run.sft if stage == "sft" else run.steps) if row["stage"] == stage]
        sft = stage == "sft"
        data = values.get("sft.data" if sft else "data.train")
        yield [
            stage_title(stage),
            str(checkpoint.step if stage == checkpoint.stage else rows[-1]["step"] if rows else 0),
            str(values.get("seed", "")),
            f"{values.get('sft.learning_rate' if sft else 'optimizer.learning_rate', '')}",
            "SFT" if sft else f"resample {values.get('algorithm.resample')}, keep {values.get('algorithm.keep')}",
            _data(data, run, stage),
            _name(values.get("data.heldout")),
        ]


def _data(path: Any, run: RunRecord, stage: str) -> str:
    """The file's name, with the digest of the problems from the stage's newest checkpoint."""
    newest = RunDir(run.path).newest_checkpoint(stage)
    digest = str(read_object(newest.path / "progress.json").get("data", "")) if newest else ""
    return f"{_name(path)}{f' (digest {digest[:12]})' if digest else ''}"


def _name(path: Any) -> str:
    return Path(str(path)).name if path else "generated by rstar_ray.tiny"


def _settings(config: Row) -> str:
    from rstar_ray.config.options import as_toml

    default = leaves(RunConfig())
    changed = {
        name: Path(value).name if isinstance(value, str) and value.startswith("/") else value
        for name, value in flatten(config).items()
        if not name.startswith(OF_THE_MACHINE) and name in default and _listed(default[name]) != value
    }
    return as_toml(changed).rstrip()


def _listed(value: Any) -> Any:
    """The value as JSON."""
    return list(value) if isinstance(value, tuple) else value


def _versions(run: RunRecord, checkpoint: Checkpoint) -> dict[str, str]:
    launches = [row for row in run.launches if row.get("stage") == checkpoint.stage]
    return dict(launches[-1]["versions"]) if launches else {}
