"""Root-mean-square normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension of any shape."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class GemmaRMSNorm(RMSNorm):
    """Gemma stores `weight - 1`, and scales in float32 before it rounds to the type of x."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.weight.shape, weight, self.eps).to(x.dtype)
