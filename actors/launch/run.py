"""One training command from start to end: check, hold the run directory, start the actors, run the stages, report."""

import asyncio
import logging
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from actors.launch.changed_settings import changed_rules, rule_digests
from actors.launch.checks import Phase, Start, check, finished_before
from actors.launch.command_line import parse
from actors.launch.datasets import sft_examples
from actors.launch.exit_status import end, status_of
from actors.launch.ray_connection import connect
from actors.launch.run_paths import run_path
from actors.launch.start_model import start_model
from actors.launch.stop_signals import StopSignals, grace_of_run
from rstar_ray.chat.load_chat import load_chat
from rstar_ray.config import RunConfig, differences, idle, leaves, may_change, with_values
from rstar_ray.config.options import as_toml, given, with_config_file
from rstar_ray.config.recipe import Recipe
from rstar_ray.config.scales import at_scale
from rstar_ray.context import RunContext
from rstar_ray.errors import ConfigError
from rstar_ray.evaluation.evaluator import HELD_OUT, evaluated, run_evaluation
from rstar_ray.logs import log_to
from rstar_ray.run_dir.best_effort import best_effort
from rstar_ray.run_dir.durable import read_json, write_text
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.stage_progress import StageProgress
from rstar_ray.stages import STAGES, previous_checkpoint, run_rl, run_sft

if TYPE_CHECKING:
    from actors.system import TrainingActors

log = logging.getLogger(__name__)


def launch(recipes: Sequence[Recipe], argv: Sequence[str] | None = None, *, sft: Recipe | None = None) -> None:
    """The `main` of every recipe. At scale tiny, `sft` runs first if there is no policy to start from.

    Exit status: 0 done, 1 failed, 2 refused before anything started, 3 steps in a row had no usable update,
    130 stopped.
    """

    def act() -> None:
        words = sys.argv[1:] if argv is None else argv
        configs = parse(recipes, words)
        check(Start(asked=configs), Phase.MACHINE)
        configs = with_sft_before(configs, recipes[0], sft)
        run(configs, steps_given="--sft.steps" in given(with_config_file(words)))

    end(status_of(act, interrupted="stopped; the same command resumes from the newest checkpoint"))


def run(configs: Sequence[RunConfig], *, steps_given: bool = True) -> None:
    """Check everything, then start and run the stages that are not done.

    `steps_given`: the user set --sft.steps.
    """
    start = Start(asked=configs, steps_given=steps_given)
    check(start, Phase.MACHINE, Phase.FILES)
    with start.run_dir.held():
        _claim(start)
        log.info(f"run directory: {start.path}")
        log_to(start.run_dir.log_path)
        check(start, Phase.RUN_DIR)
        if start.ahead:
            connect()
            check(start, Phase.CLUSTER)
            asyncio.run(_run_stages(start))
        else:
            log.info("every stage is done already")
    with best_effort("the report"):
        from rstar_ray.report.write import write_report

        write_report(start.path)
        log.info(f"report: {start.path / 'report.md'}")


def _open(path: Path, config: RunConfig) -> AbstractContextManager[RunDir]:
    moved = {"algorithm.reference_model"} if config.algorithm.served_reference else set[str]()  # to another address
    return RunDir.open(path, config.stage, asdict(config), may_differ={*may_change(config), *idle(config), *moved})


def _claim(start: Start) -> None:
    """Claim the run directory for every stage, and write each stage's settings as a TOML file for `--config`.

    Stages that the directory already has come first, so that a refusal leaves it unchanged.
    """
    claimed = start.run_dir.config_path
    there = read_json(claimed) if claimed.exists() else {}
    for config in sorted(start.configs, key=lambda config: config.stage not in there):
        with _open(start.path, config), best_effort(f"{config.stage}.toml"):
            unused = idle(config)
            used = {name: value for name, value in leaves(config).items() if name not in unused}
            write_text(start.path / f"{config.stage}.toml", as_toml(used))


def with_sft_before(configs: Sequence[RunConfig], recipe: Recipe, sft: Recipe | None) -> list[RunConfig]:
    """The stages, with SFT first if scale is tiny and there is no policy to start from.

    `recipe`: the recipe of the first stage, without the command line's options; these apply to SFT too.
    """
    first, path = configs[0], run_path(configs[0])
    if first.stage == "sft" or first.model or previous_checkpoint(RunDir(path), first.stage) is not None:
        return list(configs)
    if first.scale != "tiny" or sft is None:
        before = STAGES[STAGES.index(first.stage) - 1]
        raise ConfigError("--model", f"{before} is not finished in {path}", f"give a policy, or run {before} first")
    log.info(f"{first.stage}: no policy to start from in {path}; SFT comes first")
    asked = differences(first, at_scale(recipe.paper, "tiny", recipe.tiny))
    return [with_values(at_scale(sft.paper, "tiny", sft.tiny), asked), *configs]


async def _run_stages(start: Start) -> None:
    from actors.system import TrainingActors

    first, path = start.ahead[0], start.path
    model = start_model(first, path, finished_before(first, path))
    chat = load_chat(model, first.chat, instruct=first.rollout.instruct, tools=start.tools)
    stop = StopSignals(grace_of_run(first.checkpoint.grace_s))
    actors = TrainingActors(first, model, chat=chat, tools=start.tools, run_dir=path)
    try:
        with stop.handled():
            await actors.start()
            for config in start.configs:
                with _open(path, config) as run_dir:
                    if not start.done(config):
                        with best_effort(run_dir.launches_path.name):
                            for line in changed_rules(run_dir, config):
                                log.warning(line)
                            correction = "" if config.stage == "sft" else config.correction
                            run_dir.log_launch(
                                stage=config.stage,
                                scale=config.scale,
                                importance_correction=correction,
                                rules=rule_digests(config),
                            )
                        context = actors.context(run_dir, stop.asked)
                        await actors.repeat(
                            partial(_run_stage, config, start, actors, context),
                            partial(_steps_saved, run_dir, config.stage),
                        )
    finally:
        await actors.close()


def _steps_saved(run_dir: RunDir, stage: str) -> int:
    newest = run_dir.newest_checkpoint(stage)
    return newest.step if newest else 0


async def _run_stage(config: RunConfig, start: Start, actors: "TrainingActors", context: RunContext) -> None:
    """Train one stage to its end, then evaluate it on the held-out problems."""
    run_dir, heldout = context.run_dir, start.heldout
    checkpoint = run_dir.finished_checkpoint(config.stage)
    if checkpoint is not None:
        await context.learner.load_checkpoint(checkpoint.path)
    elif config.stage == "sft":
        plan = start.sft_plan
        train, validation = await sft_examples(config, plan, actors.chat, actors.tools.execute)
        log.info(f"sft: {len(train):,} rows to train on, {len(validation):,} held back")
        checkpoint = await run_sft(config, train, validation, context, source=plan.source if plan else "")
    else:
        checkpoint = await run_rl(config, start.fitting.get(config.stage, []), context, heldout=heldout)
    if heldout and not evaluated(run_dir, config.stage, checkpoint.step):
        progress = StageProgress.read(checkpoint.path)
        await context.services.publish(progress.policy_version)
        await run_evaluation(config, {HELD_OUT: heldout}, context, step=checkpoint.step)
