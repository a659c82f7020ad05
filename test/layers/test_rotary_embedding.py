"""Rotation, and the frequencies of each kind of scaling."""

from __future__ import annotations

import pytest
import torch

from srt.layers.rotary_embedding import RotaryEmbedding, rope_frequencies, rotate
from srt.rope_config import RopeConfig


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    torch.manual_seed(0)
    rotary = RotaryEmbedding(RopeConfig(theta=100.0), head_dim=8)
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)

    def score(q_position: int, k_position: int) -> torch.Tensor:
        q_turned = rotate(q, *rotary(torch.tensor([q_position])))
        k_turned = rotate(k, *rotary(torch.tensor([k_position])))
        assert torch.allclose(q_turned.norm(), q.norm(), atol=1e-5)
        return (q_turned * k_turned).sum()

    assert torch.allclose(score(9, 4), score(105, 100), atol=1e-4)
    assert not torch.allclose(score(9, 4), score(9, 5), atol=1e-2)


def test_position_zero_is_not_rotated() -> None:
    x = torch.randn(1, 3, 8)
    cos, sin = RotaryEmbedding(RopeConfig(theta=1e4), head_dim=8)(torch.tensor([0]))
    assert torch.equal(rotate(x, cos, sin), x)


def test_bfloat16_heads_are_rotated_by_exact_angles() -> None:
    x = torch.randn(2, 3, 8)
    cos, sin = RotaryEmbedding(RopeConfig(theta=1e4), head_dim=8)(torch.tensor([1000, 1001]))
    rotated = rotate(x.bfloat16(), cos, sin)
    assert rotated.dtype is torch.bfloat16
    expected = rotate(x.bfloat16().float(), cos, sin)
    torch.testing.assert_close(rotated.float(), expected, atol=0, rtol=2**-8)


def test_linear_scaling_slows_every_frequency_by_the_factor() -> None:
    plain, _ = rope_frequencies(RopeConfig(theta=1e4), 16)
    slowed, scale = rope_frequencies(RopeConfig(1e4, "linear", factor=4.0), 16)
    assert torch.allclose(slowed * 4, plain) and scale == 1.0


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_stretching_keeps_fast_dimensions_and_slows_slow_ones_by_the_factor(kind: str) -> None:
    plain, _ = rope_frequencies(RopeConfig(theta=5e5), 128)
    rope = RopeConfig(5e5, kind, factor=8.0, original_max_position_embeddings=8192)
    stretched, _ = rope_frequencies(rope, 128)
    assert torch.allclose(stretched[0], plain[0])
    assert torch.allclose(stretched[-1] * 8, plain[-1])
    ratio = plain / stretched
    assert bool((ratio[1:] >= ratio[:-1] - 1e-5).all())


def test_yarn_scales_attention_as_its_config_says() -> None:
    def scale(**settings: float) -> float:
        rope = RopeConfig(1e4, "yarn", 4.0, 64, **settings)
        return rope_frequencies(rope, 16)[1]

    assert scale() == pytest.approx(1.138629, abs=1e-6)  # 0.1 ln 4 + 1
    assert scale(attention_factor=1.5) == 1.5
    assert scale(mscale=1.0, mscale_all_dim=1.0) == 1.0
