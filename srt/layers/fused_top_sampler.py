"""Top-k, top-p and min-p sampling on a GPU, without a sort.

All filters keep a beginning of the order by logit. As in FlashInfer (Ye et al., 2025) and Qrita
(Park et al., 2026), it is found by searching for thresholds: a histogram of the logits tells which
bins can hold tokens that are kept, those tokens are written to a list, and one program a row
bisects over the list. Top-k, top-p and the draw itself are each the search for the token at which
a running count or weight reaches a number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from srt.layers.sampling_math import (
    LOW_WORD,
    MAX_KEY,
    MAX_WEIGHT,
    MIN_KEY,
    ZERO_DISTANCE,
    aot_case,
    bins_of,
    keys_of,
    least_weight,
    load_logits,
    logit_of,
    target_weight,
    total_weight,
    uniform_of,
    weights_of,
)
from srt.sampling_batch import DrawColumns

CHUNK = 2048  # tokens of a program in passes over the vocabulary
TILE = 2048  # candidates that a search looks at at once
BINS = 512  # of the histogram; the last is for tokens that weigh nothing
# Elements of the lists of one call, 16 bytes each: more rows are drawn in blocks.
MAX_LIST_ELEMENTS = 1 << 24


class Candidates(NamedTuple):
    """The tokens of g rows that the filters may keep: those of row i in no order, at the beginning
    of keys[i] and weights[i]."""

    keys: torch.Tensor  # [g, vocab] int64
    weights: torch.Tensor  # [g, vocab] int64
    # [g, BINS + 1] int32: the histogram, and in its last column the length of the list.
    counters: torch.Tensor
    # [g, chunks] int64, sums over the whole vocabulary; None if no row's list may lack a part of
    # what its top-p is a share of.
    chunk_weights: torch.Tensor | None


def draw_from_top(
    logits: torch.Tensor,
    best: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    columns: DrawColumns,
    has_tail: bool,
    tokens: torch.Tensor,
) -> None:
    """Draw for `rows` [g], write to `tokens` [b]. `best` [b] holds the key of each row's best
    token; `has_tail` says that rows may have top-p without top-k."""
    found = find_candidates(logits, best, rows, columns, has_tail)
    chunks = triton.cdiv(logits.shape[1], CHUNK)
    search_kernel[(len(rows),)](
        rows,
        best,
        columns.top_k,
        columns.top_p,
        columns.min_p,
        columns.seed,
        seq_lens,
        found.chunk_weights,
        found.counters,
        found.keys,
        found.weights,
        tokens,
        logits.shape[1],
        chunks,
        BINS=BINS,
        BLOCK_C=triton.next_power_of_2(chunks),
        TILE=TILE,
        num_warps=8,
    )


def find_candidates(
    logits: torch.Tensor,
    best: torch.Tensor,
    rows: torch.Tensor,
    columns: DrawColumns,
    has_tail: bool,
) -> Candidates:
    g, vocab_size, device = len(rows), logits.shape[1], logits.device
    chunks = triton.cdiv(vocab_size, CHUNK)
    keys = torch.empty((g, vocab_size), dtype=torch.int64, device=device)
    found = Candidates(
        keys=keys,
        weights=torch.empty_like(keys),
        counters=torch.zeros((g, BINS + 1), dtype=torch.int32, device=device),
        chunk_weights=keys.new_empty((g, chunks)) if has_tail else None,
    )
    count_kernel[(g, chunks)](
        logits,
        rows,
        best,
        columns.temperature,
        found.chunk_weights,
        found.counters,
        vocab_size,
        logits.stride(0),
        CHUNK=CHUNK,
        BINS=BINS,
        num_warps=4,
    )
    list_kernel[(g, chunks)](
        logits,
        rows,
        best,
        columns.temperature,
        columns.top_k,
        columns.top_p,
        found.chunk_weights,
        found.counters,
        found.keys,
        found.weights,
        vocab_size,
        logits.stride(0),
        CHUNK=CHUNK,
        BINS=BINS,
        BLOCK_C=triton.next_power_of_2(chunks),
        num_warps=4,
    )
    return found


@triton.jit
def count_kernel(
    logits_ptr,  # [b, vocab_size] float32
    rows_ptr,  # [g] int64
    best_ptr,  # [b] int64, key of the best token
    temperature_ptr,  # [g] float64
    chunk_weights_ptr,  # [g, chunks] int64, or None
    counters_ptr,  # [g, BINS + 1] int32, zero before
    vocab_size,
    stride_logits_b,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
):
    """Grid (g, chunks)."""
    place, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + place)
    best = logit_of(tl.load(best_ptr + row))
    temperature = tl.load(temperature_ptr + place)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    keep = token < vocab_size
    x = load_logits(logits_ptr, row, token, vocab_size, stride_logits_b)
    if chunk_weights_ptr is not None:
        weights = tl.where(keep, weights_of(x, best, temperature), 0)
        tl.store(chunk_weights_ptr + place * tl.num_programs(1) + chunk, tl.sum(weights, 0))
    # Nobody reads the last bin, so what lies beyond the vocabulary may go there.
    counts = tl.histogram(tl.where(keep, bins_of(x, best, temperature, BINS), BINS - 1), BINS)
    bin = tl.arange(0, BINS)
    counters = counters_ptr + place * (BINS + 1) + bin
    mask = (counts > 0) & (bin < BINS - 1)
    tl.atomic_add(counters, counts, mask=mask, sem="relaxed")


@triton.jit
def list_kernel(
    logits_ptr,  # [b, vocab_size] float32
    rows_ptr,  # [g] int64
    best_ptr,  # [b] int64
    temperature_ptr,  # [g] float64
    top_k_ptr,  # [g] int64
    top_p_ptr,  # [g] float64
    chunk_weights_ptr,  # [g, chunks] int64, or None
    counters_ptr,  # [g, BINS + 1] int32: histogram, and the length of the list so far
    keys_ptr,  # [g, vocab_size] int64, the list, in no order
    weights_ptr,  # [g, vocab_size] int64
    vocab_size,
    stride_logits_b,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid (g, chunks). Append the chunk's tokens that the filters may keep to the row's list."""
    place, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + place)
    temperature = tl.load(temperature_ptr + place)
    top_k = tl.load(top_k_ptr + place)
    bin = tl.arange(0, BINS)
    counters = counters_ptr + place * (BINS + 1)
    counts = tl.load(counters + bin, mask=bin < BINS - 1, other=0)
    # The first bins that together hold k tokens.
    bins_kept = tl.sum((tl.cumsum(counts, 0) < top_k).to(tl.int32), 0) + 1
    if chunk_weights_ptr is not None:  # noqa: SIM102, as only this is known to the compiler
        if top_k >= vocab_size:
            # A tail of bins can go if it surely weighs less than the 1 - p that top-p leaves out.
            # No token of a bin weighs more than at its upper edge; the factor covers the rounding
            # of bins, and the 2 that of integers.
            total = total_weight(chunk_weights_ptr, place, tl.num_programs(1), BLOCK_C)
            left_out = (1.0 - tl.load(top_p_ptr + place)) * total.to(tl.float64) - 2.0
            edge = tl.exp(bin.to(tl.float64) * (-ZERO_DISTANCE / (BINS - 1))) * MAX_WEIGHT
            bin_weights = counts.to(tl.float64) * edge * 1.001
            tail = tl.sum(bin_weights, 0) - tl.cumsum(bin_weights, 0) + bin_weights
            bins_kept = tl.sum((tail > left_out).to(tl.int32), 0)
    bins_kept = tl.minimum(bins_kept, BINS - 1)

    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits_ptr, row, token, vocab_size, stride_logits_b)
    best = logit_of(tl.load(best_ptr + row))
    is_kept = (bins_of(x, best, temperature, BINS) < bins_kept) & (token < vocab_size)
    num_kept = tl.sum(is_kept.to(tl.int32), 0)
    if num_kept > 0:  # few chunks have any, and weights are dear
        start = tl.atomic_add(counters + BINS, num_kept, sem="relaxed")
        entry = place * vocab_size + start + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        tl.store(keys_ptr + entry, keys_of(x, token), mask=is_kept)
        tl.store(weights_ptr + entry, weights_of(x, best, temperature), mask=is_kept)


