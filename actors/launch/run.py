"""One command from start to end: refuse early, hold the run directory, start the actors, run the stages, report."""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from actors.launch.changed_settings import asked_otherwise
from actors.launch.checkpoint_space import checkpoint_lines
from actors.launch.command_line import given, parse
from actors.launch.datasets import (
    heldout_problems,
    problem_sets,
    sft_examples,
    sft_plan,
    split,
    tell_too_long,
    that_fit,
    training_problems,
)
from actors.launch.exit_status import status_of
from actors.launch.ray_connection import connect
from actors.launch.start_model import (
    checked_chat,
    refuse_beyond_context,
    refuse_uneven_split,
    start_folder,
    start_model,
    with_local_model,
)
from actors.launch.stop_signals import GRACE_OF_EVALUATION, StopSignals, grace_of_run
from rstar_ray.chat.load_chat import load_chat
from rstar_ray.config import RunConfig, differences, idle, may_change, own_rewards, with_values
from rstar_ray.config.recipe import Recipe
from rstar_ray.config.scales import at_scale, refuse_without_gpu
from rstar_ray.context import RunContext
from rstar_ray.data.order import digest_of_problems, digest_of_rows
from rstar_ray.data.sft_plan import SftPlan
from rstar_ray.errors import ConfigError
from rstar_ray.evaluation.evaluator import HELD_OUT, evaluated, result_files, run_evaluation
from rstar_ray.evaluation.request_digest import brought_along, digest_of
from rstar_ray.hard_set import kept_hard_set
from rstar_ray.logs import log_to
from rstar_ray.reward.own_function import check_own_reward
from rstar_ray.run_dir.best_effort import best_effort
from rstar_ray.run_dir.durable import read_json
from rstar_ray.run_dir.folder import RunDir, refuse_damaged_end
from rstar_ray.run_dir.lock import written_alone
from rstar_ray.run_dir.sinks import refuse_missing_sink
from rstar_ray.stage_progress import StageProgress, refuse_other_data
from rstar_ray.stages import STAGES, previous_checkpoint, run_rl, run_sft
from rstar_ray.tools.loader import check_environment, tool_specs
from rstar_ray.tools.spec import PYTHON, ToolSpec
from rstar_ray.trajectory import Problem

if TYPE_CHECKING:
    from actors.system import TrainingActors

log = logging.getLogger(__name__)


def launch(recipes: Sequence[Recipe], argv: Sequence[str] | None = None, *, sft: Recipe | None = None) -> None:
    """The `main` of every recipe; `sft` comes first in the tiny world where there is no policy to start from.

    Exit status: 0 done, 1 the run failed, 2 refused before anything started.
    """
    argv = sys.argv[1:] if argv is None else argv

    def act() -> None:
        configs = parse(recipes, argv)
        if not (run_path(configs[0]) / "config.json").exists():  # a run that has ended can be reported anywhere
            refuse_without_gpu(configs[0])
        configs = with_sft_before(configs, recipes[0], sft)
        run(configs, steps_given="--sft.steps" in given(argv))

    _end(status_of(act, interrupted="stopped; the same command goes on from the newest checkpoint"))


def launch_evaluation(recipe: Recipe, argv: Sequence[str] | None = None) -> None:
    """The `main` of recipes/evaluate.py; exit statuses as `launch`."""
    argv = sys.argv[1:] if argv is None else argv

    def act() -> None:
        (config,) = parse([recipe], argv)
        refuse_without_gpu(config)
        with_values(config, {"model": ""}).check_paths()
        if config.telemetry.wandb:
            raise ConfigError("--telemetry.wandb", "it gets the numbers of training steps alone", "leave it out")
        refuse_own_code(config)
        sets = problem_sets(config)
        tools = tools_of(config)
        path = run_path(config)
        config = with_local_model(config)
        config.check_paths()
        model = _policy_to_evaluate(config, path)
        refuse_beyond_context(config, model)
        refuse_uneven_split(config, model)
        tell_too_long(config, sets, checked_chat(config, model, tools))
        for line in asked_otherwise(model, config):
            log.info(line)
        files = result_files(config, sets, RunDir(path), brought_along(config, tools), step=0, model=model)
        with ExitStack() as alone:  # in this directory a run may train meanwhile, and others may be evaluated
            for file in files.values():
                alone.enter_context(written_alone(file, by="another evaluation that asks the same"))
            log_to(RunDir(path).evaluation_log_path)
            connect()
            _refuse_unseen(None, config, model)
            turns = f"evaluate-{digest_of({'files': sorted(map(str, files.values()))})}"
            asyncio.run(_evaluate(config, sets, model, path, tools, _journal(path, turns)))
            RunDir(path).drop_turns(turns)

    _end(status_of(act, interrupted="stopped; the same command goes on with the problems that are left"))


