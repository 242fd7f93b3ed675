"""What a trained parameter takes in the learner: DeepSpeed is told so by the learner, and the planner budgets it."""

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float32", "bfloat16"]
BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}
GRADIENTS: Dtype = "float32"
"""What gradients are added up in over micro batches and ranks, whatever the forward pass computes in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Of one parameter, over all ranks that share it."""

    weight: int
    gradient: int
    master: int  # the float32 weight that the optimizer steps on; 0 where the weight itself is float32
    moments: int  # AdamW's two

    @property
    def total(self) -> int:
        return self.weight + self.gradient + self.master + self.moments

    @property
    def offloaded(self) -> int:
        """What `--learner.offload` keeps in host memory."""
        return self.master + self.moments


def state_bytes(dtype: Dtype) -> StateBytes:
    """Under `--learner.dtype`.

    >>> state_bytes("bfloat16").total, state_bytes("bfloat16").offloaded
    (18, 12)
    """
    master = 0 if dtype == "float32" else BYTES["float32"]
    return StateBytes(weight=BYTES[dtype], gradient=BYTES[GRADIENTS], master=master, moments=2 * BYTES["float32"])
