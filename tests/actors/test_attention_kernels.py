"""Which kernels compute attention: set for a process, and refused in one line where a GPU has none for a model."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.backends import cuda as kernels

from actors.learner import attention_kernels
from actors.learner.attention_kernels import choose, refuse_unfit, tried
from rstar_ray.errors import ConfigError
from tests import derived

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MODEL = SimpleNamespace(num_attention_heads=40, num_key_value_heads=8, head_dim=128)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    cudnn, math = kernels.cudnn_sdp_enabled(), kernels.math_sdp_enabled()
    yield
    kernels.enable_cudnn_sdp(cudnn)
    kernels.enable_math_sdp(math)


def no_kernel(*_: object) -> str:
    return "No available kernel"


def a_kernel(*_: object) -> str:
    return ""


def test_a_gpu_has_neither_cudnns_attention_nor_the_mathematical_path():
    choose(GPU)
    assert kernels.flash_sdp_enabled() and kernels.mem_efficient_sdp_enabled()
    assert not kernels.cudnn_sdp_enabled() and not kernels.math_sdp_enabled()
    choose(CPU)
    assert kernels.math_sdp_enabled()


def test_a_gpu_without_a_fused_kernel_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch):
    learner = derived.learner(dtype="bfloat16").learner
    monkeypatch.setattr(attention_kernels, "tried", no_kernel)
    with pytest.raises(ConfigError, match=r"^--model: .*40 heads of 128 in bfloat16 \(No available kernel\)\. Hint: "):
        refuse_unfit(learner, MODEL, GPU)
    refuse_unfit(learner, MODEL, CPU)
    monkeypatch.setattr(attention_kernels, "tried", a_kernel)
    refuse_unfit(learner, MODEL, GPU)


def test_a_driver_that_does_not_work_is_a_message_and_no_traceback():
    assert tried(4, 2, 8, torch.float32, CPU) == ""
    assert tried(4, 2, 8, torch.float32, torch.device("cuda", 63))  # there is no such GPU, here or anywhere
