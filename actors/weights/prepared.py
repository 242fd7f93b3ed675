"""New weights made ready beside those that serve, so that a pause is no longer than handing them over.

On a CPU vLLM packs every linear layer for oneDNN as it loads it, into memory that is new each time: several copies of
all bytes, during which an engine that is loaded in place stands still. Here copies of the model's modules, which share
nothing that loading changes, take the new weights by vLLM's own layer-wise reload while the modules themselves go on
serving. What loading made of each then takes its place: a packed layer is one attribute, embeddings and norms are
copied. Meanwhile an engine holds its weights twice.

Runs in vLLM's worker processes, in a thread.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import MLAAttention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    LAYERWISE_INFO,
    _get_original_loader,  # pyright: ignore[reportPrivateUsage]
    _layerwise_process,  # pyright: ignore[reportPrivateUsage]  # what vLLM's reload does with a layer that is whole
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_MODULES, to_meta_tensor

PACKED = "cpu_linear"
"""The attribute that vLLM's packing of a layer leaves: a function that holds the packed weights."""
UNPACKED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""The ways of handling a layer's weights of which nothing else is left. Exactly these: others inherit from them."""
OWN = {"_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"}
"""A copy's dictionaries, of its own."""
OF_NO_MATTER = {
    *OWN,
    PACKED,
    "_already_called_process_weights_after_loading",
    "_do_torchao_reload",
    "_original_do_torchao_reload",
}
"""Attributes in which a loaded copy may differ from the module that it is a copy of."""


class NotPrepared(Exception):
    """This model's weights can only be loaded in place."""


