"""A product with weights whose rows do not depend on how many rows there are.

Libraries choose another kernel, and with it another order of addition, for another number of rows.
Here every row meets the same tile and adds up its inputs in the same order, whoever is beside it.
Thinking Machines' "Defeating Nondeterminism in LLM Inference" (2025) says why this is what it takes
for a request to get the same tokens in any batch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 64
FLOAT32_BLOCK_K = 32  # whose operands take twice the shared memory


def invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias` for x [n, in_size], weight [out_size, in_size], bias [out_size], all of
    one type. Adds up in float32 and rounds once."""
    n, in_size = x.shape
    out_size = weight.shape[0]
    assert weight.shape[1] == in_size, f"weight {tuple(weight.shape)} for {in_size} inputs"
    assert x.dtype == weight.dtype, f"x is {x.dtype}, weight {weight.dtype}"
    if x.stride(1) != 1:
        x = x.contiguous()
    assert weight.stride(1) == 1, "inputs of a weight must lie side by side"
    out = torch.empty((n, out_size), dtype=x.dtype, device=x.device)
    if n == 0:
        return out
    # Weights are what costs: programs that share a tile of them run side by side.
    invariant_linear_kernel[(triton.cdiv(n, BLOCK_M), triton.cdiv(out_size, BLOCK_N))](
        x,
        weight,
        bias,
        out,
        n,
        x.stride(0),
        weight.stride(0),
        OUT_SIZE=out_size,
        IN_SIZE=in_size,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=FLOAT32_BLOCK_K if x.dtype == torch.float32 else BLOCK_K,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=3,
    )
    return out


def invariant_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The same in float64, rounded once."""
    out = x.double() @ weight.double().T
    return (out if bias is None else out + bias.double()).to(x.dtype)


# Not compiled again for one row or for multiples of 16: that might round differently.
@triton.jit(do_not_specialize=["n"])
def invariant_linear_kernel(
    x_ptr,  # [n, IN_SIZE]
    weight_ptr,  # [OUT_SIZE, IN_SIZE]
    bias_ptr,  # [OUT_SIZE], or None
    out_ptr,  # [n, OUT_SIZE], contiguous
    n,
    stride_x,
    stride_weight,
    OUT_SIZE: tl.constexpr,
    IN_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (cdiv(n, BLOCK_M), cdiv(OUT_SIZE, BLOCK_N))."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x = x_ptr + row[:, None] * stride_x + k[None, :]
    weight = weight_ptr + column[None, :] * stride_weight + k[:, None]
    is_row, is_column = (row < n)[:, None], (column < OUT_SIZE)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN_SIZE, BLOCK_K):
        inside = start + k < IN_SIZE
        a = tl.load(x + start, mask=is_row & inside[None, :], other=0.0)
        b = tl.load(weight + start, mask=is_column & inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column < OUT_SIZE, other=0.0)
        total += bias.to(tl.float32)[None, :]
    out = out_ptr + row[:, None] * OUT_SIZE + column[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_row & is_column)


def _aot_case(
    out_size: int, in_size: int, dtype: str = "bf16", bias: bool = False
) -> dict[str, Any]:
    pointer = f"*{dtype}"
    signature = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), pointer)
    constants: dict[str, Any] = {}
    if bias:
        signature["bias_ptr"] = pointer
    else:
        constants["bias_ptr"] = None
    is_float32 = dtype == "fp32"
    return {
        "kernel": invariant_linear_kernel,
        "name": f"invariant linear {in_size} -> {out_size} {dtype}{' + bias' * bias}",
        "signature": signature | {"n": "i32", "stride_x": "i32:16", "stride_weight": "i32:16"},
        "constexprs": {
            **constants,
            "OUT_SIZE": out_size,
            "IN_SIZE": in_size,
            "BLOCK_M": BLOCK_M,
            "BLOCK_N": BLOCK_N,
            "BLOCK_K": FLOAT32_BLOCK_K if is_float32 else BLOCK_K,
            "PRECISION": "ieee" if is_float32 else "tf32",
        },
        "num_warps": 4,
        "num_stages": 3,
    }


AOT_CASES = [
    _aot_case(6144, 4096),
    _aot_case(4096, 14336),
    _aot_case(1152, 896, bias=True),
    _aot_case(1536, 576, dtype="fp32"),
]
