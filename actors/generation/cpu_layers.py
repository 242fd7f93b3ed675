"""Layers vLLM runs as a chain of small torch operations on CPUs, as the one operation its own library has for them.

With a small model those chains are a seventh of a decode step. Importing this module in a worker replaces them through
vLLM's registry of out-of-tree layers; the values stay within rounding (the log-prob tests hold them to it).
"""

import torch
from vllm.model_executor.layers.layernorm import RMSNorm


@RMSNorm.register_oot(name="RMSNorm")
class CpuRMSNorm(RMSNorm):
    """Root-mean-square norm, the residual added first where there is one."""

    def forward_cpu(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if self.variance_size_override is not None or not self.has_weight or x.dtype != self.weight.dtype:
            return self.forward_native(x, residual)
        x = x.contiguous()  # the kernels read rows side by side; queries and keys arrive as slices of one tensor
        if residual is not None:
            torch.ops._C.fused_add_rms_norm(x, residual, self.weight, self.variance_epsilon)
            return x, residual
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, self.weight, self.variance_epsilon)
        return out
