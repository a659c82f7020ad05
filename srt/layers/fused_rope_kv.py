"""Rotary embedding in one pass over memory, alone or on the way from projection to KV cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

# Heads of a program; times a head of 128 elements, 16 elements a thread.
BLOCK_HEADS = 16


class HeadNorm(NamedTuple):
    """RMSNorm of each query and key head before it is rotated (Qwen 3, Gemma 3)."""

    q_weight: torch.Tensor  # [head_dim]
    k_weight: torch.Tensor  # [head_dim]
    eps: float
    add_one: bool  # as GemmaRMSNorm does to its weight


class KVSlots(NamedTuple):
    """Where a layer's K and V of this pass go, and what they are divided by on the way (for
    fp8)."""

    k_buffer: torch.Tensor  # [num_slots, num_kv_heads, head_dim]
    v_buffer: torch.Tensor  # [num_slots, num_kv_heads, head_dim]
    out_cache_loc: torch.Tensor  # [n] int64
    k_scale: float = 1.0
    v_scale: float = 1.0


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As rotary_embedding.rotate: x [n, heads, head_dim], whose heads must be contiguous each, cos
    and sin [n, 1, rotary_dim / 2] float32. Elements from rotary_dim on stay as they are."""
    return _launch(x, cos, sin, x.shape[1], None, None)


def rotate_and_write_kv(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: KVSlots,
    norm: HeadNorm | None = None,
) -> torch.Tensor:
    """What follows the QKV projection `heads` [n, num_heads + 2 * num_kv_heads, head_dim]:
    normalise and rotate queries and keys, write keys and values to their slots, return the queries
    [n, num_heads, head_dim]. Rounds wherever the separate steps round.

    Slot 0 is not written. It is nobody's, and all padded rows of a CUDA graph point at it."""
    num_heads = heads.shape[1] - 2 * slots.k_buffer.shape[1]
    return _launch(heads, cos, sin, num_heads, slots, norm)


def rotate_and_write_kv_reference(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: KVSlots,
    norm: HeadNorm | None = None,
) -> torch.Tensor:
    """The same in float64, rounded at the same places; slot 0 is written."""
    num_kv_heads = slots.k_buffer.shape[1]
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = heads.double().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norm is not None:
        normed = []
        for x, weight in ((q, norm.q_weight), (k, norm.k_weight)):
            inverse = (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
            normed.append((x * inverse * (weight.double() + norm.add_one)).to(heads.dtype).double())
        q, k = normed
    half = cos.shape[-1]
    rotated = []
    for x in (q, k):
        first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin, rest)
        rotated.append(torch.cat(turned, dim=-1).to(heads.dtype))
    q, k = rotated
    slots.k_buffer[slots.out_cache_loc] = (k / slots.k_scale).to(slots.k_buffer.dtype)
    slots.v_buffer[slots.out_cache_loc] = (v / slots.v_scale).to(slots.v_buffer.dtype)
    return q


def _launch(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    slots: KVSlots | None,
    norm: HeadNorm | None,
) -> torch.Tensor:
    n, all_heads, head_dim = heads.shape
    half = cos.shape[-1]
    assert heads.stride(2) == 1, f"heads have a stride of {heads.stride(2)}, must be contiguous"
    assert cos.shape == sin.shape == (n, 1, half), f"cos {cos.shape}, sin {sin.shape} for {n} rows"
    assert cos.is_contiguous() and sin.is_contiguous(), "cos and sin must be contiguous"
    assert 2 * half <= head_dim, f"rotating {2 * half} elements of heads of {head_dim}"
    q = torch.empty((n, num_heads, head_dim), dtype=heads.dtype, device=heads.device)
    if n == 0:
        return q
    if slots is not None:
        # One set of strides serves both, and elements lie side by side.
        assert slots.k_buffer.stride() == slots.v_buffer.stride(), "K and V differ in strides"
        assert slots.k_buffer.stride(2) == 1, "elements of a cached head must lie side by side"
    rope_kv_kernel[(n, triton.cdiv(all_heads, BLOCK_HEADS))](
        heads,
        cos,
        sin,
        q,
        None if slots is None else slots.k_buffer,
        None if slots is None else slots.v_buffer,
        None if slots is None else slots.out_cache_loc,
        None if norm is None else norm.q_weight,
        None if norm is None else norm.k_weight,
        heads.stride(0),
        heads.stride(1),
        0 if slots is None else slots.k_buffer.stride(0),
        0 if slots is None else slots.k_buffer.stride(1),
        0.0 if norm is None else norm.eps,
        1.0 if slots is None else slots.k_scale,
        1.0 if slots is None else slots.v_scale,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=(all_heads - num_heads) // 2,
        HEAD_DIM=head_dim,
        HALF=half,
        ADD_ONE=norm is not None and norm.add_one,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(head_dim - 2 * half),
        BLOCK_HEADS=BLOCK_HEADS,
        num_warps=4,
    )
    return q


