"""What is message of nodes that something is wrong with; of fabricated ones, and in the last tests of this machine."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from tokenizers import Tokenizer, models

from actors.cluster.gpu_environment import gpu_environment
from actors.preflight import read_facts as read
from actors.preflight.__main__ import main, parse
from actors.preflight.cluster_checks import check_cluster
from actors.preflight.facts import Finding, Folder, GpuFacts, NodeFacts, PreflightOptions, Probe, Verdict
from actors.preflight.node_checks import check_node
from actors.preflight.nodes import (
    _readers,
    _seen_by,
    every_node,
    refuse_absent,
    refuse_folders,
    refuse_unseen,
    wrong_with,
)
from actors.preflight.pair import judge_pair
from actors.preflight.read_facts import (
    has_ipc_lock,
    import_problem,
    look_at_model,
    look_at_needed,
    look_at_run_dir,
    read_facts,
)
from actors.preflight.required_paths import needed_paths, with_absolute_paths
from rstar_ray.config import RunConfig, with_values
from rstar_ray.errors import ConfigError

GOOD = Probe(worked=True, message="did")
VERSIONS = {"python": "3.12.3", "ray": "2.60.0", "torch": "2.13.0", "vllm": "0.32.0", "deepspeed": "0.19.8"}
MI300X = NodeFacts(
    node="node-1",
    accelerator="rocm",
    gpus=8,
    visible_gpus=8,
    driver="6.16.6",
    rocm="7.2.3-81",
    versions=VERSIONS,
    torch_build="hip 7.2.53211",
    gpu_facts=(GpuFacts(name="MI300X", capability=(9, 4), memory_bytes=192 * 10**9, free_bytes=190 * 10**9),) * 8,
    compiler="/usr/bin/gcc",
    environment=gpu_environment("rocm"),
    shm_bytes=800 * 10**9,
    memory_bytes=1_500 * 10**9,
    descriptors=65_536,
    locked_memory=-1,
    sandbox=GOOD,
    all_reduce=GOOD,
    ipc=GOOD,
    attention=GOOD,
)
H100 = replace(
    MI300X,
    accelerator="cuda",
    driver="580.65.06",
    rocm="",
    torch_build="cuda 13.0",
    target="cuda",
    gpu_facts=(GpuFacts(name="H100", capability=(9, 0), memory_bytes=80 * 10**9, free_bytes=79 * 10**9),) * 8,
    environment=gpu_environment("cuda"),
)
LAPTOP = NodeFacts(
    node="laptop",
    accelerator="cpu",
    versions=VERSIONS,
    shm_bytes=8 * 10**9,
    memory_bytes=16 * 10**9,
    descriptors=65_536,
    locked_memory=65_536,
)


def worst(found: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in found if finding.verdict in (Verdict.WRONG, Verdict.WARNING)}


def changed(**fields: Any) -> NodeFacts:
    return replace(MI300X, **fields)


def test_on_a_cpu_only_what_applies_is_judged():
    findings = check_node(LAPTOP, PreflightOptions())
    assert worst(findings) == {}
    apart = {finding.check for finding in findings if finding.verdict is Verdict.NOT_HERE}
    assert {"driver", "runtime", "masks", "environment", "locked memory"} <= apart


def h100(**fields: Any) -> NodeFacts:
    return replace(H100, **fields)


def one_gpu(**fields: Any) -> tuple[GpuFacts, ...]:
    """The H100s of a node, the last of which differs."""
    return (*H100.gpu_facts[:-1], replace(H100.gpu_facts[0], **fields))


def found(facts: NodeFacts, check: str) -> Finding:
    """The one thing that is wrong with a node of eight GPUs."""
    wrong = worst(check_node(facts, PreflightOptions(gpus=8)))
    assert list(wrong) == [check]
    return wrong[check]


def test_nothing_is_wrong_with_a_node_as_it_should_be():
    assert worst(check_node(MI300X, PreflightOptions(gpus=8))) == {}
    assert worst(check_node(H100, PreflightOptions(gpus=8))) == {}


@pytest.mark.parametrize(
    ("facts", "check", "message", "hint"),
    [
        (changed(driver=""), "driver", "amdgpu is not loaded", "modprobe amdgpu"),
        (h100(driver="550.54.15"), "driver", "nvidia 550.54.15, 580 or newer wanted", "580 or newer on the host"),
        (changed(rocm="7.2.1-70"), "runtime", "ROCm 7.2.1-70", "ROCm 7.2.2 or newer"),
        (h100(gpu_problem="driver too old", gpu_facts=()), "GPUs", "driver too old", "see driver"),
        (h100(gpu_facts=one_gpu(name="V100", capability=(7, 0))), "GPUs", "(V100) has compute capability 7.0, 8.0", ""),
        (
            h100(gpu_facts=one_gpu(free_bytes=40 * 10**9)),
            "GPUs",
            "GPU 7 has 40.0 GB free of 80.0; an engine needs 48",
            "",
        ),
        (changed(versions={**VERSIONS, "vllm": ""}), "packages", "vllm not installed", "make setup TARGET=rocm"),
        (changed(torch_build="cuda 13.0"), "packages", "built for cuda 13.0", "never install torch over vLLM's image"),
        (changed(torch_build="cpu"), "packages", "built for cpu", "TARGET=rocm"),
        (h100(import_problem="import fails: no nms"), "packages", "import fails: no nms", "make setup TARGET=cuda"),
        (changed(visible_gpus=0), "masks", "0 of 8 GPUs are visible; no mask is set", "--group-add"),
        (changed(shm_bytes=64 * 10**6), "shared memory", "has 0.1 GB, 450.0 wanted", "--ipc host"),
        (changed(descriptors=1_024), "descriptors", "limit 1024, 65536 wanted", "ulimit -n 65536"),
        (changed(sandbox=Probe(worked=False, message="EPERM")), "sandbox", "EPERM", "seccomp=unconfined"),
    ],
)
def test_what_is_wrong_with_a_node_is_named_with_its_fix(facts: NodeFacts, check: str, message: str, hint: str):
    wrong = found(facts, check)
    assert wrong.verdict is Verdict.WRONG
    assert message in wrong.message and hint in wrong.hint


@pytest.mark.parametrize(
    ("facts", "check", "message"),
    [
        (changed(rocm=""), "runtime", "no /opt/rocm"),
        (changed(locked_memory=65_536), "locked memory", "65536 bytes may be pinned"),
        (changed(all_reduce=Probe(worked=False, message="hung")), "all-reduce", "hung"),
        (changed(attention=Probe(worked=False, message="No available kernel")), "attention", "No available kernel"),
        (changed(ipc=Probe(worked=False, message="bad handle")), "IPC", "bad handle"),
        (changed(ipc=replace(GOOD, leaked_bytes=2**22)), "IPC", "4.0 MiB leak in each round"),
        (h100(gpu_facts=one_gpu(free_bytes=60 * 10**9)), "GPUs", "60.0 GB free"),
        (h100(compiler=""), "compiler", "no gcc: Triton needs it"),
        (h100(other_versions=("numpy 1.26.4 (<3,>=2.3 wanted)",)), "packages", "numpy 1.26.4 (<3,>=2.3 wanted)"),
        (h100(python_headers=False), "compiler", "no Python.h"),
    ],
)
def test_what_has_never_passed_on_a_gpu_does_not_stop_a_job(facts: NodeFacts, check: str, message: str):
    warned = found(facts, check)
    assert warned.verdict is Verdict.WARNING and message in warned.message


def test_on_a_cpu_a_failed_probe_is_wrong():
    failed = replace(LAPTOP, all_reduce=Probe(worked=False, message="hung"))
    assert worst(check_node(failed, PreflightOptions()))["all-reduce"].verdict is Verdict.WRONG


def test_a_capability_lifts_the_limit_of_locked_memory(tmp_path: Path):
    assert worst(check_node(changed(locked_memory=65_536, ipc_lock=True), PreflightOptions())) == {}
    (tmp_path / "status").write_text("Name:\tx\nCapPrm:\t0000000000000000\nCapEff:\t0000000000004000\n")
    assert has_ipc_lock(tmp_path / "status")
    (tmp_path / "status").write_text("CapEff:\t00000000a80425fb\n")  # Docker's default
    assert not has_ipc_lock(tmp_path / "status")


def test_an_environment_for_gpus_on_a_machine_without_one_is_one_line():
    wrong = worst(check_node(replace(LAPTOP, target="cuda", torch_build="cuda 13.0"), PreflightOptions()))
    assert list(wrong) == ["driver"]
    assert (wrong["driver"].verdict, wrong["driver"].message.startswith("no GPU here")) == (Verdict.WARNING, True)


@pytest.mark.parametrize(
    ("torch", "vllm", "message"),
    [
        ("cuda = hip = None", "LLM = 1", "torch is built for cpu, and this environment is for cuda"),
        ("cuda, hip = '13.0', None", "raise RuntimeError('no nms')", "import fails: RuntimeError: no nms"),
        ("cuda, hip = '13.0', None", "", "import fails: AttributeError: module 'vllm' has no attribute 'LLM'"),
        ("cuda, hip = '13.0', None", "LLM = 1", ""),
    ],
)
def test_an_environment_whose_torch_or_imports_are_wrong_is_noticed(
    torch: str, vllm: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With packages of these contents in place of the real ones."""
    for name, text in (("torch", f"class version:\n    {torch}\n"), ("vllm", vllm), ("deepspeed", "")):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert import_problem("cuda") == message