@triton.jit
def search_kernel(
    rows_ptr,  # [g] int64
    best_ptr,  # [b] int64
    top_k_ptr,  # [g] int64
    top_p_ptr,  # [g] float64
    min_p_ptr,  # [g] float64
    seed_ptr,  # [g] int64
    seq_lens_ptr,  # [b] int64
    chunk_weights_ptr,  # [g, chunks] int64, or None
    counters_ptr,  # [g, BINS + 1] int32, the last of a row is the length of its list
    keys_ptr,  # [g, vocab_size] int64, of which the list is the beginning
    weights_ptr,  # [g, vocab_size] int64
    tokens_ptr,  # [b] int64
    vocab_size,
    chunks,
    BINS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (g,). Every filter keeps a beginning of the order, so that all of them together keep the
    one that weighs least, and its weight says all about it."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + place)
    top_k, top_p = tl.load(top_k_ptr + place), tl.load(top_p_ptr + place)
    least = least_weight(tl.load(min_p_ptr + place))
    length = tl.load(counters_ptr + place * (BINS + 1) + BINS)
    keys_ptr += place * vocab_size
    weights_ptr += place * vocab_size
    before_best = tl.load(best_ptr + row) - 1

    last_key = tl.full((), MAX_KEY, tl.int64)
    if top_k < length:
        last_key, _ = find_key(keys_ptr, weights_ptr, length, top_k, before_best, True, TILE)
    in_top_k = tl.zeros((TILE,), tl.int64)
    in_min_p = tl.zeros((TILE,), tl.int64)
    for start in range(0, length, TILE):
        i = start + tl.arange(0, TILE)
        key = tl.load(keys_ptr + i, mask=i < length, other=MAX_KEY)
        weights = tl.load(weights_ptr + i, mask=i < length, other=0)
        weights = tl.where(key <= last_key, weights, 0)
        in_top_k += weights
        in_min_p += tl.where(weights >= least, weights, 0)
    total = tl.sum(in_top_k, 0)
    if chunk_weights_ptr is not None:  # noqa: SIM102
        if top_k >= vocab_size:  # then the list may lack what top-p leaves out
            total = total_weight(chunk_weights_ptr, place, chunks, BLOCK_C)
    if top_p < 1.0:
        enough = tl.minimum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), total)
        _, total = find_key(keys_ptr, weights_ptr, length, enough, before_best, False, TILE)
    total = tl.minimum(total, tl.sum(in_min_p, 0))

    uniform = uniform_of(tl.load(seed_ptr + place), tl.load(seq_lens_ptr + row))
    target = target_weight(uniform, total)
    key, _ = find_key(keys_ptr, weights_ptr, length, target + 1, before_best, False, TILE)
    tl.store(tokens_ptr + row, key & LOW_WORD)


