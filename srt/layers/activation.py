"""Gated activations of the feed-forward layers (Shazeer 2020)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from srt.layers import native_ops


class GatedActivation(nn.Module):
    """[n, 2 * size] -> [n, size]: the activation of the first half times the second half. `name` is
    one of model_config.ACTIVATIONS."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.is_cuda:
            # Not at the top: there is no Triton where there is no CUDA.
            from srt.layers.fused_activation import gated_activation

            return gated_activation(gate_up, self.name)
        library = native_ops.kernels_for(gate_up)
        if library is not None:
            return native_ops.gated_activation(library, gate_up, self.name)
        gate, up = gate_up.chunk(2, dim=-1)
        if self.name == "silu":
            return F.silu(gate).mul_(up)
        if self.name == "gelu_pytorch_tanh":
            return F.gelu(gate, approximate="tanh").mul_(up)
        assert self.name == "gelu", f"unknown activation {self.name}"
        return F.gelu(gate).mul_(up)
