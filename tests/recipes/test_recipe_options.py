import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from actors.launch.checks import Start
from actors.launch.command_line import parse
from actors.launch.datasets import problem_sets
from actors.launch.evaluation import launch_evaluation
from actors.launch.run import launch, run, with_sft_before
from actors.launch.run_paths import run_path
from actors.launch.start_model import model_context_tokens
from recipes.chat import main as chat
from recipes.evaluate import EVALUATE
from recipes.prepare import main as prepare
from recipes.serve import main as serve
from recipes.sft import SFT
from recipes.stage1 import STAGE_1
from recipes.stage2 import STAGE_2
from recipes.stage3 import STAGE_3
from recipes.watch import main as watch
from rstar_ray.chat.__main__ import main as show_chat
from rstar_ray.chat.load_chat import load_chat
from rstar_ray.config import RunConfig, idle, leaves, may_change, with_values
from rstar_ray.config.recipe import Recipe
from rstar_ray.config.scales import SCALES
from rstar_ray.errors import ConfigError, RStarError
from rstar_ray.rollouts import FinishedRollout, TrajectoryRef, has_signal, resample
from rstar_ray.run_dir.code_version import code_version
from rstar_ray.run_dir.folder import RunDir
from tests.rstar_ray.chat.families import save_family
from tests.rstar_ray.fabricate import summary

ALL = [SFT, STAGE_1, STAGE_2, STAGE_3]
TINY = ["--scale", "tiny"]


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as refused:
        parse([STAGE_1], [*TINY, *arguments])
    return str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "named", "hint"),
    [
        (["--rollout.max-respons-tokens", "5"], "--rollout.max-respons-tokens", "--rollout.max-response-tokens"),
        (["--nonsense"], "--nonsense", "--help"),
        (["--rollout.max-response-tokens", "many"], "--rollout.max-response-tokens", "--help"),
        (["--rollout.max-response-tokens", "-5"], "--rollout.max-response-tokens", "at least 1"),
        (["--rollout.max-response-tokens", "4096"], "--rollout.max-response-tokens", "--engine.max-context-tokens"),
        (["--rollout.temperature", "nan"], "--rollout.temperature", "must be 0 (greedy) or from 0.01 to 2.0"),
        (["--rollout.temperature", "0.001"], "--rollout.temperature", "must be 0 (greedy) or from 0.01 to 2.0"),
        (["--detector.still-s", "inf"], "--detector.still-s", "must be finite"),
        (["--optimizer.learning-rate", "inf"], "--optimizer.learning-rate", "finite"),
        (["--algorithm.keep", "99"], "--algorithm.keep", "--algorithm.rollouts-per-prompt"),
        (["--algorithm.correction", "tis"], "--algorithm.correction", "token"),
        (["--learner.zero", "4"], "--learner.zero", "0"),
        (["--learner.zero", "0", "--learner.offload"], "--learner.offload", "--learner.zero"),
        (["--sandbox.warm", "numpy"], "--sandbox.warm", "add lean"),
        (["--tools.use", "python", "search"], "--tools.use", "module:object"),
        (["--steps", "-3"], "--steps", "at least 0"),
        (["--stage", "stage2"], "--stage", "recipes/stage2.py"),
        (["--stage", "stage9"], "--stage", "leave it out"),
        (["--sft.warmup-share", "0.9", "--sft.steps", "4"], "--sft.warmup-share", "--sft.steps"),
    ],
)
def test_a_bad_option_is_refused_in_one_line_that_names_it_and_the_fix(arguments: list[str], named: str, hint: str):
    """How a command line says it."""
    line = refusal(*arguments)
    assert line.startswith(named) and hint in line and "\n" not in line


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "option", "meant"),
    [
        (SFT, "--steps", "--sft.steps"),
        (SFT, "--optimizer.learning-rate", "--sft.learning-rate"),
        (EVALUATE, "--rollout.temperature", "--evaluate.temperature"),
        (EVALUATE, "--rollout.max-response-tokens", "--evaluate.max-response-tokens"),
    ],
)
def test_a_setting_of_other_stages_is_refused_with_the_one_that_is_meant(recipe: Recipe, option: str, meant: str):
    with pytest.raises(ConfigError) as refused:
        parse([recipe], [*TINY, f"{option}=1"])
    assert str(refused.value).startswith(f"{option}: has no effect in ") and str(refused.value).endswith(meant)
    parse([recipe], [*TINY, option, "1", meant, "1"])  # options that several commands share
    parse(ALL, [*TINY, option, "1"])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            "--algorithm.min-zero-reward-trace-num 3",
            "--algorithm.min-zero-reward-trace-num: has no effect with --algorithm.resample paper. Hint: give "
            "--algorithm.resample release, or leave it out",
        ),
        ("--algorithm.advantage-std none --algorithm.advantage rloo", "--algorithm.advantage-std: has no effect with"),
        ("--algorithm.least-failures 1 --algorithm.resample none", "--algorithm.least-failures: has no effect with"),
        ("--algorithm.no-roc-error-ratio --algorithm.resample=random", "--algorithm.no-roc-error-ratio: has no effect"),
        (
            "--algorithm.correction-cap=3 --algorithm.correction icepop",
            "--algorithm.correction-cap: has no effect with --algorithm.correction icepop",
        ),
        (
            "--float32-head",
            "--float32-head: has no effect with --learner.dtype float32. Hint: give --engine.dtype bfloat16",
        ),
        ("--algorithm.correction-high=3", "--algorithm.correction-high: has no effect with --algorithm.correction"),
        (
            "--learner.max-padding 0.1",
            "--learner.max-padding: has no effect with --learner.attention rows. Hint: give --l",
        ),
        (
            "--data.no-integer-answers",
            "--data.no-integer-answers: has no effect without --data.train. Hint: give --data.t",
        ),
        (
            "--engine.no-compile",
            "--engine.no-compile: has no effect with --engine.gpus-per-replica 0.0. Hint: give --engine",
        ),
        (
            "--data.num-train 9 --data.train x.jsonl",
            "--data.num-train: has no effect with --data.train x.jsonl. Hint: leave out one of the two",
        ),
    ],
)
def test_an_option_that_the_mode_has_no_use_for_is_refused(options: str, line: str):
    assert refusal(*options.split()).startswith(line)


