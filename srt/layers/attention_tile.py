"""What the two attention kernels share: online softmax over tiles of keys found through a table."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2_E = math.log2(math.e)

# How attend() tests its keys.
ALL_VISIBLE = tl.constexpr(0)  # not at all: every row sees every key of [lo, hi)
UP_TO_END = tl.constexpr(1)  # every row sees the keys before `end`
CAUSAL = tl.constexpr(2)  # a row sees the keys up to its own position, and inside its window


@dataclass(frozen=True)
class Tile:
    """Shape of the work of one program: rows (query token x query head), keys a turn, and how the
    compiler maps it to the machine. docs/kernels.md says why each was chosen."""

    rows: int
    keys: int
    warps: int
    stages: int


def softmax_scale(scale: float, logit_cap: float, k_scale: float) -> float:
    """What a kernel multiplies q.k with. The exponent is taken to base 2, so log2(e) goes in here
    too; with a cap it is applied after the cap instead, and the 2 of tanh's formula goes in."""
    if logit_cap > 0:
        return 2 * LOG2_E * scale * k_scale / logit_cap
    return LOG2_E * scale * k_scale


def dot_precision(dtype: torch.dtype) -> str:
    """float32 means float32: TF32 would cut it to 10 bits of mantissa."""
    return "ieee" if dtype == torch.float32 else "tf32"


@triton.jit
def for_tensor_core(q, KV_TYPE: tl.constexpr):
    """q in the type that it is multiplied in, its own unless keys are e4m3: those become float16
    in half an instruction each, and bf16 in three, which is more than a memory-bound loop has to
    spare. float16 holds more digits than bf16 and less range, so what would overflow saturates."""
    if q.dtype == tl.bfloat16 and KV_TYPE.is_fp8():
        q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return q


@triton.jit
def attend(
    q,  # [M, BLOCK_D]
    m,  # [M] float32, running maximum of the logits, in units of log2(e)
    total,  # [M] or, if LAZY_SUM, [M, BLOCK_N] float32: running sum of weights
    acc,  # [M, BLOCK_D] float32, running sum of weighted values
    lo,  # keys [lo, hi) in tiles of BLOCK_N
    hi,
    end,  # keys from here on do not exist
    q_pos,  # [M] positions of the rows; read if TEST is CAUSAL
    slots_ptr,  # the request's row of req_to_token: slot of each position
    k_ptr,  # [num_slots, num_kv_heads, D], at the first element of our KV head
    v_ptr,
    scale,  # see softmax_scale
    TEST: tl.constexpr,
    WINDOW: tl.constexpr,
    LOGIT_CAP: tl.constexpr,
    LAZY_SUM: tl.constexpr,
    KV_STRIDE: tl.constexpr,  # elements from slot to slot
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One online-softmax loop (Milakov and Gimelshein; FlashAttention). Returns m, total, acc.

    The stride is a constant because a cache never changes its shape, and constants saved a quarter
    of the loop. LAZY_SUM keeps the weights of each column apart and leaves their sum to the caller:
    with few rows, summing across warps in every turn costs more than the registers.
    """
    d = tl.arange(0, BLOCK_D)
    # Columns belong to the base, rows to the offset: one multiply-add an address.
    k_columns = k_ptr + d[None, :]
    v_columns = v_ptr + d[None, :]
    for n in range(lo, hi, BLOCK_N):
        pos = n + tl.arange(0, BLOCK_N)
        if TEST == ALL_VISIBLE:
            slot = tl.load(slots_ptr + pos).to(tl.int64)
        else:
            # A lane beyond the end reads nothing: a stale slot may hold another request's NaN,
            # which a weight of zero does not silence.
            slot = tl.load(slots_ptr + pos, mask=pos < end, other=0).to(tl.int64)
        offset = slot[:, None] * KV_STRIDE
        k = _load_rows(k_columns + offset, pos, end, d, TEST, D, BLOCK_D).to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if LOGIT_CAP > 0:
            # cap * tanh(x / cap) in units of log2(e); tanh(y) = 1 - 2 / (exp(2 y) + 1) overflows
            # to the right limits. The comparison below must see capped values, hence no folding.
            s = LOGIT_CAP * 1.4426950408889634 * (1.0 - 2.0 / (tl.exp2(s * scale) + 1.0))
        if TEST == UP_TO_END:
            s = tl.where((pos < end)[None, :], s, float("-inf"))
        if TEST == CAUSAL:
            seen = pos[None, :] <= q_pos[:, None]
            if WINDOW > 0:
                seen = seen & (pos[None, :] > q_pos[:, None] - WINDOW)
            s = tl.where(seen, s, float("-inf"))
        # Without a cap the scale is applied from here on, where it fuses with the subtraction.
        top = tl.max(s, 1)
        m_new = tl.maximum(m, top if LOGIT_CAP > 0 else top * scale)
        shift = m_new
        if TEST == CAUSAL:
            # A row that has seen no key yet: its weights must be 0, not exp(-inf + inf).
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - shift)
        p = tl.exp2((s if LOGIT_CAP > 0 else s * scale) - shift[:, None])
        total = total * alpha[:, None] + p if LAZY_SUM else total * alpha + tl.sum(p, 1)
        v = _load_rows(v_columns + offset, pos, end, d, TEST, D, BLOCK_D).to(q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    return m, total, acc


@triton.jit
def _load_rows(ptrs, pos, end, d, TEST: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_N, BLOCK_D]; zero beyond `end` (if TEST) and beyond column D."""
    if TEST == ALL_VISIBLE:
        rows = tl.load(ptrs) if D == BLOCK_D else tl.load(ptrs, mask=(d < D)[None, :], other=0.0)
    else:
        real = (pos < end)[:, None] if D == BLOCK_D else (pos < end)[:, None] & (d < D)[None, :]
        rows = tl.load(ptrs, mask=real, other=0.0)
    return rows
