"""The batch-invariant product against float64, and its rows in any company."""

from __future__ import annotations

import pytest
import torch

from srt.layers.invariant_linear import BLOCK_K, BLOCK_M, invariant_linear
from srt.layers.invariant_linear import invariant_linear_reference as reference

# A unit in the last place of what is rounded once; float32 adds up in another order than float64.
RTOL = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("n", "in_size", "out_size"),
    [(1, 1, 1), (3, BLOCK_K - 1, 65), (BLOCK_M + 1, BLOCK_K + 1, 7), (5, 200, 130)],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_is_the_product_plus_bias(kernel_device, n, in_size, out_size, has_bias, dtype):
    x = random(n, in_size, dtype=dtype, device=kernel_device)
    weight = random(out_size, in_size, dtype=dtype, device=kernel_device, seed=1)
    bias = random(out_size, dtype=dtype, device=kernel_device, seed=2) if has_bias else None
    got = invariant_linear(x, weight, bias)
    assert got.dtype == dtype and got.is_contiguous()
    torch.testing.assert_close(got, reference(x, weight, bias), rtol=RTOL[dtype], atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_company(kernel_device, dtype):
    x = random(BLOCK_M + 9, 150, dtype=dtype, device=kernel_device)
    weight = random(70, 150, dtype=dtype, device=kernel_device, seed=1)
    whole = invariant_linear(x, weight)
    # On a CPU the interpreter's product is numpy's, for which the place in a tile matters.
    elsewhere = [slice(4, 20), slice(BLOCK_M - 1, None)] if kernel_device == "cuda" else []
    for rows in (slice(0, 1), slice(0, 20), slice(BLOCK_M, None), *elsewhere):
        assert torch.equal(invariant_linear(x[rows], weight), whole[rows])


def test_no_rows_give_no_rows_and_rows_may_lie_apart(kernel_device):
    weight = random(6, 10, dtype=torch.float32, device=kernel_device)
    wide = random(4, 30, dtype=torch.float32, device=kernel_device)
    assert invariant_linear(wide[:0, :10], weight).shape == (0, 6)
    for x in (wide[:, 5:15], wide[::2, :10], wide[:, ::3]):
        torch.testing.assert_close(
            invariant_linear(x, weight), reference(x, weight), rtol=2e-6, atol=2e-5
        )
