"""A rank's weights in buckets, on its device or on the host: what it sends to engines."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from actors.weights.buckets import BucketPlan, WeightBucket, pack, plan_buckets, size_of
from actors.weights.tensors import TensorBucket, filled, named_array

if TYPE_CHECKING:
    from actors.learner.state import LearnerState


class ServedWeights:
    """The `Weights` of `actors.weights.transfer`: about a bucket is gathered at a time, nobody holds a whole model."""

    def __init__(self, state: "LearnerState", bucket_bytes: int, *, everywhere: bool) -> None:
        """`everywhere`: every rank has the buckets, and not the first alone."""
        self._state = state
        self._bucket_bytes = bucket_bytes
        self._everywhere = everywhere

    @property
    def plan(self) -> BucketPlan:
        return plan_buckets(self._state.served_entries(), self._bucket_bytes)

    def on_host(self) -> Iterator[WeightBucket]:
        parameters = (named_array(name, weight) for name, weight in self._state.served(self._bucket_bytes))
        return pack(parameters, self._bucket_bytes)

    def on_device(self, data: Tensor) -> Iterator[TensorBucket]:
        parameters = self._state.served(self._bucket_bytes, everywhere=self._everywhere)
        for entries in self.plan:
            yield filled(entries, data[: size_of(entries)], parameters)
        for name, _ in parameters:  # the last group's end is a collective too
            raise ValueError(f"{name} is not in the plan")

    def take_part(self) -> None:
        """Gather with the others, and keep nothing."""
        for _ in self._state.served(self._bucket_bytes, everywhere=False):
            pass
