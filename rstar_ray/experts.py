"""Detects mixture-of-experts models from their Hugging Face config.json."""

from collections.abc import Mapping
from typing import Any

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "moe_num_experts")
"""Fields that hold the number of routed experts: Qwen and OLMoE, Mixtral and gpt-oss, DeepSeek and GLM, ERNIE."""


def experts_in(config: Mapping[str, Any]) -> str:
    """The field of config.json that makes the model a mixture of experts, with its value; empty for a dense model.

    >>> experts_in({"num_experts": 128}), experts_in({"num_local_experts": 0})
    ('num_experts is 128', '')
    """
    for name in COUNTS:
        value = config.get(name)
        counts = value if isinstance(value, list) else [value]
        if any(isinstance(count, int) and count > 1 for count in counts):
            return f"{name} is {value}"
    return ""
