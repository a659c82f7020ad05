"""Extend attention: many new tokens of ragged requests over cached prefixes, causal.

A program computes a tile: some consecutive new tokens of one request, times the query heads that
share a KV head, packed into the rows of one matrix. The host lists the tiles. New keys and values
are in the cache before the kernel starts, and all are read through the request's row of
`req_to_token`: a gather costs no more instructions than contiguous rows do (docs/kernels.md), and
one grid of key tiles from position 0 adds a token's weights in the same order, however its prompt
was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from srt.layers.attention_tile import (
    ALL_VISIBLE,
    CAUSAL,
    Tile,
    attend,
    dot_precision,
    for_tensor_core,
    softmax_scale,
)


def extend_tile(
    head_dim: int,
    itemsize: int,
    group_size: int,
    window: int | None,
    capability: tuple[int, int],
) -> Tile:
    """`itemsize` of a query element; `group_size` query heads share a KV head; `capability` of the
    device. Two warpgroups feed the tensor cores of 9.x and 10.x; the others hold operands in
    registers and have less shared memory. The rows do not depend on the window."""
    warpgroups = capability[0] in (9, 10)
    if itemsize == 4:
        # Plain multiply-adds: small tiles, since every operand is in registers.
        rows, keys = (64, 32) if head_dim <= 64 else (32, 16)
    elif head_dim <= 64:
        rows, keys = 128, 64
    elif head_dim <= 128:
        # The loop for the window's edge takes registers, too: 128 keys would spill in it.
        rows, keys = 128, (64 if window else 128) if warpgroups else 32
    else:
        rows, keys = 128 if warpgroups else 64, 32
    return Tile(max(rows, triton.next_power_of_2(group_size)), keys, warps=8, stages=2)


@triton.jit
def extend_kernel(
    q_ptr,  # [n, num_heads, D]
    k_ptr,  # [num_slots, num_kv_heads, D], as v
    v_ptr,
    out_ptr,  # [n, num_heads, D]
    tiles_ptr,  # [num_tiles, 3] int32: request, row of q of its first new token, tile's first token
    table_ptr,  # req_to_token [rows, context_len] int32
    table_row_ptr,  # [batch] int64
    seq_lens_ptr,  # [batch] int64, tokens once this pass has run
    extend_lens_ptr,  # [batch] int64, new ones among them
    stride_table,
    stride_q,
    stride_out,
    scale,
    v_scale,
    KV_STRIDE: tl.constexpr,
    G: tl.constexpr,  # query heads of a KV head
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    LOGIT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (num_kv_heads, num_tiles).

    keys of the tile:  |  cut by the window  |   seen by every row   |  cut by causality  |
                     first               all_from                  all_to               last
    """
    TOKENS: tl.constexpr = BLOCK_M // G
    kv_head = tl.program_id(0)
    tile_ptr = tiles_ptr + tl.program_id(1) * 3
    b = tl.load(tile_ptr)
    q_start = tl.load(tile_ptr + 1).to(tl.int64)
    start = tl.load(tile_ptr + 2)
    extend_len = tl.load(extend_lens_ptr + b).to(tl.int32)
    prefix_len = tl.load(seq_lens_ptr + b).to(tl.int32) - extend_len

    row = tl.arange(0, BLOCK_M)
    token = start + row // G
    heads = kv_head * G + row % G
    real = (token < extend_len) & (row < TOKENS * G)
    d = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (d < D)[None, :]
    columns = (heads * D)[:, None] + d[None, :]
    q = tl.load(q_ptr + (q_start + token)[:, None] * stride_q + columns, mask=inside, other=0.0)
    q = for_tensor_core(q, k_ptr.dtype.element_ty)
    q_pos = prefix_len + token
    slots_ptr = table_ptr + tl.load(table_row_ptr + b) * stride_table
    k_head = k_ptr + kv_head * D
    v_head = v_ptr + kv_head * D

    lowest = prefix_len + start  # positions of the first and the last query of the tile
    highest = prefix_len + tl.minimum(start + TOKENS, extend_len) - 1
    last = highest + 1
    first = 0
    all_from = 0
    if WINDOW > 0:
        first = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        cut = tl.maximum(highest - WINDOW + 1, 0)
        all_from = tl.minimum(tl.cdiv(cut, BLOCK_N) * BLOCK_N, last)
    all_to = tl.maximum((lowest + 1) // BLOCK_N * BLOCK_N, all_from)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if WINDOW > 0:
        m, total, acc = attend(
            q, m, total, acc, first, all_from, last, q_pos, slots_ptr, k_head, v_head, scale,
            CAUSAL, WINDOW, LOGIT_CAP, False, KV_STRIDE, D, BLOCK_D, BLOCK_N, PRECISION,
        )  # fmt: skip
    m, total, acc = attend(
        q, m, total, acc, all_from, all_to, last, q_pos, slots_ptr, k_head, v_head, scale,
        ALL_VISIBLE, WINDOW, LOGIT_CAP, False, KV_STRIDE, D, BLOCK_D, BLOCK_N, PRECISION,
    )  # fmt: skip
    m, total, acc = attend(
        q, m, total, acc, all_to, last, last, q_pos, slots_ptr, k_head, v_head, scale,
        CAUSAL, WINDOW, LOGIT_CAP, False, KV_STRIDE, D, BLOCK_D, BLOCK_N, PRECISION,
    )  # fmt: skip
    # A padding row may have seen nothing.
    acc = acc * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (q_start + token)[:, None] * stride_out + columns, out, mask=inside)


