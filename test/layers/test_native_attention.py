"""The C++ attention against the float64 reference, and to the bit where it promises that."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable

import pytest
import torch
from test_torch_attention import DECODES, EXTENDS, Pass, make_layer, make_pass, reference

from srt.forward_batch import ForwardBatch, ForwardMode
from srt.layers.attention import Attention
from srt.layers.native_attention import NativeAttentionBackend
from srt.mem_cache.kv_cache import KVCache
from srt.native import native_library

LIBRARY = native_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="needs a C++ compiler")
# Around tiles of 32 positions and splits of 256, with rows enough for several query blocks.
LONG = [(255, 1), (256, 3), (257, 20), (31, 1), (32, 33), (0, 300), (700, 17), (1000, 1)]
LONG_DECODES = [[(700, 1)], [(255, 1), (256, 1), (511, 1), (31, 1), (32, 1), (1200, 1)]]


def native_pass(
    shapes: list[tuple[int, int]],
    mode: ForwardMode,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> Pass:
    assert LIBRARY is not None
    made = make_pass(shapes, mode, 0, dtype, kv_dtype)
    cache, table = made.backend.kv_cache, made.backend.req_to_token
    return dataclasses.replace(made, backend=NativeAttentionBackend(LIBRARY, cache, table))


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("window", [None, 1, 16, 1000])
@pytest.mark.parametrize("shapes", EXTENDS)
def test_native_extend_attends_as_defined(
    shapes: list[tuple[int, int]], window: int | None, cap: float
) -> None:
    made, layer = native_pass(shapes, ForwardMode.EXTEND), make_layer(window, cap)
    torch.testing.assert_close(made.run(layer).double(), reference(layer, made), atol=2e-6, rtol=0)


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("window", [None, 1, 16, 1000])
@pytest.mark.parametrize("shapes", DECODES + LONG_DECODES)
def test_native_decode_attends_as_defined(
    shapes: list[tuple[int, int]], window: int | None, cap: float
) -> None:
    made, layer = native_pass(shapes, ForwardMode.DECODE), make_layer(window, cap)
    torch.testing.assert_close(made.run(layer).double(), reference(layer, made), atol=2e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 300])
def test_native_extend_is_right_across_tiles_and_splits(window: int | None) -> None:
    made, layer = native_pass(LONG, ForwardMode.EXTEND), make_layer(window)
    torch.testing.assert_close(made.run(layer).double(), reference(layer, made), atol=2e-6, rtol=0)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("window", [None, 100])
def test_a_token_has_the_same_bits_decoded_alone_or_prefilled_in_company(
    window: int | None, kv_dtype: torch.dtype
) -> None:
    layer = make_layer(window)
    shapes = [*LONG[:3], (0, 1300)]
    made = native_pass(shapes, ForwardMode.EXTEND, kv_dtype=kv_dtype)
    together = made.run(layer)
    n = len(together)
    for back in (1, 2, 40, 800):  # from the end of the long row, whose keys are all cached now
        at = n - back
        end = 1300 - back + 1
        batch = ForwardBatch(
            ForwardMode.DECODE,
            made.batch.input_ids[at : at + 1],
            made.batch.positions[at : at + 1],
            made.batch.req_pool_indices[3:],
            torch.tensor([end]),
            torch.tensor([1]),
            made.batch.out_cache_loc[at : at + 1],
            [end],
            [1],
            None,
        )
        made.backend.plan(batch)
        rows = slice(at, at + 1)
        alone = made.backend.forward(layer, made.q[rows], made.k[rows], made.v[rows])
        assert torch.equal(alone, together[rows])


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_a_decoded_row_has_the_same_bits_in_a_large_batch_and_a_small_one(
    kv_dtype: torch.dtype,
) -> None:
    # Alone, its keys are shared out among threads; in the large batch one thread takes them all.
    layer = make_layer()
    made = native_pass([(900, 1)] + [(3, 1)] * 40, ForwardMode.DECODE, kv_dtype=kv_dtype)
    together = made.run(layer)
    batch = dataclasses.replace(
        made.batch,
        req_pool_indices=made.batch.req_pool_indices[:1],
        seq_lens=made.batch.seq_lens[:1],
        extend_lens=made.batch.extend_lens[:1],
        out_cache_loc=made.batch.out_cache_loc[:1],
        seq_lens_cpu=[901],
        extend_lens_cpu=[1],
    )
    made.backend.plan(batch)
    alone = made.backend.forward(layer, made.q[:1], made.k[:1], made.v[:1])
    assert torch.equal(alone, together[:1])


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ForwardMode)
def test_a_narrow_cache_rounds_to_nearest(mode: ForwardMode, kv_dtype: torch.dtype) -> None:
    shapes = DECODES[2] if mode is ForwardMode.DECODE else EXTENDS[2]
    made = native_pass(shapes, mode, kv_dtype=kv_dtype)
    layer = make_layer(16)
    out = made.run(layer)
    made.all_k = [k.to(kv_dtype) for k in made.all_k]
    made.all_v = [v.to(kv_dtype) for v in made.all_v]
    torch.testing.assert_close(out.double(), reference(layer, made), atol=2e-6, rtol=0)
    written = made.backend.kv_cache.get(0)[0][made.batch.out_cache_loc]
    assert torch.equal(written, made.k.to(kv_dtype))


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize("mode", ForwardMode)
def test_what_is_no_number_breaks_its_own_row_and_no_other(
    mode: ForwardMode, kv_dtype: torch.dtype, which: str
) -> None:
    shapes = DECODES[1] if mode is ForwardMode.DECODE else EXTENDS[1]
    made = native_pass(shapes, mode, kv_dtype=kv_dtype)
    getattr(made, which)[0, 0, 3] = float("nan")
    out = made.run(make_layer())
    assert not out[0, 0].isfinite().all()
    assert out[made.batch.extend_lens_cpu[0] :].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_activations_are_right_within_their_rounding(dtype: torch.dtype) -> None:
    made, layer = native_pass(EXTENDS[1], ForwardMode.EXTEND, dtype=dtype), make_layer(16)
    out = made.run(layer)
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), reference(layer, made), atol=2e-2, rtol=0)


@pytest.mark.parametrize("head_dim", [2, 20, 64, 80, 256])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
def test_heads_of_any_size_work_and_qkv_may_be_slices(head_dim: int, kv_dtype: torch.dtype) -> None:
    assert LIBRARY is not None
    generator = torch.Generator().manual_seed(1)
    layer = Attention(0, 4, 2, head_dim, head_dim**-0.5)
    cache = KVCache(64, 1, 2, head_dim, kv_dtype, "cpu")
    table = torch.zeros(2, 64, dtype=torch.int32)
    table[1, :40] = torch.randperm(40, generator=generator).int() + 1
    heads = torch.randn(40, 8, head_dim, generator=generator)
    q, k, v = heads[:, :4], heads[:, 4:6], heads[:, 6:]
    batch = ForwardBatch(
        ForwardMode.EXTEND,
        torch.zeros(40, dtype=torch.int64),
        torch.arange(40),
        torch.tensor([1]),
        torch.tensor([40]),
        torch.tensor([40]),
        table[1, :40].long(),
        [40],
        [40],
        None,
    )
    backend = NativeAttentionBackend(LIBRARY, cache, table)
    backend.plan(batch)
    out = backend.forward(layer, q, k, v)
    rounded_k, rounded_v = (
        x.to(kv_dtype).double().repeat_interleave(2, 1).transpose(0, 1) for x in (k, v)
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double().transpose(0, 1), rounded_k, rounded_v, is_causal=True
    ).transpose(0, 1)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=0)


def test_layers_of_a_pass_may_have_different_windows() -> None:
    made = native_pass(DECODES[2], ForwardMode.DECODE)
    made.backend.plan(made.batch)
    for layer in (make_layer(None), make_layer(16), make_layer(None)):
        out = made.backend.forward(layer, made.q, made.k, made.v)
        torch.testing.assert_close(out.double(), reference(layer, made), atol=2e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [8, 16])
def test_the_code_without_intrinsics_attends_as_defined_too(
    lanes: int, portable_kernels: Callable[[int], ctypes.CDLL]
) -> None:
    library = portable_kernels(lanes)
    made = make_pass(LONG, ForwardMode.EXTEND)
    backend = NativeAttentionBackend(library, made.backend.kv_cache, made.backend.req_to_token)
    made = dataclasses.replace(made, backend=backend)
    layer = make_layer(300, 2.0)
    torch.testing.assert_close(made.run(layer).double(), reference(layer, made), atol=2e-6, rtol=0)
