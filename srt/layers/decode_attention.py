"""Decode attention: one query token a request, its keys split over programs (flash decoding).

The work is a list of items. An item is a run of keys of one request; a program computes an item for
the query heads that share one KV head. How many items a request gets is decided on the device, from
all lengths, once a step: the host never waits, and a CUDA graph replays it for new lengths. Flash
decoding is by Dao, Haziza, Massa and Sizov (2023); a list rather than a grid of (request, split)
means that one long request among many short ones is cut as finely as it deserves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from srt.layers.attention_tile import (
    ALL_VISIBLE,
    UP_TO_END,
    Tile,
    attend,
    dot_precision,
    for_tensor_core,
    softmax_scale,
)

MIN_SPLIT = 128  # keys; below this a split costs more than it gains
SPLIT_STEP = 64  # keys; a multiple of every tile, so that equal shares in whole tiles are not empty
# Programs that an SM should get at least, so that it always has loads in flight.
PROGRAMS_PER_SM = 4
# In batch-invariant mode a request's splits depend on its own length only.
INVARIANT_SPLIT = 512  # keys
INVARIANT_MAX_SPLITS = 16
MAX_ROWS = 32  # query heads of a program; 64 spill on sm_80
REDUCE_BLOCK = 16  # splits that the reduce kernel reads at once


def decode_tile(head_dim: int, kv_itemsize: int, group_size: int) -> Tile:
    """`group_size`: query heads that share a KV head. A tensor core wants at least 16 rows."""
    rows = min(MAX_ROWS, max(16, triton.next_power_of_2(group_size)))
    keys = 64 if head_dim <= 128 else 32
    if kv_itemsize == 4:
        keys = 32 if head_dim <= 64 else 16
    return Tile(rows=rows, keys=keys, warps=4, stages=3 if kv_itemsize == 1 else 2)


@dataclass(frozen=True)
class DecodeScratch:
    """Buffers of all decode passes of up to `max_batch` rows; their addresses never change, so that
    a CUDA graph may hold them. A stream needs its own."""

    items: torch.Tensor  # [num_items] int32, request of each item, -1 for none
    first_item: torch.Tensor  # [max_batch + 1] int32, where each request's items begin
    partial: torch.Tensor  # [num_items, num_heads, head_dim] float32
    log_sum: torch.Tensor  # [num_items, num_heads] float32, log2 of an item's sum of weights
    programs: int  # that the machine should get at least
    batch_invariant: bool

    @classmethod
    def allocate(
        cls,
        max_batch: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_sms: int,
        batch_invariant: bool,
        device: torch.device,
    ) -> DecodeScratch:
        programs = num_sms * PROGRAMS_PER_SM
        num_items = _num_items(max_batch, num_heads, num_kv_heads, programs, batch_invariant)

        def buffer(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            items=buffer(torch.int32, num_items),
            first_item=buffer(torch.int32, max_batch + 1),
            partial=buffer(torch.float32, num_items, num_heads, head_dim),
            log_sum=buffer(torch.float32, num_items, num_heads),
            programs=programs,
            batch_invariant=batch_invariant,
        )

    def for_another_window(self) -> DecodeScratch:
        """A second plan over the same partial results, which live for one layer only."""
        return replace(
            self,
            items=torch.empty_like(self.items),
            first_item=torch.empty_like(self.first_item),
        )


def scratch_bytes(
    max_batch: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_sms: int,
    batch_invariant: bool,
) -> int:
    """Bytes of a DecodeScratch, but for a plan or two more, which are small."""
    programs = num_sms * PROGRAMS_PER_SM
    num_items = _num_items(max_batch, num_heads, num_kv_heads, programs, batch_invariant)
    return 4 * (num_items * (num_heads * (head_dim + 1) + 1) + max_batch + 1)


def _head_tiles(num_heads: int, num_kv_heads: int) -> int:
    """Programs an item has: tiles of query heads, of which each has one KV head."""
    group_size = num_heads // num_kv_heads
    rows = min(MAX_ROWS, max(16, triton.next_power_of_2(group_size)))
    return num_kv_heads * triton.cdiv(group_size, rows)


def _num_items(
    batch: int, num_heads: int, num_kv_heads: int, programs: int, batch_invariant: bool
) -> int:
    """Enough for any lengths: each request wastes less than one split, and what remains is at most
    one split for each program that the machine should get."""
    if batch_invariant:
        return batch * INVARIANT_MAX_SPLITS
    return batch + triton.cdiv(programs, _head_tiles(num_heads, num_kv_heads))


@triton.jit
def decode_plan_kernel(
    seq_lens_ptr,  # [batch] int64
    items_ptr,  # [num_items] int32, out
    first_item_ptr,  # [batch + 1] int32, out
    batch,
    num_items,
    item_budget,  # splits beyond one a request
    WINDOW: tl.constexpr,
    BATCH_INVARIANT: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SPLIT_STEP: tl.constexpr,
    INVARIANT_SPLIT: tl.constexpr,
    INVARIANT_MAX_SPLITS: tl.constexpr,
    BLOCK_B: tl.constexpr,  # at least batch
    BLOCK_I: tl.constexpr,  # at least num_items
):
    """One program: how many splits each request gets, and the list of all."""
    b = tl.arange(0, BLOCK_B)
    lens = tl.load(seq_lens_ptr + b, mask=b < batch, other=0)
    if WINDOW > 0:
        lens = tl.minimum(lens, WINDOW)
    if BATCH_INVARIANT:
        splits = tl.minimum(tl.cdiv(lens, INVARIANT_SPLIT), INVARIANT_MAX_SPLITS)
    else:
        size = tl.maximum(tl.cdiv(tl.sum(lens, 0), item_budget), MIN_SPLIT)
        size = tl.cdiv(size, SPLIT_STEP) * SPLIT_STEP
        splits = tl.cdiv(lens, size)
    # A row without keys (padding) has an item, too: its output is then written, as zeros.
    splits = tl.where(b < batch, tl.maximum(splits, 1), 0).to(tl.int32)
    last = tl.cumsum(splits, 0)
    first = last - splits
    tl.store(first_item_ptr + b, first, mask=b < batch)
    tl.store(first_item_ptr + batch, tl.sum(splits, 0))
    i = tl.arange(0, BLOCK_I)
    tl.store(items_ptr + i, -1, mask=(i >= tl.sum(splits, 0)) & (i < num_items))
    for s in range(0, tl.max(splits, 0)):
        tl.store(items_ptr + first + s, b, mask=s < splits)


@triton.jit
def decode_split_kernel(
    q_ptr,  # [batch, num_heads, D]
    k_ptr,  # [num_slots, num_kv_heads, D], as v
    v_ptr,
    out_ptr,  # [batch, num_heads, D]
    partial_ptr,  # [num_items, num_heads, D] float32
    log_sum_ptr,  # [num_items, num_heads] float32
    items_ptr,  # [num_items] int32
    first_item_ptr,  # [batch + 1] int32
    table_ptr,  # req_to_token [rows, context_len] int32
    table_row_ptr,  # [batch] int64
    seq_lens_ptr,  # [batch] int64
    stride_table,
    stride_q,
    stride_out,
    scale,
    v_scale,
    KV_STRIDE: tl.constexpr,
    G: tl.constexpr,  # query heads of a KV head
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    LOGIT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (num_kv_heads * tiles of G, num_items); the heads of an item run side by side, because
    they read neighbouring memory."""
    TILES: tl.constexpr = (G + BLOCK_H - 1) // BLOCK_H
    item = tl.program_id(1)
    b = tl.load(items_ptr + item)
    if b < 0:
        return
    kv_head = tl.program_id(0) // TILES
    num_heads = tl.num_programs(0) // TILES * G
    first = tl.load(first_item_ptr + b)
    splits = tl.load(first_item_ptr + b + 1) - first
    seq_len = tl.load(seq_lens_ptr + b).to(tl.int32)
    base = 0
    if WINDOW > 0:
        base = tl.maximum(seq_len - WINDOW, 0)
    # Equal shares in whole tiles: only a request's last item has a partial tile.
    size = tl.cdiv(tl.cdiv(seq_len - base, splits), BLOCK_N) * BLOCK_N
    start = base + (item - first) * size
    end = tl.minimum(start + size, seq_len)

    heads = tl.program_id(0) % TILES * BLOCK_H + tl.arange(0, BLOCK_H)  # within the group
    real = heads < G
    heads = kv_head * G + heads
    d = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (d < D)[None, :]
    q_row = q_ptr + b.to(tl.int64) * stride_q
    q = tl.load(q_row + heads[:, None] * D + d[None, :], mask=inside, other=0.0)
    q = for_tensor_core(q, k_ptr.dtype.element_ty)
    slots_ptr = table_ptr + tl.load(table_row_ptr + b) * stride_table
    k_head = k_ptr + kv_head * D
    v_head = v_ptr + kv_head * D
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    whole = start + (end - start) // BLOCK_N * BLOCK_N
    m, weights, acc = attend(
        q, m, weights, acc, start, whole, end, heads, slots_ptr, k_head, v_head, scale,
        ALL_VISIBLE, WINDOW, LOGIT_CAP, True, KV_STRIDE, D, BLOCK_D, BLOCK_N, PRECISION,
    )  # fmt: skip
    m, weights, acc = attend(
        q, m, weights, acc, whole, end, end, heads, slots_ptr, k_head, v_head, scale,
        UP_TO_END, WINDOW, LOGIT_CAP, True, KV_STRIDE, D, BLOCK_D, BLOCK_N, PRECISION,
    )  # fmt: skip
    total = tl.sum(weights, 1)
    # An item may be empty: a row without keys, or equal shares rounded up to whole tiles.
    total = tl.where(total > 0, total, 1.0)
    acc = acc * (v_scale / total)[:, None]
    if splits == 1:
        out_row = out_ptr + b.to(tl.int64) * stride_out
        out = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_row + heads[:, None] * D + d[None, :], out, mask=inside)
    else:
        row = item.to(tl.int64) * num_heads + heads
        tl.store(partial_ptr + row[:, None] * D + d[None, :], acc, mask=inside)
        tl.store(log_sum_ptr + row, m + tl.log2(total), mask=real)


