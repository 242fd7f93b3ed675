"""What attention is computed by: chosen for a process, and refused with the arithmetic where it would not fit."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.backends import cuda as kernels

from actors.learner import attention_kernels
from actors.learner.attention_kernels import choose, refuse_unfit
from actors.learner.row_attention import Heads, attend
from rstar_ray.errors import ConfigError
from tests import derived

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MODEL = SimpleNamespace(num_attention_heads=40, num_key_value_heads=8, head_dim=128)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    flags = kernels.flash_sdp_enabled(), kernels.mem_efficient_sdp_enabled(), kernels.math_sdp_enabled()
    cudnn = kernels.cudnn_sdp_enabled()
    yield
    kernels.enable_flash_sdp(flags[0])
    kernels.enable_mem_efficient_sdp(flags[1])
    kernels.enable_math_sdp(flags[2])
    kernels.enable_cudnn_sdp(cudnn)


@pytest.fixture
def gpu_of_192_gb(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=192e9))
    return monkeypatch


def settings(**changes: Any) -> Any:
    return derived.learner(**{"max_context_tokens": 16_384, "dtype": "bfloat16", **changes})


def test_the_mathematical_path_computes_the_same_and_is_taken_where_it_was_asked_for():
    torch.manual_seed(0)
    heads = Heads(torch.randn(1, 4, 24, 8), torch.randn(1, 2, 24, 8), torch.randn(1, 2, 24, 8))
    choose("fused", CPU)
    fused = attend(heads, row_lengths=(10, 14))
    assert kernels.flash_sdp_enabled() and kernels.math_sdp_enabled()
    choose("eager", CPU)
    assert not kernels.flash_sdp_enabled() and not kernels.mem_efficient_sdp_enabled()
    torch.testing.assert_close(attend(heads, row_lengths=(10, 14)), fused)


def test_on_a_gpu_the_mathematical_path_is_shut_unless_asked_for():
    choose("fused", GPU)
    assert kernels.flash_sdp_enabled() and not kernels.math_sdp_enabled()
    choose("eager", GPU)
    assert kernels.math_sdp_enabled()


def test_aiter_without_rocm_is_refused():
    with pytest.raises(
        ConfigError, match=r"--learner\.attention-kernel: aiter's kernels are ROCm's.*. Hint: give fused"
    ):
        choose("aiter", CPU)


def test_a_gpu_without_a_fused_kernel_is_refused_with_what_the_mathematical_path_would_hold(
    gpu_of_192_gb: pytest.MonkeyPatch,
):
    gpu_of_192_gb.setattr(attention_kernels, "tried", lambda *_: "No available kernel")
    one = settings(micro_batch_tokens=32_768)
    with pytest.raises(
        ConfigError,
        match=r"no fused attention for 40 heads of 128 in bfloat16 here \(No available kernel\), and the mathematical "
        r"path would hold 40 heads x 32768 x 16384 tokens x 12 bytes = 257\.7 GB of 192. Hint: take vLLM's own image",
    ):
        refuse_unfit(one, MODEL, GPU)
    refuse_unfit(one, MODEL, CPU)
    gpu_of_192_gb.setattr(attention_kernels, "tried", lambda *_: "")
    refuse_unfit(one, MODEL, GPU)
