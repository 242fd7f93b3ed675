"""A learner's parameters and optimizer state under any ZeRO stage, whole tensors in and out.

Where adapters are trained, the frozen weights have neither moments nor a float32 master.
Everything here that reads or writes a parameter is a collective: all ranks call it, in the same order.
"""

from collections.abc import Iterator
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import utils as deepspeed_utils
from torch import Tensor, nn

from actors.learner.adapters import adapted_weights, is_adapters, merged
from actors.learner.optimizer import MOMENTS, RefusingAdamW
from actors.weights.buckets import NamedArray
from actors.weights.tensors import named_array


class LearnerState:
    """Names, weights and moments of one policy; `zero` is how much of them ZeRO spreads over the ranks (0 to 3)."""

    def __init__(self, engine: Any, model: nn.Module, optimizer: RefusingAdamW, zero: int) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._zero = zero
        self._parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._adapted = adapted_weights(model)
        self._rank = dist.get_rank()
        self._device = torch.device(engine.device)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes by Hugging Face name; tied parameters once."""
        return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self._parameters.items()}

    @property
    def served_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the weights as folders and engines know them, adapters merged."""
        own = {adapted.base: name for name, adapted in self._adapted.items()}
        return {own.get(name, name): shape for name, shape in self.shapes.items() if not is_adapters(name)}

    def parts(self, name: str) -> tuple[str | None, ...]:
        """What there is of a parameter: the weight (None), and its moments where it is trained."""
        return (None, *MOMENTS) if self._parameters[name].requires_grad else (None,)

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
        if not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter], enabled=self._zero == 3):
                return parameter.detach().float().clone()
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
            if not parameter.requires_grad:
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=self._zero == 3):
                    parameter.copy_(whole)
            elif self._zero == 0:
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

    def set_served(self, name: str, value: Tensor | None) -> None:
        """Take over a weight as `served` names it; its adapter adds nothing then."""
        adapted = self._adapted.get(name)
        self.set(adapted.base if adapted else name, value)
        if adapted:
            self.set(adapted.b, torch.zeros(self.shapes[adapted.b]) if self._rank == 0 else None)

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
        for name, shape in self.served_shapes.items():
            group.append(name)
            size += _num_elements(shape) * self._parameters[self._behind(name)[0]].element_size()
            if size >= group_bytes:
                yield from self._served_group(group)
                group, size = [], 0
        yield from self._served_group(group)

    def _served_group(self, names: list[str]) -> Iterator[NamedArray]:
        behind = [self._parameters[each] for name in names for each in self._behind(name)]
        with deepspeed.zero.GatheredParameters(behind, modifier_rank=None, enabled=self._zero == 3):
            if self._zero < 3 and self._rank == 0:
                yield from (named_array(name, self._served_weight(name)) for name in names)
            elif self._rank == 0:
                yield from [named_array(name, self._served_weight(name)) for name in names]

    def _behind(self, name: str) -> tuple[str, ...]:
        """The parameters that make a served weight."""
        adapted = self._adapted.get(name)
        return (adapted.base, adapted.a, adapted.b) if adapted else (name,)

    def _served_weight(self, name: str) -> Tensor:
        adapted = self._adapted.get(name)
        if adapted is None:
            return self._parameters[name]
        base, a, b = (self._parameters[each] for each in self._behind(name))
        return merged(base, a, b, adapted.scale)


def _num_elements(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
