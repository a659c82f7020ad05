"""The C++ attention over an int8 cache against float64 on what the cache gives back."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_native_attention import LONG, LONG_DECODES, native_pass
from test_torch_attention import (
    DECODES,
    EXTENDS,
    Pass,
    as_stored,
    make_layer,
    make_pass,
    reference,
)

from srt.forward_batch import ForwardBatch, ForwardMode
from srt.layers.attention import Attention
from srt.layers.attention_reference import attention_reference
from srt.layers.native_attention import NativeAttentionBackend
from srt.layers.torch_attention import TorchAttentionBackend
from srt.mem_cache import int8_rows
from srt.mem_cache.kv_cache import KVCache
from srt.native import load_library, native_library

LIBRARY = native_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="needs a C++ compiler")
# What is left once queries are rounded as the kernel does: orders of summation.
ROUNDING = 3e-6


def rounded_queries(q: torch.Tensor, scale: float) -> torch.Tensor:
    """q [.., head_dim] as the kernel multiplies it: int8, a float32 scale for each 32."""
    blocks = F.pad(q * scale, (0, -q.shape[-1] % 32)).unflatten(-1, (-1, 32))
    steps = blocks.abs().amax(-1, keepdim=True) / 127
    codes = (blocks * torch.where(steps > 0, 1 / steps, 0.0)).round()
    return (codes.double() * steps.double()).flatten(-2)[..., : q.shape[-1]] / scale


def expected(made: Pass, layer: Attention) -> torch.Tensor:
    return reference(
        layer,
        dataclasses.replace(
            made,
            q=rounded_queries(made.q, layer.scale),
            all_k=[as_stored(k) for k in made.all_k],
            all_v=[as_stored(v) for v in made.all_v],
        ),
    )


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("window", [None, 1, 16, 1000])
@pytest.mark.parametrize("shapes", EXTENDS)
def test_extend_over_int8_attends_as_defined(
    shapes: list[tuple[int, int]], window: int | None, cap: float
) -> None:
    made = native_pass(shapes, ForwardMode.EXTEND, kv_dtype=torch.int8)
    layer = make_layer(window, cap)
    out = made.run(layer).double()
    torch.testing.assert_close(out, expected(made, layer), atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("window", [None, 1, 16, 1000])
@pytest.mark.parametrize("shapes", DECODES + LONG_DECODES)
def test_decode_over_int8_attends_as_defined(
    shapes: list[tuple[int, int]], window: int | None, cap: float
) -> None:
    made = native_pass(shapes, ForwardMode.DECODE, kv_dtype=torch.int8)
    layer = make_layer(window, cap)
    out = made.run(layer).double()
    torch.testing.assert_close(out, expected(made, layer), atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("window", [None, 300])
def test_extend_over_int8_is_right_across_tiles_and_splits(window: int | None) -> None:
    made = native_pass(LONG, ForwardMode.EXTEND, kv_dtype=torch.int8)
    layer = make_layer(window)
    out = made.run(layer).double()
    torch.testing.assert_close(out, expected(made, layer), atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("mode", ForwardMode)
def test_the_kernels_write_the_bytes_that_torch_writes(mode: ForwardMode) -> None:
    shapes = DECODES[2] if mode is ForwardMode.DECODE else EXTENDS[2]
    made = native_pass(shapes, mode, kv_dtype=torch.int8)
    made.run(make_layer())
    loc = made.batch.out_cache_loc
    for buffer, x in zip(made.backend.kv_cache.get(0), (made.k, made.v), strict=True):
        assert torch.equal(buffer[loc], int8_rows.encode(x))
        assert not buffer[0].any()  # the padding slot


@pytest.mark.parametrize("mode", ForwardMode)
def test_the_kernels_and_torch_agree_over_int8(mode: ForwardMode) -> None:
    shapes = DECODES[2] if mode is ForwardMode.DECODE else EXTENDS[2]
    made, layer = native_pass(shapes, mode, kv_dtype=torch.int8), make_layer(16)
    backend = TorchAttentionBackend(made.backend.kv_cache, made.backend.req_to_token)
    in_torch = dataclasses.replace(made, backend=backend).run(layer)
    # Torch does not round the queries.
    torch.testing.assert_close(made.run(layer), in_torch, atol=0.03, rtol=0)


def lone_request(head_dim: int, num_heads: int, num_kv_heads: int) -> tuple[torch.Tensor, ...]:
    """Q, K, V [40, heads, head_dim] of one prompt as slices of one tensor."""
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(40, num_heads + 2 * num_kv_heads, head_dim, generator=generator)
    return heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)


def attend_alone(
    library: ctypes.CDLL, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: int
) -> torch.Tensor:
    """The prompt prefilled in chunks over an int8 cache."""
    (n, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    layer = Attention(0, num_heads, num_kv_heads, head_dim, head_dim**-0.5)
    table = torch.zeros(2, n, dtype=torch.int32)
    table[1] = torch.randperm(n, generator=torch.Generator().manual_seed(2)).int() + 1
    cache = KVCache(n + 1, 1, num_kv_heads, head_dim, torch.int8, "cpu")
    backend = NativeAttentionBackend(library, cache, table)
    parts = []
    for start in range(0, n, chunk):
        end = min(n, start + chunk)
        lens = [end - start]
        batch = ForwardBatch(
            ForwardMode.EXTEND,
            torch.zeros(lens[0], dtype=torch.int64),
            torch.arange(start, end),
            torch.tensor([1]),
            torch.tensor([end]),
            torch.tensor(lens),
            table[1, start:end].long(),
            [end],
            lens,
            None,
        )
        backend.plan(batch)
        parts.append(backend.forward(layer, q[start:end], k[start:end], v[start:end]))
    return torch.cat(parts)


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1), (14, 2)])
@pytest.mark.parametrize("head_dim", [2, 20, 40, 64, 80, 96, 256])
def test_heads_of_any_size_and_number_attend_over_int8(
    head_dim: int, heads: tuple[int, int]
) -> None:
    assert LIBRARY is not None
    q, k, v = lone_request(head_dim, *heads)
    scale = head_dim**-0.5
    rounded = rounded_queries(q, scale)
    right = attention_reference(rounded, as_stored(k), as_stored(v), scale, None, 0.0)
    out = attend_alone(LIBRARY, q, k, v, 40)
    torch.testing.assert_close(out.double(), right, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (14, 2)])
def test_a_prompt_has_the_same_bits_in_chunks_of_any_size_over_int8(
    heads: tuple[int, int],
) -> None:
    assert LIBRARY is not None
    q, k, v = lone_request(80, *heads)
    whole = attend_alone(LIBRARY, q, k, v, 40)
    for chunk in (1, 2, 7, 33):
        assert torch.equal(attend_alone(LIBRARY, q, k, v, chunk), whole)


@pytest.mark.parametrize("strange", [float("inf"), -float("inf")])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_is_infinite_does_not_become_finite_in_int8(which: str, strange: float) -> None:
    made = native_pass(EXTENDS[1], ForwardMode.EXTEND, kv_dtype=torch.int8)
    getattr(made, which)[0, 0, 3] = strange
    out = made.run(make_layer())
    assert not out[0, 0].isfinite().all()
    assert out[made.batch.extend_lens_cpu[0] :].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_activations_attend_over_int8(dtype: torch.dtype) -> None:
    made = native_pass(EXTENDS[1], ForwardMode.EXTEND, dtype=dtype, kv_dtype=torch.int8)
    layer = make_layer(16)
    out = made.run(layer)
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), reference(layer, made), atol=4e-2, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [8, 16])
def test_the_code_without_intrinsics_attends_over_int8_too(lanes: int, tmp_path: Path) -> None:
    library: ctypes.CDLL = load_library(tmp_path, [f"-DRG_LANES={lanes}"])
    made = make_pass(LONG, ForwardMode.EXTEND, kv_dtype=torch.int8)
    backend = NativeAttentionBackend(library, made.backend.kv_cache, made.backend.req_to_token)
    made, layer = dataclasses.replace(made, backend=backend), make_layer(300, 2.0)
    out = made.run(layer).double()
    torch.testing.assert_close(out, expected(made, layer), atol=ROUNDING, rtol=0)
