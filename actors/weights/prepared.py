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
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,  # pyright: ignore[reportPrivateUsage]
    _layerwise_process,  # pyright: ignore[reportPrivateUsage]  # what vLLM's reload does with a layer that is whole
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

PACKED = "cpu_linear"
"""The attribute that vLLM's packing of a layer leaves: a function that holds the packed weights."""
UNPACKED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""The ways of handling a layer's weights of which nothing else is left. Exactly these: others inherit from them."""


class NotPrepared(Exception):
    """This model's weights can only be loaded in place."""


class PreparedWeights:
    """One version's weights, beside a model that serves."""

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        """Raises `NotPrepared`."""
        self._copies: dict[nn.Module, nn.Module] = {}
        self._copy = self._copied(model)
        for module, copy in self._copies.items():
            _refuse_what_else_loading_changes(module)
            own, others = get_layerwise_info(copy), get_layerwise_info(module)
            own.restore_device = others.restore_device
            parameters, buffers = others.restore_metadata
            own.restore_metadata = _unwrapped(parameters), _unwrapped(buffers)
        initialize_layerwise_reload(self._copy)
        for copy in self._copies.values():
            get_layerwise_info(copy).kernel_tensors = None  # these are the model's own: it serves from them

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Some of them, by the names they are saved under; returns the parameters that they are."""
        copy: Any = self._copy  # vLLM knows of any torch module only that it is one
        return set(copy.load_weights(weights))

    @torch.no_grad()
    def finish(self) -> None:
        """After the last: layers that are larger than what was saved of them, and those that are tied to others."""
        for copy in self._copies.values():
            info = get_layerwise_info(copy)
            if info.can_load() and info.load_numel > 0:
                _layerwise_process(copy, info)
        empty = {module: copy for module, copy in self._copies.items() if get_layerwise_info(copy).can_load()}
        for module in empty:
            del self._copies[module]
        for module, copy in empty.items():
            self._tie(module, copy)

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
        self._copies.clear()

    def _copied(self, module: nn.Module) -> nn.Module:
        """With dictionaries of its own, down to the last child; a module that is there twice stays one."""
        if module not in self._copies:
            copy = self._copies[module] = object.__new__(type(module))
            vars(copy).update(vars(module))
            vars(copy)["_parameters"] = {name: _own_bias(name, one) for name, one in module._parameters.items()}
            vars(copy)["_buffers"] = dict(module._buffers)
            vars(copy)["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
            children = module._modules.items()
            vars(copy)["_modules"] = {name: child and self._copied(child) for name, child in children}
        return self._copies[module]

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


def _own_bias(name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """vLLM's reload loads biases in place, so that a copy needs its own from the beginning."""
    if name != "bias" or parameter is None:
        return parameter
    own: Any = parameter.data.clone()
    own.__class__ = parameter.__class__
    own.__dict__ = parameter.__dict__.copy()
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
    method = getattr(module, "quant_method", None)
    has_parameters = any(one is not None for one in module._parameters.values())
    if method is not None and has_parameters and type(method) not in UNPACKED:
        raise NotPrepared(f"{type(module).__name__} handles its weights by {type(method).__name__}")
    if has_parameters and is_deferred_attention_layer(module):
        raise NotPrepared(f"{type(module).__name__} has weights of its own")


def _pairs(module: nn.Module, copy: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """What the model serves from, and what is to lie there."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield parameter, copy._parameters[name]  # type: ignore[misc]  # the copy has the same
    for name, buffer in module._buffers.items():
        new = copy._buffers.get(name)
        if buffer is not None and new is not None and name not in module._non_persistent_buffers_set:
            yield buffer, new
