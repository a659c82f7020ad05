"""Fused RMS normalisation against the definition in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from srt.layers.fused_norm import add_rms_norm, rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# A unit in the last place: float32 and float64 may round to different sides.
RTOL = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
EPS = 1e-5


def reference(x: torch.Tensor, weight: torch.Tensor, add_one: bool = False) -> torch.Tensor:
    exact = F.rms_norm(x.double(), weight.shape, weight.double() + add_one, EPS)
    return exact.to(x.dtype)


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected, rtol=RTOL[got.dtype], atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 63, 64, 65, 576, 1023, 1024, 1025, 5120])
def test_a_row_is_divided_by_its_root_mean_square_and_weighed(kernel_device, size, dtype):
    x = random(3, size, dtype=dtype, device=kernel_device)
    weight = random(size, dtype=dtype, device=kernel_device)
    assert_close(rms_norm(x, weight, EPS), reference(x, weight))


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 33])
def test_any_number_of_short_rows_is_normalised(kernel_device, num_rows):
    x = random(num_rows, 64, dtype=torch.bfloat16, device=kernel_device)
    weight = random(64, dtype=torch.float32, device=kernel_device)
    assert_close(rms_norm(x, weight, EPS), reference(x, weight))


def test_gemma_weights_are_offsets_from_one(kernel_device):
    x = random(3, 200, dtype=torch.float32, device=kernel_device)
    weight = random(200, dtype=torch.float32, device=kernel_device)
    assert_close(rms_norm(x, weight, EPS, add_one=True), reference(x, weight, add_one=True))


def test_eps_keeps_small_rows_small(kernel_device):
    x = random(4, 128, dtype=torch.float32, device=kernel_device) * 1e-3
    x[1] = 0
    weight = torch.ones(128, device=kernel_device)
    normed = rms_norm(x, weight, EPS)
    assert_close(normed, reference(x, weight))
    assert not normed[1].any() and normed[0].abs().max() < 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [slice(0, 5), slice(5, 7), slice(8, 9)])
def test_heads_between_others_are_normalised_one_by_one(kernel_device, heads, dtype):
    qkv = random(7, 9, 80, dtype=dtype, device=kernel_device)
    weight = random(80, dtype=dtype, device=kernel_device)
    assert_close(rms_norm(qkv[:, heads], weight, EPS), reference(qkv[:, heads], weight))


def test_shapes_and_gaps_of_any_kind_are_taken(kernel_device):
    weight = random(24, dtype=torch.float32, device=kernel_device)
    wide = random(6, 2, 3, 50, dtype=torch.float32, device=kernel_device)
    for x in (
        wide[0, 0, 0, :24],
        wide[:, 0, 0, 3:27],
        wide[:, :, :, 1:25],
        wide[:, 1:, 1:, 26:],
        wide[0, 0, :, ::2][:, :24],
        random(24, 5, dtype=torch.float32, device=kernel_device).t(),
    ):
        assert_close(rms_norm(x, weight, EPS), reference(x, weight))


def test_nothing_is_normalised_to_nothing(kernel_device):
    x, weight = torch.empty(0, 64, device=kernel_device), torch.ones(64, device=kernel_device)
    assert rms_norm(x, weight, EPS).shape == (0, 64)
    assert [t.shape for t in add_rms_norm(x, x, weight, EPS)] == [(0, 64), (0, 64)]


@pytest.mark.parametrize("add_one", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 65, 576, 1025])
def test_a_sum_is_rounded_and_then_normalised(kernel_device, size, dtype, add_one):
    residual = random(3, size, dtype=dtype, device=kernel_device)
    update = random(3, size, dtype=dtype, device=kernel_device, seed=1) * 100
    weight = random(size, dtype=dtype, device=kernel_device)
    before = residual.clone(), update.clone()
    normed, total = add_rms_norm(residual, update, weight, EPS, add_one)
    assert torch.equal(total, residual + update)
    assert_close(normed, reference(total, weight, add_one))
    assert torch.equal(residual, before[0]) and torch.equal(update, before[1])


def test_a_sum_is_rounded_before_its_square_is_taken(kernel_device):
    # The sums are 1 + 2**-9 in float32 and 1 in bfloat16; the last element decides the scale. With
    # the weights all over a binade, half of the products would round differently.
    residual = torch.ones(1, 129, dtype=torch.bfloat16, device=kernel_device)
    update = torch.full_like(residual, 2**-9)
    update[0, -1] = 1000
    weight = torch.linspace(1, 2, 129, device=kernel_device)
    normed, total = add_rms_norm(residual, update, weight, EPS)
    assert (normed == reference(total, weight)).float().mean() > 0.9


def test_residual_and_update_may_have_different_gaps(kernel_device):
    left = random(4, 3, 40, dtype=torch.float32, device=kernel_device)
    right = random(4, 100, dtype=torch.float32, device=kernel_device)
    weight = random(33, dtype=torch.float32, device=kernel_device)
    residual, update = left[:, 1, :33], right[:, 50:83]
    normed, total = add_rms_norm(residual, update, weight, EPS)
    assert torch.equal(total, residual + update)
    assert_close(normed, reference(total, weight))
    heads_of_one, heads_of_other = left[:, :2, :33], right.view(4, 2, 50)[:, :, 17:]
    normed, total = add_rms_norm(heads_of_one, heads_of_other, weight, EPS)
    assert torch.equal(total, heads_of_one + heads_of_other)
    assert_close(normed, reference(total, weight))


@pytest.mark.parametrize("size", [128, 896])
def test_a_row_alone_has_the_bits_it_has_among_others(kernel_device, size):
    x = random(21, size, dtype=torch.bfloat16, device=kernel_device)
    weight = random(size, dtype=torch.bfloat16, device=kernel_device)
    together = rms_norm(x, weight, EPS)
    for row in (0, 7, 20):
        assert torch.equal(rms_norm(x[row : row + 1], weight, EPS)[0], together[row])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2048, 2560, 3584, 4096, 5376, 8192, 12288, 16384, 16385])
def test_rows_of_all_sizes_in_use_are_normalised(kernel_device, size, dtype):
    residual = random(9, size, dtype=dtype, device=kernel_device)
    update = random(9, size, dtype=dtype, device=kernel_device, seed=1)
    weight = random(size, dtype=dtype, device=kernel_device)
    normed, total = add_rms_norm(residual, update, weight, EPS)
    assert torch.equal(total, residual + update)
    assert_close(normed, reference(total, weight))
    assert_close(rms_norm(total, weight, EPS, True), reference(total, weight, True))


def test_a_row_too_large_for_a_program_is_refused_with_its_size(kernel_device):
    x = torch.zeros(1, 65537, device=kernel_device)
    with pytest.raises(AssertionError, match="65537"):
        rms_norm(x, x[0], EPS)