def _end(status: int) -> None:
    if status:
        sys.exit(status)


def run(configs: Sequence[RunConfig], *, steps_given: bool = True) -> None:
    """Check everything that can be checked, then start and go through the stages that are not done.

    `steps_given`: a person chose how long SFT is.
    """
    path = run_path(configs[0])
    tools, problems, heldout = brought(configs)
    configs = [with_local_model(config, trains=True) for config in configs]
    for config in configs:
        config.check_paths()
    ahead = [config for config in configs if not _done(config, RunDir(path), heldout)]
    model = start_folder(ahead[0], path, _finished_before(ahead[0], path)) if ahead else path
    for config in ahead:  # all of them run on the engines of the first
        refuse_beyond_context(config, model)
        refuse_uneven_split(config, model)
    if ahead:
        _refuse_other_adapters(ahead[0], path)
        chat = checked_chat(ahead[0], model, tools)
        tell_too_long(ahead[0], {HELD_OUT: heldout}, chat)
        problems = {
            config.stage: that_fit(config, problems[config.stage], chat) for config in ahead if config.stage in problems
        }
    for config in ahead:
        if config.stage in problems:
            _refuse_other_problems(config, problems[config.stage], path)
    plan = _plan_sft(ahead, path, steps_given=steps_given)
    with RunDir(path).held():
        _claim(path, configs)
        log.info(f"run directory: {path}")
        log_to(RunDir(path).log_path)
        for line in (*checkpoint_lines(ahead, model, path), *(asked_otherwise(model, ahead[0]) if ahead else ())):
            log.info(line)
        for line in correction_lines(ahead):
            log.info(line)
        if not ahead:
            log.info("every stage is done already")
        else:
            for config in ahead:  # finished, and not evaluated
                if (end := RunDir(path).finished_checkpoint(config.stage)) is not None:
                    refuse_damaged_end(end)
            connect()
            _refuse_unseen(path, ahead[0], model)
            asyncio.run(_run_stages(configs, problems, heldout, path, plan))
    with best_effort("the report"):
        from rstar_ray.report.write import write_report

        write_report(path)
        log.info(f"report: {path / 'report.md'}")


def correction_lines(ahead: Sequence[RunConfig]) -> list[str]:
    """Which importance correction `--algorithm.correction auto` stands for, where it stands for one."""
    chosen = {config.correction for config in ahead if config.stage != "sft" and config.algorithm.correction == "auto"}
    return [
        f"importance correction: {mode} (--algorithm.correction auto with --learner.dtype {ahead[0].learner.dtype})"
        for mode in sorted(chosen - {"none"})
    ]


def brought(configs: Sequence[RunConfig]) -> tuple[list[ToolSpec], dict[str, list[Problem]], list[Problem]]:
    """What a person brings beside the model, which may have to be fetched: tools, problems by stage, held-out ones.

    Raises `ConfigError` for what is not there, or not what it should be.
    """
    for config in configs:
        with_values(config, {"model": ""}).check_paths()
        refuse_missing_sink(config.telemetry.wandb)
        if config.evaluate.files:
            mend = "give --data.heldout, or evaluate with recipes/evaluate.py"
            raise ConfigError("--evaluate.files", "a run is evaluated on its held-out problems", mend)
    refuse_own_code(configs[0])
    custom = [name for name in configs[0].tools.use if name != PYTHON]
    if custom and not configs[0].rollout.instruct and configs[0].chat.protocol == "own":
        log.info(
            f"warning: --tools.use {' '.join(custom)}: the policy is not shown these tools, because "
            "--rollout.instruct is off. Hint: add --rollout.instruct, unless SFT taught the model to call them"
        )
    problems = {config.stage: training_problems(config) for config in configs if config.stage != "sft"}
    heldout = heldout_problems(configs[0])
    if configs[0].evaluate.every_steps and not heldout:
        raise ConfigError("--evaluate.every-steps", "there are no held-out problems", "give --data.heldout too")
    return tools_of(configs[0]), problems, heldout


def _refuse_other_adapters(config: RunConfig, path: Path) -> None:
    """Raise `ConfigError` where the stage before left a learner whose adapters are not those asked for."""
    before = previous_checkpoint(RunDir(path), config.stage)
    if config.model or before is None:
        return
    theirs = read_json(RunDir(path).config_path)[before.stage]["learner"]
    for name in ("lora_rank", "lora_alpha"):
        ours = getattr(config.learner, name)
        if theirs[name] != ours and (config.learner.lora_rank or theirs["lora_rank"]):
            raise ConfigError(
                f"--learner.{name.replace('_', '-')}",
                f"{before.stage} of {path} was trained with {theirs[name]}, not {ours}",
                f"give the same, or a new --run-dir with --model {before.path / 'model'}",
            )