def test_a_group_of_equal_rewards_has_no_signal_though_one_rollout_is_penalised_for_its_length():
    (config,) = parse([STAGE_2], ["--model", "m", "--algorithm.overlong-buffer", "64"])
    longest = config.rollout.max_response_tokens
    group = [
        FinishedRollout(
            summary=replace(summary("g", sibling, reward=1.0), num_response_tokens=longest if sibling == 0 else 100),
            ref=TrajectoryRef([], 0),
        )
        for sibling in range(4)
    ]
    assert not has_signal(group)


def test_skipping_solved_problems_is_refused_where_they_end_the_stage():
    line = refusal("--until", "solved", "--data.skip-solved", "20")
    assert line.startswith("--data.skip-solved: cannot be combined with --until solved")


def keeps_a_signal(recipe: Recipe, *options: str) -> bool:
    """Whether a group with one failure is still trained on."""
    (config,) = parse([recipe], [*options, "--model", "m"])
    rollouts = [
        FinishedRollout(summary=summary("g", sibling, reward=float(sibling > 0)), ref=TrajectoryRef([], 0))
        for sibling in range(config.algorithm.num_rollouts)
    ]
    return has_signal(resample(rollouts, config, 1))


@pytest.mark.parametrize(
    "options",
    [
        "--algorithm.resample mine:best --algorithm.least-failures 2 --algorithm.no-roc-error-ratio",
        "--algorithm.loss mine:masked --algorithm.dppo-threshold 0.1",
    ],
)
def test_a_rule_of_the_user_may_read_the_settings_of_the_built_in_ones(options: str):
    parse([STAGE_1], [*TINY, *options.split()])  # it refuses settings without effect


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("recipe", [STAGE_2, STAGE_3], ids=lambda recipe: recipe.stage)
def test_a_single_failure_of_a_group_is_trained_on_late_in_a_run(recipe: Recipe, scale: str):
    assert keeps_a_signal(recipe, "--scale", scale)
    assert not keeps_a_signal(recipe, "--scale", scale, "--algorithm.least-failures", "0")


