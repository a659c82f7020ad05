"""Int8 rows give back what they were made of, within half a step."""

from __future__ import annotations

import pytest
import torch

from srt.mem_cache import int8_rows


@pytest.mark.parametrize(("head_dim", "size"), [(64, 68), (32, 34), (128, 136), (80, 102), (1, 34)])
def test_a_row_is_its_codes_and_a_scale_for_each_32(head_dim: int, size: int) -> None:
    assert int8_rows.row_bytes(head_dim) == size
    rows = int8_rows.encode(torch.ones(3, 2, head_dim))
    assert rows.shape == (3, 2, size) and rows.dtype is torch.uint8


@pytest.mark.parametrize("head_dim", [64, 80, 40, 20, 1])
@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 1e6, 1e30])
def test_every_element_comes_back_within_half_a_step_of_its_block(
    head_dim: int, scale: float
) -> None:
    x = torch.randn(7, 3, head_dim, generator=torch.Generator().manual_seed(0)) * scale
    back = int8_rows.decode(int8_rows.encode(x), head_dim, torch.float32)
    assert back.shape == x.shape
    for block, wrong in zip(x.split(32, dim=-1), (x - back).split(32, dim=-1), strict=True):
        largest = block.abs().amax(-1)
        # Half of a 127th, and what a scale of 8 bits may be too small or too large by.
        assert bool((wrong.abs().amax(-1) <= largest * (0.5 / 127 + 2**-9) * 1.001).all())


def test_rows_are_kept_exactly_where_codes_and_scale_can() -> None:
    x = torch.arange(-127, 128).float()[:96].view(1, 1, 96) * 0.25
    x[..., ::32] = -127 * 0.25
    assert torch.equal(int8_rows.decode(int8_rows.encode(x), 96, torch.float32), x)


def test_zeros_come_back_from_zeros_and_from_bytes_of_zero() -> None:
    rows = int8_rows.encode(torch.zeros(2, 1, 40))
    assert not rows.any()
    assert not int8_rows.decode(torch.zeros_like(rows), 40, torch.float32).any()


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf")])
def test_a_block_with_something_that_is_not_finite_is_nan_and_others_are_not(
    strange: float,
) -> None:
    x = torch.ones(2, 1, 80)
    x[1, 0, 40] = strange
    back = int8_rows.decode(int8_rows.encode(x), 80, torch.float32)
    assert back[1, 0, 32:64].isnan().all()
    assert back[0].isfinite().all() and back[1, 0, :32].isfinite().all()
    assert back[1, 0, 64:].isfinite().all()