class PreparedWeights:
    """One version's weights, beside a model that serves."""

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        """Raises `NotPrepared`."""
        self._all: dict[nn.Module, nn.Module] = {}  # a copy of every module
        for module in model.modules():
            _refuse_what_else_loading_changes(module)
        self._copy = self._copied(model)
        for module, copy in self._all.items():
            own, others = get_layerwise_info(copy), get_layerwise_info(module)
            own.restore_device = others.restore_device
            parameters, buffers = others.restore_metadata
            own.restore_metadata = _unwrapped(parameters), _unwrapped(buffers)
        initialize_layerwise_reload(self._copy)
        for copy in self._all.values():
            get_layerwise_info(copy).kernel_tensors = None  # these are the model's own: it serves from them
        self._copies = dict(self._all)  # those that take their module's place

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Some of them, by the names they are saved under; returns the parameters that they are."""
        copy: Any = self._copy  # vLLM knows of any torch module only that it is one
        return set(copy.load_weights(weights))

    @torch.no_grad()
    def finish(self) -> None:
        """After the last: layers that are larger than what was saved of them, and those that are tied to others.

        Raises `NotPrepared` where not all that loading made could be handed over.
        """
        for copy in self._copies.values():
            info = get_layerwise_info(copy)
            if info.can_load() and info.load_numel > 0:
                _refuse_parts(copy, {name for name, _ in info.loaded_weights})
                _layerwise_process(copy, info)
        empty = {module: copy for module, copy in self._copies.items() if get_layerwise_info(copy).can_load()}
        for module in empty:
            del self._copies[module]
        for module, copy in empty.items():
            self._tie(module, copy)
        for module, copy in self._copies.items():
            _refuse_what_would_stay(module, copy)

    @torch.no_grad()
    def hand_over(self) -> None:
        """The model serves these weights from now on. Nothing may run in it meanwhile."""
        done: set[int] = set()
        for module, copy in self._copies.items():
            for own, new in _pairs(module, copy):
                if id(own) not in done:
                    own.data.copy_(new)
                done.add(id(own))
            if PACKED in vars(copy):
                setattr(module, PACKED, vars(copy)[PACKED])
        self.release()

    def release(self) -> None:
        """Let go of what was loaded: vLLM's reload remembers its layers by what holds them, and so for ever."""
        for copy in self._all.values():
            LAYERWISE_INFO.pop(copy, None)
            vars(copy).clear()
        self._all.clear()
        self._copies.clear()

    def _copied(self, module: nn.Module) -> nn.Module:
        """With dictionaries of its own, down to the last child; a module that is there twice stays one."""
        if module not in self._all:
            copy = self._all[module] = object.__new__(type(module))
            vars(copy).update(vars(module))
            vars(copy)["_parameters"] = {name: _own_bias(name, one) for name, one in module._parameters.items()}
            vars(copy)["_buffers"] = {name: _own_bias(name, one) for name, one in module._buffers.items()}
            vars(copy)["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
            children = module._modules.items()
            vars(copy)["_modules"] = {name: None if child is None else self._copied(child) for name, child in children}
        return self._all[module]

    def _tie(self, module: nn.Module, copy: nn.Module) -> None:
        """A layer to which nothing was loaded: it has no weights, or, such as a head that is tied, those of another."""
        new = {id(own): new for other in self._copies.items() for own, new in _pairs(*other)}
        shared = {name: new[id(own)] for name, own in module._parameters.items() if id(own) in new}
        if shared:
            copy._parameters.update(shared)  # type: ignore[arg-type]  # vLLM's parameters are any tensors
            method: Any = getattr(copy, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(copy)
            self._copies[module] = copy


def _own_bias(name: str, tensor: Tensor | None) -> Tensor | None:
    """vLLM's reload loads biases in place, so that a copy needs its own from the beginning."""
    if name != "bias" or tensor is None:
        return tensor
    own: Any = tensor.data.clone()
    own.__class__ = tensor.__class__
    own.__dict__ = tensor.__dict__.copy()
    return own


def _unwrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a layer is to be loaded into, of one's own: vLLM's reload hangs what counts a layer's weights on these."""
    fresh: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        one: Any = to_meta_tensor(tensor)
        if hasattr(tensor, "weight_loader"):
            one.weight_loader = _get_original_loader(tensor)
        fresh[name] = one
    return fresh


def _refuse_what_else_loading_changes(module: nn.Module) -> None:
    name = type(module).__name__
    method = getattr(module, "quant_method", None)
    has_parameters = any(one is not None for one in module._parameters.values())
    if method is not None and has_parameters and type(method) not in UNPACKED:
        raise NotPrepared(f"{name} handles its weights by {type(method).__name__}")
    if name in SKIP_MODULES or isinstance(module, MLAAttention):
        raise NotPrepared(f"{name} is loaded in a way of its own")
    if has_parameters and is_deferred_attention_layer(module):
        raise NotPrepared(f"{name} has weights of its own")


def _refuse_parts(copy: nn.Module, loaded: set[str]) -> None:
    """A layer of which whole parameters did not come, such as a head with a bias that is tied."""
    lacking = {name for name, one in copy._parameters.items() if one is not None} - loaded - {"bias"}
    if lacking:
        raise NotPrepared(f"of {type(copy).__name__} came everything but {sorted(lacking)}")


def _refuse_what_would_stay(module: nn.Module, copy: nn.Module) -> None:
    """What loading has made of a copy beside tensors and packed weights, and tensors that do not fit."""
    before, after = vars(module), vars(copy)
    changed = {name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)} - OF_NO_MATTER
    if changed:
        raise NotPrepared(f"loading changes {sorted(changed)} of {type(module).__name__}")
    for own, new in _pairs(module, copy):
        if own.shape != new.shape or own.dtype != new.dtype or new.is_meta:
            raise NotPrepared(f"loading makes another tensor of {type(module).__name__}")


def _pairs(module: nn.Module, copy: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """What the model serves from, and what is to lie there."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield parameter, copy._parameters[name]  # type: ignore[misc]  # the copy has the same
    for name, buffer in module._buffers.items():
        new = copy._buffers.get(name)
        if buffer is not None and new is not None and name not in module._non_persistent_buffers_set:
            yield buffer, new
