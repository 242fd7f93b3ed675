"""One version at a time, being made ready beside the weights that serve: begun, asked about, then taken or given up.

Runs in vLLM's worker processes.
"""

from collections.abc import Iterator, Set
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event

from torch import nn
from vllm.logger import init_logger

from actors.weights.prepared import NotPrepared, PreparedWeights
from actors.weights.tensors import TensorBucket, add_checksum

logger = init_logger(__name__)


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


@dataclass(frozen=True, slots=True)
class Prepared:
    """A version that is ready to be handed over."""

    path: str  # of the file it lies in
    weights: PreparedWeights
    missing: set[str]  # parameters that did not come
    checksum: LoadedChecksum


class Preparing:
    """The version that is made ready for one model."""

    def __init__(self, model: nn.Module, parameters: Set[str]) -> None:
        """`parameters`: names of all that a version has to bring."""
        self._model = model
        self._parameters = parameters
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights-beside")
        self._version: Future[Prepared] | None = None
        self._given_up = Event()
        self._can = True

    def begin(self, path: str, buckets: Iterator[TensorBucket], checksum: LoadedChecksum) -> bool:
        """Begin with the weights of a file; whether that can be done for this model."""
        self.give_up()
        if self._can:
            self._version = self._thread.submit(self._prepare, path, buckets, checksum, self._given_up)
        return self._can

    def ready(self) -> bool | None:
        """Whether weights are; None while they are being made so."""
        if self._version is None or not self._version.done():
            return None if self._version else False
        failed = self._version.exception()
        missing = () if failed else self._version.result().missing
        if not (failed or missing):
            return True
        self._can = self._can and not isinstance(failed, NotPrepared)
        logger.warning("weights are loaded in place, which pauses the model for longer: %r", failed or missing)
        self.give_up()
        return False

    def take(self, path: str) -> Prepared:
        """The version of this file, which is nobody else's from now on. Raises `ValueError` where there is none."""
        version = self._version.result() if self._version else None
        if version is None or version.path != path:
            raise ValueError(f"the weights of {path} were not made ready")
        self._version = None
        return version

    def give_up(self) -> None:
        """Let go of a version that nobody asked for in the end."""
        self._given_up.set()
        self._given_up = Event()
        if self._version is not None:
            self._version.add_done_callback(_release)
        self._version = None

    def close(self) -> None:
        self.give_up()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _prepare(
        self, path: str, buckets: Iterator[TensorBucket], checksum: LoadedChecksum, given_up: Event
    ) -> Prepared:
        ready = PreparedWeights(self._model)
        try:
            missing = set(self._parameters)
            for bucket in buckets:
                missing -= ready.load(bucket.weights())
                checksum.add(bucket)
                if given_up.is_set():
                    raise CancelledError
            ready.finish()
        except BaseException:
            ready.release()
            raise
        return Prepared(path, ready, missing, checksum)


def _release(version: "Future[Prepared]") -> None:
    if not version.cancelled() and version.exception() is None:
        version.result().weights.release()