def _refuse_unseen(path: Path | None, config: RunConfig, model: Path) -> None:
    """Raise `ConfigError` where a node of the cluster does not see the run directory, or what the run reads beside
    it."""
    from actors.preflight.nodes import refuse_unseen
    from actors.preflight.required_paths import needed_paths

    refuse_unseen(path, needed_paths(config, model))


def _journal(path: Path, turns: str) -> Path | None:
    """Where what an evaluation samples is kept until it ends; with a line, nowhere, as its rows are there anyway."""
    from actors.preflight.nodes import refuse_unseen

    try:
        refuse_unseen(path)
    except ConfigError as unseen:
        log.info(f"{unseen.problem}: rollouts of a worker that is lost begin again at their prompts")
        return None
    return RunDir(path).journal_path / turns


def refuse_own_code(config: RunConfig) -> None:
    """Raise `ConfigError` for a reward or an environment of the person's own that cannot be imported or called."""
    folder = str(Path(config.own_folder).absolute())
    for name in own_rewards(config.reward):
        option = "--reward.name" if name == config.reward.name else "--reward.functions"
        check_own_reward(name, folder, option=option)
    if config.tools.environment:
        check_environment(config.tools.environment, folder)


def tools_of(config: RunConfig) -> list[ToolSpec]:
    """What the policy may call. Raises `ConfigError` for what is no tool."""
    return tool_specs(config.tools.use, str(Path(config.own_folder).absolute()))


def _plan_sft(ahead: Sequence[RunConfig], path: Path, *, steps_given: bool) -> SftPlan | None:
    """What SFT will train on, where it is still ahead and its policy is not there already."""
    for config in ahead:
        if config.stage == "sft" and RunDir(path).finished_checkpoint("sft") is None:
            folder = start_folder(config, path, _finished_before(config, path))
            plan = sft_plan(config, folder, steps_given=steps_given)
            if plan is not None:
                train, _ = split(plan.examples, config.seed)
                _refuse_other_data(config, digest_of_rows(train, plan.source), path)
            return plan
    return None


def _refuse_other_problems(config: RunConfig, problems: Sequence[Problem], path: Path) -> None:
    """Raise `ConfigError` where the stage would go on with problems that it was not begun with."""
    kept = kept_hard_set(problems, config, RunDir(path)) if config.drop_solved else None
    _refuse_other_data(config, digest_of_problems(problems if kept is None else kept), path)


def _refuse_other_data(config: RunConfig, data: str, path: Path) -> None:
    """Before anything starts; the stage looks again, once it knows which checkpoint is whole."""
    newest = RunDir(path).newest_checkpoint(config.stage)
    if newest is None or RunDir(path).finished_checkpoint(config.stage) is not None:
        return
    try:
        progress = StageProgress.read(newest.path)
    except (OSError, ValueError):  # damaged: the stage sets it aside, and goes on from the one before
        return
    refuse_other_data(config, progress, data)


def run_path(config: RunConfig) -> Path:
    """Absolute: a job's own folder is thrown away with its session, so there a relative path starts beside `runs`."""
    in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    if config.run_dir:
        runs = os.environ.get("RSTAR_RAY_RUNS")
        start = (Path(runs).parent if runs else Path.home()) if in_job else Path.cwd()
        return (start / Path(config.run_dir).expanduser()).absolute()
    runs = os.environ.get("RSTAR_RAY_RUNS") or (Path.home() / "rstar_ray_runs" if in_job else Path.cwd() / "runs")
    return Path(runs).absolute() / config.scale


def _open(path: Path, config: RunConfig) -> AbstractContextManager[RunDir]:
    return RunDir.open(path, config.stage, asdict(config), may_differ={*may_change(config), *idle(config)})


def _claim(path: Path, configs: Sequence[RunConfig]) -> None:
    """Claim the run directory for every stage; those it already has come first, so that a refusal changes nothing."""
    claimed = RunDir(path).config_path
    there = read_json(claimed) if claimed.exists() else {}
    for config in sorted(configs, key=lambda config: config.stage not in there):
        with _open(path, config):
            pass


