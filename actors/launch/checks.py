"""The table of checks that can refuse a run before it starts; cheap checks come first.

A check reads facts of `Start`, which are computed once. It raises `ConfigError` to refuse the run, and logs what the
user should know otherwise. Recipes, `plan` and preflight use the same table.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from pathlib import Path

from actors.agents.agent_command import command_of
from actors.launch.changed_settings import different_settings
from actors.launch.checkpoint_space import checkpoint_lines
from actors.launch.datasets import (
    heldout_problems,
    log_too_long,
    problem_sets,
    sft_plan,
    split,
    that_fit,
    training_problems,
)
from actors.launch.run_paths import run_path
from actors.launch.start_model import check_context, check_heads, start_chat, start_folder, with_local_model
from rstar_ray.algorithm.rules import check_rules
from rstar_ray.chat.hub import local_folder
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.config import RunConfig, own_environments, own_rewards, own_rules, with_values
from rstar_ray.config.options import spelled
from rstar_ray.config.scales import check_gpu_here
from rstar_ray.data.order import digest_of_problems, digest_of_rows
from rstar_ray.data.sft_plan import SftPlan
from rstar_ray.errors import ConfigError
from rstar_ray.evaluation.evaluator import HELD_OUT, evaluated
from rstar_ray.hard_set import stored_hard_set
from rstar_ray.reward.own_function import check_own_reward
from rstar_ray.run_dir.durable import read_json
from rstar_ray.run_dir.folder import RunDir, refuse_damaged_end
from rstar_ray.run_dir.sinks import projects, refuse_missing_sink
from rstar_ray.stage_progress import StageProgress, refuse_other_data
from rstar_ray.stages import STAGES, previous_checkpoint
from rstar_ray.tools.loader import check_environment, check_function, tool_specs
from rstar_ray.tools.spec import PYTHON, ToolSpec
from rstar_ray.trajectory import Problem
from sandbox.command import check_command

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Start:
    """The stages of one command, and facts about them that several checks use."""

    asked: Sequence[RunConfig]  # as on the command line
    steps_given: bool = True  # the user set --sft.steps
    weights: bool = True  # read the model's weights, which downloads them if needed

    @property
    def evaluates(self) -> bool:
        return self.asked[0].stage == "evaluate"

    @cached_property
    def path(self) -> Path:
        """The run directory."""
        return run_path(self.asked[0])

    @cached_property
    def run_dir(self) -> RunDir:
        return RunDir(self.path)

    @cached_property
    def tools(self) -> list[ToolSpec]:
        """The tools of the policy."""
        return tool_specs(self.asked[0].tools.use, own_folder(self.asked[0]))

    @cached_property
    def problems(self) -> dict[str, list[Problem]]:
        """All problems of the file, by RL stage."""
        return {config.stage: training_problems(config) for config in self.asked if config.stage in STAGES[1:]}

    @cached_property
    def sets(self) -> dict[str, list[Problem]]:
        """The evaluated sets, by name."""
        return problem_sets(self.asked[0]) if self.evaluates else {HELD_OUT: heldout_problems(self.asked[0])}

    @property
    def heldout(self) -> list[Problem]:
        return self.sets.get(HELD_OUT, [])

    @cached_property
    def configs(self) -> list[RunConfig]:
        """The settings, with a Hugging Face model id replaced by the downloaded folder."""
        return [with_local_model(config, weights=self.weights) for config in self.asked]

    @cached_property
    def ahead(self) -> list[RunConfig]:
        """The stages that are not done; they all use the engines of the first one."""
        return [config for config in self.configs if self.evaluates or not self.done(config)]

    def done(self, config: RunConfig) -> bool:
        """Whether the stage is trained and, if there are held-out problems, evaluated."""
        finished = self.run_dir.finished_checkpoint(config.stage)
        return finished is not None and (not self.heldout or evaluated(self.run_dir, config.stage, finished.step))

    @cached_property
    def model(self) -> Path:
        """The model folder that the first stage ahead starts from; at scale tiny it may not exist yet."""
        if self.evaluates:
            return self._policy_to_evaluate()
        return self.start_folder(self.ahead[0]) if self.ahead else self.path

    def start_folder(self, config: RunConfig) -> Path:
        return start_folder(config, self.path, finished_before(config, self.path))

    def _policy_to_evaluate(self) -> Path:
        """The configured folder, or the newest finished stage of the run directory."""
        if model := self.configs[0].model:
            return Path(model)
        for stage in reversed(STAGES):
            if (checkpoint := self.run_dir.finished_checkpoint(stage)) is not None:
                log.info(f"evaluating {checkpoint.path.name}")
                return checkpoint.path / "model"
        hint = "give a Hugging Face model folder, or train first"
        raise ConfigError("--model", f"{self.path} has no finished stage", hint)

    @cached_property
    def chat(self) -> TokenizerChat:
        return start_chat(self.ahead[0], self.model, self.tools)

    @cached_property
    def fitting(self) -> dict[str, list[Problem]]:
        """The problems of the stages ahead whose prompts fit the context."""
        return {
            config.stage: that_fit(config, self.problems[config.stage], self.chat)
            for config in self.ahead
            if config.stage in self.problems
        }

    @cached_property
    def sft_plan(self) -> SftPlan | None:
        """The rows of SFT; None if SFT is not ahead, or its rows do not come from a file."""
        for config in self.ahead:
            if config.stage == "sft" and self.run_dir.finished_checkpoint("sft") is None:
                return sft_plan(config, self.start_folder(config), steps_given=self.steps_given)
        return None


def own_folder(config: RunConfig) -> str:
    return str(Path(config.own_folder).absolute())


def finished_before(config: RunConfig, path: Path) -> Path | None:
    """The checkpoint of the previous stage, if that is finished."""
    before = previous_checkpoint(RunDir(path), config.stage)
    return before.path if before else None


def _gpu(start: Start) -> None:
    if start.evaluates or not start.run_dir.config_path.exists():  # a finished run can be reported on any machine
        check_gpu_here(start.asked[0])


def _paths(start: Start) -> None:
    for config in start.asked:
        with_values(config, {"model": ""}).check_paths()


def _telemetry(start: Start) -> None:
    for config in start.asked:
        if start.evaluates and (sinks := projects(config.telemetry)):
            option = f"--telemetry.{next(iter(sinks))}"
            raise ConfigError(option, "receives metrics of training steps only", "omit it in an evaluation")
        refuse_missing_sink(config.telemetry)


def _evaluation_files(start: Start) -> None:
    if not start.evaluates and any(config.evaluate.files for config in start.asked):
        hint = "give --data.heldout, or evaluate with recipes/evaluate.py"
        raise ConfigError("--evaluate.files", "a run is evaluated on its held-out problems", hint)


def _own_code(start: Start) -> None:
    """Refuse a reward, environment or agent of the user that cannot be imported or called."""
    config = start.asked[0]
    for name in own_rewards(config.reward):
        option = "--reward.name" if name == config.reward.name else "--reward.functions"
        check_own_reward(name, own_folder(config), option=option)
    for name in own_environments(config.tools):
        option = "--tools.environment" if name == config.tools.environment else "--tools.environments"
        check_environment(name, own_folder(config), option=option)
    for name, num_arguments in ((config.agent.run, 2), (config.agent.failed, 1)):
        if name:
            option = "--agent.run" if name == config.agent.run else "--agent.failed"
            check_function(name, num_arguments, own_folder(config), option=option)
    agent = config.agent
    if agent.command:
        command = command_of(config)
        asyncio.run(check_command(command))
        where = "isolated, without a network" if command.confined else "NOT isolated: it has your rights"
        log.info(f"agent: {agent.command} runs {where} (docs/security.md)")
    if agent.used:
        which = agent.failed or "those marked rstar_failed"
        name = agent.run or agent.command
        log.info(f"agent: {name}; failed tool results, for resampling: {which}, and unreadable calls")


def _rules(start: Start) -> None:
    """Refuse an unknown rule of the algorithm, or a user's function that fails on generated data."""
    for config in start.asked:
        if config.stage in STAGES[1:]:
            if own := own_rules(config.algorithm):  # said first: a module may block when it is imported
                log.info(f"{config.stage}: rules of the algorithm are tested on made-up data: {', '.join(own)}")
            check_rules(config.algorithm, config.own_folder)