@triton.jit
def rope_kv_kernel(
    heads_ptr,  # [n, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM]
    cos_ptr,  # [n, HALF] float32
    sin_ptr,  # [n, HALF] float32
    q_ptr,  # [n, NUM_HEADS, HEAD_DIM], contiguous
    k_ptr,  # [num_slots, NUM_KV_HEADS, HEAD_DIM]; None if there are only queries
    v_ptr,  # the same
    loc_ptr,  # [n] int64
    q_norm_ptr,  # [HEAD_DIM], None without norm
    k_norm_ptr,  # [HEAD_DIM]
    stride_heads_n,
    stride_heads_h,
    stride_kv_slot,
    stride_kv_h,
    eps,
    k_scale,
    v_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # element i < HALF turns with element i + HALF
    ADD_ONE: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,  # of the elements from 2 * HALF on; 0 if there are none
    BLOCK_HEADS: tl.constexpr,
):
    """Grid (n, cdiv(heads of all kinds, BLOCK_HEADS)). Tiles are [BLOCK_HEADS, BLOCK_HALF]."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    exists = head < NUM_HEADS + 2 * NUM_KV_HEADS
    pair = tl.arange(0, BLOCK_HALF)
    in_half = pair < HALF
    keep = exists[:, None] & in_half[None, :]
    source = heads_ptr + row * stride_heads_n + head[:, None] * stride_heads_h
    first = tl.load(source + pair[None, :], mask=keep, other=0.0)
    second = tl.load(source + HALF + pair[None, :], mask=keep, other=0.0)
    if BLOCK_REST > 0:
        spare = 2 * HALF + tl.arange(0, BLOCK_REST)
        in_rest = spare < HEAD_DIM
        keep_rest = exists[:, None] & in_rest[None, :]
        rest = tl.load(source + spare[None, :], mask=keep_rest, other=0.0)

    x, y = first.to(tl.float32), second.to(tl.float32)
    if q_norm_ptr is not None:
        square = tl.sum(x * x, 1) + tl.sum(y * y, 1)
        if BLOCK_REST > 0:
            z = rest.to(tl.float32)
            square += tl.sum(z * z, 1)
        inverse = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        is_query = (head < NUM_HEADS)[:, None]
        x *= _norm_weight(q_norm_ptr, k_norm_ptr, is_query, pair, in_half, ADD_ONE) * inverse
        y *= _norm_weight(q_norm_ptr, k_norm_ptr, is_query, HALF + pair, in_half, ADD_ONE) * inverse
        x, y = x.to(first.dtype).to(tl.float32), y.to(first.dtype).to(tl.float32)
    cos = tl.load(cos_ptr + row * HALF + pair, mask=in_half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + row * HALF + pair, mask=in_half, other=0.0)[None, :]
    turned_first = (x * cos - y * sin).to(first.dtype)
    turned_second = (y * cos + x * sin).to(first.dtype)

    q = q_ptr + row * NUM_HEADS * HEAD_DIM + head[:, None] * HEAD_DIM
    keep_q = keep & (head < NUM_HEADS)[:, None]
    tl.store(q + pair[None, :], turned_first, mask=keep_q)
    tl.store(q + HALF + pair[None, :], turned_second, mask=keep_q)
    if BLOCK_REST > 0:
        kept = rest
        if q_norm_ptr is not None:
            weight = _norm_weight(q_norm_ptr, k_norm_ptr, is_query, spare, in_rest, ADD_ONE)
            kept = (z * weight * inverse).to(first.dtype)
        tl.store(q + spare[None, :], kept, mask=keep_rest & (head < NUM_HEADS)[:, None])

    if k_ptr is not None:
        slot = tl.load(loc_ptr + row)
        # All padded rows point at slot 0, and nobody reads it: their heads go nowhere.
        kv_head = tl.where(slot > 0, head - NUM_HEADS, -1)
        is_key = (kv_head >= 0) & (kv_head < NUM_KV_HEADS)
        is_value = kv_head >= NUM_KV_HEADS
        k = k_ptr + slot * stride_kv_slot + kv_head[:, None] * stride_kv_h
        keep_k = keep & is_key[:, None]
        tl.store(k + pair[None, :], _scaled(turned_first, k_scale, k_ptr), mask=keep_k)
        tl.store(k + HALF + pair[None, :], _scaled(turned_second, k_scale, k_ptr), mask=keep_k)
        v = v_ptr + slot * stride_kv_slot + (kv_head - NUM_KV_HEADS)[:, None] * stride_kv_h
        keep_v = keep & is_value[:, None]
        tl.store(v + pair[None, :], _scaled(first, v_scale, v_ptr), mask=keep_v)
        tl.store(v + HALF + pair[None, :], _scaled(second, v_scale, v_ptr), mask=keep_v)
        if BLOCK_REST > 0:
            keep_k, keep_v = keep_rest & is_key[:, None], keep_rest & is_value[:, None]
            tl.store(k + spare[None, :], _scaled(kept, k_scale, k_ptr), mask=keep_k)
            tl.store(v + spare[None, :], _scaled(rest, v_scale, v_ptr), mask=keep_v)


@triton.jit
def _norm_weight(q_norm_ptr, k_norm_ptr, is_query, column, keep, ADD_ONE: tl.constexpr):
    """[BLOCK_HEADS, columns] float32"""
    q_weight = tl.load(q_norm_ptr + column, mask=keep, other=0.0).to(tl.float32)
    k_weight = tl.load(k_norm_ptr + column, mask=keep, other=0.0).to(tl.float32)
    weight = tl.where(is_query, q_weight[None, :], k_weight[None, :])
    if ADD_ONE:
        weight += 1.0
    return weight


@triton.jit
def _scaled(x, scale, target_ptr):
    return (x.to(tl.float32) / scale).to(target_ptr.dtype.element_ty)


def _aot_case(
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    norm: bool = False,
    kv: str | None = "bf16",
    rotary_dim: int | None = None,
) -> dict[str, Any]:
    half = (rotary_dim or head_dim) // 2
    pointers = {"heads_ptr": "*bf16", "q_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    scalars = {"stride_heads_n": "i32:16", "stride_heads_h": "i32:16", "eps": "fp32"}
    scalars |= {"k_scale": "fp32", "v_scale": "fp32"}
    scalars |= {"stride_kv_slot": "i32:16", "stride_kv_h": "i32:16"}
    constants: dict[str, Any] = {}
    for wanted, names, kind in (
        (kv is not None, ("k_ptr", "v_ptr"), f"*{kv}"),
        (kv is not None, ("loc_ptr",), "*i64"),
        (norm, ("q_norm_ptr", "k_norm_ptr"), "*bf16"),
    ):
        if wanted:
            pointers |= dict.fromkeys(names, kind)
        else:
            constants |= dict.fromkeys(names)
    what = "rope" if kv is None else f"rope + kv {kv}"
    shape = f"d{head_dim} r{2 * half} h{num_heads}/{num_kv_heads}"
    case = {
        "kernel": rope_kv_kernel,
        "name": f"{'norm + ' if norm else ''}{what} {shape}",
        "signature": pointers | scalars,
        "constexprs": {
            **constants,
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "HALF": half,
            "ADD_ONE": False,
            "BLOCK_HALF": triton.next_power_of_2(half),
            "BLOCK_REST": triton.next_power_of_2(head_dim - 2 * half),
            "BLOCK_HEADS": BLOCK_HEADS,
        },
        "num_warps": 4,
    }
    if kv == "fp8e4nv":
        case["arch"] = (89, 90, 100, 120)  # Ampere has no fp8
    return case


AOT_CASES = [
    _aot_case(64, 9, 0, kv=None),
    _aot_case(64, 9, 3),
    _aot_case(128, 32, 8),
    _aot_case(128, 32, 8, norm=True),
    _aot_case(128, 32, 8, kv="fp8e4nv"),
    _aot_case(80, 32, 32),
    _aot_case(128, 32, 8, rotary_dim=64),
    _aot_case(256, 4, 1, norm=True),
]
