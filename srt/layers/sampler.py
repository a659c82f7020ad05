"""Logits to tokens: a pure function of logits, knobs, seed and position.

What a row samples must not depend on its batch mates, so nothing here may round differently in
another batch. Sums over the vocabulary are therefore taken over integers: floating-point `sum` and
`cumsum` pick their order of addition by the shape of the whole tensor, on CUDA even by chance.
"""

from __future__ import annotations

import numpy as np
import torch

from srt.layers import native_ops
from srt.sampling_batch import (
    BROKEN,
    MAX_SHORT_TOP_K,
    BiasColumns,
    DrawColumns,
    DrawPath,
    PenaltyColumns,
    RowGroup,
    SamplingBatch,
)

# The weight of the most likely token. Others are proportional and rounded down, so a token less
# likely than 2**-40 of the best is never drawn. Any vocabulary below 2**22 sums up within int64.
MAX_WEIGHT = 1 << 40
# Elements of one [rows, vocab] intermediate: rows are drawn in blocks, to bound memory.
MAX_BLOCK_ELEMENTS = 1 << 24


def sample(logits: torch.Tensor, sampling: SamplingBatch, seq_lens: torch.Tensor) -> torch.Tensor:
    """The next token [b] int64 of each row of `logits` [b, vocab] float32, which stay as they are.
    `seq_lens` [b] int64 counts the tokens before the new one, in other words it is its position.

    Order: repetition penalty (prompt and outputs, as in Hugging Face's processor of that name),
    frequency and presence penalty (outputs, as the OpenAI API defines them), logit_bias and
    min_new_tokens; then greedy rows take the most likely token, the lowest id among equals. Others:
    temperature, top-k, top-p, min-p, each on what the one before left. Exactly k tokens pass top-k
    (ties: lowest ids), and top-p keeps the smallest set whose probability is at least p.

    A row that holds NaN or +inf, or no finite logit at all, gives BROKEN. Whether it does is
    decided on the device: nothing waits for it."""
    logits = adjust_logits(logits, sampling, seq_lens)
    if logits.is_cuda:
        # Not at the top: there is no Triton where there is no CUDA.
        from srt.layers.fused_sampler import choose_tokens

        next_token_ids = choose_tokens(logits, sampling, seq_lens)
        # The largest of numbers among which is NaN is NaN.
        return next_token_ids.masked_fill_(~logits.amax(dim=-1).isfinite(), BROKEN)
    next_token_ids = _most_likely(logits)
    for path, group in sampling.draws.items():
        block = max(1, MAX_BLOCK_ELEMENTS // logits.shape[1])
        for start in range(0, len(group), block):
            rows = group.row_index[start : start + block]
            columns = DrawColumns(*(column[start : start + block] for column in group.columns))
            # Short of a copy when the group is the whole batch.
            row_logits = logits if len(rows) == len(logits) else logits[rows]
            uniforms = uniform(columns.seed, seq_lens[rows])
            drawn = _draw(row_logits, path, columns, uniforms)
            next_token_ids[rows] = drawn.masked_fill_(next_token_ids[rows] == BROKEN, BROKEN)
    return next_token_ids


def _most_likely(logits: torch.Tensor) -> torch.Tensor:
    """[b] int64, BROKEN where the row means nothing."""
    library = native_ops.kernels_for(logits)
    if library is not None:
        return native_ops.argmax(library, logits)
    best, ids = logits.max(dim=-1)
    return ids.masked_fill_(~best.isfinite(), BROKEN)


def mark_broken(hidden: torch.Tensor) -> torch.Tensor:
    """For rows `hidden` [b, size] that are not sampled: BROKEN [b] int64 where one holds NaN or
    infinity, else 0. What poisons the KV of any token poisons those after it, too."""
    is_finite = hidden.isfinite().all(dim=-1)
    return is_finite.logical_not_().long().mul_(BROKEN)


def adjust_logits(
    logits: torch.Tensor, sampling: SamplingBatch, seq_lens: torch.Tensor
) -> torch.Tensor:
    """`logits` [b, vocab] with the rows' penalties and biases; the same object without any."""
    if sampling.penalties is None and sampling.biases is None:
        return logits
    if logits.is_cuda:
        from srt.layers import fused_penalties

        return fused_penalties.adjust_logits(logits, sampling, seq_lens)
    logits = logits.clone()
    if sampling.penalties is not None:
        _penalize(logits, sampling.penalties)
    if sampling.biases is not None:
        _add_biases(logits, sampling.biases, seq_lens)
    return logits


def _penalize(logits: torch.Tensor, penalties: RowGroup[PenaltyColumns]) -> None:
    rows, columns = penalties.row_index, penalties.columns
    row_logits = logits[rows]  # [g, vocab]
    in_output = columns.output_counts > 0
    repeated = torch.where(
        row_logits > 0, row_logits / columns.repetition, row_logits * columns.repetition
    )
    row_logits = torch.where(columns.in_prompt | in_output, repeated, row_logits)
    row_logits -= columns.frequency * columns.output_counts + columns.presence * in_output
    logits[rows] = row_logits


def _add_biases(
    logits: torch.Tensor, biases: RowGroup[BiasColumns], seq_lens: torch.Tensor
) -> None:
    rows, columns = biases.row_index, biases.columns
    bias = torch.where(seq_lens[rows] < columns.until, columns.bias, 0.0)
    logits.index_put_((rows, columns.token_id), bias, accumulate=True)


def _draw(
    logits: torch.Tensor, path: DrawPath, columns: DrawColumns, uniforms: torch.Tensor
) -> torch.Tensor:
    """One token [g] int64 for each row of `logits` [g, vocab], by inverse CDF at `uniforms` [g]."""
    if path is DrawPath.WHOLE:
        weights = _weights(logits, columns)
        weights.masked_fill_(weights < _min_weight(columns), 0)
        cumulative = weights.cumsum(dim=-1)
        return _invert(cumulative, cumulative[:, -1:], uniforms).squeeze(1)

    ids = _best_ids(logits, path)  # [g, m], most likely first
    weights = _weights(logits.gather(1, ids), columns)
    cumulative = weights.cumsum(dim=-1)
    # Every filter keeps a beginning of the order, so all of them together are one length.
    top_k = columns.top_k.unsqueeze(1).clamp(max=ids.shape[1])
    enough = columns.top_p.unsqueeze(1) * cumulative.gather(1, top_k - 1).double()
    in_top_p = torch.searchsorted(cumulative, enough.ceil_().long()) + 1
    in_min_p = torch.searchsorted(-weights, -_min_weight(columns), right=True)
    length = torch.minimum(torch.minimum(top_k, in_top_p), in_min_p).clamp(min=1)
    place = _invert(cumulative, cumulative.gather(1, length - 1), uniforms)
    return ids.gather(1, place).squeeze(1)


def _weights(logits: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
    """Probabilities after temperature as integers [g, m], the largest being MAX_WEIGHT."""
    exact = logits.double()
    exact = exact - exact.amax(dim=-1, keepdim=True)
    return (exact.div_(columns.temperature.unsqueeze(1)).exp_().mul_(MAX_WEIGHT)).long()


def _min_weight(columns: DrawColumns) -> torch.Tensor:
    """Weight [g, 1] int64 that a token needs to pass min-p."""
    return (columns.min_p.unsqueeze(1) * MAX_WEIGHT).ceil_().long()


def _best_ids(logits: torch.Tensor, path: DrawPath) -> torch.Tensor:
    """Token ids [g, m] by falling logit, equal ones by rising id; m is all or MAX_SHORT_TOP_K."""
    # An integer that rises as the float falls, above the id: no two keys are equal, so that their
    # order is unique, whatever algorithm finds it. Positive floats order as their bits do, negative
    # ones backwards, hence the xor.
    bits = logits.contiguous().view(torch.int32)
    falling = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))
    keys = falling.long().bitwise_left_shift_(32)
    keys.bitwise_or_(torch.arange(logits.shape[1], device=logits.device))
    if path is DrawPath.SHORT:
        keys = keys.topk(min(MAX_SHORT_TOP_K, logits.shape[1]), dim=-1, largest=False).values
    elif keys.is_cpu:
        # NumPy sorts integers with vector instructions: 0.5 ms against torch's 2.9 ms for 49152
        # tokens on one core of an x86 server.
        keys = torch.from_numpy(np.sort(keys.numpy(), axis=-1))
    else:
        keys = keys.sort(dim=-1).values
    return keys.bitwise_and_(0xFFFFFFFF)


def _invert(cumulative: torch.Tensor, total: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first place [g, 1] of `cumulative` [g, m] above uniform x total [g, 1]."""
    target = (uniforms.unsqueeze(1) * total.double()).long()
    # Rounding may reach the total itself, and NaN logits make any numbers at all.
    target = torch.minimum(target, total - 1)
    place = torch.searchsorted(cumulative, target, right=True)
    return place.clamp_(max=cumulative.shape[1] - 1)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A number in [0, 1) [g] float64 for each (seed, position), both int64: the same bits on every
    device and in every batch. Counter-based: the position is the counter of a SplitMix64 generator
    (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) whose
    state starts at the mixed seed, so that neighbouring seeds are unrelated."""
    state = _mix(seeds + _GAMMA) + positions * _GAMMA
    return _shift_right(_mix(state), 11).double() * 2.0**-53


def _signed(value: int) -> int:
    """An unsigned 64-bit constant as the int64 of the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer; int64 arithmetic wraps around."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift; that of int64 would copy the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