def test_sft_that_comes_first_runs_under_the_options_given(tmp_path: Path):
    options = ["--algorithm.clip-high", "0.5", "--learner.ranks", "1", "--rollout.temperature", "0.7"]
    configs = parse([STAGE_1], [*TINY, "--run-dir", str(tmp_path / "run"), *options])
    sft, stage1 = with_sft_before(configs, STAGE_1, SFT)
    assert stage1 is configs[0] and sft.stage == "sft"
    assert (sft.algorithm.clip_high, sft.learner.ranks, sft.rollout.temperature) == (0.5, 1, 0.7)
    (as_in_train,) = parse([SFT], [*TINY, "--run-dir", str(tmp_path / "run"), *options])
    assert sft == as_in_train


def test_help_shows_every_field_with_its_default(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        parse([STAGE_1], [*TINY, "--help"])
    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name in leaves(RunConfig()):
        assert "--" + name.replace("_", "-") in shown, name
    assert "[tokens]" in shown and "(default: 88)" in shown


def test_run_directories_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RSTAR_RAY_RUNS", raising=False)
    (config,) = parse([STAGE_1], TINY)
    assert run_path(config) == tmp_path / "runs" / "tiny"
    monkeypatch.setenv("RSTAR_RAY_RUNS", "/elsewhere")
    assert run_path(config) == Path("/elsewhere/tiny")
    assert run_path(with_values(config, {"run_dir": "mine"})) == tmp_path / "mine"


@pytest.mark.parametrize(
    ("options", "rows", "named"),
    [
        (["--model", "/no/such/model"], None, "--model"),
        (["--data.train", "/no/such/file.jsonl"], None, "--data.train"),
        ([], '{"id": "a", "problem": "1+1"}\n', "row 1"),
        ([], '{"id": "a", "problem": "1+1", "answer": "one half"}\n', "row 1"),
        ([], "", "train.jsonl"),
        (["--sft.data", "/no/such/conversations.jsonl"], None, "--sft.data"),
        (["--data.num-train", "99999"], None, "--data.num-train"),
        (["--data.num-heldout", "999999"], None, "--data.num-heldout"),
    ],
)
def test_missing_and_broken_inputs_are_refused_before_any_actor_starts(
    options: list[str], rows: str | None, named: str, tmp_path: Path
):
    if rows is not None:
        (tmp_path / "train.jsonl").write_text(rows)
        options = [*options, "--data.train", str(tmp_path / "train.jsonl")]
    with pytest.raises(ConfigError) as refused:
        run(parse([STAGE_1], [*TINY, "--run-dir", str(tmp_path / "run"), *options]))
    assert named in str(refused.value).replace(":1", "row 1") and "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_second_run_is_refused_before_ray_starts_whatever_the_first_is_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def connected() -> None:
        command = [sys.executable, "-c", "import sys; from rstar_ray.run_dir.folder import RunDir"]
        command[-1] += "; RunDir.open(sys.argv[1], 'stage1', {'seed': 0}).__enter__()"
        found.append(subprocess.run([*command, str(tmp_path / "run")], capture_output=True, text=True).stderr)
        raise RStarError("that will do")

    found: list[str] = []
    monkeypatch.setattr("actors.launch.run.connect", connected)
    with pytest.raises(RStarError, match="that will do"):
        run(parse([SFT], [*TINY, "--run-dir", str(tmp_path / "run")]))
    assert f"in use by process {os.getpid()}" in found[0]


def model_folder(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def context_refusal(run_dir: Path, *options: str) -> str:
    with pytest.raises(ConfigError) as refused:
        run(parse([STAGE_1], [*TINY, "--run-dir", str(run_dir), *options]))
    return str(refused.value)


@pytest.mark.parametrize("stage", [SFT, STAGE_1])
def test_a_mixture_of_experts_is_refused_before_anything_starts(
    stage: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("actors.launch.run.connect", lambda: pytest.fail("Ray was started"))
    model = model_folder(tmp_path / "model", n_routed_experts=256, max_position_embeddings=32_768)
    with pytest.raises(ConfigError, match=r"^--model: .*mixture of experts \(n_routed_experts is 256\)"):
        run(parse([stage], [*TINY, "--run-dir", str(tmp_path / "run"), "--model", str(model)]))
    assert not (tmp_path / "run").exists()


def test_heads_that_cannot_be_split_over_a_replicas_gpus_are_refused_and_nothing_is_written(tmp_path: Path):
    model = model_folder(tmp_path / "model", max_position_embeddings=4_096, num_attention_heads=12)
    line = context_refusal(tmp_path / "run", "--model", str(model), "--engine.tensor-parallel", "8")
    assert line.startswith("--engine.tensor-parallel: vLLM cannot split the 12 attention heads and 12 KV heads")
    assert line.endswith("give one of 1, 2, 3, 4, 6, 12")
    model = model_folder(tmp_path / "kv", max_position_embeddings=4_096, num_attention_heads=12, num_key_value_heads=4)
    line = context_refusal(tmp_path / "run", "--model", str(model), "--engine.tensor-parallel", "3")
    assert line.endswith("give one of 1, 2, 4, 12")
    assert "the 8 attention heads" in context_refusal(tmp_path / "run", "--engine.tensor-parallel", "3")
    assert not (tmp_path / "run").exists()


def test_adapters_other_than_those_of_the_stage_before_are_refused(tmp_path: Path):
    (sft,) = parse([SFT], [*TINY, "--run-dir", str(tmp_path / "run"), "--learner.lora-rank", "4"])
    with RunDir.open(tmp_path / "run", "sft", asdict(sft), may_differ=may_change(sft)) as run_dir:
        with run_dir.write_checkpoint("sft", 1) as folder:
            model_folder(folder / "model", max_position_embeddings=3_000)
        run_dir.finish_stage("sft", 1)
    for asked, named in (("0", "--learner.lora-rank: sft of"), ("4", "--learner.lora-alpha: sft of")):
        options = ["--learner.lora-rank", asked, *(["--learner.lora-alpha", "8"] if asked != "0" else [])]
        (config,) = parse([STAGE_1], [*TINY, "--run-dir", str(tmp_path / "run"), *options])
        with pytest.raises(ConfigError, match=named) as refused:
            run([config])
        assert "a new --run-dir with --model" in str(refused.value)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 2_048}, 2_048),
        ({"text_config": {"max_position_embeddings": 2_048}}, 2_048),
        ({"max_position_embeddings": 2_048, "rope_scaling": {"type": "linear", "factor": 2.0}}, 4_096),
        ({"max_position_embeddings": 2_048, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, 2_048),
        ({"hidden_size": 8}, None),
    ],
)
def test_a_models_context_is_read_from_its_configuration(config: dict[str, object], tokens: int | None, tmp_path: Path):
    assert model_context_tokens(model_folder(tmp_path / "m", **config) / "config.json") == tokens


