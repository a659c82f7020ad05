"""Packed weights keep a checkpoint's values, and their products are right and never move."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from srt.layers.quantization.blocks import QuantizedBlocks
from srt.layers.quantization.packed_weight import PackedFormat, PackedWeight, PanelArena
from srt.native import native_library

pytestmark = pytest.mark.skipif(native_library() is None, reason="needs a C++ compiler")
KINDS = ["Q4_0", "Q4_1", "Q8_0"]
SHAPES = [(8, 32), (70, 96), (5, 576), (33, 1536)]  # outputs: whole panels, parts, fewer than one


def library() -> ctypes.CDLL:
    found = native_library()
    assert found is not None
    return found


def random_weight(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=generator) * inputs**-0.5


def random_blocks(kind: str, outputs: int, inputs: int, seed: int = 0) -> QuantizedBlocks:
    weight = random_weight(outputs, inputs, seed).numpy()
    data = quantize(weight, GGMLQuantizationType[kind])
    return QuantizedBlocks(kind, (outputs, inputs), torch.from_numpy(data).view(outputs, -1))


def packed(
    values: QuantizedBlocks | torch.Tensor,
    weight_format: PackedFormat | None = None,
    exact: bool = False,
    bias: torch.Tensor | None = None,
    kernels: ctypes.CDLL | None = None,
) -> PackedWeight:
    weight = PackedWeight(
        kernels or library(), PanelArena(), *values.shape, weight_format, exact, bias
    )
    weight.load_rows(0, values)
    return weight


def values_of(weight: PackedWeight) -> torch.Tensor:
    return weight.rows(torch.arange(weight.shape[0]))


def rounded_activations(x: torch.Tensor) -> torch.Tensor:
    """x [rows, inputs] in float64 after rounding to int8 in blocks of 32, from the definition."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    scales = padded.abs().amax(-1, keepdim=True) * torch.tensor(1 / 127, dtype=torch.float32)
    codes = torch.where(scales > 0, padded * (1 / scales), 0).round()
    return (codes.double() * scales.double()).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoints_blocks_keep_their_values(kind: str, shape: tuple[int, int]) -> None:
    blocks = random_blocks(kind, *shape)
    expected = dequantize(blocks.data.numpy(), GGMLQuantizationType[kind])
    assert np.array_equal(blocks.dequantize().numpy(), expected)
    weight = packed(blocks)
    assert weight.format is (PackedFormat.Q8 if kind == "Q8_0" else PackedFormat.Q4)
    assert np.array_equal(values_of(weight).numpy(), expected)


@pytest.mark.parametrize("shape", [*SHAPES, (9, 44), (3, 1)])
@pytest.mark.parametrize(
    ("weight_format", "levels"), [(PackedFormat.Q4, 15), (PackedFormat.Q8, 254)]
)
def test_float_weights_are_rounded_by_half_a_level_at_most(
    weight_format: PackedFormat, levels: int, shape: tuple[int, int]
) -> None:
    weight = random_weight(*shape)
    rounded = values_of(packed(weight, weight_format))
    padded = torch.nn.functional.pad(weight, (0, -shape[1] % 32), value=float("nan"))
    blocks = padded.unflatten(1, (-1, 32)).nan_to_num(0)
    span = blocks.amax(-1) - blocks.amin(-1)
    if weight_format is PackedFormat.Q8:
        span = 2 * blocks.abs().amax(-1)
    # Scale and minimum are float16: that may cost another part in 1024 of the largest.
    limit = span / levels / 2 + blocks.abs().amax(-1) / 512 + 1e-7
    error = torch.nn.functional.pad((rounded - weight).abs(), (0, -shape[1] % 32))
    assert bool((error.unflatten(1, (-1, 32)).amax(-1) <= limit).all())


