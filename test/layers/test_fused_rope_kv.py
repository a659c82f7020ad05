"""Fused rotation, and rotation on the way to the KV cache, against the steps one by one."""

from __future__ import annotations

import pytest
import torch

from srt.layers.fused_rope_kv import (
    BLOCK_HEADS,
    HeadNorm,
    KVSlots,
    rotate,
    rotate_and_write_kv,
    rotate_and_write_kv_reference,
)
from srt.layers.rotary_embedding import RotaryEmbedding
from srt.layers.rotary_embedding import rotate as rotate_in_torch
from srt.rope_config import RopeConfig

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP8 = torch.float8_e4m3fn
# A unit in the last place: float32 and float64 may round to different sides.
RTOL = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10, FP8: 2**-3}
ATOL = 2e-6  # of a difference of products


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def angles(n: int, rotary_dim: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    positions = torch.randint(0, 100000, (n,), generator=generator)
    rotary = RotaryEmbedding(RopeConfig(theta=10000.0), rotary_dim)
    cos, sin = rotary(positions)
    return cos.to(device), sin.to(device)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    rtol = RTOL[got.dtype]
    torch.testing.assert_close(got.float(), expected.float(), rtol=rtol, atol=ATOL)


def assert_nearly_all_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    """For what is rounded twice: where the first rounding differs, so do differences of two such
    numbers, by more than a unit of their own."""
    same = got.float() == expected.float()
    assert same.float().mean() > 0.98
    # Four at most in size, both before and after a rotation.
    atol = 8 * RTOL[got.dtype]
    torch.testing.assert_close(got.float(), expected.float(), rtol=0, atol=atol)


class Case:
    """A projection and two caches of 23 slots, filled alike: one for the kernel, one to compare."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        head_dim: int,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        n: int = 5,
        kv_dtype: torch.dtype | None = None,
        rotary_dim: int | None = None,
    ) -> None:
        kv_dtype = kv_dtype or dtype
        self.heads = random(n, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device=device)
        self.cos, self.sin = angles(n, rotary_dim or head_dim, device)
        # Slots in no order, and the first row a padded one.
        self.loc = torch.randperm(22, generator=torch.Generator().manual_seed(n))[:n] + 1
        self.loc[0] = 0
        self.loc = self.loc.to(device)
        cache = random(2, 23, num_kv_heads, head_dim, dtype=torch.float32, device=device)
        self.kernel_cache = cache.to(kv_dtype)
        self.reference_cache = self.kernel_cache.clone()

    def check(
        self, norm: HeadNorm | None = None, k_scale: float = 1.0, v_scale: float = 1.0
    ) -> None:
        before, padding = self.heads.clone(), self.kernel_cache[:, 0].clone()
        slots, expected_slots = (
            KVSlots(cache[0], cache[1], self.loc, k_scale, v_scale)
            for cache in (self.kernel_cache, self.reference_cache)
        )
        q = rotate_and_write_kv(self.heads, self.cos, self.sin, slots, norm)
        expected = rotate_and_write_kv_reference(
            self.heads, self.cos, self.sin, expected_slots, norm
        )
        assert torch.equal(self.heads, before)
        assert q.is_contiguous()
        rounds_twice = norm is not None and q.dtype != torch.float32
        compare = assert_nearly_all_equal if rounds_twice else assert_close
        compare(q, expected)
        # All slots: those of others must have stayed as they were.
        compare(self.kernel_cache[:, 1:], self.reference_cache[:, 1:])
        assert torch.equal(self.kernel_cache[:, 0].float(), padding.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 64, 80, 96, 128, 256])
def test_heads_are_rotated_as_in_torch(kernel_device, head_dim, dtype):
    x = random(3, 5, head_dim, dtype=dtype, device=kernel_device)
    cos, sin = angles(3, head_dim, kernel_device)
    before = x.clone()
    expected = rotate_in_torch(x.cpu(), cos.cpu(), sin.cpu())
    assert_close(rotate(x, cos, sin).cpu(), expected)
    assert torch.equal(x, before)


@pytest.mark.parametrize("heads", [1, BLOCK_HEADS - 1, BLOCK_HEADS, BLOCK_HEADS + 1, 35])
def test_any_number_of_heads_is_rotated(kernel_device, heads):
    x = random(2, heads + 4, 64, dtype=torch.float32, device=kernel_device)[:, 2:-2]
    cos, sin = angles(2, 64, kernel_device)
    assert_close(rotate(x, cos, sin).cpu(), rotate_in_torch(x.cpu(), cos.cpu(), sin.cpu()))


def test_no_token_is_rotated_to_none(kernel_device):
    cos, sin = angles(0, 64, kernel_device)
    x = torch.empty(0, 4, 64, device=kernel_device)
    assert rotate(x, cos, sin).shape == (0, 4, 64)


def test_a_rotated_pair_keeps_its_length_and_turns_by_its_position(kernel_device):
    x = torch.zeros(4, 1, 4, device=kernel_device)
    x[:, :, 0] = 1.0
    rotary = RotaryEmbedding(RopeConfig(theta=10000.0), 4)
    cos, sin = (t.to(kernel_device) for t in rotary(torch.arange(4)))
    turned = rotate(x, cos, sin).cpu()[:, 0]
    radians = torch.arange(4).float()
    torch.testing.assert_close(turned[:, 0], radians.cos())
    torch.testing.assert_close(turned[:, 2], radians.sin())
    assert not turned[:, [1, 3]].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_keys_are_rotated_and_written_with_their_values(kernel_device, head_dim, dtype):
    Case(kernel_device, dtype, head_dim).check()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(1, 1), (9, 3), (14, 2), (16, 1), (7, 7), (32, 8), (17, 17)]
)
def test_every_split_of_heads_is_written(kernel_device, num_heads, num_kv_heads):
    Case(kernel_device, torch.float32, 16, num_heads, num_kv_heads, n=3).check()


@pytest.mark.parametrize("add_one", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [80, 128, 256])
def test_queries_and_keys_are_normalised_before_they_are_rotated(
    kernel_device, head_dim, dtype, add_one
):
    case = Case(kernel_device, dtype, head_dim)
    q_weight = random(head_dim, dtype=dtype, device=kernel_device)
    k_weight = random(head_dim, dtype=dtype, device=kernel_device, seed=1)
    case.heads *= 0.01  # so that eps shows
    case.check(HeadNorm(q_weight, k_weight, 1e-5, add_one))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 32), (80, 32), (96, 72), (128, 2)])
def test_what_lies_beyond_the_rotary_dimensions_is_not_rotated(
    kernel_device, head_dim, rotary_dim, norm
):
    case = Case(kernel_device, torch.float32, head_dim, rotary_dim=rotary_dim)
    weights = random(2, head_dim, dtype=torch.float32, device=kernel_device)
    case.check(HeadNorm(weights[0], weights[1], 1e-5, False) if norm else None)
    x = case.heads
    rotated = rotate(x, case.cos, case.sin)
    assert torch.equal(rotated[..., rotary_dim:], x[..., rotary_dim:])
    assert not torch.equal(rotated[..., :rotary_dim], x[..., :rotary_dim])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
def test_fp8_caches_hold_what_their_scales_divide(kernel_device, dtype, norm):
    case = Case(kernel_device, dtype, 64, kv_dtype=FP8)
    weights = random(2, 64, dtype=dtype, device=kernel_device)
    case.check(HeadNorm(*weights, 1e-5, False) if norm else None, k_scale=0.5, v_scale=0.03)


def test_fp8_caches_saturate(kernel_device):
    case = Case(kernel_device, torch.float32, 16, kv_dtype=FP8)
    case.heads *= 1e4
    slots = KVSlots(case.kernel_cache[0], case.kernel_cache[1], case.loc)
    rotate_and_write_kv(case.heads, case.cos, case.sin, slots)
    written = case.kernel_cache[:, case.loc[1:]].float()
    assert written.isfinite().all()
    assert written.abs().max() == 448


def test_16_bit_caches_of_a_float32_model_are_rounded(kernel_device):
    Case(kernel_device, torch.float32, 64, kv_dtype=torch.bfloat16).check()


def test_caches_may_lie_among_others(kernel_device):
    case = Case(kernel_device, torch.float32, 16)
    wide = torch.zeros(2, 23, 3, 2, 40, device=kernel_device)
    for name in ("kernel_cache", "reference_cache"):
        view = wide.clone()[:, :, 1, :, 7:23]
        view.copy_(getattr(case, name))
        setattr(case, name, view)
    case.check()


def test_all_rows_may_be_padded(kernel_device):
    case = Case(kernel_device, torch.bfloat16, 64)
    case.loc.zero_()
    before = case.kernel_cache.clone()
    slots = KVSlots(case.kernel_cache[0], case.kernel_cache[1], case.loc)
    rotate_and_write_kv(case.heads, case.cos, case.sin, slots)
    assert torch.equal(case.kernel_cache, before)


def test_shapes_that_do_not_fit_are_refused(kernel_device):
    case = Case(kernel_device, torch.float32, 16)
    with pytest.raises(AssertionError, match="rotating 16 elements of heads of 8"):
        rotate(case.heads[..., :8], case.cos, case.sin)
    with pytest.raises(AssertionError, match="for 4 rows"):
        rotate(case.heads[:4], case.cos, case.sin)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(9, 3, 64), (14, 2, 64), (32, 8, 128), (64, 8, 128), (4, 1, 256), (32, 32, 80), (32, 32, 96)],
)
def test_heads_of_models_in_use_are_rotated_and_written(
    kernel_device, num_heads, num_kv_heads, head_dim, dtype, norm
):
    weights = random(2, head_dim, dtype=dtype, device=kernel_device)
    head_norm = HeadNorm(weights[0], weights[1], 1e-6, True) if norm else None
    for kv_dtype in (dtype, FP8):
        case = Case(kernel_device, dtype, head_dim, num_heads, num_kv_heads, n=5, kv_dtype=kv_dtype)
        case.check(head_norm)
