"""Runs inside vLLM's worker processes: receives and loads weights, and computes their checksum.

`Engine` passes `WorkerExtension` as `worker_extension_cls`; importing this module in the worker registers the backend
for vLLM's weight-transfer interface. An engine has only one backend, so each parcel names its way of transfer.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo
from vllm.platforms import current_platform

from actors.generation.owner import end_with_owner
from actors.generation.vllm_private import loadable_names, repack_tied_head, use_fused_cpu_norm
from actors.weights.adapter_folder import is_adapter
from actors.weights.arrivals import Arrivals
from actors.weights.buckets import from_rows
from actors.weights.ipc import BY_HANDLE, layout, opening
from actors.weights.tensors import add_checksum
from actors.weights.transfer import BACKEND


@dataclass
class Meet(WeightTransferInitInfo):
    """The broadcast group for later versions (`actors.weights.collective.Meeting`)."""

    meeting: dict[str, Any]


@dataclass
class Parcel(WeightTransferUpdateInfo):
    """Buckets of one version and their way of transfer."""

    by: str
    buckets: list[Any]
    path: str = ""
    handle: dict[str, Any] = field(default_factory=dict)


class CountedModel:
    """The model that vLLM loads one version into; records missing parameters and the checksum."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._device = device
        self.missing = loadable_names(model)
        self.checksum = 0  # of the loaded bytes, computed on this worker's device

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.missing -= set(self._model.load_weights(self._counted(weights)))

    def _counted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            if not name:  # padding between two parameters
                continue
            here = weight.to(self._device)
            self.checksum = add_checksum([(name, here)], self.checksum)
            if not is_adapter(name):
                yield name, here


class Loading(IPCWeightTransferEngine):
    """vLLM's receiver for GPU memory handles, extended to shared memory and broadcasts.

    Its layer-wise reload repeats each layer's post-processing into the same storage (on x86 vLLM repacks linear weights
    for oneDNN).
    """

    init_info_cls: Any = Meet
    update_info_cls: Any = Parcel
    counted: CountedModel
    received: bool  # whether a parcel of this version has arrived

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.packed = True
        self._arrivals = Arrivals(self.device, self.parallel_config.rank)

    def init_transfer_engine(self, init_info: Any) -> None:
        self._arrivals.join(init_info.meeting)

    def start_weight_update(self) -> None:
        self.received = False
        self.counted = CountedModel(self.model, self.device)  # before the reload gives tied weights separate names
        super().start_weight_update()
        self.set_weight_update_target(cast(Any, self.counted), self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As in the base class, but synchronises only if there is an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Any) -> None:
        parcel: Parcel = update_info
        self.received = True
        if parcel.by == BY_HANDLE:
            for rows in parcel.buckets:
                packed: dict[str, Any] = layout(from_rows(rows))
                super().receive_weights(IPCWeightTransferUpdateInfo(ipc_handles=opening(parcel.handle), **packed))
            return
        for bucket in self._arrivals.parcel(parcel.by, parcel.buckets, parcel.path):
            self.counted.load_weights(bucket.weights())

    def finish_weight_update(self) -> None:
        """If no parcel was received, vLLM puts the old weights back."""
        if self.received and self.counted.missing:
            raise ValueError(f"no weights were received for {sorted(self.counted.missing)}")
        self.reset_weight_update_target()
        super().finish_weight_update()
        if self.received and self.device.type == "cpu":
            repack_tied_head(self.model)


class WorkerExtension:
    """Methods that vLLM adds to its worker, called by `collective_rpc`."""

    weight_transfer_engine: WeightTransferEngine[Any, Any] | None  # set by vLLM

    def loaded_checksum(self) -> int:
        assert isinstance(self.weight_transfer_engine, Loading)
        return self.weight_transfer_engine.counted.checksum


WeightTransferEngineFactory.register_engine(BACKEND, Loading)
end_with_owner()
if current_platform.is_cpu():
    use_fused_cpu_norm()
