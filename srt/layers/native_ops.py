"""The small operations between products, as C++ kernels for float32 on a CPU.

Each computes what the torch code beside its caller does, in one pass over memory and one call: at
batch 1 the dispatch of torch's many small operations would cost as much as the products.
"""

from __future__ import annotations

import ctypes

import torch

from srt.native import native_library

# The numbers of csrc/elementwise.h.
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1, "gelu": 2}


def kernels_for(x: torch.Tensor, weight: torch.Tensor | None = None) -> ctypes.CDLL | None:
    """The kernels, if they take tensors like `x` and `weight`: float32 in host memory."""
    is_float32 = x.dtype is torch.float32 and (weight is None or weight.dtype is torch.float32)
    if x.is_cpu and is_float32:
        return native_library()
    return None


def rms_norm(
    library: ctypes.CDLL, x: torch.Tensor, weight: torch.Tensor, eps: float, adds_one: bool
) -> torch.Tensor:
    """x [..., size] / rms(x) * (weight + adds_one)."""
    x = x.contiguous()
    size = x.shape[-1]
    out = torch.empty_like(x)
    library.rg_rms_norm(
        x.data_ptr(), None, weight.data_ptr(), eps, adds_one, x.numel() // size, size, None,
        out.data_ptr(),
    )  # fmt: skip
    return out


def add_rms_norm(
    library: ctypes.CDLL,
    residual: torch.Tensor,
    update: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    adds_one: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of residual + update [..., size], and the sum."""
    residual, update = residual.contiguous(), update.contiguous()
    size = residual.shape[-1]
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    library.rg_rms_norm(
        residual.data_ptr(), update.data_ptr(), weight.data_ptr(), eps, adds_one,
        residual.numel() // size, size, total.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out, total


def gated_activation(library: ctypes.CDLL, gate_up: torch.Tensor, name: str) -> torch.Tensor:
    """gate_up [..., 2 * size] -> [..., size]; see GatedActivation."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=torch.float32)
    library.rg_gated(
        gate_up.data_ptr(), ACTIVATIONS[name], out.numel() // size, size, out.data_ptr()
    )
    return out


def rotate(
    library: ctypes.CDLL, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """x [n, heads, head_dim] with cos and sin [n, 1, head_dim / 2] float32; see `rotate` there."""
    n, heads, head_dim = x.shape
    if x.stride(2) != 1 or x.stride(1) != head_dim:
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty((n, heads, head_dim), dtype=torch.float32)
    library.rg_rotate(
        x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), n, heads, head_dim,
        out.data_ptr(),
    )  # fmt: skip
    return out


def argmax(library: ctypes.CDLL, logits: torch.Tensor) -> torch.Tensor:
    """The place [rows] int64 of each row's largest value, the lowest among equals; -1 for a row
    that holds NaN or +inf, or nothing but -inf."""
    logits = logits.contiguous()
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    library.rg_argmax(logits.data_ptr(), *logits.shape, out.data_ptr())
    return out