OF_THE_LOSS = (
    *("loss", "correction", "correction_cap", "correction_low", "correction_high", "clip_low", "clip_high"),
    *("dual_clip", "dppo_threshold", "normalisation", "kl_coefficient", "entropy_coefficient", "reference_model"),
)
"""Settings of the algorithm that the learner reads."""


def _one_loss(start: Start) -> None:
    """Refuse stages of one launch with different losses: engines and learner have the settings of the first stage."""
    for config in start.ahead if not start.evaluates else ():
        if config.stage not in STAGES[1:]:
            continue
        for name in ("staleness", *(f"algorithm.{field}" for field in OF_THE_LOSS)):
            first, now = (_of_the_loss(one, name) for one in (start.ahead[0], config))
            if first != now:
                problem = f"{config.stage} has {now}, and {start.ahead[0].stage} of the same launch {first}"
                raise ConfigError(spelled(name), problem, "launch them one after the other")


def _of_the_loss(config: RunConfig, name: str) -> object:
    return config.staleness if name == "staleness" else getattr(config.loss, name.partition(".")[2])


def _tools(start: Start) -> None:
    config = start.asked[0]
    custom = [tool for tool in config.tools.use if tool != PYTHON]
    if custom and not start.evaluates and not config.rollout.instruct and config.chat.protocol == "own":
        log.info(
            f"warning: --tools.use {' '.join(custom)}: the policy is not shown these tools, because "
            "--rollout.instruct is off. Hint: add --rollout.instruct, unless SFT taught the model to call them"
        )
    _ = start.tools


