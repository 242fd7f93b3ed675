"""AdamW that can refuse an update."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")


class RefusingAdamW(torch.optim.AdamW):
    """AdamW whose `step` changes nothing if `refuse` is set or, with `clip_here`, if a gradient is not finite.

    The optimizer itself refuses, because DeepSpeed calls `step` within its own bookkeeping, which must always run.
    Without ZeRO, DeepSpeed does not clip here, so this class does.
    """

    refuse: bool = False
    clip_here: float | None = None  # without ZeRO: maximum norm; 0: no clipping
    grad_norm: float = 0.0  # of the last step, set with `clip_here`
    refused: bool = False

    def step(self, closure: Any = None) -> Any:
        self.refused = self.refuse
        if self.clip_here is not None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            limit = self.clip_here or float("inf")
            self.grad_norm = float(nn.utils.clip_grad_norm_(parameters, limit))
            self.refused = self.refused or not torch.isfinite(torch.tensor(self.grad_norm)).item()
        return None if self.refused else super().step(closure)

    def fill_state(self, parameters: Iterable[Tensor]) -> None:
        """Create zero moments for parameters that have none yet."""
        for parameter in parameters:
            if "step" not in self.state[parameter]:
                at = parameter.device if self.defaults["fused"] else "cpu"
                self.state[parameter]["step"] = torch.zeros((), dtype=torch.float32, device=at)
                for moment in MOMENTS:
                    self.state[parameter][moment] = torch.zeros_like(parameter)

    def set_steps(self, step: int) -> None:
        """Set Adam's step count, which its bias correction uses."""
        for state in self.state.values():
            state["step"].fill_(step)
