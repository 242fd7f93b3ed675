"""A learner's parameters and optimizer state under any ZeRO stage, whole tensors in and out.

Everything here that reads or writes a parameter is a collective: all ranks call it, in the same order.
"""

from collections.abc import Iterator
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import utils as deepspeed_utils
from torch import Tensor, nn

from actors.learner.optimizer import RefusingAdamW
from actors.weights.buckets import NamedArray
from actors.weights.tensors import named_array


class LearnerState:
    """Names, weights and moments of one policy; `zero` is how much of them ZeRO spreads over the ranks (0 to 3)."""

    def __init__(self, engine: Any, model: nn.Module, optimizer: RefusingAdamW, zero: int) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._zero = zero
        self._parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._rank = dist.get_rank()
        self._device = torch.device(engine.device)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes by Hugging Face name; tied parameters once."""
        return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self._parameters.items()}

    def prepare_moments(self) -> None:
        """Make the optimizer's state readable and writable before its first step."""
        if self._zero == 3:
            # ZeRO-3 lends its partitions to the optimizer's groups only during a step.
            self._optimizer.fill_state(self._engine.optimizer.fp32_partitioned_groups_flat)
        else:
            self._optimizer.fill_state(p for group in self._optimizer.param_groups for p in group["params"])
        if self._zero > 0 and hasattr(self._engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def get(self, name: str, moment: str | None = None) -> Tensor:
        """The float32 master weight, or one moment; whole, on every rank."""
        parameter = self._parameters[name]
        if self._zero == 0:
            return (parameter if moment is None else self._optimizer.state[parameter][moment]).detach()
        if moment is None:
            value = deepspeed_utils.safe_get_full_fp32_param(parameter)
        else:
            value = deepspeed_utils.safe_get_full_optimizer_state(parameter, moment)
        return cast(Tensor, value).view(self.shapes[name])

    def set(self, name: str, value: Tensor | None, moment: str | None = None) -> None:
        """Overwrite a weight (its low-precision copy too) or a moment with rank 0's `value`."""
        parameter = self._parameters[name]
        whole = torch.empty(self.shapes[name], dtype=torch.float32, device=self._device)
        if self._rank == 0:
            assert value is not None
            whole.copy_(value)
        dist.broadcast(whole, 0)
        with torch.no_grad():
            if self._zero == 0:
                (parameter if moment is None else self._optimizer.state[parameter][moment]).copy_(whole)
            elif self._zero < 3:
                if moment is None:
                    deepspeed_utils.safe_set_full_fp32_param(parameter, whole)
                    parameter.copy_(whole)
                else:
                    deepspeed_utils.safe_set_full_optimizer_state(parameter, whole, moment)
            else:
                self._set_partition(parameter, whole, moment)

    def _set_partition(self, parameter: nn.Parameter, whole: Tensor, moment: str | None) -> None:
        size = cast(Any, parameter).ds_tensor.numel()
        padded = torch.zeros(size * dist.get_world_size(), dtype=torch.float32, device=self._device)
        padded[: whole.numel()] = whole.flatten()
        part = padded[self._rank * size : (self._rank + 1) * size]
        if moment is not None:
            deepspeed_utils.safe_set_local_optimizer_state(parameter, part, moment)
            return
        deepspeed_utils.safe_set_local_fp32_param(parameter, part)
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if self._rank == 0:
                parameter.copy_(whole)

    def clear_moments(self) -> None:
        """A fresh optimizer: zero moments, zero steps."""
        for state in self._optimizer.state.values():
            for value in state.values():
                value.zero_()

    def served(self, group_bytes: int) -> Iterator[NamedArray]:
        """The weights as an engine serves them, in the type of the forward pass, on rank 0; nothing elsewhere.

        Under ZeRO-3 about `group_bytes` are gathered at a time; a yielded array is valid until the next.
        """
        group: list[str] = []
        size = 0
        for name, parameter in self._parameters.items():
            group.append(name)
            size += _num_elements(self.shapes[name]) * parameter.element_size()
            if size >= group_bytes:
                yield from self._served_group(group)
                group, size = [], 0
        yield from self._served_group(group)

    def _served_group(self, names: list[str]) -> Iterator[NamedArray]:
        parameters = [self._parameters[name] for name in names]
        if self._zero < 3:
            if self._rank == 0:
                yield from (named_array(name, p) for name, p in zip(names, parameters, strict=True))
            return
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=None):
            arrays = [named_array(n, p) for n, p in zip(names, parameters, strict=True)] if self._rank == 0 else []
            yield from arrays


def _num_elements(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