def _problems(start: Start) -> None:
    _ = start.problems
    if start.asked[0].evaluate.every_steps and not start.evaluates and not start.heldout:
        raise ConfigError("--evaluate.every-steps", "there are no held-out problems", "give --data.heldout too")
    _ = start.sets


def _model(start: Start) -> None:
    """Refuse a model that cannot be trained, before its weights are downloaded."""
    from actors.weights.model_parameters import refuse_untrainable

    if not start.evaluates:
        for model in {config.model for config in start.asked if config.model}:
            refuse_untrainable(local_folder(model, weights=False))
    for config in start.configs:
        config.check_paths()
    _ = start.model


def _context(start: Start) -> None:
    for config in start.ahead:
        check_context(config, start.model)
        check_heads(config, start.model)


def _adapters(start: Start) -> None:
    """Refuse adapters that differ from those of the previous stage."""
    if start.evaluates or not start.ahead or start.ahead[0].model:
        return
    config = start.ahead[0]
    before = previous_checkpoint(start.run_dir, config.stage)
    if before is None:
        return
    theirs = read_json(start.run_dir.config_path)[before.stage]["learner"]
    for name in ("lora_rank", "lora_alpha"):
        ours = getattr(config.learner, name)
        if theirs[name] != ours and (config.learner.lora_rank or theirs["lora_rank"]):
            raise ConfigError(
                f"--learner.{name.replace('_', '-')}",
                f"{before.stage} of {start.path} was trained with {theirs[name]} (got {ours})",
                f"give the same, or a new --run-dir with --model {before.path / 'model'}",
            )


def _weights(start: Start) -> None:
    """Only for a model that the user gives: models of earlier stages are known to fit."""
    from actors.weights.model_parameters import refuse_misfit, refuse_unpacked

    if start.weights and start.ahead and start.ahead[0].model:
        refuse_misfit(start.model)
        refuse_unpacked(start.model, start.ahead[0].learner.attention)


def _reference(start: Start) -> None:
    """Refuse a served reference model whose log-probs would be those of other tokens, or of another temperature."""
    from actors.learner.served_reference import refuse_unfit

    for config in start.ahead:
        if config.algorithm.served_reference and config.rollout.policy_temperature != 1:
            problem = f"a served reference model needs 1 (got {config.rollout.temperature:g})"
            raise ConfigError("--rollout.temperature", problem, "give 1, or the reference model's folder")
    if start.ahead and (address := start.ahead[0].algorithm.served_reference):
        context = max(config.engine.max_context_tokens for config in start.ahead)
        tokenizer = start.chat.tokenizer
        refuse_unfit(address, context=context, token_ids=lambda text: tokenizer.encode(text, add_special_tokens=False))


def _prompts(start: Start) -> None:
    if start.ahead:
        log_too_long(start.ahead[0], start.sets, start.chat)
        _ = start.fitting


def _same_data(start: Start) -> None:
    """Refuse a stage that would resume with other data than it started with."""
    for config in start.ahead:
        if config.stage in start.fitting:
            problems = start.fitting[config.stage]
            kept = stored_hard_set(problems, config, start.run_dir) if config.drop_solved else None
            _check_data(start, config, digest_of_problems(problems if kept is None else kept))
        elif config.stage == "sft" and start.sft_plan is not None:
            train, _ = split(start.sft_plan.examples, config.seed)
            _check_data(start, config, digest_of_rows(train, start.sft_plan.source))


