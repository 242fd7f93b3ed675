"""What runs inside vLLM's worker processes: weights arrive, are loaded, and are counted.

`Engine` names `WorkerExtension` as `worker_extension_cls`; importing this module in the worker registers the
`object_store` backend of vLLM's weight-transfer interface.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from actors.weights.buckets import checksum, unpack
from actors.weights.shared_memory import BACKEND, from_payload, open_buckets
from actors.weights.tensors import as_tensor


@dataclass
class ObjectStoreInit(WeightTransferInitInfo):
    """Nothing to agree on: the payload describes itself."""


@dataclass
class ObjectStoreUpdate(WeightTransferUpdateInfo):
    """One version's weights (`SharedWeights.payload`)."""

    path: str
    buckets: list[Any]


class ObjectStoreTransfer(WeightTransferEngine[ObjectStoreInit, ObjectStoreUpdate]):
    """Loads weights from a file in shared memory, through vLLM's layer-wise reload.

    The reload runs each layer's post-processing again (on x86 vLLM repacks linear weights for oneDNN), into the same
    storage. The checksum is of the bytes that were loaded, as this worker read them.
    """

    init_info_cls = ObjectStoreInit
    update_info_cls = ObjectStoreUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parameters = {name for name, _ in self.model.named_parameters()}  # of tied ones only the first
        self._hashing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-checksum")
        self._checksum: Future[int] | None = None

    def init_transfer_engine(self, init_info: ObjectStoreInit) -> None:
        """No rendezvous."""

    def start_weight_update(self) -> None:
        self._checksum = None
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, which ends by synchronising an accelerator; a CPU has none."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ObjectStoreUpdate) -> None:
        buckets = open_buckets(from_payload(update_info.path, update_info.buckets))
        weights = ((p.name, as_tensor(p).to(self.device)) for p in unpack(buckets))
        model: Any = self.model  # vLLM knows of any torch module only that it is one
        loaded = model.load_weights(weights)
        if missing := self._parameters - set(loaded):
            raise ValueError(f"no weights came for {sorted(missing)}")
        self._checksum = self._hashing.submit(checksum, buckets)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._repack_tied_head()

    def checksum(self) -> int | None:
        """None while it is still being computed."""
        if self._checksum is None:
            raise RuntimeError("no weights have been loaded through the object store")
        return self._checksum.result() if self._checksum.done() else None

    def _repack_tied_head(self) -> None:
        """vLLM 0.32 packs a tied output head for oneDNN on its own, and its reload leaves the head the old weights.

        Whether it is tied the parameters tell: of a folder that saves the head beside its embeddings, vLLM's copy of
        config.json says that it is not, and the two are tied again once they turn out to be equal.
        """
        head: Any = getattr(self.model, "lm_head", None)
        if hasattr(head, "quant_method") and "lm_head.weight" not in self._parameters:
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        self._hashing.shutdown(wait=False)


class WorkerExtension:
    """Methods vLLM adds to its worker, reached by `collective_rpc`."""

    weight_transfer_engine: WeightTransferEngine[Any, Any] | None  # vLLM's own

    def loaded_checksum(self) -> int | None:
        assert isinstance(self.weight_transfer_engine, ObjectStoreTransfer)
        return self.weight_transfer_engine.checksum()


WeightTransferEngineFactory.register_engine(BACKEND, ObjectStoreTransfer)
if current_platform.is_cpu():
    import_module("actors.generation.cpu_layers")