@triton.jit
def find_key(
    keys_ptr, weights_ptr, length, need, before, BY_COUNT: tl.constexpr, TILE: tl.constexpr
):
    """The least key of the list at which the number of tokens, or their weight, with keys up to it
    reaches `need`; and that number or weight. All keys are above `before`. Bisects, and moves each
    end on to a key that exists, so that a gap between keys costs nothing."""
    low = before  # not enough up to here
    high = tl.full((), MAX_KEY, tl.int64)  # enough up to here
    reached = tl.full((), 0, tl.int64)
    while low + 1 < high:
        # Their mean; their sum might not fit.
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        amount = tl.zeros((TILE,), tl.int64)
        last_in = tl.full((TILE,), MIN_KEY, tl.int64)
        first_out = tl.full((TILE,), MAX_KEY, tl.int64)
        for start in range(0, length, TILE):
            i = start + tl.arange(0, TILE)
            key = tl.load(keys_ptr + i, mask=i < length, other=MAX_KEY)
            is_in = key <= middle
            if BY_COUNT:
                amount += is_in.to(tl.int64)
            else:
                weights = tl.load(weights_ptr + i, mask=i < length, other=0)
                amount += tl.where(is_in, weights, 0)
            last_in = tl.maximum(last_in, tl.where(is_in, key, MIN_KEY))
            first_out = tl.minimum(first_out, tl.where(is_in, MAX_KEY, key))
        sum_in = tl.sum(amount, 0)
        if sum_in >= need:
            high = tl.max(last_in, 0)
            reached = sum_in
        else:
            low = tl.min(first_out, 0) - 1
    return high, reached


_LISTS = {"CHUNK": CHUNK, "BINS": BINS, "BLOCK_C": 128}
_SEARCH = {"BINS": BINS, "BLOCK_C": 128, "TILE": TILE}
_NO_TAIL = ("chunk_weights_ptr",)

AOT_CASES = [
    aot_case(count_kernel, "count top-k", {"CHUNK": CHUNK, "BINS": BINS}, _NO_TAIL),
    aot_case(count_kernel, "count top-p", {"CHUNK": CHUNK, "BINS": BINS}),
    aot_case(list_kernel, "list top-k", _LISTS, _NO_TAIL),
    aot_case(list_kernel, "list top-p", _LISTS),
    aot_case(search_kernel, "search top-k", _SEARCH, _NO_TAIL, warps=8),
    aot_case(search_kernel, "search top-p", _SEARCH, warps=8),
]