@pytest.mark.parametrize("shape", [*SHAPES, (9, 44), (3, 1)])
def test_dense_weights_are_kept_to_the_bit_and_blocks_dequantised(shape: tuple[int, int]) -> None:
    weight = random_weight(*shape)
    assert torch.equal(values_of(packed(weight, PackedFormat.DENSE)), weight)
    for kind in KINDS:
        blocks = random_blocks(kind, 9, 96)
        assert torch.equal(values_of(packed(blocks, PackedFormat.DENSE)), blocks.dequantize())


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 13, 40])
@pytest.mark.parametrize("shape", [*SHAPES, (24, 44)])
@pytest.mark.parametrize("weight_format", [PackedFormat.Q4, PackedFormat.Q8])
def test_products_with_int8_activations_are_those_of_the_definition(
    weight_format: PackedFormat, shape: tuple[int, int], rows: int
) -> None:
    bias = torch.linspace(-1, 1, shape[0])
    weight = packed(random_weight(*shape), weight_format, bias=bias)
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(1))
    expected = rounded_activations(x) @ values_of(weight).double().T + bias.double()
    torch.testing.assert_close(weight.multiply(x).double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("rows", [1, 5, 6, 40])
@pytest.mark.parametrize("shape", [*SHAPES, (24, 44)])
@pytest.mark.parametrize("weight_format", PackedFormat)
def test_products_with_float_activations_are_exact(
    weight_format: PackedFormat, shape: tuple[int, int], rows: int
) -> None:
    weight = packed(random_weight(*shape), weight_format, exact=True)
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(1))
    expected = x.double() @ values_of(weight).double().T
    torch.testing.assert_close(weight.multiply(x).double(), expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("weight_format", PackedFormat)
def test_a_row_has_the_same_bits_with_any_number_of_others(
    weight_format: PackedFormat, exact: bool
) -> None:
    weight = packed(random_weight(200, 576), weight_format, exact)
    x = torch.randn(45, 576, generator=torch.Generator().manual_seed(2))
    together = weight.multiply(x)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 17):
        for first in (0, 11, 45 - count):
            rows = slice(first, first + count)
            assert torch.equal(weight.multiply(x[rows]), together[rows]), (count, first)


def test_extreme_activations_neither_overflow_nor_vanish() -> None:
    # All codes and activations at their limits: the largest sums that integers must hold.
    for weight_format in PackedFormat:
        weight = packed(torch.full((16, 576), 1.0), weight_format)
        for value in (3.0, -3.0, 1e30, -1e-30):
            x = torch.full((5, 576), value)
            expected = torch.full((5, 16), value).double() * 576
            torch.testing.assert_close(weight.multiply(x).double(), expected, atol=0, rtol=2e-3)
        alternating = torch.tensor([1.0, -1.0]).repeat(16, 288)
        weight = packed(alternating, weight_format)
        product = weight.multiply(alternating[:3] * 7)
        torch.testing.assert_close(product, torch.full((3, 16), 7.0 * 576), atol=0, rtol=2e-3)
        assert torch.equal(weight.multiply(torch.zeros(2, 576)), torch.zeros(2, 16))


def test_the_lowest_code_of_eight_bits_counts_whatever_the_sign_of_the_activation() -> None:
    # -128 has no counterpart of the other sign in 8 bits; a file may hold it.
    data = torch.zeros(8, 34, dtype=torch.uint8)
    data[:, :2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
    data[:, 2:] = 128
    weight = packed(QuantizedBlocks("Q8_0", (8, 32), data))
    assert torch.equal(values_of(weight), torch.full((8, 32), -128.0))
    x = torch.tensor([[-127.0], [127.0]]).expand(2, 32)
    product = weight.multiply(x.contiguous())
    assert torch.equal(product[:, 0], torch.tensor([127.0, -127.0]) * 128 * 32), product


def test_parts_of_different_kinds_share_a_matrix_in_eight_bits() -> None:
    four, eight = random_blocks("Q4_1", 10, 64, 1), random_blocks("Q8_0", 7, 64, 2)
    weight = PackedWeight(library(), PanelArena(), 17, 64, None, exact=False)
    weight.load_rows(10, eight)
    weight.load_rows(0, four)
    assert weight.format is PackedFormat.Q8
    values = values_of(weight)
    assert torch.equal(values[10:], eight.dequantize())
    assert float((values[:10] - four.dequantize()).abs().max()) < 0.005


def test_activations_may_be_strided_and_have_more_dimensions() -> None:
    weight = packed(random_weight(16, 64), PackedFormat.Q8)
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(3))
    plain = weight.multiply(x[:, :64].contiguous())
    assert torch.equal(weight.multiply(x[:, :64]), plain)
    assert torch.equal(weight.multiply(x[:, :64].unflatten(0, (2, 3))), plain.unflatten(0, (2, 3)))
    assert weight.multiply(x[:, :64].bfloat16()).dtype is torch.bfloat16


def test_blocks_of_the_wrong_size_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"Q4_1 blocks of \[2, 64\] values must be \[2, 40\]"):
        QuantizedBlocks("Q4_1", (2, 64), torch.zeros(2, 41, dtype=torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [8, 16])
def test_the_code_without_intrinsics_gives_the_same_products(
    lanes: int, portable_kernels: Callable[[int], ctypes.CDLL]
) -> None:
    portable = portable_kernels(lanes)
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))
    for kind in KINDS:
        blocks = random_blocks(kind, 37, 96)
        for exact in (False, True):
            native = packed(blocks, exact=exact)
            other = packed(blocks, exact=exact, kernels=portable)
            assert torch.equal(values_of(other), values_of(native))
            torch.testing.assert_close(other.multiply(x), native.multiply(x), atol=2e-6, rtol=0)
