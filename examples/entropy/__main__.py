"""Where the policies of a run hesitate: python -m examples.entropy RUN

For the policy at each stage's end and the held-out trajectories recorded of it: the top 20 % of tokens by entropy of
every trajectory, counted by where they stand (arXiv:2508.20722 section 5.4), with examples. Written to RUN/analysis.md
and .json. The policies' weights are read from RUN/checkpoints.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from examples.entropy.measure import Entropies
from examples.entropy.read_run import sampled_turns, whole
from examples.entropy.report import Checkpoint, Example, markdown_analysis, reflection_example
from examples.entropy.zones import count_zones, marked, zones
from rstar_ray.chat.call_syntax import SYNTAXES
from rstar_ray.chat.load_chat import load_chat
from rstar_ray.config import ChatConfig
from rstar_ray.config.checks import at_least, check_bounds
from rstar_ray.config.options import run_command
from rstar_ray.errors import ConfigError, RStarError
from rstar_ray.report.run_record import TrajectoryFile, read_run, trajectory_files
from rstar_ray.run_dir.durable import write_json, write_text
from rstar_ray.run_dir.folder import RunDir


@dataclass(frozen=True, kw_only=True)
class AnalysisOptions:
    run: Annotated[Path, tyro.conf.Positional]
    """a run directory"""
    trajectories: Annotated[int, at_least(1)] = 64
    """of each stage's end, at most"""

    def __post_init__(self) -> None:
        check_bounds("", self)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(AnalysisOptions, _analyse, argv, description=__doc__)


def _analyse(options: AnalysisOptions) -> int:
    try:
        print(analyse(options.run, most=options.trajectories))
    except RStarError as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    return 0


def analyse(path: Path, *, most: int) -> Path:
    """Look at every stage's end; returns the markdown's path. Raises `ConfigError` where there is none."""
    run_dir, run = RunDir(path), read_run(path)
    for fault in run.faults:
        print(fault, file=sys.stderr)
    found: list[Checkpoint] = []
    for file in trajectory_files(run):
        checkpoint = run_dir.finished_checkpoint(file.stage) if file.problem_set == "held-out" else None
        if checkpoint is not None and checkpoint.step == file.step:
            print(f"{file.stage}: the policy after step {file.step}", flush=True)
            found.append(_looked_at(file, checkpoint.path / "model", most, _chat_config(run_dir, file.stage)))
    if not found:
        raise ConfigError("run", f"{path} has no finished stage with held-out trajectories", "train one to its end")
    write_json(path / "analysis.json", [asdict(one) for one in found])
    write_text(path / "analysis.md", markdown_analysis(found))
    return path / "analysis.md"


def _chat_config(run_dir: RunDir, stage: str) -> ChatConfig:
    """How the stage read calls; the folder of its policy has the template."""
    chat = run_dir.configs().get(stage, {}).get("chat", {})
    return ChatConfig(parser=chat.get("parser", "auto"), stop=tuple(chat.get("stop", ())))


def _looked_at(file: TrajectoryFile, model: Path, most: int, chat_config: ChatConfig) -> Checkpoint:
    chat = load_chat(model, chat_config, instruct=False, tools=())
    syntax, stops = SYNTAXES.get(chat.profile.syntax), chat.profile.stop_token_ids
    if syntax is None:
        print(f"{file.stage}: calls of {chat.profile.syntax} are not found in the text; they count as prose")
    entropies = Entropies(model)

    def pieces(ids: Sequence[int]) -> list[str]:
        return [chat.decode([token_id]) for token_id in ids]

    counted: list[tuple[Any, Any]] = []
    examples: list[Example] = []
    for row in file.rows()[:most]:
        turns = sampled_turns(row, pieces, syntax=syntax, stops=stops)
        zone_T, entropy_T = zones(turns), entropies.of(*whole(row))
        counted.append((zone_T, entropy_T))
        texts = [text for turn in turns for text in pieces(turn.token_ids)]
        if example := reflection_example(row, zone_T, texts, entropy_T, marked(entropy_T)):
            examples.append(example)
    best = sorted(examples, key=lambda example: -example.entropy)[:3]
    return Checkpoint(file.stage, file.step, len(counted), count_zones(counted), best)


if __name__ == "__main__":
    sys.exit(main())
