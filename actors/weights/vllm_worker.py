"""What runs inside vLLM's worker processes: weights arrive, are loaded, and are counted.

`Engine` names `WorkerExtension` as `worker_extension_cls`; importing this module in the worker registers one backend of
vLLM's weight-transfer interface, since an engine has one for its life: each parcel says how its weights come
(`actors.weights.arrivals`).
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

from actors.generation.owner import end_with_owner
from actors.generation.vllm_private import (
    begin_reload,
    finish_reload,
    loadable_names,
    repack_tied_head,
    use_fused_cpu_norm,
)
from actors.weights.adapter_folder import is_adapter
from actors.weights.arrivals import Arrivals
from actors.weights.tensors import TensorBucket, add_checksum
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


class LoadedChecksum:
    """Of one version's bytes as this worker read them, in a thread beside their loading."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        """`thread`: one alone, which hashes the buckets in order."""
        self._thread = thread
        self._so_far: Future[int] | None = None

    def add(self, bucket: TensorBucket) -> None:
        before = self._so_far  # it is done when its thread comes to the next
        self._so_far = self._thread.submit(lambda: add_checksum(bucket, before.result() if before else 0))

    def value(self) -> int | None:
        """None while it is still being computed."""
        if self._so_far is None:
            raise RuntimeError("no weights have been loaded")
        return self._so_far.result() if self._so_far.done() else None


class Loading(WeightTransferEngine[Meet, Parcel]):
    """Loads what arrives through vLLM's layer-wise reload.

    The reload runs each layer's post-processing again (on x86 vLLM repacks linear weights for oneDNN), into the same
    storage. The checksum is of the bytes that were loaded, as this worker read them.
    """

    init_info_cls = Meet
    update_info_cls = Parcel

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parameters = loadable_names(self.model)
        self._arrivals = Arrivals(self.device, self.parallel_config.rank)
        self._hashing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-checksum")
        self._checksum = LoadedChecksum(self._hashing)
        self._missing: set[str] = set()
        self._reloading = False  # between the first weights of a version and its last

    def init_transfer_engine(self, init_info: Meet) -> None:
        self._arrivals.join(init_info.meeting)

    def start_weight_update(self) -> None:
        self._checksum = LoadedChecksum(self._hashing)
        self._missing = set(self._parameters)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, which ends by synchronising an accelerator; a CPU has none."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Parcel) -> None:
        if not self._reloading:
            begin_reload(self.model)
            self._reloading = True
        model: Any = self.model  # vLLM knows of any torch module only that it is one
        for bucket in self._arrivals.parcel(**vars(update_info)):
            named = ((name, weight) for name, weight in bucket.weights() if not is_adapter(name))
            weights = ((name, weight.to(self.device)) for name, weight in named)
            self._missing -= set(model.load_weights(weights))
            self._checksum.add(bucket)

    def finish_weight_update(self) -> None:
        self._arrivals.end()
        if self._missing:
            raise ValueError(f"no weights came for {sorted(self._missing)}")
        if self._reloading:
            finish_reload(self.model, self.model_config)
            self._reloading = False
            if self.device.type == "cpu":
                repack_tied_head(self.model)

    def checksum(self) -> int | None:
        """None while it is still being computed."""
        return self._checksum.value()

    def shutdown(self) -> None:
        self._arrivals.end()
        self._hashing.shutdown(wait=False)


class WorkerExtension:
    """Methods vLLM adds to its worker, reached by `collective_rpc`."""

    weight_transfer_engine: WeightTransferEngine[Any, Any] | None  # vLLM's own

    def loaded_checksum(self) -> int | None:
        assert isinstance(self.weight_transfer_engine, Loading)
        return self.weight_transfer_engine.checksum()


WeightTransferEngineFactory.register_engine(BACKEND, Loading)
end_with_owner()
if current_platform.is_cpu():
    use_fused_cpu_norm()
