"""What processes on GPUs find in their environment, and which GPU they see first."""

import subprocess
import sys
from pathlib import Path

import pytest

from actors.cluster.devices import mask_for, own_first
from actors.cluster.gpu_environment import (
    DEPLOY,
    accelerator,
    gpu_environment,
    missing,
    parse_env_file,
    read_env_file,
)
from rstar_ray.config.scales import local_resources
from rstar_ray.errors import ConfigError

FILES = ("rocm.env", "cuda.env")


@pytest.mark.parametrize("name", FILES)
def test_a_shell_reads_the_same_values_as_we_do(name: str):
    script = f"set -a; . {DEPLOY / name}; env -0"
    printed = subprocess.run(["env", "-i", "bash", "-c", script], capture_output=True, check=True, text=True).stdout
    seen = dict(line.split("=", 1) for line in printed.split("\0") if line)
    values = read_env_file(DEPLOY / name).values
    assert {key: seen.get(key) for key in values} == values


def test_on_rocm_every_process_sees_all_gpus_and_ipc_does_not_leak():
    values = gpu_environment("rocm")
    assert values["RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES"] == "1"
    assert values["HSA_ENABLE_IPC_MODE_LEGACY"] == "1"
    assert "NCCL_MIN_NCHANNELS" in read_env_file(DEPLOY / "rocm.env").harmful
    assert gpu_environment("cpu") == {}


@pytest.mark.parametrize(
    "line", ["export A=1", "A = 1", 'A="1"', "A=1 # why", "A=$B", "A", "A=~/x", "A=1;rm", "A=`x`", "1A=2", " A=1"]
)
def test_what_docker_kubernetes_and_a_shell_read_differently_is_refused_with_its_line(line: str):
    with pytest.raises(ConfigError, match=r"deploy/x\.env:2: .* Hint: write NAME=value"):
        parse_env_file(f"B=1\n{line}\n", "deploy/x.env")


def test_what_a_site_and_a_shell_set_goes_before_the_file(tmp_path: Path):
    (tmp_path / "rocm.env").write_text("NCCL_IB_GID_INDEX=3\nHSA_XNACK=0\n")
    assert gpu_environment("rocm", tmp_path) == {"NCCL_IB_GID_INDEX": "3", "HSA_XNACK": "0"}
    (tmp_path / "site.env").write_text("NCCL_IB_GID_INDEX=1\nNCCL_IB_HCA=mlx5_0:1,mlx5_1:1\n")
    wanted = gpu_environment("rocm", tmp_path)
    assert wanted == {"NCCL_IB_GID_INDEX": "1", "HSA_XNACK": "0", "NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1"}
    assert missing(wanted, {"HSA_XNACK": "1"}) == {"NCCL_IB_GID_INDEX": "1", "NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1"}


def test_the_kind_of_gpu_is_read_off_its_device_files(tmp_path: Path):
    assert accelerator(tmp_path) == "cpu"
    (tmp_path / "nvidiactl").touch()
    assert accelerator(tmp_path) == "cpu"
    (tmp_path / "kfd").touch()
    assert accelerator(tmp_path) == "rocm"
    (tmp_path / "nvidia0").touch()  # AMD's driver may be there for a processor's graphics
    assert accelerator(tmp_path) == "cuda"


@pytest.mark.parametrize(
    ("made", "mask", "gpus"),
    [("", None, 3), ("cuda", "0,2", 2), ("", "", 0), ("", "GPU-a", 1), ("", "-1", 0), ("cpu", None, 0)],
)
def test_a_run_has_the_gpus_that_are_visible_unless_its_environment_is_for_cpus(
    made: str, mask: str | None, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", ".target"):
        (tmp_path / name).write_text(made)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert local_resources(tmp_path) == {"GPU": gpus}


def test_a_mask_begins_with_ones_own_gpus_and_leaves_none_out():
    assert own_first(["2"], ["0", "1", "2", "3"]) == "2,0,1,3"
    assert own_first(["4", "5"], [str(gpu) for gpu in range(8)]) == "4,5,0,1,2,3,6,7"


def test_a_process_sets_a_mask_only_where_ray_was_set_to_leave_it_alone():
    rocm = gpu_environment("rocm")
    assert mask_for(rocm, own=["3"], num_gpus=8) == {"HIP_VISIBLE_DEVICES": "3,0,1,2,4,5,6,7"}
    assert mask_for({"CUDA_VISIBLE_DEVICES": "3"}, own=["3"], num_gpus=8) == {}
    assert mask_for(rocm, own=[], num_gpus=8) == {}
    assert mask_for(gpu_environment("cuda"), own=["3"], num_gpus=8) == {}
    cuda = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "true"}
    assert mask_for(cuda, own=["1"], num_gpus=2) == {"CUDA_VISIBLE_DEVICES": "1,0"}


def test_of_a_node_that_lends_only_some_gpus_no_others_are_seen():
    environment = {**gpu_environment("rocm"), "HIP_VISIBLE_DEVICES": "4,5,6"}
    assert mask_for(environment, own=["6"], num_gpus=3) == {"HIP_VISIBLE_DEVICES": "6,4,5"}