COMPUTES = {
    "engine.dtype": "bfloat16",
    "engine.max_context_tokens": 1_024,
    "learner.dtype": "bfloat16",
    "learner.attention": "sdpa",
    "learner.lora_rank": 4,
    "learner.lora_alpha": 8,
    "sandbox.time_limit_s": 3.0,
    "sandbox.wall_limit_s": 9.0,
    "sandbox.max_output_mb": 2,
    "sandbox.memory_mb": 300,
    "sandbox.max_output_chars": 500,
}
"""All of engine, learner and sandbox that changes what a run computes."""


@pytest.mark.long
def test_a_run_that_continues_may_move_but_not_compute_something_else(tmp_path: Path):
    (config,) = parse([STAGE_1], [*TINY, "--run-dir", str(tmp_path)])
    for name, value in COMPUTES.items():
        with RunDir.open(tmp_path / name, "stage1", asdict(config), may_differ=may_change(config)):
            pass
        other = with_values(config, {name: value, "run_dir": str(tmp_path / name)})
        if name in idle(config):  # it computes nothing in this mode
            with RunDir.open(tmp_path / name, "stage1", asdict(other), may_differ={*may_change(other), *idle(other)}):
                pass
            continue
        with pytest.raises(ConfigError, match=name):
            run([other])
    where = {name for name in leaves(config) if name.partition(".")[0] in ("engine", "learner", "sandbox")}
    assert where - may_change(config) == COMPUTES.keys()


