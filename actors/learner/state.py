"""Access to parameters and optimizer state under any ZeRO stage: full tensors, or this rank's shard.

With LoRA, the frozen weights have neither moments nor float32 master weights. Every method that reads or writes a full
parameter is a collective: all ranks call it in the same order. Shards are ranges of elements of the flattened tensor.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import utils as deepspeed_utils
from torch import Tensor, nn

from actors.learner.adapters import adapted_weights, frozen_biases, is_adapters, merged
from actors.learner.optimizer import MOMENTS, RefusingAdamW
from actors.weights.adapter_folder import adapter_name
from actors.weights.buckets import WeightEntry

Part = str | None  # of a parameter: the float32 weight (None), or a moment


class LearnerState:
    """Names, weights and moments of one policy; `zero` is the ZeRO stage (0 to 3)."""

    def __init__(self, engine: Any, model: nn.Module, optimizer: RefusingAdamW, zero: int) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._zero = zero
        self._parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._adapted = adapted_weights(model)
        self._biases = frozen_biases(model)
        self.base_replaced = False  # with LoRA: the frozen weights differ from the model folder's
        self._rank = dist.get_rank()
        self._device = torch.device(engine.device)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Unsharded shapes by Hugging Face name; tied parameters once."""
        return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self._parameters.items()}

    @property
    def folder_shapes(self) -> dict[str, tuple[int, ...]]:
        """Unsharded shapes of the model's weights, by their names in a model folder."""
        shapes = self.shapes
        return {name: shapes[own] for name, own in self._model_parameters().items()}

    def parts(self, name: str) -> tuple[Part, ...]:
        """The parts of a parameter: the weight (None), and its moments if it is trained."""
        return (None, *MOMENTS) if self._parameters[name].requires_grad else (None,)

    def numel(self, name: str) -> int:
        return _num_elements(self.shapes[name])

    # ------------------------------------------------------------ what this rank holds

    def held(self, name: str) -> range:
        """The elements on this rank: its partition under ZeRO, otherwise all."""
        parameter = cast(Any, self._parameters[name])
        if self._zero == 3:
            return _share(self.numel(name), self._rank, parameter.ds_tensor.numel())
        if not self._spread(name):
            return range(self.numel(name))
        mapping = parameter._hp_mapping  # None if this rank has no elements of it
        start = mapping.lp_fragment_address.start if mapping else 0
        return range(start, start + (mapping.lp_fragment_address.numel if mapping else 0))

    def own(self, name: str) -> range:
        """The part of `held` that this rank writes; over all ranks, each element is written once."""
        if self._spread(name):
            return self.held(name)
        numel = self.numel(name)
        return _share(numel, self._rank, -(-numel // dist.get_world_size()))

    def snapshot(self) -> Iterator[tuple[str, Part, range, Tensor]]:
        """Float32 copies in host memory of the elements in `own`; not a collective."""
        for name in self.shapes:
            own, held = self.own(name), self.held(name)
            for part in self.parts(name) if own else ():
                flat = self._flat(name, part)[own.start - held.start : own.stop - held.start]
                yield name, part, own, flat.detach().to("cpu", torch.float32, copy=True)

    def restore(self, read: Callable[[str, Part, range], Tensor]) -> None:
        """Load all elements in `held` with `read`, then update the weights in the forward dtype. A collective."""
        changed = False
        with torch.no_grad():
            for name in self.shapes:
                held = self.held(name)
                for part in self.parts(name) if held else ():
                    value = read(name, part, held).to(self._device)
                    if not self._parameters[name].requires_grad:
                        before = self._flat(name, part)[: len(value)]
                        changed = changed or not torch.equal(before, value.to(before.dtype))
                    self._set_flat(name, part, value)
        self._note_base(changed)
        zero = self._engine.optimizer
        if self._zero in (1, 2):
            zero.update_lp_params()
        elif self._zero == 3:
            if self._engine.zero_hpz_partition_size() > 1:
                zero.invalidate_secondary_tensor()  # hpZ's copy has the old weights
            if zero.persistent_parameters:  # small parameters, of which every rank also has a full copy
                zero.persistent_parameters[0].partition(zero.persistent_parameters)
                zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def _spread(self, name: str) -> bool:
        """Whether ZeRO shards it: each element is on one rank only."""
        return self._zero == 3 or (self._zero > 0 and self._parameters[name].requires_grad)

    def _flat(self, name: str, part: Part) -> Tensor:
        """The elements in `held`; under ZeRO-3 followed by the padding of the last rank."""
        parameter = cast(Any, self._parameters[name])
        if not self._spread(name):
            return (parameter if part is None else self._optimizer.state[parameter][part]).flatten()
        if self._zero < 3:
            return parameter._hp_mapping.get_hp_fragment(part)
        if not parameter.requires_grad:
            return parameter.ds_tensor
        if part is None:
            return cast(Tensor, deepspeed_utils.safe_get_local_fp32_param(parameter))
        return cast(Tensor, deepspeed_utils.safe_get_local_optimizer_state(parameter, part))

    def _set_flat(self, name: str, part: Part, value: Tensor) -> None:
        parameter = cast(Any, self._parameters[name])
        if self._zero == 3:
            padded = value.new_zeros(parameter.ds_tensor.numel())
            padded[: len(value)] = value
            if part is not None:
                deepspeed_utils.safe_set_local_optimizer_state(parameter, padded, part)
                return
            deepspeed_utils.safe_set_local_fp32_param(parameter, padded)  # no effect if it is frozen
            parameter.ds_tensor.copy_(padded)
        elif self._spread(name):
            parameter._hp_mapping.get_hp_fragment(part).copy_(value)
        else:
            full = parameter if part is None else self._optimizer.state[parameter][part]
            full.copy_(value.view(full.shape))

    # ------------------------------------------------------------ whole tensors

    def prepare_moments(self) -> None:
        """Create the optimizer's state, so that it can be read and written before the first step."""
        if self._zero == 3:
            # ZeRO-3 puts its partitions into the optimizer's groups only during a step.
            self._optimizer.fill_state(self._engine.optimizer.fp32_partitioned_groups_flat)
        else:
            self._optimizer.fill_state(p for group in self._optimizer.param_groups for p in group["params"])
        if self._zero > 0 and hasattr(self._engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def get(self, name: str, moment: str | None = None) -> Tensor:
        """The float32 master weight, or one moment; unsharded, on every rank."""
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

    def set(self, name: str, value: Tensor | None) -> None:
        """Overwrite a weight, and its low-precision copy, with rank 0's `value`."""
        parameter = self._parameters[name]
        full = torch.empty(self.shapes[name], dtype=torch.float32, device=self._device)
        if self._rank == 0:
            assert value is not None
            full.copy_(value)
        dist.broadcast(full, 0)
        held = self.held(name)
        with torch.no_grad():
            if self._spread(name) and held and parameter.requires_grad:
                self._set_flat(name, None, full.flatten()[held.start : held.stop])
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=self._zero == 3):
                changed = not parameter.requires_grad and not torch.equal(parameter, full.to(parameter.dtype))
                if self._zero < 3 or self._rank == 0:
                    parameter.copy_(full)
        self._note_base(changed)

    def set_model_weight(self, name: str, value: Tensor | None) -> None:
        """Set a weight by its name in a model folder; its adapter's B is set to zero."""
        adapted = self._adapted.get(name)
        self.set(self._model_parameters()[name], value)
        if adapted:
            self.set(adapted.b, torch.zeros(self.shapes[adapted.b]) if self._rank == 0 else None)

    def clear_moments(self) -> None:
        """Reset the optimizer: zero moments, zero steps."""
        for state in self._optimizer.state.values():
            for value in state.values():
                value.zero_()

    def _note_base(self, changed: bool) -> None:
        """Set `base_replaced` on all ranks if frozen weights changed on any."""
        if self._adapted:
            any_changed = torch.tensor(int(changed), device=self._device)
            dist.all_reduce(any_changed, dist.ReduceOp.MAX)
            self.base_replaced = self.base_replaced or bool(any_changed)

    def served_entries(self) -> Iterator[WeightEntry]:
        """Names, shapes and dtypes of `served`, in its order, on every rank without a gather; offsets are 0."""
        for name, own in self._served_parameters().items():
            dtype = str(self._parameters[own].dtype).removeprefix("torch.")
            yield WeightEntry(name, self.shapes[own], dtype, 0)

    def served(self, group_bytes: int, *, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The weights that engines need, in the forward dtype; on rank 0 only, or on every rank.

        With LoRA: the adapters' matrices under PEFT's names, and the model's weights only if they differ from the model
        folder that engines start from. A yielded tensor is valid until the next one.
        """
        sources = {name: (own,) for name, own in self._served_parameters().items()}
        for name, (parameter,) in self._gathered(sources, group_bytes, everywhere=everywhere):
            yield name, parameter

    def adapter(self, group_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """The adapters' matrices in the forward dtype, by PEFT's names; on rank 0 only."""
        sources = {name: (own,) for name, own in self._adapter_parameters().items()}
        for name, (parameter,) in self._gathered(sources, group_bytes):
            yield name, parameter

    def whole_model(self, group_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """The model's weights by their names in a model folder, on rank 0 only; with LoRA merged, in float32."""
        sources = {
            name: (own, self._adapted[name].a, self._adapted[name].b) if name in self._adapted else (own,)
            for name, own in self._model_parameters().items()
        }
        for name, parameters in self._gathered(sources, group_bytes):
            if name in self._adapted:
                base, a, b = parameters
                yield name, merged(base, a, b, self._adapted[name].scale)
            else:
                yield name, parameters[0].float() if self._adapted else parameters[0]

    def _gathered(
        self, sources: Mapping[str, tuple[str, ...]], group_bytes: int, *, everywhere: bool = False
    ) -> Iterator[tuple[str, list[Tensor]]]:
        """The parameters of each name. Under ZeRO-3 about `group_bytes` are gathered at a time."""
        for group in self._groups(sources, group_bytes):
            needed = [self._parameters[own] for name in group for own in sources[name]]
            with deepspeed.zero.GatheredParameters(needed, modifier_rank=None, enabled=self._zero == 3):
                if everywhere or self._rank == 0:
                    for name in group:
                        tensors: list[Tensor] = [self._parameters[own] for own in sources[name]]
                        yield name, tensors

    def _groups(self, sources: Mapping[str, tuple[str, ...]], group_bytes: int) -> Iterator[list[str]]:
        group: list[str] = []
        size = 0
        for name, behind in sources.items():
            group.append(name)
            size += sum(self.numel(own) * self._parameters[own].element_size() for own in behind)
            if size >= group_bytes:
                yield group
                group, size = [], 0
        if group:
            yield group

    def _served_parameters(self) -> dict[str, str]:
        if not self._adapted:
            return self._model_parameters()
        return {**(self._model_parameters() if self.base_replaced else {}), **self._adapter_parameters()}

    def _model_parameters(self) -> dict[str, str]:
        """Names of all parameters but the adapters', by their names in a model folder."""
        names = {adapted.base: name for name, adapted in self._adapted.items()}
        names |= {own: name for name, own in self._biases.items()}
        return {names.get(own, own): own for own in self._parameters if not is_adapters(own)}

    def _adapter_parameters(self) -> dict[str, str]:
        """Names of the adapters' parameters, by PEFT's names."""
        found: dict[str, str] = {}
        for name, adapted in self._adapted.items():
            layer = name.removesuffix(".weight")
            found |= {adapter_name(layer, "A"): adapted.a, adapter_name(layer, "B"): adapted.b}
        return found


def _share(numel: int, rank: int, size: int) -> range:
    """The elements of one rank if each takes `size` in turn; the last ranks may have fewer, or none."""
    return range(min(rank * size, numel), min((rank + 1) * size, numel))


def _num_elements(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
