"""Liger's kernels in the learner, through transformers' own hook: which of them, and what is refused."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from actors.learner.policy import use_liger
from rstar_ray.errors import ConfigError


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a stand-in for the package is asked to replace; it has kernels for Qwen3 alone."""
    asked: list[dict[str, Any]] = []
    patches = ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": None}  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", patches)
    monkeypatch.setattr("transformers.utils.import_utils.is_liger_kernel_available", lambda: True)
    monkeypatch.setattr(
        "transformers.integrations.liger.apply_liger_kernel", lambda model, kernels: asked.append(kernels)
    )
    return asked


def model(kind: str) -> Any:
    return SimpleNamespace(config=SimpleNamespace(model_type=kind))


def test_the_loss_stays_the_projects_own(applied: list[dict[str, Any]]):
    use_liger(model("qwen3"))
    assert applied == [{"cross_entropy": False, "fused_linear_cross_entropy": False}]


def test_a_model_that_liger_has_no_kernels_for_is_refused(applied: list[dict[str, Any]]):
    with pytest.raises(ConfigError, match=r"--learner\.liger: liger-kernel has no kernels for marian"):
        use_liger(model("marian"))
    assert not applied


def test_a_missing_package_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"--learner\.liger: the package liger-kernel is not installed"):
        use_liger(model("qwen3"))
