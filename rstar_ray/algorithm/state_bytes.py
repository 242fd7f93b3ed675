"""The learner's memory per trained parameter: the learner passes it to DeepSpeed, and the planner budgets it."""

from dataclasses import dataclass

from rstar_ray.config.machines import Dtype

BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}
GRADIENTS: Dtype = "float32"
"""Precision in which gradients are summed over micro batches and ranks, whatever the forward pass computes in."""
REDUCE_BUCKET = 100_000_000
"""Gradients that ZeRO sums over ranks at a time; DeepSpeed's default 5e8 would take 2 GB of every GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per parameter, over all ranks that share it."""

    weight: int
    gradient: int
    master: int  # the float32 weight that the optimizer steps on; ZeRO has one even of a float32 weight
    moments: int  # AdamW's two

    @property
    def total(self) -> int:
        return self.weight + self.gradient + self.master + self.moments

    @property
    def offloaded(self) -> int:
        """What `--learner.offload` keeps in host memory: gradients twice, as ZeRO-3's flat buffer and as those of the
        float32 weights (DeepSpeed 0.19.8, stage3.py, `_setup_for_real_optimizer` and `initialize_optimizer_states`)."""
        return 2 * self.gradient + self.master + self.moments


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """Bytes of one rank, by purpose."""

    weights: float
    gradients: float
    master: float
    moments: float
    bucket: float  # of `REDUCE_BUCKET`; no share of the model

    @property
    def state(self) -> float:
        return self.weights + self.gradients + self.master + self.moments

    @property
    def offloaded(self) -> float:
        return self.gradients + self.master + self.moments


def state_bytes(dtype: Dtype, zero: int) -> StateBytes:
    """Under `--learner.dtype` and `--learner.zero`.

    >>> state_bytes("bfloat16", 3).total, state_bytes("bfloat16", 3).offloaded
    (18, 20)
    """
    master = BYTES["float32"] if zero else 0
    return StateBytes(weight=BYTES[dtype], gradient=BYTES[GRADIENTS], master=master, moments=2 * BYTES["float32"])


def gradient_bytes(dtype: Dtype, zero: int) -> int:
    """Most gradient bytes per parameter: ZeRO-1 holds those of a backward pass, in their own precision, until
    it ends.
    """
    both = zero == 1 and dtype == "bfloat16"
    return BYTES[GRADIENTS] + (BYTES[dtype] if both else 0)


def rank_bytes(parameters: float, *, dtype: Dtype, zero: int, ranks: int) -> RankBytes:
    """What a rank holds of so many trained parameters while gradients are added up.

    ZeRO spreads the optimizer's state over the ranks (1 and above), gradients too (2 and above), weights too (3). In
    float32 ZeRO-1 frees other ranks' gradients as well once they are added up; those of a model that fits into
    one bucket never leave it.

    >>> rank_bytes(1e9, dtype="bfloat16", zero=3, ranks=4).state / 1e9
    4.5
    """
    each = state_bytes(dtype, zero)
    in_bucket = zero == 1 and dtype == "float32" and parameters <= REDUCE_BUCKET
    spread = zero >= 2 or (zero == 1 and dtype == "float32")
    return RankBytes(
        weights=parameters * each.weight / (ranks if zero == 3 else 1),
        gradients=0.0 if in_bucket else parameters * gradient_bytes(dtype, zero) / (ranks if spread else 1),
        master=parameters * each.master / (ranks if zero else 1),
        moments=parameters * each.moments / (ranks if zero else 1),
        bucket=float(REDUCE_BUCKET * BYTES[GRADIENTS]) if zero == 3 or in_bucket else 0.0,
    )