def test_the_environment_is_compared_with_the_file():
    without = {name: value for name, value in MI300X.environment.items() if name != "HSA_NO_SCRATCH_RECLAIM"}
    wrong = worst(check_node(changed(environment=without), PreflightOptions()))["environment"]
    assert (wrong.verdict, wrong.message) == (Verdict.WRONG, "not set: HSA_NO_SCRATCH_RECLAIM")
    harmful = {**MI300X.environment, "NCCL_MIN_NCHANNELS": "112"}
    wrong = worst(check_node(changed(environment=harmful), PreflightOptions()))["environment"]
    assert "NCCL_MIN_NCHANNELS is set" in wrong.message and "rocm-systems #11253" in wrong.message
    other = {**MI300X.environment, "VLLM_ROCM_USE_AITER": "0"}
    warned = worst(check_node(changed(environment=other), PreflightOptions()))["environment"]
    assert (warned.verdict, "VLLM_ROCM_USE_AITER=0" in warned.message) == (Verdict.WARNING, True)


def test_room_for_checkpoints_is_counted_from_the_models_weights():
    model = Folder(content="x", weight_bytes=29_600_000_000)
    facts = changed(run_dir=Folder(free_bytes=500 * 10**9), model=model)
    wrong = worst(check_node(facts, PreflightOptions(run_dir="/r", model="/m")))
    assert wrong["disk"].message == "500 GB free, 3 checkpoints take 622 GB"
    assert worst(check_node(facts, PreflightOptions(run_dir="/r", model="/m", checkpoints=2))) == {}


