"""What a learner's rank and an engine do differently on a GPU, with stand-ins for CUDA and ROCm."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from actors.generation.vllm_start import engine_environment, refuse_sleep_on_rocm
from actors.learner import deepspeed_start
from actors.learner.optimizer import RefusingAdamW
from actors.learner.optimizer_step import OptimizerSteps
from actors.weights.ipc import CudaExporter
from rstar_ray.config import with_values
from rstar_ray.errors import ConfigError
from tests import derived
from tests.actors.policies import draw_rows, weighted

GPU = torch.device("cuda", 0)


def test_engines_that_sleep_are_refused_on_rocm(monkeypatch: pytest.MonkeyPatch):
    share = {"engine.gpus_per_replica": 0.5, "learner.gpus_per_rank": 0.5}
    sleeping = with_values(derived.learner(), {**share, "engine.sleep": True})
    refuse_sleep_on_rocm(sleeping)
    monkeypatch.setattr(torch.version, "hip", "7.2.1")
    with pytest.raises(ConfigError, match=r"^--engine\.sleep: .*ROCm 7\.2\.1.*Hint: give --engine\.no-sleep"):
        refuse_sleep_on_rocm(sleeping)
    refuse_sleep_on_rocm(with_values(sleeping, {"engine.sleep": False}))


@pytest.mark.parametrize(("device", "backend", "named"), [(GPU, "nccl", GPU), (torch.device("cpu"), "gloo", None)])
def test_the_process_group_knows_the_ranks_gpu_from_the_start(
    device: torch.device, backend: str, named: torch.device | None, monkeypatch: pytest.MonkeyPatch
):
    """Without it a barrier takes the number of the rank for that of its GPU."""
    made: dict[str, Any] = {}

    def init(backend: str, **options: Any) -> None:
        made.update(options, backend=backend)

    monkeypatch.setattr(torch.distributed, "init_process_group", init)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    deepspeed_start.join_ranks(derived.learner().learner, 0, device, None)
    assert (made["backend"], made["device_id"]) == (backend, named)


@pytest.mark.long
def test_on_a_gpu_deepspeed_probes_no_operation(monkeypatch: pytest.MonkeyPatch):
    import deepspeed

    def probe() -> Any:
        raise AssertionError("every operation is compiled or looked for")

    def initialize(**options: Any) -> tuple[str]:
        return ("engine",)

    monkeypatch.setattr("deepspeed.ops._probe_compatible_ops", probe)
    monkeypatch.delitem(vars(deepspeed.ops), "__compatible_ops__", raising=False)
    monkeypatch.setattr(deepspeed, "initialize", initialize)
    config = derived.learner(gpus_per_rank=1.0)
    policy: Any = nn.Linear(2, 2)
    engine, _ = deepspeed_start.start_deepspeed(policy, config.learner, config.optimizer)
    assert engine == "engine"


class OnCpu:
    """DeepSpeed's engine, as far as an optimizer step of one parameter uses it."""

    device = "cpu"

    def __init__(self, optimizer: RefusingAdamW) -> None:
        self.step = optimizer.step

    def set_gradient_accumulation_boundary(self, boundary: bool) -> None: ...

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


@pytest.mark.parametrize(("shared", "emptied"), [(True, 1), (False, 0)])
def test_after_an_update_unused_memory_goes_to_the_engine_on_the_same_gpu(
    shared: bool, emptied: int, monkeypatch: pytest.MonkeyPatch
):
    calls: list[str] = []

    def all_reduce(*_: Any) -> None: ...

    def empty_cache() -> None:
        calls.append("emptied")

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    share = {"engine.gpus_per_replica": 0.5, "learner.gpus_per_rank": 0.5} if shared else {}
    config = with_values(derived.learner(zero=0), share)
    weight = nn.Parameter(torch.ones(1))
    optimizer = RefusingAdamW([weight], lr=0.0)
    optimizer.clip_here = 0.0
    steps = OptimizerSteps(config, 0, OnCpu(optimizer), optimizer)
    batch: Any = SimpleNamespace(targets_N=[1], num_input_tokens=1, num_padded_tokens=1)

    def loss_of(index: int, batch: Any) -> Any:
        return weight.sum(), {}

    assert steps.take([weighted(draw_rows(1))], [batch], loss_of, 0.1).applied
    assert len(calls) == emptied


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_memory_for_an_engine_lies_outside_expandable_segments_and_a_sites_other_settings_stay(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    calls: list[str] = []

    def empty(num_bytes: int, **_: Any) -> str:
        calls.append(f"{num_bytes} bytes")
        return "room"

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append)
    monkeypatch.setenv(name, "max_split_size_mb:512,expandable_segments:True")
    CudaExporter().room(8)
    without = "max_split_size_mb:512,expandable_segments:False"
    assert calls == [without, "8 bytes", "max_split_size_mb:512,expandable_segments:True"]


def test_engines_of_one_node_have_each_their_own_cache_of_compiled_graphs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/scratch/vllm")
    roots: list[str] = []
    for mask in ("3", "1,0,2,3"):  # Ray's, and one's own first
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        environment = engine_environment(derived.engine())
        monkeypatch.setenv("VLLM_CACHE_ROOT", environment["VLLM_CACHE_ROOT"])
        assert engine_environment(derived.engine()) == environment  # of the next engine of this process
        monkeypatch.setenv("VLLM_CACHE_ROOT", "/scratch/vllm")
        roots.append(environment["VLLM_CACHE_ROOT"])
    assert roots == ["/scratch/vllm/gpu-3", "/scratch/vllm/gpu-1"]