def test_a_run_directory_from_before_a_change_of_the_settings_is_refused_with_what_changed(tmp_path: Path):
    (config,) = parse([STAGE_1], [*TINY, "--run-dir", str(tmp_path)])
    before = asdict(config)
    before["learner"]["zero_stage"] = before["learner"].pop("zero")
    with RunDir.open(tmp_path, "stage1", before) as run_dir:
        run_dir.log_launch(stage="stage1")
    with pytest.raises(ConfigError) as refused:
        run([config])
    line = str(refused.value)
    assert line.startswith("--run-dir: stage1 in") and "\n" not in line
    assert f"written by rstar_ray {code_version()}; this is rstar_ray {code_version()}" in line
    assert "(gone since: learner.zero_stage; new since: learner.zero)" in line and "new directory" in line


def test_a_stage_at_a_larger_scale_asks_for_its_policy(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--model: sft is not finished"):
        with_sft_before(parse([STAGE_1], ["--scale", "gpu", "--run-dir", str(tmp_path / "run")]), STAGE_1, SFT)


def test_help_and_refusals_load_no_framework():
    """They take seconds of CPU, and nothing is trained or served yet."""
    heavy = ("torch", "transformers", "vllm", "deepspeed", "ray")
    code = f"import actors.launch.run, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_what_nobody_would_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")  # that it has GPUs is not asked before it starts
    files = ["--evaluate.files", str(tmp_path), "--run-dir", str(tmp_path / "run")]
    with pytest.raises(ConfigError, match=r"--evaluate\.files: a run is evaluated on its held-out problems"):
        run(parse([STAGE_1], [*TINY, *files]))
    problems = tmp_path / "set.jsonl"
    problems.write_text('{"id": "a", "problem": "1 + 1?", "answer": "2"}\n')
    curves = ["--evaluate.every-steps", "10", "--data.train", str(problems), "--run-dir", str(tmp_path / "run")]
    with pytest.raises(
        ConfigError, match=r"--evaluate\.every-steps: there are no held-out problems. Hint: give --data\.heldout"
    ):
        run(parse([STAGE_1], ["--scale", "gpu", *curves]))
    with pytest.raises(ConfigError, match=r"--evaluate\.files: it is empty, and scale gpu has no default"):
        problem_sets(*parse([EVALUATE], ["--scale", "gpu"]))
    with pytest.raises(SystemExit, match="2"):
        launch_evaluation(EVALUATE, [*TINY, "--telemetry.wandb", "project"])
    assert capsys.readouterr().err.startswith("error: --telemetry.wandb: receives metrics of training steps only")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [partial(launch, [STAGE_1]), partial(launch_evaluation, EVALUATE)])