def test_a_run_directory_that_one_node_does_not_see_is_named_with_the_node():
    options = PreflightOptions(run_dir="/runs", mark="mine")
    head = changed(run_dir=Folder(mark="mine"))
    blind = changed(node="node-2", run_dir=Folder(problem="/runs does not exist here"))
    own = changed(node="node-3", run_dir=Folder())
    wrong = [f for f in check_cluster([head, blind, own], options) if f.verdict is Verdict.WRONG]
    assert [(f.check, f.node) for f in wrong] == [("run directory", "node-2"), ("run directory", "node-3")]
    assert "is not the folder that the first node wrote to" in wrong[1].message
    assert all("storage that all nodes mount" in f.hint for f in wrong)


def test_a_run_directory_is_written_to_and_left_as_it_was(tmp_path: Path):
    (tmp_path / ".mark").write_text("mine")
    seen = look_at_run_dir(tmp_path, ".mark")
    assert (seen.problem, seen.mark, seen.free_bytes > 0) == ("", "mine", True)
    assert [path.name for path in tmp_path.iterdir()] == [".mark"]
    assert "does not exist here" in look_at_run_dir(tmp_path / "none", "x").problem


def test_a_model_is_known_by_its_configuration_and_its_weights(tmp_path: Path):
    assert "has no config.json here" in look_at_model(tmp_path).problem
    (tmp_path / "config.json").write_text("{}")
    assert "has no *.safetensors here" in look_at_model(tmp_path).problem
    (tmp_path / "model.safetensors").write_bytes(b"12345678rest")
    seen = look_at_model(tmp_path)
    assert (seen.problem, seen.weight_bytes) == ("", 12)
    (tmp_path / "model.safetensors").write_bytes(b"12345678more of it")
    assert look_at_model(tmp_path).content != seen.content