def with_sft_before(configs: Sequence[RunConfig], recipe: Recipe, sft: Recipe | None) -> list[RunConfig]:
    """In the tiny world a stage run by itself brings the policy it needs: SFT comes first where nothing else has.

    `recipe` is the first of `configs` as it is without the command line, whose options hold for SFT too.
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


def _done(config: RunConfig, run_dir: RunDir, heldout: Sequence[Problem]) -> bool:
    finished = run_dir.finished_checkpoint(config.stage)
    return finished is not None and (not heldout or evaluated(run_dir, config.stage, finished.step))


def _finished_before(config: RunConfig, path: Path) -> Path | None:
    before = previous_checkpoint(RunDir(path), config.stage)
    return before.path if before else None


async def _run_stages(
    configs: Sequence[RunConfig],
    problems: dict[str, list[Problem]],
    heldout: list[Problem],
    path: Path,
    plan: SftPlan | None,
) -> None:
    from actors.system import TrainingActors

    first = next(config for config in configs if not _done(config, RunDir(path), heldout))
    model = start_model(first, path, _finished_before(first, path))
    tools = tools_of(first)
    chat = load_chat(model, first.chat, instruct=first.rollout.instruct, tools=tools)
    stop = StopSignals(grace_of_run(first.checkpoint.grace_s))
    actors = TrainingActors(first, model, chat=chat, tools=tools, run_dir=path)
    try:
        with stop.handled():
            await actors.start()
            for config in configs:
                with _open(path, config) as run_dir:
                    if not _done(config, run_dir, heldout):
                        with best_effort(run_dir.launches_path.name):
                            correction = "" if config.stage == "sft" else config.correction
                            run_dir.log_launch(stage=config.stage, scale=config.scale, importance_correction=correction)
                        of_stage = problems.get(config.stage, [])
                        context = actors.context(run_dir, stop.asked)
                        await actors.repeat(
                            partial(_run_stage, config, of_stage, heldout, actors, context, plan),
                            partial(_steps_saved, run_dir, config.stage),
                        )
    finally:
        await actors.close()


def _steps_saved(run_dir: RunDir, stage: str) -> int:
    newest = run_dir.newest_checkpoint(stage)
    return newest.step if newest else 0


async def _run_stage(
    config: RunConfig,
    problems: list[Problem],
    heldout: list[Problem],
    actors: "TrainingActors",
    context: RunContext,
    plan: SftPlan | None,
) -> None:
    """One stage to its checkpoint, and what it is worth on held-out problems."""
    run_dir = context.run_dir
    checkpoint = run_dir.finished_checkpoint(config.stage)
    if checkpoint is not None:
        await context.learner.load_checkpoint(checkpoint.path)
    elif config.stage == "sft":
        train, validation = await sft_examples(config, plan, actors.chat, actors.tools.execute)
        log.info(f"sft: {len(train):,} rows to train on, {len(validation):,} held back")
        checkpoint = await run_sft(config, train, validation, context, source=plan.source if plan else "")
    else:
        checkpoint = await run_rl(config, problems, context, heldout=heldout)
    if heldout and not evaluated(run_dir, config.stage, checkpoint.step):
        progress = StageProgress.read(checkpoint.path)
        await context.services.publish(progress.policy_version)
        await run_evaluation(config, {HELD_OUT: heldout}, context, step=checkpoint.step)


def _policy_to_evaluate(config: RunConfig, path: Path) -> Path:
    """The folder asked for, or the newest finished stage of the run directory."""
    if config.model:
        return Path(config.model)
    for stage in reversed(STAGES):
        if (checkpoint := RunDir(path).finished_checkpoint(stage)) is not None:
            log.info(f"evaluating {checkpoint.path.name}")
            return checkpoint.path / "model"
    raise ConfigError("--model", f"{path} has no finished stage", "give a Hugging Face model folder, or train first")


async def _evaluate(
    config: RunConfig,
    sets: dict[str, list[Problem]],
    model: Path,
    path: Path,
    tools: Sequence[ToolSpec],
    journal: Path | None,
) -> None:
    """Replicas that are lost come back by themselves; where nothing gets on any more it ends with what was waited for.

    The first signal ends it too: what is finished is kept, and there is no checkpoint to wait for.
    """
    from actors.system import TrainingActors

    chat = load_chat(model, config.chat, instruct=config.rollout.instruct, tools=tools)
    stop = StopSignals(GRACE_OF_EVALUATION)
    actors = TrainingActors(config, model, chat=chat, tools=tools, journal=journal)

    async def evaluate() -> None:
        await actors.serving()
        await run_evaluation(config, sets, actors.context(RunDir(path), stop.asked), step=0, model=model)

    try:
        with stop.handled():
            await actors.start(learner=False)
            await actors.watch.guard(evaluate())
    finally:
        await actors.close()