def _check_data(start: Start, config: RunConfig, data: str) -> None:
    """Compare with the newest checkpoint; the stage repeats this check with the checkpoint that it resumes from."""
    newest = start.run_dir.newest_checkpoint(config.stage)
    if newest is None or start.run_dir.finished_checkpoint(config.stage) is not None:
        return
    try:
        progress = StageProgress.read(newest.path)
    except (OSError, ValueError):  # damaged: the stage resumes from the checkpoint before
        return
    refuse_other_data(config, progress, data)


def _disk(start: Start) -> None:
    for line in () if start.evaluates else checkpoint_lines(start.ahead, start.model, start.path):
        log.info(line)


def _settings(start: Start) -> None:
    """Report settings that differ from those the policy was trained with, and the values of `auto`."""
    for line in different_settings(start.model, start.ahead[0]) if start.ahead else ():
        log.info(line)
    trained = [config for config in start.ahead if config.stage in STAGES[1:]]
    chosen = {config.correction: config for config in trained if config.algorithm.correction == "auto"}
    for mode, config in sorted(chosen.items()):
        if mode != "none":
            cause = f"--learner.dtype {config.learner.dtype}, --staleness {config.staleness}"
            log.info(f"off-policy correction: {mode} (--algorithm.correction auto with {cause})")
    if any(config.staleness and config.correction == "sampler" and ":" in config.algorithm.loss for config in trained):
        log.info(
            "warning: --algorithm.correction sampler: it corrects your loss only if the loss reads `old_logprobs_N`. "
            "Hint: otherwise give --algorithm.correction token"
        )
    if any(config.staleness and config.correction == "sequence" for config in trained):
        log.info(
            "warning: --algorithm.correction sequence: with --staleness the product over a long row is near 0 or above "
            "the cap. Hint: leave it out"
        )


def _stage_ends(start: Start) -> None:
    """Refuse a damaged checkpoint of a finished stage; not checked in an evaluation."""
    for config in start.ahead:
        if not start.evaluates and (end := start.run_dir.finished_checkpoint(config.stage)) is not None:
            refuse_damaged_end(end)


def _nodes(start: Start) -> None:
    """Refuse nodes that do not see the run directory, or files beside it that the run reads."""
    from actors.preflight.nodes import refuse_unseen
    from actors.preflight.required_paths import needed_paths

    refuse_unseen(None if start.evaluates else start.path, needed_paths(start.ahead[0], start.model))


class Phase(Enum):
    """What a check needs."""

    MACHINE = auto()  # the machine that starts the run
    FILES = auto()  # files and code that the options name
    RUN_DIR = auto()  # the run directory, locked by this process
    CLUSTER = auto()  # a Ray cluster


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    phase: Phase
    run: Callable[[Start], None]


CHECKS = (
    Check("GPUs", Phase.MACHINE, _gpu),
    Check("paths", Phase.FILES, _paths),
    Check("telemetry", Phase.FILES, _telemetry),
    Check("evaluation files", Phase.FILES, _evaluation_files),
    Check("own code", Phase.FILES, _own_code),
    Check("rules", Phase.FILES, _rules),
    Check("losses of the stages", Phase.FILES, _one_loss),
    Check("tools", Phase.FILES, _tools),
    Check("problems", Phase.FILES, _problems),
    Check("model", Phase.FILES, _model),
    Check("context", Phase.FILES, _context),
    Check("adapters", Phase.FILES, _adapters),
    Check("weights", Phase.FILES, _weights),
    Check("reference model", Phase.FILES, _reference),
    Check("prompts", Phase.FILES, _prompts),
    Check("data of the stage", Phase.FILES, _same_data),
    Check("disk", Phase.RUN_DIR, _disk),
    Check("settings", Phase.RUN_DIR, _settings),
    Check("stage ends", Phase.RUN_DIR, _stage_ends),
    Check("nodes", Phase.CLUSTER, _nodes),
)


def check(start: Start, *phases: Phase) -> None:
    """Raise `ConfigError` for the first check of these phases that refuses."""
    for each in CHECKS:
        if each.phase in phases:
            each.run(start)


def check_files(config: RunConfig) -> Iterator[tuple[str, ConfigError | None]]:
    """Each check of the named files, with its refusal; checks after a refusal are not run."""
    start = Start(asked=[config], weights=False)
    for each in CHECKS:
        if each.phase is Phase.FILES:
            try:
                each.run(start)
            except ConfigError as refused:
                yield each.name, refused
                return
            yield each.name, None
