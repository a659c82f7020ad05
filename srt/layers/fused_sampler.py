"""Logits to tokens on a GPU: what sampler.py does, to the bit, in few passes and without a sort.

A row's tokens are weighed by integers, whose sums do not depend on the order of addition; so
neither the division of the work among programs nor their order shows in the result.

Rows that draw from the whole vocabulary take two passes: one sums the weights of each chunk, one
looks into the chunk where the cumulative weight passes the random number. The others are the
business of fused_top_sampler.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from srt.layers.fused_top_sampler import MAX_LIST_ELEMENTS, draw_from_top
from srt.layers.sampling_math import (
    LOW_WORD,
    MAX_KEY,
    aot_case,
    keys_of,
    least_weight,
    load_logits,
    logit_of,
    target_weight,
    uniform_of,
    weights_of,
)
from srt.sampling_batch import DrawColumns, DrawPath, SamplingBatch

CHUNK = 2048  # tokens of a program in passes over the vocabulary


def choose_tokens(
    logits: torch.Tensor, sampling: SamplingBatch, seq_lens: torch.Tensor
) -> torch.Tensor:
    """The tokens [b] int64 that sampler.sample gives for adjusted `logits` [b, vocab] float32; NaN
    counts as -inf."""
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    num_rows, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, CHUNK)
    best_of_chunk = torch.empty((num_rows, chunks), dtype=torch.int64, device=logits.device)
    best_kernel[(num_rows, chunks)](
        logits, best_of_chunk, vocab_size, logits.stride(0), CHUNK=CHUNK, num_warps=4
    )
    best = best_of_chunk.amin(dim=1)
    tokens = best.bitwise_and(LOW_WORD.value)
    for path, group in sampling.draws.items():
        if path is DrawPath.WHOLE:
            draw_from_all(logits, best, seq_lens, group.row_index, group.columns, tokens)
            continue
        step = max(1, MAX_LIST_ELEMENTS // vocab_size)
        for start in range(0, len(group), step):
            rows = group.row_index[start : start + step]
            columns = DrawColumns(*(column[start : start + step] for column in group.columns))
            has_tail = path is DrawPath.SORTED
            draw_from_top(logits, best, seq_lens, rows, columns, has_tail, tokens)
    return tokens


def draw_from_all(
    logits: torch.Tensor,
    best: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    columns: DrawColumns,
    tokens: torch.Tensor,
) -> None:
    """Draw for `rows` [g], write to `tokens` [b]. `best` [b] holds the key of each row's best
    token."""
    vocab_size = logits.shape[1]
    chunks = triton.cdiv(vocab_size, CHUNK)
    chunk_weights = torch.empty((len(rows), chunks), dtype=torch.int64, device=logits.device)
    weigh_kernel[(len(rows), chunks)](
        logits,
        rows,
        best,
        columns.temperature,
        columns.min_p,
        chunk_weights,
        vocab_size,
        logits.stride(0),
        CHUNK=CHUNK,
        num_warps=4,
    )
    pick_kernel[(len(rows),)](
        logits,
        rows,
        best,
        columns.temperature,
        columns.min_p,
        columns.seed,
        seq_lens,
        chunk_weights,
        tokens,
        vocab_size,
        chunks,
        logits.stride(0),
        CHUNK=CHUNK,
        BLOCK_C=triton.next_power_of_2(chunks),
        num_warps=4,
    )


@triton.jit
def best_kernel(
    logits_ptr,  # [b, vocab_size] float32
    best_ptr,  # [b, chunks] int64, the least key of each chunk
    vocab_size,
    stride_logits_b,
    CHUNK: tl.constexpr,
):
    """Grid (b, chunks)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits_ptr, row, token, vocab_size, stride_logits_b)
    # Zeros of both signs are equals here: the lowest id of either is the most likely token.
    key = tl.where(token < vocab_size, keys_of(tl.where(x == 0.0, 0.0, x), token), MAX_KEY)
    tl.store(best_ptr + row * tl.num_programs(1) + chunk, tl.min(key, 0))


@triton.jit
def weigh_kernel(
    logits_ptr,  # [b, vocab_size] float32
    rows_ptr,  # [g] int64
    best_ptr,  # [b] int64, key of the best token
    temperature_ptr,  # [g] float64
    min_p_ptr,  # [g] float64
    chunk_weights_ptr,  # [g, chunks] int64
    vocab_size,
    stride_logits_b,
    CHUNK: tl.constexpr,
):
    """Grid (g, chunks)."""
    place, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + place)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits_ptr, row, token, vocab_size, stride_logits_b)
    best = logit_of(tl.load(best_ptr + row))
    weights = weights_of(x, best, tl.load(temperature_ptr + place))
    least = least_weight(tl.load(min_p_ptr + place))
    weights = tl.where((token < vocab_size) & (weights >= least), weights, 0)
    tl.store(chunk_weights_ptr + place * tl.num_programs(1) + chunk, tl.sum(weights, 0))


@triton.jit
def pick_kernel(
    logits_ptr,  # [b, vocab_size] float32
    rows_ptr,  # [g] int64
    best_ptr,  # [b] int64
    temperature_ptr,  # [g] float64
    min_p_ptr,  # [g] float64
    seed_ptr,  # [g] int64
    seq_lens_ptr,  # [b] int64
    chunk_weights_ptr,  # [g, chunks] int64
    tokens_ptr,  # [b] int64
    vocab_size,
    chunks,
    stride_logits_b,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid (g,). By inverse CDF in the order of ids: first the chunk, then the token in it."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + place)
    uniform = uniform_of(tl.load(seed_ptr + place), tl.load(seq_lens_ptr + row))
    c = tl.arange(0, BLOCK_C)
    chunk_weights = tl.load(chunk_weights_ptr + place * chunks + c, mask=c < chunks, other=0)
    target = target_weight(uniform, tl.sum(chunk_weights, 0))
    is_before = tl.cumsum(chunk_weights, 0) <= target
    chunk = tl.sum(is_before.to(tl.int32), 0)
    target -= tl.sum(tl.where(is_before, chunk_weights, 0), 0)

    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits_ptr, row, token, vocab_size, stride_logits_b)
    best = logit_of(tl.load(best_ptr + row))
    weights = weights_of(x, best, tl.load(temperature_ptr + place))
    least = least_weight(tl.load(min_p_ptr + place))
    weights = tl.where((token < vocab_size) & (weights >= least), weights, 0)
    is_before = tl.cumsum(weights, 0) <= target
    tl.store(tokens_ptr + row, chunk * CHUNK + tl.sum(is_before.to(tl.int32), 0))


AOT_CASES = [
    aot_case(best_kernel, "best token", {"CHUNK": CHUNK}),
    aot_case(weigh_kernel, "weigh", {"CHUNK": CHUNK}),
    aot_case(pick_kernel, "pick", {"CHUNK": CHUNK, "BLOCK_C": 128}),
]