def test_a_model_that_comes_too_slowly_for_a_start_is_a_warning():
    model = Folder(content="x", weight_bytes=29_600_000_000, read_bytes_s=50e6)
    nodes = [changed(model=model), changed(node="node-2", model=replace(model, read_bytes_s=1e9))]
    (warned,) = (one for one in check_cluster(nodes, PreflightOptions(model="/m")) if one.verdict is Verdict.WARNING)
    assert (warned.verdict, warned.node, warned.check) == (Verdict.WARNING, "node-1", "model")
    assert warned.message == "30 GB at 0.05 GB/s take 592 s of the 900 s of a start"


def test_an_images_package_outside_of_the_ranges_is_noticed(monkeypatch: pytest.MonkeyPatch):
    assert read.other_versions() == ()
    installed = read.version
    monkeypatch.setattr(read, "version", lambda name: "1.26.4" if name == "numpy" else installed(name))
    assert read.other_versions() == ("numpy 1.26.4 (<3,>=2.3 wanted)",)


def test_a_run_is_refused_where_nodes_do_not_see_its_directory():
    refuse_folders({"n1": "", "n2": ""}, Path("/runs"))
    seen = {"n1": "", **{f"n{number}": "/runs does not exist here" for number in range(2, 7)}}
    with pytest.raises(
        ConfigError, match=r"--run-dir: n2, n3, n4 and 2 more do not see /runs .*. Hint: give a folder on"
    ):
        refuse_folders(seen, Path("/runs"))


