"""Passes of padding that compile and load what requests will need, before the first one comes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from srt.forward_batch import ForwardBatch, ForwardMode
from srt.sampling_batch import SamplingBatch
from srt.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# One of each way to draw a token, and of each way to change logits.
SAMPLING_KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=20),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.0, presence_penalty=0.5),
    SamplingParams(temperature=0.0, logit_bias={0: 1.0}),
)
# New tokens of each request. Triton compiles again for some sizes: 1, and multiples of 16.
EXTENDS = ((1,), (16,), (33, 1, 7))
# Rows of decode passes, beside those that are captured.
DECODES = (1, 2, 16)


def warm_up(
    step: Callable[[ForwardBatch], torch.Tensor],
    vocab_size: int,
    context_len: int,
    decode_sizes: Sequence[int],
    max_running_requests: int,
    device: str,
) -> None:
    """Run `step` on batches of padding. Slot 0 is all that they write."""
    start = time.monotonic()
    num_passes = 0
    for batch in _passes(vocab_size, context_len, decode_sizes, max_running_requests, device):
        step(batch)
        num_passes += 1
    torch.cuda.synchronize()
    logger.info("Warm up end. passes=%d, elapsed=%.1f s", num_passes, time.monotonic() - start)


def _passes(
    vocab_size: int,
    context_len: int,
    decode_sizes: Sequence[int],
    max_running_requests: int,
    device: str,
) -> Iterator[ForwardBatch]:
    greedy = SAMPLING_KINDS[0]
    for lens in EXTENDS:
        fitting = [min(n, context_len) for n in lens[:max_running_requests]]
        yield padding_batch(ForwardMode.EXTEND, fitting, [greedy], vocab_size, device)
    sizes = {size for size in DECODES if size <= max_running_requests} | set(decode_sizes)
    for size in sorted(sizes):
        yield padding_batch(ForwardMode.DECODE, [1] * size, [greedy], vocab_size, device)
    for kind in SAMPLING_KINDS[1:]:
        yield padding_batch(ForwardMode.DECODE, [1], [kind], vocab_size, device)
    mixed = [1] * min(len(SAMPLING_KINDS), max_running_requests)
    yield padding_batch(ForwardMode.DECODE, mixed, SAMPLING_KINDS, vocab_size, device)


def padding_batch(
    mode: ForwardMode,
    lens: Sequence[int],
    kinds: Sequence[SamplingParams],
    vocab_size: int,
    device: str,
) -> ForwardBatch:
    """A pass of requests of `lens` new tokens each, without prefix, all in slot 0 of row 0. `kinds`
    are given out in turns."""
    b, n = len(lens), sum(lens)
    numbers = torch.tensor(lens, dtype=torch.int64, device=device)
    params = [kinds[i % len(kinds)] for i in range(b)]
    return ForwardBatch(
        mode=mode,
        input_ids=torch.zeros(n, dtype=torch.int64, device=device),
        positions=torch.cat([torch.arange(length, device=device) for length in lens]),
        req_pool_indices=torch.zeros(b, dtype=torch.int64, device=device),
        seq_lens=numbers,
        extend_lens=numbers,
        out_cache_loc=torch.zeros(n, dtype=torch.int64, device=device),
        seq_lens_cpu=list(lens),
        extend_lens_cpu=list(lens),
        sampling=SamplingBatch.build(
            params, [[0]] * b, [[]] * b, [()] * b, vocab_size, torch.device(device)
        ),
    )
