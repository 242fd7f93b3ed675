"""What runs inside vLLM's worker processes: weights arrive, are loaded, and are counted.

`Engine` names `WorkerExtension` as `worker_extension_cls`; importing this module in the worker registers one backend of
vLLM's weight-transfer interface, since an engine has one for its life: each parcel says how its weights come.
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
    """The group that later versions are broadcast in (`actors.weights.collective.Meeting`)."""

    meeting: dict[str, Any]


@dataclass
class Parcel(WeightTransferUpdateInfo):
    """Weights of one version, or some of them, and how they come."""

    by: str
    buckets: list[Any]
    path: str = ""
    handle: dict[str, Any] = field(default_factory=dict)


class CountedModel:
    """The model of one version's weights, as vLLM's engine loads into it, and what came."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._device = device
        self.missing = loadable_names(model)
        self.checksum = 0  # of the bytes that were loaded, as they lay on this worker's device

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.missing -= set(self._model.load_weights(self._counted(weights)))

    def _counted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            if not name:  # bytes between two parameters
                continue
            here = weight.to(self._device)
            self.checksum = add_checksum([(name, here)], self.checksum)
            if not is_adapter(name):
                yield name, here


class Loading(IPCWeightTransferEngine):
    """vLLM's engine for handles of GPU memory, which here takes weights from shared memory and broadcasts too.

    Its layer-wise reload runs each layer's post-processing again (on x86 vLLM repacks linear weights for oneDNN), into
    the same storage.
    """

    init_info_cls: Any = Meet
    update_info_cls: Any = Parcel
    counted: CountedModel

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.packed = True
        self._arrivals = Arrivals(self.device, self.parallel_config.rank)

    def init_transfer_engine(self, init_info: Any) -> None:
        self._arrivals.join(init_info.meeting)

    def start_weight_update(self) -> None:
        self.counted = CountedModel(self.model, self.device)  # before the reload gives tied weights a name each
        super().start_weight_update()
        self.set_weight_update_target(cast(Any, self.counted), self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, which ends by synchronising an accelerator; a CPU has none."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Any) -> None:
        parcel: Parcel = update_info
        if parcel.by == BY_HANDLE:
            for rows in parcel.buckets:
                packed: dict[str, Any] = layout(from_rows(rows))
                super().receive_weights(IPCWeightTransferUpdateInfo(ipc_handles=opening(parcel.handle), **packed))
            return
        for bucket in self._arrivals.parcel(parcel.by, parcel.buckets, parcel.path):
            self.counted.load_weights(bucket.weights())

    def finish_weight_update(self) -> None:
        if self.counted.missing:
            raise ValueError(f"no weights came for {sorted(self.counted.missing)}")
        self.reset_weight_update_target()
        super().finish_weight_update()
        if self.device.type == "cpu":
            repack_tied_head(self.model)


class WorkerExtension:
    """Methods vLLM adds to its worker, reached by `collective_rpc`."""

    weight_transfer_engine: WeightTransferEngine[Any, Any] | None  # vLLM's own

    def loaded_checksum(self) -> int:
        assert isinstance(self.weight_transfer_engine, Loading)
        return self.weight_transfer_engine.counted.checksum


WeightTransferEngineFactory.register_engine(BACKEND, Loading)
end_with_owner()
if current_platform.is_cpu():
    use_fused_cpu_norm()
