"""Root-mean-square normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from srt.layers import native_ops


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension of any shape."""

    adds_one = False  # to the weight

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            # Not at the top: there is no Triton where there is no CUDA.
            from srt.layers.fused_norm import rms_norm

            return rms_norm(x, self.weight, self.eps, self.adds_one)
        library = native_ops.kernels_for(x, self.weight)
        if library is not None:
            return native_ops.rms_norm(library, x, self.weight, self.eps, self.adds_one)
        return self.normalize(x)

    def add(
        self, residual: torch.Tensor, update: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`residual + update` and its norm, of one shape: (norm, sum)."""
        if residual.is_cuda:
            from srt.layers.fused_norm import add_rms_norm

            return add_rms_norm(residual, update, self.weight, self.eps, self.adds_one)
        library = native_ops.kernels_for(residual, self.weight)
        if library is not None:
            return native_ops.add_rms_norm(
                library, residual, update, self.weight, self.eps, self.adds_one
            )
        total = residual + update
        return self.normalize(total), total

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """The definition, in torch."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class GemmaRMSNorm(RMSNorm):
    """Gemma stores `weight - 1`, and scales in float32 before it rounds to the type of x."""

    adds_one = True

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        weight = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.weight.shape, weight, self.eps).to(x.dtype)
