"""The torch backend against a naive float64 reference over odd ragged shapes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch

import srt.layers.torch_attention as torch_attention
from srt.forward_batch import ForwardBatch, ForwardMode
from srt.layers.attention import Attention
from srt.layers.torch_attention import TorchAttentionBackend
from srt.mem_cache import int8_rows
from srt.mem_cache.kv_cache import KVCache

NUM_SLOTS = 4096
CONTEXT_LEN = 1500
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16


@dataclass
class Pass:
    """Cached prefixes and new tokens of a few requests, laid out in scattered slots."""

    backend: TorchAttentionBackend
    batch: ForwardBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    all_k: list[torch.Tensor]  # per request [seq_len, KV_HEADS, HEAD_DIM]
    all_v: list[torch.Tensor]

    def run(self, layer: Attention) -> torch.Tensor:
        self.backend.plan(self.batch)
        return self.backend.forward(layer, self.q, self.k, self.v)


def make_pass(
    shapes: list[tuple[int, int]],
    mode: ForwardMode,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> Pass:
    """`shapes` are (prefix_len, extend_len). Rows and slots are random; slots nobody owns hold NaN,
    and so does what is stale in the table, but for slot 0, which is zero."""
    generator = torch.Generator().manual_seed(seed)
    cache = KVCache(NUM_SLOTS, 1, KV_HEADS, HEAD_DIM, kv_dtype or dtype, "cpu")
    for buffer in cache.get(0):
        # Of an int8 cache all bits set: scales that are NaN.
        buffer[1:] = 255 if buffer.dtype is torch.uint8 else float("nan")
    free = (torch.randperm(NUM_SLOTS - 1, generator=generator) + 1).tolist()
    garbage = free.pop()
    table = torch.full((len(shapes) + 3, CONTEXT_LEN), garbage, dtype=torch.int32)
    rows = (torch.randperm(len(shapes) + 2, generator=generator)[: len(shapes)] + 1).tolist()
    q, k, v, out_cache_loc, positions, all_k, all_v = [], [], [], [], [], [], []
    for row, (prefix_len, extend_len) in zip(rows, shapes, strict=True):
        seq_len = prefix_len + extend_len
        slots = torch.tensor([free.pop() for _ in range(seq_len)])
        table[row, :seq_len] = slots.int()
        shape = (seq_len, KV_HEADS, HEAD_DIM)
        request_k = torch.randn(shape, generator=generator).to(dtype)
        request_v = torch.randn(shape, generator=generator).to(dtype)
        cache.set_kv(0, slots[:prefix_len], request_k[:prefix_len], request_v[:prefix_len])
        all_k.append(request_k)
        all_v.append(request_v)
        k.append(request_k[prefix_len:])
        v.append(request_v[prefix_len:])
        q.append(torch.randn((extend_len, HEADS, HEAD_DIM), generator=generator).to(dtype))
        out_cache_loc.append(slots[prefix_len:])
        positions.append(torch.arange(prefix_len, seq_len))
    seq_lens = [prefix_len + extend_len for prefix_len, extend_len in shapes]
    extend_lens = [extend_len for _, extend_len in shapes]
    batch = ForwardBatch(
        mode=mode,
        input_ids=torch.zeros(sum(extend_lens), dtype=torch.int64),
        positions=torch.cat(positions),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(seq_lens),
        extend_lens=torch.tensor(extend_lens),
        out_cache_loc=torch.cat(out_cache_loc),
        seq_lens_cpu=seq_lens,
        extend_lens_cpu=extend_lens,
        sampling=None,
    )
    backend = TorchAttentionBackend(cache, table)
    return Pass(backend, batch, torch.cat(q), torch.cat(k), torch.cat(v), all_k, all_v)


def reference(layer: Attention, made: Pass) -> torch.Tensor:
    """One query and head at a time in float64, straight from the definition."""
    out = torch.empty(made.q.shape, dtype=torch.float64)
    n = 0
    for i, extend_len in enumerate(made.batch.extend_lens_cpu):
        seq_len = made.batch.seq_lens_cpu[i]
        for position in range(seq_len - extend_len, seq_len):
            first = max(0, position - layer.sliding_window + 1) if layer.sliding_window else 0
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                keys = made.all_k[i][first : position + 1, kv_head].double()
                values = made.all_v[i][first : position + 1, kv_head].double()
                scores = keys @ made.q[n, head].double() * layer.scale
                if layer.logit_cap:
                    scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
                out[n, head] = scores.softmax(0) @ values
            n += 1
    return out


def make_layer(window: int | None = None, cap: float = 0.0) -> Attention:
    return Attention(0, HEADS, KV_HEADS, HEAD_DIM, 0.3, window, cap)


def as_stored(x: torch.Tensor) -> torch.Tensor:
    """x as an int8 cache gives it back."""
    return int8_rows.decode(int8_rows.encode(x), x.shape[-1], torch.float64)


EXTENDS = [
    [(0, 1)],
    [(0, 5), (7, 1), (1, 1), (0, 1), (30, 9)],
    [(3, 40), (0, 33), (64, 2)],
    [(15, 1), (16, 1), (14, 2), (15, 3), (0, 16), (0, 17)],  # around a window of 16
]
DECODES = [
    [(0, 1)],
    [(1, 1), (0, 1), (2, 1)],
    [(600, 1), (3, 1), (14, 1), (15, 1), (16, 1), (400, 1), (90, 1), (599, 1)],
]


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("window", [None, 1, 16, 1000])
@pytest.mark.parametrize("shapes", EXTENDS)
def test_extend_attends_as_defined(
    shapes: list[tuple[int, int]], window: int | None, cap: float
) -> None:
    made, layer = make_pass(shapes, ForwardMode.EXTEND), make_layer(window, cap)
    torch.testing.assert_close(made.run(layer).double(), reference(layer, made), atol=2e-6, rtol=0)


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("window", [None, 1, 16, 1000])
@pytest.mark.parametrize("shapes", DECODES)
def test_decode_attends_as_defined(
    shapes: list[tuple[int, int]], window: int | None, cap: float
) -> None:
    made, layer = make_pass(shapes, ForwardMode.DECODE), make_layer(window, cap)
    torch.testing.assert_close(made.run(layer).double(), reference(layer, made), atol=2e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 16])
def test_extend_is_the_same_in_small_query_blocks(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, layer = make_pass(EXTENDS[2], ForwardMode.EXTEND), make_layer(window)
    monkeypatch.setattr(torch_attention, "MAX_QUERY_BLOCK", 7)
    torch.testing.assert_close(made.run(layer).double(), reference(layer, made), atol=2e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 100])
def test_a_row_of_several_query_blocks_agrees_with_its_last_token_decoded(
    window: int | None,
) -> None:
    layer = make_layer(window)
    long = make_pass([(0, 1300)], ForwardMode.EXTEND)
    last = long.run(layer)[-1:]
    # The same keys are in the cache now; decode the last position over them.
    batch = dataclasses.replace(
        long.batch,
        mode=ForwardMode.DECODE,
        extend_lens=torch.tensor([1]),
        extend_lens_cpu=[1],
        out_cache_loc=long.batch.out_cache_loc[-1:],
    )
    long.backend.plan(batch)
    decoded = long.backend.forward(layer, long.q[-1:], long.k[-1:], long.v[-1:])
    torch.testing.assert_close(decoded, last, atol=2e-6, rtol=0)


def test_decode_is_the_same_when_little_may_be_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    made, layer = make_pass(DECODES[2], ForwardMode.DECODE), make_layer()
    monkeypatch.setattr(torch_attention, "MAX_GATHERED_TOKENS", 1)
    torch.testing.assert_close(made.run(layer).double(), reference(layer, made), atol=2e-6, rtol=0)


@pytest.mark.parametrize("mode", ForwardMode)
def test_a_request_gives_alone_what_it_gives_in_a_batch(mode: ForwardMode) -> None:
    shapes = DECODES[2] if mode is ForwardMode.DECODE else EXTENDS[1]
    made, layer = make_pass(shapes, mode), make_layer(16)
    together = made.run(layer)
    start = 0
    for i, extend_len in enumerate(made.batch.extend_lens_cpu):
        rows = slice(start, start + extend_len)
        start += extend_len
        batch = ForwardBatch(
            mode,
            made.batch.input_ids[rows],
            made.batch.positions[rows],
            made.batch.req_pool_indices[i : i + 1],
            made.batch.seq_lens[i : i + 1],
            made.batch.extend_lens[i : i + 1],
            made.batch.out_cache_loc[rows],
            made.batch.seq_lens_cpu[i : i + 1],
            [extend_len],
            None,
        )
        made.backend.plan(batch)
        alone = made.backend.forward(layer, made.q[rows], made.k[rows], made.v[rows])
        torch.testing.assert_close(alone, together[rows], atol=1e-6, rtol=0)


def test_layers_with_different_windows_share_a_pass() -> None:
    made = make_pass(DECODES[2], ForwardMode.DECODE)
    made.backend.plan(made.batch)
    for layer in (make_layer(None), make_layer(16), make_layer(None)):
        out = made.backend.forward(layer, made.q, made.k, made.v)
        torch.testing.assert_close(out.double(), reference(layer, made), atol=2e-6, rtol=0)


@pytest.mark.parametrize("mode", ForwardMode)
def test_a_narrower_cache_rounds_keys_whether_they_are_new_or_cached(mode: ForwardMode) -> None:
    shapes = [(9, 1), (0, 1)] if mode is ForwardMode.DECODE else [(9, 4), (0, 6)]
    made = make_pass(shapes, mode, kv_dtype=torch.bfloat16)
    layer = make_layer()
    out = made.run(layer)
    made.all_k = [k.bfloat16() for k in made.all_k]
    made.all_v = [v.bfloat16() for v in made.all_v]
    torch.testing.assert_close(out.double(), reference(layer, made), atol=2e-6, rtol=0)


@pytest.mark.parametrize("mode", ForwardMode)
def test_bfloat16_attention_is_right_within_its_rounding(mode: ForwardMode) -> None:
    shapes = DECODES[2] if mode is ForwardMode.DECODE else EXTENDS[1]
    made, layer = make_pass(shapes, mode, dtype=torch.bfloat16), make_layer(16)
    out = made.run(layer)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.double(), reference(layer, made), atol=2e-2, rtol=0)


@pytest.mark.parametrize("mode", ForwardMode)
def test_an_int8_cache_is_read_by_its_scales(mode: ForwardMode) -> None:
    shapes = DECODES[2] if mode is ForwardMode.DECODE else EXTENDS[2]
    made, layer = make_pass(shapes, mode, kv_dtype=torch.int8), make_layer(16, 2.0)
    out = made.run(layer)
    made.all_k, made.all_v = ([as_stored(x) for x in xs] for xs in (made.all_k, made.all_v))
    torch.testing.assert_close(out.double(), reference(layer, made), atol=2e-6, rtol=0)
