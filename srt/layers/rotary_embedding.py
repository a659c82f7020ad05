"""Rotary position embedding (Su et al. 2021) and the ways of stretching it to longer contexts."""

from __future__ import annotations

import math

import torch
from torch import nn

from srt.layers import native_ops
from srt.rope_config import RopeConfig


class RotaryEmbedding(nn.Module):
    """Cosines and sines of a pass, computed once and shared by all layers of a kind. No table of
    the whole context is kept."""

    inv_freq: torch.Tensor  # [head_dim / 2] float32, radians a token

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        super().__init__()
        inv_freq, self.scale = rope_frequencies(rope, head_dim)
        # Not persistent: it follows from the config, and is never in our state dict.
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [n] -> cos and sin, each [n, 1, head_dim / 2] float32."""
        # float32 whatever the model's type: bfloat16 cannot tell positions above 256 apart.
        angles = positions.float()[:, None, None] * self.inv_freq
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads x [n, heads, head_dim]; element i turns with element i + head_dim / 2, as in the
    Hugging Face layout of all families here."""
    if x.is_cuda:
        # Not at the top: there is no Triton where there is no CUDA.
        from srt.layers import fused_rope_kv

        return fused_rope_kv.rotate(x, cos, sin)
    library = native_ops.kernels_for(x)
    if library is not None:
        return native_ops.rotate(library, x, cos, sin)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    rotated = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, cos.dtype), device=x.device)
    torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[..., half:]).addcmul_(first, sin)
    return rotated.to(x.dtype)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_dim / 2] float32 and the factor for cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inv_freq), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, inv_freq, head_dim), _yarn_attention_factor(rope)
    assert rope.kind == "default", f"unknown rope kind {rope.kind}"
    return inv_freq, 1.0


def _llama3(rope: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: what turned less than `low_freq_factor` times over the trained length is slowed by
    `factor`, what turned more than `high_freq_factor` times is kept, and a ramp joins the two."""
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return inv_freq * keep + inv_freq / rope.factor * (1 - keep)


def _yarn(rope: RopeConfig, inv_freq: torch.Tensor, head_dim: int) -> torch.Tensor:
    """YaRN (Peng et al. 2023), section 3.2: as llama3, with the ramp over the dimensions."""

    def dimension(turns: float) -> float:
        """The (fractional) pair of dimensions that turns so often over the trained length."""
        period = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(period) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # A ramp of no width would divide by zero; a step is meant.
    width = high - low if high != low else 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    stretch = ((pairs - low) / width).clamp(0, 1)
    return inv_freq / rope.factor * stretch + inv_freq * (1 - stretch)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """Equation 22 of the paper, or what the config says in either of two ways."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)
