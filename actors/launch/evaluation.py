"""Runs an evaluation command: checks, locks its result files, starts the engines, evaluates."""

import asyncio
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from actors.launch.checks import Phase, Start, check
from actors.launch.command_line import parse
from actors.launch.exit_status import end, status_of
from actors.launch.ray_connection import connect
from actors.launch.stop_signals import GRACE_OF_EVALUATION, StopSignals
from rstar_ray.chat.load_chat import load_chat
from rstar_ray.config.recipe import Recipe
from rstar_ray.errors import ConfigError
from rstar_ray.evaluation.evaluator import result_files, run_evaluation
from rstar_ray.evaluation.request_digest import digest_of, plugin_digest
from rstar_ray.logs import log_to
from rstar_ray.run_dir.lock import written_alone

log = logging.getLogger(__name__)


def launch_evaluation(recipe: Recipe, argv: Sequence[str] | None = None) -> None:
    """The `main` of recipes/evaluate.py; exit statuses as `launch`."""

    def act() -> None:
        start = Start(asked=parse([recipe], sys.argv[1:] if argv is None else argv))
        check(start, Phase.MACHINE, Phase.FILES, Phase.RUN_DIR)
        (config,) = start.configs
        plugins = plugin_digest(config, start.tools)
        files = result_files(config, start.sets, start.run_dir, plugins, step=0, model=start.model)
        with ExitStack() as alone:  # training and other evaluations may use the directory at the same time
            for file in files.values():
                alone.enter_context(written_alone(file))
            log_to(start.run_dir.evaluation_log_path)
            connect()
            check(start, Phase.CLUSTER)
            turns = f"evaluate-{digest_of({'files': sorted(map(str, files.values()))})}"
            asyncio.run(_evaluate(start, _journal(start, turns)))
            start.run_dir.drop_turns(turns)

    end(status_of(act, interrupted="stopped; the same command resumes with the remaining problems"))


def _journal(start: Start, turns: str) -> Path | None:
    """The folder for sampled turns until the evaluation ends; None if a node does not see the run directory."""
    from actors.preflight.nodes import refuse_unseen

    try:
        refuse_unseen(start.path)
    except ConfigError as unseen:
        log.info(f"{unseen.problem}: rollouts of a lost worker restart from their prompts")
        return None
    return start.run_dir.journal_path / turns


async def _evaluate(start: Start, journal: Path | None) -> None:
    """Evaluate until done, without progress, or the first stop signal; lost replicas are restarted.

    The first signal stops at once, because finished problems are saved and there is no checkpoint to wait for.
    """
    from actors.system import TrainingActors

    (config,) = start.configs
    chat = load_chat(start.model, config.chat, instruct=config.rollout.instruct, tools=start.tools)
    stop = StopSignals(GRACE_OF_EVALUATION)
    actors = TrainingActors(config, start.model, chat=chat, tools=start.tools, journal=journal)

    async def evaluate() -> None:
        await actors.serving()
        context = actors.context(start.run_dir, stop.asked)
        await run_evaluation(config, start.sets, context, step=0, model=start.model)

    try:
        with stop.handled():
            await actors.start(learner=False)
            await actors.watchdog.guard(evaluate())
    finally:
        await actors.close()
