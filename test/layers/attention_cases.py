"""Ragged requests in scattered slots, and their attention in float64 from the definition."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from srt.forward_batch import ForwardBatch, ForwardMode
from srt.layers.attention import Attention
from srt.layers.attention_reference import attention_reference
from srt.layers.triton_attention import GpuFacts, TritonAttentionBackend
from srt.mem_cache.kv_cache import KVCache

SMALL_GPU = GpuFacts(num_sms=2, capability=(9, 0))
# Attention averages values of size 1; what remains is the rounding of the output and of weights.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LAYER = 1  # of two: the other must stay untouched

HEAD_DIMS = [64, 80, 96, 128, 256]
DTYPES = [  # of the queries, and of a cache that has another
    (torch.bfloat16, None),
    (torch.float16, None),
    (torch.float32, None),
    (torch.bfloat16, torch.float8_e4m3fn),
]
WINDOWS = [(None, 0.0), (65, 0.0), (128, 4.0)]  # and the cap of the logits
PAGE_SIZES = [1, 16, 64]
# What a kernel is made for, in every combination. A page size is nothing that kernels know, only an
# order of the slots that the table leads to: each meets every value of each of the others.
EVERYWHERE = [
    (head_dim, *dtypes, *window, PAGE_SIZES[(h + t + w) % len(PAGE_SIZES)])
    for h, head_dim in enumerate(HEAD_DIMS)
    for t, dtypes in enumerate(DTYPES)
    for w, window in enumerate(WINDOWS)
]


@dataclass
class Case:
    """A pass over requests of (prefix_len, extend_len), with what is needed to check it.

    Slots that no request owns hold NaN, the padding slot 0 too, and stale entries of the table lead
    to some: a kernel that looks where it should not shows it.
    """

    layer: Attention
    backend: TritonAttentionBackend
    batch: ForwardBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keys: list[torch.Tensor]  # of each request [seq_len, num_kv_heads, head_dim] float64
    values: list[torch.Tensor]

    def run(self) -> torch.Tensor:
        self.backend.plan(self.batch)
        return self.backend.forward(self.layer, self.q, self.k, self.v)

    def reference(self) -> torch.Tensor:
        return torch.cat(
            [
                reference(self.layer, q.double().cpu(), keys, values)
                for q, keys, values in zip(
                    self.q.split(self.batch.extend_lens_cpu), self.keys, self.values, strict=True
                )
            ]
        )

    def check(self) -> None:
        """Raise unless the kernel agrees with the reference."""
        tolerance = TOLERANCE[self.q.dtype]
        out = self.run().double().cpu()
        torch.testing.assert_close(out, self.reference(), atol=tolerance, rtol=tolerance)


def reference(
    layer: Attention, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """attention_reference() of what `layer` computes."""
    return attention_reference(q, keys, values, layer.scale, layer.sliding_window, layer.logit_cap)


def make_case(
    shapes: Sequence[tuple[int, int]],
    mode: ForwardMode,
    *,
    device: str,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    window: int | None = None,
    logit_cap: float = 0.0,
    page_size: int = 1,
    batch_invariant: bool = False,
    gpu: GpuFacts = SMALL_GPU,
    seed: int = 0,
) -> Case:
    """`shapes` are (prefix_len, extend_len); decode: extend_len 1. Rows of the table and pages of
    slots are in random order; a page's slots are consecutive. `scales` of an e4m3 cache."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    seq_lens = [prefix_len + extend_len for prefix_len, extend_len in shapes]
    extend_lens = [extend_len for _, extend_len in shapes]
    num_pages = sum(-(-seq_len // page_size) for seq_len in seq_lens) + 2
    num_slots = (num_pages + 1) * page_size
    cache = KVCache(num_slots, 2, num_kv_heads, head_dim, kv_dtype or dtype, "cpu")
    cache.k_scales[LAYER], cache.v_scales[LAYER] = scales
    for buffer in cache.get(LAYER):
        buffer.fill_(float("nan"))
    pages = list(range(1, num_pages + 1))
    rng.shuffle(pages)
    garbage = pages.pop() * page_size
    rows = rng.sample(range(1, len(shapes) + 3), len(shapes))
    table = torch.full((len(shapes) + 3, max(seq_lens) + 7), garbage, dtype=torch.int32)
    q, k, v, loc, positions, keys, values = [], [], [], [], [], [], []
    for row, (prefix_len, extend_len) in zip(rows, shapes, strict=True):
        seq_len = prefix_len + extend_len
        own = [pages.pop() for _ in range(-(-seq_len // page_size))]
        slots = torch.tensor(
            [own[i // page_size] * page_size + i % page_size for i in range(seq_len)]
        )
        table[row, :seq_len] = slots.int()
        shape = (seq_len, num_kv_heads, head_dim)
        all_k = torch.randn(shape, generator=generator).to(dtype)
        all_v = torch.randn(shape, generator=generator).to(dtype)
        cache.set_kv(LAYER, slots[:prefix_len], all_k[:prefix_len], all_v[:prefix_len])
        k.append(all_k[prefix_len:])
        v.append(all_v[prefix_len:])
        q.append(torch.randn((extend_len, num_heads, head_dim), generator=generator).to(dtype))
        loc.append(slots[prefix_len:])
        positions.append(torch.arange(prefix_len, seq_len))
        keys.append(_as_stored(cache, all_k, scales[0]))
        values.append(_as_stored(cache, all_v, scales[1]))
    for buffers in (cache.k_buffers, cache.v_buffers):
        buffers[:] = [buffer.to(device) for buffer in buffers]

    def on_device(numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    n = sum(extend_lens)
    batch = ForwardBatch(
        mode=mode,
        input_ids=torch.zeros(n, dtype=torch.int64, device=device),
        positions=torch.cat(positions).to(device),
        req_pool_indices=on_device(rows),
        seq_lens=on_device(seq_lens),
        extend_lens=on_device(extend_lens),
        out_cache_loc=torch.cat(loc).to(device),
        seq_lens_cpu=seq_lens,
        extend_lens_cpu=extend_lens,
        sampling=None,
    )
    layer = Attention(LAYER, num_heads, num_kv_heads, head_dim, head_dim**-0.5, window, logit_cap)
    backend = TritonAttentionBackend(
        cache,
        table.to(device),
        num_heads,
        dtype,
        {None, window},
        max_batch=len(shapes) + 2,
        gpu=gpu,
        batch_invariant=batch_invariant,
    )
    q_all, k_all, v_all = (torch.cat(x).to(device) for x in (q, k, v))
    return Case(layer, backend, batch, q_all, k_all, v_all, keys, values)


def _as_stored(cache: KVCache, x: torch.Tensor, scale: float) -> torch.Tensor:
    """x as the cache gives it back, in float64."""
    if cache.dtype != torch.float8_e4m3fn:
        return x.to(cache.dtype).double()
    return (x.float() / scale).to(torch.float8_e4m3fn).double() * scale