def own_files(folder: Path) -> RunConfig:
    """A run that needs each kind of path, and these paths."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"12345678rest")
    (folder / "chat.jinja").write_text("{{ messages }}")
    (folder / "mine.py").write_text("import beside")
    (folder / "beside.py").write_text("")
    (folder / "tool.json").write_text("{}")
    chat = {"chat.template": str(folder / "chat.jinja"), "chat.tool_schema": str(folder / "tool.json")}
    values = {**chat, "own_folder": str(folder), "reward.name": "mine:reward"}
    kl = {"algorithm.kl_coefficient": 0.1, "algorithm.reference_model": str(model)}
    return with_values(RunConfig(), values | kl)


def test_actors_are_handed_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = own_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    chat = {"chat.template": "chat.jinja", "chat.tool_schema": "tool.json"}
    relative = with_values(config, {**chat, "algorithm.reference_model": "model"})
    assert with_absolute_paths(relative) == config
    assert with_absolute_paths(RunConfig()) == RunConfig(own_folder=str(tmp_path))
    saved = with_absolute_paths(with_values(config, {"optimizer.save_bad_updates": "bad"})).optimizer.save_bad_updates
    assert saved == str(tmp_path / "bad")
    for traces, absolute in (("traces", str(tmp_path / "traces")), ("http://127.0.0.1:4318", "http://127.0.0.1:4318")):
        assert with_absolute_paths(with_values(config, {"telemetry.traces": traces})).telemetry.traces == absolute


def test_the_figures_of_a_pair_are_found_among_the_lines_of_nccl():
    figures = '{"reduced_gb_s": 12.5, "leaked_bytes": 0.0}'
    reduced, shared = judge_pair([0, 0], [f"n1:7:7 NCCL INFO Boot\n{figures}\nNCCL version 2.27\n", ""], ["", ""])
    assert reduced.worked and "12.5 GB/s" in reduced.message and shared.worked


def test_of_a_pair_that_failed_the_cause_is_named_and_not_its_consequence():
    errors = ["...\nRuntimeError: Connection closed by peer [127.0.0.1]", "...\nHIP error: invalid device pointer"]
    assert {probe.message for probe in judge_pair([1, 1], ["", ""], errors)} == {"HIP error: invalid device pointer"}
    assert "Connection closed by peer" in judge_pair([1, 0], ["", ""], errors)[0].message
    assert judge_pair([-9, 0], ["", ""], ["", ""])[1].message == "a process ended with -9"


def test_a_cluster_that_does_not_answer_is_named_and_not_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("Failed to connect to Ray cluster at 127.0.0.1:1.\nIs it running?")

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(ray, "init", refuse)
    assert main(["--no-probes", "--run-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: RAY_ADDRESS: 127.0.0.1:1: ConnectionError: Failed to connect")
    assert said.count("\n") == 1 and not list(tmp_path.iterdir())
    assert main(["--no-probes", "--run-dir", "/proc/none"]) == 2
    assert capsys.readouterr().err.startswith("error: --run-dir: /proc/none: ")


@pytest.mark.parametrize("option, name, text", [
    ("--model", "model/model.safetensors", "12345678more of it"), ("--chat.template", "chat.jinja", "other"),
    ("--own-folder", "beside.py", "x = 1"),
])  # fmt: skip
def test_what_a_node_has_is_held_against_what_is_here(tmp_path: Path, option: str, name: str, text: str):
    config = own_files(tmp_path)
    (needed,) = [one for one in needed_paths(config, tmp_path / "model") if one.option == option]
    here = look_at_needed(needed)
    assert wrong_with(look_at_needed(needed), here) == ""
    (tmp_path / name).write_text(text)
    assert wrong_with(look_at_needed(needed), here) == "its content differs from the driver's"
    gone = replace(needed, path=tmp_path / "elsewhere")
    assert "elsewhere" in wrong_with(look_at_needed(gone), here)


def model_folder(folder: Path, *, vocab_size: int, tokens: tuple[str, ...] = ()) -> Path:
    """Without weights, and without a tokenizer unless it has tokens."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    if tokens:
        vocabulary = {token: number for number, token in enumerate(tokens)}
        Tokenizer(models.WordLevel(vocabulary, unk_token=tokens[0])).save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def test_a_reference_model_with_another_vocabulary_is_refused(tmp_path: Path):
    model = model_folder(tmp_path / "model", vocab_size=3, tokens=("a", "b", "c"))

    def needed(reference: Path, policy: Path = model, **values: str) -> list[str]:
        config = with_values(RunConfig(), {"algorithm.reference_model": str(reference), **values})
        return [one.option for one in needed_paths(config, policy)]

    padded = model_folder(tmp_path / "padded", vocab_size=64, tokens=("a", "b", "c"))
    plain = model_folder(tmp_path / "plain", vocab_size=3)
    longer = model_folder(tmp_path / "longer", vocab_size=4, tokens=("a", "b", "c", "d"))
    for reference in (padded, plain, longer):
        assert needed(reference) == ["--model", "--algorithm.reference-model"]
    other = model_folder(tmp_path / "other", vocab_size=3, tokens=("a", "c", "b"))
    shorter = model_folder(tmp_path / "shorter", vocab_size=2, tokens=("a", "b"))
    small = model_folder(tmp_path / "small", vocab_size=2)
    for reference, wrong in (
        (other, "token 'b' is 2 there, 1 in --model; differing tokens: 2"),
        (shorter, "token 'c' is absent there, 2 in --model; differing tokens: 1"),
        (small, "vocab_size is 2 there, 3 in --model"),
    ):
        with pytest.raises(ConfigError) as refused:
            needed(reference)
        assert str(refused.value) == (
            f"--algorithm.reference-model: {reference} has another vocabulary than {model} ({wrong}). Hint: "
            "give a model with the tokenizer of --model"
        )
    later = tmp_path / "written-later"
    assert needed(other, later)
    with pytest.raises(ConfigError, match=r"\(vocab_size is 2 there, \d+ in --model\)"):
        needed(small, later, scale="tiny")  # the run makes the tiny model