def test_a_scale_for_gpus_is_refused_on_a_machine_without_one_before_anything_else(
    command: Callable[[list[str]], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("rstar_ray.config.scales.local_resources", lambda: {"GPU": 0.0})
    for made, reason in (("cuda", "none is visible on this machine."), ("cpu", "this environment is for CPUs.")):
        monkeypatch.setattr("rstar_ray.config.scales.made_for", lambda _, made=made: made)
        with pytest.raises(SystemExit, match="2"):
            command(["--scale", "gpu", "--run-dir", str(tmp_path / "run")])  # no model and no problems, either
        assert f"error: --scale: gpu needs a GPU, and {reason}" in capsys.readouterr().err
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")  # what a cluster has is known once it is joined
    with pytest.raises(SystemExit, match="2"):
        command(["--scale", "gpu", "--run-dir", str(tmp_path / "run")])
    assert "needs a GPU" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        (prepare, ["x.jsonl", "--integer-answer"], "--integer-answer: no such option. Hint: perhaps --integer-answers"),
        (prepare, ["x.jsonl", "--max-chars", "many"], "--max-chars: "),
        (chat, ["--modle", "x"], "--modle: no such option. Hint: perhaps --model"),
        (chat, ["--model", "x", "--max-tokens", "0"], "--max-tokens: must be at least 1 (got 0). Hint: use a larger"),
        (serve, ["--port", "x"], "--port: "),
        (chat, ["--server", "x", "--token", "t"], "--token: no such option"),
        (serve, ["--model", "x", "--token", "t"], "--token: no such option"),
        (watch, ["runs/x", "--token", "t"], "--token: no such option"),
        (
            chat,
            ["--model", "x", "--temperature", "nan"],
            "--temperature: must be 0 (greedy) or from 0.01 to 2.0 (got nan)",
        ),
        (chat, ["--model", "absent/x", "--tools.use", "absent:x"], "--tools.use absent:x: ModuleNotFoundError"),
        (
            serve,
            ["--model", "x", "--allow-origin", "https://a/"],
            "--allow-origin: 'https://a/' is not an origin. Hint: give",
        ),
        (
            serve,
            ["--model", "x", "--allow-host", "a:80"],
            "--allow-host: 'a:80' is not a host name. Hint: give a name alone",
        ),
        (watch, ["runs/x", "--port", "three"], "--port: 'three' is not an integer. Hint: use an integer"),
        (chat, ["--model", "x", "--temperature", "x"], "--temperature: 'x' is not a number. Hint: use a number"),
        (watch, ["runs/x", "--prot", "1"], "--prot: no such option. Hint: perhaps --port"),
        (show_chat, [], "MODEL: is required"),
        (show_chat, ["no-such-folder"], "MODEL: there is no folder 'no-such-folder'. Hint: give"),
        (show_chat, ["x", "--chat.sytem", "y"], "--chat.sytem: no such option. Hint: perhaps --chat.system"),
    ],
)
def test_every_command_says_in_one_line_what_is_wrong_with_an_option(
    command: Callable[[list[str]], int | None], arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    try:
        status = command(arguments)
    except SystemExit as end:
        status = end.code
    error = capsys.readouterr().err
    assert status == 2 and error.startswith(f"error: {said}") and error.count("\n") == 1


def test_the_released_model_is_asked_on_five_sets_with_its_own_prompt_and_tool_by_one_command(tmp_path: Path):
    model = save_family("rstar2", tmp_path / "model")
    sets = ["aime2024", "aime2025", "hmmt2025", "math500", "gpqa"]
    for name in sets:
        row = {"id": "1", "problem": f"From {name}?", "answer": "7"}
        if name == "gpqa":
            row |= {"answer": "C", "reward": "choice"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    files = [str(tmp_path / f"{name}.jsonl") for name in sets]
    options = ["--model", str(model), "--evaluate.protocol", "rstar2-agent-14b", "--evaluate.files", *files]
    (config,) = parse([EVALUATE], ["--scale", "gpu", *options])
    problems = problem_sets(config)
    assert list(problems) == sets and problems["gpqa"][0].reward == "choice" and problems["math500"][0].reward == ""
    chat = load_chat(model, config.chat, instruct=config.rollout.instruct, tools=Start(asked=[config]).tools)
    asked = chat.decode(chat.prompt_ids(problems["hmmt2025"][0]))
    assert asked.count("python_code_with_standard_io") == 1 and "Solve the problem." not in asked
    assert "\\boxed{} tag.\nThis is the problem:\nFrom hmmt2025?<|im_end|>" in asked
    assert asked.endswith("<|im_start|>assistant\n<reason>")


@pytest.mark.parametrize(
    ("option", "new"),
    [
        ("--when-short smaller", "--on-insufficient-resources fail or scale-down"),
        ("--sandbox.spare-cells 2", "--sandbox.spare-workers"),
        ("--sandbox.calls_per_cell=5", "--sandbox.calls-per-worker"),
    ],
)
def test_a_renamed_option_is_refused_with_its_new_name(option: str, new: str):
    with pytest.raises(ConfigError, match=rf"^--[\w.-]+: was renamed. Hint: use {new}$"):
        parse([STAGE_1], [*TINY, *option.split()])


def test_a_renamed_setting_of_a_file_is_refused_with_its_new_name(tmp_path: Path):
    (tmp_path / "old.toml").write_text("[sandbox]\ncells_per_server = 7\n")
    with pytest.raises(ConfigError, match=r"^--sandbox.cells-per-server: .*use --sandbox.workers-per-server$"):
        parse([STAGE_1], [*TINY, "--config", str(tmp_path / "old.toml")])