def extend_tiles(
    seq_lens: Sequence[int], extend_lens: Sequence[int], tokens: int
) -> npt.NDArray[np.int32]:
    """Tiles [num_tiles, 3] of `tokens` new tokens at most, as extend_kernel reads them, those with
    most keys first: the long ones then do not finish alone."""
    lens = np.asarray(extend_lens, dtype=np.int64)
    counts = -(-lens // tokens)
    request = np.repeat(np.arange(len(lens)), counts)
    ends = np.cumsum(counts)
    start = (np.arange(len(request)) - (ends - counts)[request]) * tokens
    q_start = (np.cumsum(lens) - lens)[request]
    keys = (np.asarray(seq_lens, dtype=np.int64) - lens)[request] + start
    order = np.argsort(-keys, kind="stable")
    return np.stack([request, q_start, start], axis=1)[order].astype(np.int32)


def extend_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    tiles: torch.Tensor,
    tile: Tile,
    *,
    scale: float,
    window: int | None = None,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Each new token's query in q [n, num_heads, head_dim] attends to its request's keys up to and
    including its own, or the last `window` of them, which must all be in the cache.

    `tiles` [num_tiles, 3] int32 is extend_tiles() with `tile.rows // group size` tokens. Keys and
    values are [num_slots, num_kv_heads, head_dim] in q's type or float8_e4m3fn, and stand for their
    bytes times `k_scale` and `v_scale`. Returns [n, num_heads, head_dim]. Never waits for the
    device.
    """
    n, num_heads, head_dim = q.shape
    num_kv_heads = k_buffer.shape[1]
    out = torch.empty((n, num_heads, head_dim), dtype=q.dtype, device=q.device)
    extend_kernel[(num_kv_heads, len(tiles))](
        q,
        k_buffer,
        v_buffer,
        out,
        tiles,
        req_to_token,
        req_pool_indices,
        seq_lens,
        extend_lens,
        req_to_token.stride(0),
        q.stride(0),
        out.stride(0),
        softmax_scale(scale, logit_cap, k_scale),
        v_scale,
        KV_STRIDE=k_buffer.stride(0),
        G=num_heads // num_kv_heads,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        WINDOW=window or 0,
        LOGIT_CAP=logit_cap,
        PRECISION=dot_precision(q.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=True,  # the scale is meant to be free; Triton 3.10 has this off
    )
    return out


def _aot_case(
    dtype: str,
    head_dim: int,
    group_size: int,
    arch: int,
    kv: str = "",
    window: int = 0,
    cap: float = 0.0,
    max_spill: int = 0,
) -> dict[str, Any]:
    kv = kv or dtype
    itemsize = 4 if dtype == "fp32" else 2
    tile = extend_tile(head_dim, itemsize, group_size, window, divmod(arch, 10))
    name = f"extend {dtype} d{head_dim} g{group_size}"
    name += f" kv {kv}" * (kv != dtype) + f" window {window}" * bool(window) + " cap" * bool(cap)
    pointers = {"q_ptr": dtype, "k_ptr": kv, "v_ptr": kv, "out_ptr": dtype, "tiles_ptr": "i32"}
    pointers |= {"table_ptr": "i32", "table_row_ptr": "i64", "seq_lens_ptr": "i64"}
    pointers |= {"extend_lens_ptr": "i64"}
    strides = dict.fromkeys(("stride_table", "stride_q", "stride_out"), "i32:16")
    return {
        "kernel": extend_kernel,
        "name": f"{name} m{tile.rows} n{tile.keys}",
        "signature": {key: f"*{value}" for key, value in pointers.items()}
        | strides
        | {"scale": "fp32", "v_scale": "fp32"},
        "constexprs": {
            "KV_STRIDE": 8 * head_dim,
            "G": group_size,
            "D": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.keys,
            "WINDOW": window,
            "LOGIT_CAP": cap,
            "PRECISION": "ieee" if dtype == "fp32" else "tf32",
        },
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": True,
        "arch": (arch,),
        "wgmma": dtype != "fp32",
        "max_spill": max_spill,
    }


def _aot_cases() -> list[dict[str, Any]]:
    cases = []
    for arch in (80, 89, 90, 100):
        for head_dim in (80, 96, 128, 256):
            cases.append(_aot_case("bf16", head_dim, 4, arch))
        for head_dim in (64, 128, 256):
            cases.append(_aot_case("fp32", head_dim, 4, arch))
        cases.append(_aot_case("fp16", 128, 4, arch))
        cases.append(_aot_case("bf16", 128, 7, arch))
        cases.append(_aot_case("bf16", 128, 4, arch, window=4096))
        cases.append(_aot_case("bf16", 128, 4, arch, cap=50.0))
        cases.append(_aot_case("bf16", 256, 2, arch, window=4096, cap=50.0))
        # A few registers are put aside once a tile, outside of the loops.
        cases.append(_aot_case("bf16", 64, 4, arch, max_spill=8 if arch == 100 else 0))
        if arch >= 89:  # below, the compiler refuses e4m3
            cases.append(_aot_case("bf16", 64, 4, arch, kv="fp8e4nv"))
            cases.append(_aot_case("bf16", 128, 4, arch, kv="fp8e4nv"))
            cases.append(
                _aot_case("bf16", 256, 4, arch, "fp8e4nv", max_spill=80 if arch == 90 else 0)
            )
    return cases


AOT_CASES = _aot_cases()