def test_a_run_is_refused_where_nodes_lack_what_it_needs(tmp_path: Path):
    model, _, template, _, code = needed_paths(own_files(tmp_path), tmp_path / "model")
    refuse_absent({model: {"n1": "", "n2": ""}})
    found = {model: {"n1": "", "n2": ""}, template: {"n1": "", "n2": "no such file"}, code: {"n1": "", "n2": "other"}}
    with pytest.raises(ConfigError) as refused:
        refuse_absent(found)
    assert str(refused.value) == (
        f"--chat.template: n2 do not see {template.path} (no such file); "
        f"--own-folder: n2 do not see {tmp_path} (other). Hint: "
        "copy it there under the same path, or give a path on storage that all nodes mount"
    )


def test_relative_paths_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match=r"--run-dir: 'runs' is relative. Hint: give an absolute path"):
        parse(["--run-dir", "runs"])
    monkeypatch.setattr(sys, "argv", ["preflight", "--model", "m"])
    assert main() == 2
    assert capsys.readouterr().err.startswith("error: --model: 'm' is relative")


@pytest.mark.parametrize("option", [["--checkpoints", "0"], ["--gpus", "-1"]])
def test_a_count_that_would_make_every_check_good_is_refused(option: list[str]):
    with pytest.raises(ConfigError, match=rf"{option[0]}: must be at least . \(got {option[1]}\)"):
        parse(option)


def test_this_machine_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(read, "_torch", lambda: ("cpu", 0, (), ""))  # whose import takes seconds
    facts = read_facts(PreflightOptions(probes=False, run_dir=str(tmp_path)), "here")
    assert facts.memory_bytes > 0 and facts.shm_bytes > 0 and facts.versions["ray"]
    assert facts.run_dir is not None and not facts.run_dir.problem
    assert not [name for name in facts.environment if "TOKEN" in name]


@pytest.mark.real
def test_a_cluster_of_this_machine_is_looked_at_by_an_actor_on_each_node(tmp_path: Path):
    (tmp_path / "mark").write_text("mine")
    options = PreflightOptions(run_dir=str(tmp_path), mark="mark", level="landlock")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        (facts,) = every_node(options)
        with _readers() as readers:
            assert list(_seen_by(readers, tmp_path / "runs" / "new").values()) == [""]
        refuse_unseen(tmp_path)
    finally:
        ray.shutdown()
    assert facts.run_dir is not None and facts.run_dir.mark == "mine"
    assert abs(facts.clock_offset_s) < 1
    for probe in (facts.all_reduce, facts.ipc, facts.sandbox):
        assert probe is not None and probe.worked, probe
    assert facts.torch_build == "cpu" and facts.ipc is not None and facts.ipc.leaked_bytes == 0