@triton.jit
def decode_reduce_kernel(
    partial_ptr,  # [num_items, num_heads, D] float32
    log_sum_ptr,  # [num_items, num_heads] float32
    out_ptr,  # [batch, num_heads, D]
    first_item_ptr,  # [batch + 1] int32
    stride_out,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Grid (num_heads, batch): add up the items of a request that has several."""
    head = tl.program_id(0)
    b = tl.program_id(1)
    num_heads = tl.num_programs(0)
    first = tl.load(first_item_ptr + b)
    last = tl.load(first_item_ptr + b + 1)
    if last - first == 1:
        return
    d = tl.arange(0, BLOCK_D)
    m = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(first, last, BLOCK_S):
        item = start + tl.arange(0, BLOCK_S)
        real = item < last
        row = item.to(tl.int64) * num_heads + head
        log_sum = tl.load(log_sum_ptr + row, mask=real, other=float("-inf"))
        inside = real[:, None] & (d < D)[None, :]
        partial = tl.load(partial_ptr + row[:, None] * D + d[None, :], mask=inside, other=0.0)
        m_new = tl.maximum(m, tl.max(log_sum, 0))
        alpha = tl.exp2(m - m_new)
        weight = tl.exp2(log_sum - m_new)
        total = total * alpha + tl.sum(weight, 0)
        acc = acc * alpha + tl.sum(weight[:, None] * partial, 0)
        m = m_new
    out = (acc / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + b.to(tl.int64) * stride_out + head * D + d, out, mask=d < D)


def plan_decode(
    seq_lens: torch.Tensor,
    scratch: DecodeScratch,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
) -> None:
    """Fill the scratch's list of items for requests of lengths `seq_lens` [batch] int64, of which a
    layer with a window sees the last `window` tokens. Once a step for all layers of that window."""
    batch = len(seq_lens)
    num_items = _num_items(
        batch, num_heads, num_kv_heads, scratch.programs, scratch.batch_invariant
    )
    decode_plan_kernel[(1,)](
        seq_lens,
        scratch.items,
        scratch.first_item,
        batch,
        num_items,
        triton.cdiv(scratch.programs, _head_tiles(num_heads, num_kv_heads)),
        WINDOW=window or 0,
        BATCH_INVARIANT=scratch.batch_invariant,
        MIN_SPLIT=MIN_SPLIT,
        SPLIT_STEP=SPLIT_STEP,
        INVARIANT_SPLIT=INVARIANT_SPLIT,
        INVARIANT_MAX_SPLITS=INVARIANT_MAX_SPLITS,
        BLOCK_B=triton.next_power_of_2(batch),
        BLOCK_I=triton.next_power_of_2(num_items),
        num_warps=4,
    )


def decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scratch: DecodeScratch,
    *,
    scale: float,
    window: int | None = None,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Each query q [batch, num_heads, head_dim] attends to its request's `seq_lens` [batch] keys,
    or the last `window` of them. `scratch` must hold the plan of these lengths and this window.

    Keys and values are [num_slots, num_kv_heads, head_dim] in q's type or float8_e4m3fn, and stand
    for their bytes times `k_scale` and `v_scale`. Returns [batch, num_heads, head_dim]. Never waits
    for the device; every launch depends on shapes only, so a CUDA graph may hold it.
    """
    batch, num_heads, head_dim = q.shape
    num_kv_heads = k_buffer.shape[1]
    group_size = num_heads // num_kv_heads
    tile = decode_tile(head_dim, k_buffer.element_size(), group_size)
    num_items = _num_items(
        batch, num_heads, num_kv_heads, scratch.programs, scratch.batch_invariant
    )
    out = torch.empty((batch, num_heads, head_dim), dtype=q.dtype, device=q.device)
    block_d = triton.next_power_of_2(head_dim)
    decode_split_kernel[(_head_tiles(num_heads, num_kv_heads), num_items)](
        q,
        k_buffer,
        v_buffer,
        out,
        scratch.partial,
        scratch.log_sum,
        scratch.items,
        scratch.first_item,
        req_to_token,
        req_pool_indices,
        seq_lens,
        req_to_token.stride(0),
        q.stride(0),
        out.stride(0),
        softmax_scale(scale, logit_cap, k_scale),
        v_scale,
        KV_STRIDE=k_buffer.stride(0),
        G=group_size,
        D=head_dim,
        BLOCK_D=block_d,
        BLOCK_H=tile.rows,
        BLOCK_N=tile.keys,
        WINDOW=window or 0,
        LOGIT_CAP=logit_cap,
        PRECISION=dot_precision(q.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=True,  # the scale is meant to be free; Triton 3.10 has this off
    )
    decode_reduce_kernel[(num_heads, batch)](
        scratch.partial,
        scratch.log_sum,
        out,
        scratch.first_item,
        out.stride(0),
        D=head_dim,
        BLOCK_D=block_d,
        BLOCK_S=REDUCE_BLOCK,
        num_warps=4,
    )
    return out


def _aot_case(
    dtype: str, head_dim: int, group_size: int, kv: str = "", window: int = 0, cap: float = 0.0
) -> dict[str, Any]:
    kv = kv or dtype
    tile = decode_tile(head_dim, {"fp32": 4, "fp8e4nv": 1}.get(kv, 2), group_size)
    name = f"decode {dtype} d{head_dim} g{group_size}"
    name += f" kv {kv}" * (kv != dtype) + f" window {window}" * bool(window) + " cap" * bool(cap)
    pointers = {"q_ptr": dtype, "k_ptr": kv, "v_ptr": kv, "out_ptr": dtype, "partial_ptr": "fp32"}
    pointers |= {"log_sum_ptr": "fp32", "items_ptr": "i32", "first_item_ptr": "i32"}
    pointers |= {"table_ptr": "i32", "table_row_ptr": "i64", "seq_lens_ptr": "i64"}
    strides = dict.fromkeys(("stride_table", "stride_q", "stride_out"), "i32:16")
    return {
        "kernel": decode_split_kernel,
        "name": name,
        "signature": {key: f"*{value}" for key, value in pointers.items()}
        | strides
        | {"scale": "fp32", "v_scale": "fp32"},
        "constexprs": {
            "KV_STRIDE": 8 * head_dim,
            "G": group_size,
            "D": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_H": tile.rows,
            "BLOCK_N": tile.keys,
            "WINDOW": window,
            "LOGIT_CAP": cap,
            "PRECISION": "ieee" if dtype == "fp32" else "tf32",
        },
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": True,
        # Triton 3.6 for sm_89 puts a few registers aside once an item, outside of the loops.
        "max_spill": 16 if head_dim == 128 and kv == dtype != "fp32" else 0,
        # The compiler refuses this type below 8.9.
        **({"arch": (89, 90, 100)} if kv == "fp8e4nv" else {}),
    }


AOT_CASES = [
    *(_aot_case("bf16", head_dim, 4) for head_dim in (64, 80, 96, 128, 256)),
    _aot_case("fp16", 128, 4),
    _aot_case("bf16", 128, 8),
    _aot_case("bf16", 128, 64),
    _aot_case("bf16", 128, 4, window=4096),
    _aot_case("bf16", 256, 2, window=4096, cap=50.0),
    _aot_case("bf16", 128, 4, cap=50.0),
    *(_aot_case("bf16", head_dim, 4, kv="fp8e4nv") for head_dim in (64, 128, 256)),
    *(_aot_case("fp32", head_dim, 4) for head_dim in (64, 128, 256)),
    {
        "kernel": decode_reduce_kernel,
        "name": "decode reduce d128",
        "signature": {
            "partial_ptr": "*fp32",
            "log_sum_ptr": "*fp32",
            "out_ptr": "*bf16",
            "first_item_ptr": "*i32",
            "stride_out": "i32:16",
        },
        "constexprs": {"D": 128, "BLOCK_D": 128, "BLOCK_S": REDUCE_BLOCK},
        "num_warps": 4,
    },
    {
        "kernel": decode_plan_kernel,
        "name": "decode plan b256",
        "signature": {
            "seq_lens_ptr": "*i64",
            "items_ptr": "*i32",
            "first_item_ptr": "*i32",
            "batch": "i32:16",
            "num_items": "i32",
            "item_budget": "i32",
        },
        "constexprs": {
            "WINDOW": 0,
            "BATCH_INVARIANT": False,
            "MIN_SPLIT": MIN_SPLIT,
            "SPLIT_STEP": SPLIT_STEP,
            "INVARIANT_SPLIT": INVARIANT_SPLIT,
            "INVARIANT_MAX_SPLITS": INVARIANT_MAX_SPLITS,
            "BLOCK_B": 256,
            "BLOCK_I": 512,
        },
        "num_warps": 4,
    },
]
