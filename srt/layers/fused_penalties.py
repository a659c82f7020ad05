"""Penalties and biases of logits, in one pass over the logits and one over the biases."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from srt.sampling_batch import BiasColumns, PenaltyColumns, RowGroup, SamplingBatch

CHUNK = 2048  # tokens of a program
BIAS_BLOCK = 256
GROUP_BLOCK = 128  # penalised rows that a program searches for its own at once


def adjust_logits(
    logits: torch.Tensor, sampling: SamplingBatch, seq_lens: torch.Tensor
) -> torch.Tensor:
    """As sampler.adjust_logits: `logits` [b, vocab] with the rows' penalties and biases, the same
    object without any."""
    if sampling.penalties is None and sampling.biases is None:
        return logits
    adjusted = _penalized(logits, sampling.penalties)
    if sampling.biases is not None:
        _add_biases(adjusted, sampling.biases, seq_lens)
    return adjusted


def _penalized(logits: torch.Tensor, penalties: RowGroup[PenaltyColumns] | None) -> torch.Tensor:
    if penalties is None:
        return logits.clone()
    num_rows, vocab_size = logits.shape
    adjusted = torch.empty_like(logits, memory_format=torch.contiguous_format)
    columns = penalties.columns
    penalty_kernel[(num_rows, triton.cdiv(vocab_size, CHUNK))](
        logits,
        adjusted,
        penalties.row_index,
        columns.repetition,
        columns.frequency,
        columns.presence,
        columns.in_prompt.view(torch.uint8),
        columns.output_counts,
        vocab_size,
        len(penalties),
        logits.stride(0),
        CHUNK=CHUNK,
        BLOCK_G=GROUP_BLOCK,
        num_warps=4,
    )
    return adjusted


def _add_biases(
    logits: torch.Tensor, biases: RowGroup[BiasColumns], seq_lens: torch.Tensor
) -> None:
    columns = biases.columns
    bias_kernel[(triton.cdiv(len(biases), BIAS_BLOCK),)](
        logits,
        biases.row_index,
        columns.token_id,
        columns.bias,
        columns.until,
        seq_lens,
        len(biases),
        logits.stride(0),
        BLOCK=BIAS_BLOCK,
        num_warps=4,
    )


# Compiled once for any number of rows, not again for one, and for multiples of 16.
@triton.jit(do_not_specialize=["num_penalized"])
def penalty_kernel(
    logits_ptr,  # [b, vocab_size] float32
    adjusted_ptr,  # [b, vocab_size] float32, contiguous
    row_index_ptr,  # [num_penalized] int64
    repetition_ptr,  # [num_penalized] float32, as the next two
    frequency_ptr,
    presence_ptr,
    in_prompt_ptr,  # [num_penalized, vocab_size] uint8
    output_counts_ptr,  # [num_penalized, vocab_size] int32
    vocab_size,
    num_penalized,
    stride_logits_b,
    CHUNK: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Grid (b, cdiv(vocab_size, CHUNK)); rows without a penalty are copied."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    keep = token < vocab_size
    x = tl.load(logits_ptr + row * stride_logits_b + token, mask=keep, other=0.0)
    place = tl.full((), -1, tl.int32)
    for start in range(0, num_penalized, BLOCK_G):
        group = start + tl.arange(0, BLOCK_G)
        rows = tl.load(row_index_ptr + group, mask=group < num_penalized, other=-1)
        place = tl.maximum(place, tl.max(tl.where(rows == row, group, -1), 0))
    if place >= 0:
        repetition = tl.load(repetition_ptr + place)
        frequency = tl.load(frequency_ptr + place)
        presence = tl.load(presence_ptr + place)
        seen = place.to(tl.int64) * vocab_size + token
        in_prompt = tl.load(in_prompt_ptr + seen, mask=keep, other=0) != 0
        count = tl.load(output_counts_ptr + seen, mask=keep, other=0)
        repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(in_prompt | (count > 0), repeated, x)
        x -= frequency * count.to(tl.float32) + tl.where(count > 0, presence, 0.0)
    tl.store(adjusted_ptr + row * vocab_size + token, x, mask=keep)


@triton.jit(do_not_specialize=["num_biases"])
def bias_kernel(
    logits_ptr,  # [b, vocab_size] float32
    row_index_ptr,  # [num_biases] int64, as token_id and until
    token_id_ptr,
    bias_ptr,  # [num_biases] float32
    until_ptr,
    seq_lens_ptr,  # [b] int64
    num_biases,
    stride_logits_b,
    BLOCK: tl.constexpr,
):
    """Grid (cdiv(num_biases, BLOCK),). A token may have a bias and be forbidden, hence atomic; at
    most one of its biases is finite, so that the order of additions does not matter."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = entry < num_biases
    row = tl.load(row_index_ptr + entry, mask=keep, other=0)
    token = tl.load(token_id_ptr + entry, mask=keep, other=0)
    bias = tl.load(bias_ptr + entry, mask=keep, other=0.0)
    until = tl.load(until_ptr + entry, mask=keep, other=0)
    seq_len = tl.load(seq_lens_ptr + row, mask=keep, other=0)
    target = logits_ptr + row * stride_logits_b + token
    tl.atomic_add(target, bias, mask=keep & (seq_len < until), sem="relaxed")


def _aot_case(kernel: Any, name: str, constexprs: dict[str, int]) -> dict[str, Any]:
    types = {"in_prompt_ptr": "*u8", "output_counts_ptr": "*i32"}
    types |= dict.fromkeys(("row_index_ptr", "token_id_ptr", "until_ptr", "seq_lens_ptr"), "*i64")
    types |= {"vocab_size": "i32:16", "stride_logits_b": "i32:16"}
    types |= {"num_penalized": "i32", "num_biases": "i32"}
    arguments = [arg for arg in kernel.arg_names if arg not in constexprs]
    return {
        "kernel": kernel,
        "name": name,
        "signature": {arg: types.get(arg, "*fp32") for arg in arguments},
        "constexprs": constexprs,
        "num_warps": 4,
    }


def AOT_CASES() -> list[dict[str, Any]]:
    return [
        _aot_case(penalty_kernel, "penalties", {"CHUNK": CHUNK, "BLOCK_G": GROUP_BLOCK}),
        _aot_case(bias_kernel, "biases", {"BLOCK": BIAS_BLOCK}),
    ]
