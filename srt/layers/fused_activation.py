"""Gated activations in one pass over memory."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from srt.model_config import ACTIVATIONS

BLOCK = 1024
SQRT_HALF = tl.constexpr(math.sqrt(0.5))
SQRT_8_BY_PI = tl.constexpr(math.sqrt(8 / math.pi))


def gated_activation(gate_up: torch.Tensor, name: str) -> torch.Tensor:
    """GatedActivation: [.., 2 * size] -> [.., size]. The elements of a row of `gate_up` must lie
    side by side. Computed in float32 and rounded once, not also between activation and product."""
    assert name in ACTIVATIONS, f"unknown activation {name}"
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    if out.numel():
        gated_activation_kernel[(len(rows), triton.cdiv(size, BLOCK))](
            rows, out, size, rows.stride(0), NAME=name, BLOCK=BLOCK, num_warps=4
        )
    return out


@triton.jit
def gated_activation_kernel(
    gate_up_ptr,  # [n, 2 * size]
    out_ptr,  # [n, size], contiguous
    size,
    stride_gate_up_n,
    NAME: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (n, cdiv(size, BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = column < size
    gate_ptr = gate_up_ptr + row * stride_gate_up_n + column
    gate = tl.load(gate_ptr, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + size, mask=keep, other=0.0).to(tl.float32)
    if NAME == "silu":
        activated = gate * tl.sigmoid(gate)
    elif NAME == "gelu_pytorch_tanh":
        # (1 + tanh(u)) / 2 is sigmoid(2 u).
        activated = gate * tl.sigmoid((gate + 0.044715 * gate * gate * gate) * SQRT_8_BY_PI)
    else:
        activated = 0.5 * gate * (1.0 + tl.erf(gate * SQRT_HALF))
    product = (activated * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * size + column, product, mask=keep)


def _aot_case(name: str, dtype: str) -> dict[str, Any]:
    return {
        "kernel": gated_activation_kernel,
        "name": f"gated {name} {dtype}",
        "signature": {
            "gate_up_ptr": f"*{dtype}",
            "out_ptr": f"*{dtype}",
            "size": "i32:16",
            "stride_gate_up_n": "i32:16",
        },
        "constexprs": {"NAME": name, "BLOCK": BLOCK},
        "num_warps": 4,
    }


AOT_CASES = [
    _aot_case("silu", "bf16"),
    _aot_case("silu", "fp32"),
    _aot_case("gelu_pytorch_tanh", "bf16"),
    _aot_case("gelu", "bf16"),
]
