"""RMS normalisation in one pass over memory, alone or with the addition before it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# Elements of a program's tile when rows are short: a head of 64 or 128 alone would waste a warp.
MIN_TILE = 1024
MAX_SIZE = 65536


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, add_one: bool = False
) -> torch.Tensor:
    """RMSNorm (or, if `add_one`, GemmaRMSNorm) over the last dimension of x, whose elements must
    lie side by side; the other dimensions may have gaps. Returns the shape and type of x,
    contiguous. Computed in float32 and rounded once. A row's result does not depend on the other
    rows."""
    out, _ = _launch(x, None, weight, eps, add_one)
    return out


def add_rms_norm(
    residual: torch.Tensor,
    update: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    add_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`total = residual + update` and its RMSNorm: (norm, total), all of one shape. The total is
    rounded to its type before it is normalised, so that fusing does not change the result."""
    out, total = _launch(update, residual, weight, eps, add_one)
    assert total is not None
    return out, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    add_one: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    size = x.shape[-1]
    assert size <= MAX_SIZE, f"RMSNorm of {size} elements; a program holds at most {MAX_SIZE}"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(out)
    num_rows = x.numel() // size
    if num_rows == 0:
        return out, total
    # A row is x[outer, inner]; inner are the heads when a head is normalised.
    rows_of_x = _as_rows(x)
    rows_of_residual = rows_of_x if residual is None else _as_rows(residual)
    block = triton.next_power_of_2(size)
    block_rows = max(1, MIN_TILE // block)
    rms_norm_kernel[(triton.cdiv(num_rows, block_rows),)](
        rows_of_x,
        None if residual is None else rows_of_residual,
        weight,
        out,
        total,
        num_rows,
        rows_of_x.stride(0),
        rows_of_x.stride(1),
        rows_of_residual.stride(0),
        rows_of_residual.stride(1),
        eps,
        INNER=rows_of_x.shape[1],
        SIZE=size,
        ADD_ONE=add_one,
        BLOCK=block,
        BLOCK_ROWS=block_rows,
        num_warps=_num_warps(block),
    )
    return out, total


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """A view [outer, inner, size] of x; a copy only if neither its shape nor its gaps allow one."""
    x = x.reshape(-1, 1, x.shape[-1]) if x.ndim < 3 else x.flatten(0, -3)
    return x if x.stride(-1) == 1 else x.contiguous()


def _num_warps(block: int) -> int:
    """16 elements a thread, which leaves the SM room for another program or two."""
    return min(32, max(4, block // 512))


# Compiled once for any number of rows, not again for one, and for multiples of 16.
@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,  # [num_rows / INNER, INNER, SIZE]
    residual_ptr,  # the same, or None
    weight_ptr,  # [SIZE]
    out_ptr,  # [num_rows, SIZE], contiguous
    total_ptr,  # the same, or None
    num_rows,
    stride_x_outer,
    stride_x_inner,
    stride_residual_outer,
    stride_residual_inner,
    eps,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    ADD_ONE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Grid (cdiv(num_rows, BLOCK_ROWS),). A tile is [BLOCK_ROWS, BLOCK]."""
    # 64 bits: 8 k tokens x 256 k elements are too many for 32.
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK)
    keep = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    outer, inner = row // INNER, row % INNER
    x_row = outer * stride_x_outer + inner * stride_x_inner
    x = tl.load(x_ptr + x_row[:, None] + column[None, :], mask=keep, other=0.0).to(tl.float32)
    out = row[:, None] * SIZE + column[None, :]
    if residual_ptr is not None:
        residual_row = outer * stride_residual_outer + inner * stride_residual_inner
        residual = residual_ptr + residual_row[:, None] + column[None, :]
        x += tl.load(residual, mask=keep, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + out, total, mask=keep)
        x = total.to(tl.float32)
    mean_square = tl.sum(x * x, 1) / SIZE
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if ADD_ONE:
        weight += 1.0
    normed = x * tl.rsqrt(mean_square + eps)[:, None] * weight[None, :]
    tl.store(out_ptr + out, normed.to(out_ptr.dtype.element_ty), mask=keep)


def _aot_case(size: int, inner: int = 1, add: bool = False, dtype: str = "bf16") -> dict[str, Any]:
    block = triton.next_power_of_2(size)
    pointer = f"*{dtype}"
    pointers = {"residual_ptr": pointer, "total_ptr": pointer} if add else {}
    constants = {} if add else {"residual_ptr": None, "total_ptr": None}
    strides = {
        "stride_x_outer": "i32:16",
        "stride_x_inner": "i32:16",
        "stride_residual_outer": "i32:16",
        "stride_residual_inner": "i32:16",
    }
    shape = f"{inner}x{size}" if inner > 1 else f"{size}"
    return {
        "kernel": rms_norm_kernel,
        "name": f"{'add + ' if add else ''}rms_norm {shape} {dtype}",
        "signature": {
            **dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), pointer),
            **pointers,
            **strides,
            "num_rows": "i32",
            "eps": "fp32",
        },
        "constexprs": {
            **constants,
            "INNER": inner,
            "SIZE": size,
            "ADD_ONE": False,
            "BLOCK": block,
            "BLOCK_ROWS": max(1, MIN_TILE // block),
        },
        "num_warps": _num_warps(block),
    }


AOT_CASES = [
    _aot_case(576, add=True),
    _aot_case(4096),
    _aot_case(4096, add=True),
    _aot_case(8192, add=True),
    _aot_case(8192, add=True, dtype="fp32"),
    _aot_case(16384, add=True),
    _aot_case(128, inner=32),
    _aot_case(256, inner=4),
]
