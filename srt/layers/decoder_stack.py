"""What the decoder of a model is made of, for code that computes all its layers at once."""

from __future__ import annotations

from dataclasses import dataclass

from srt.layers.activation import GatedActivation
from srt.layers.attention import Attention
from srt.layers.embedding import Embedding
from srt.layers.layernorm import RMSNorm
from srt.layers.linear import Linear
from srt.layers.rotary_embedding import RotaryEmbedding


@dataclass(frozen=True)
class DecoderLayerParts:
    """One layer: `input_norm`, attention, sum, `mlp_norm`, gated MLP, sum. The norms that may be
    None are on each query and key head, and on the results of attention and MLP before the sum."""

    input_norm: RMSNorm
    qkv: Linear
    attention: Attention
    o: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    activation: GatedActivation
    down: Linear
    rotary: int = 0  # which of the stack's rotaries
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    post_attention_norm: RMSNorm | None = None
    post_mlp_norm: RMSNorm | None = None


@dataclass(frozen=True)
class DecoderStack:
    """Embedding times `embed_scale`, layers, and the last norm."""

    embedding: Embedding
    embed_scale: float
    rotaries: tuple[RotaryEmbedding, ...]
    layers: tuple[DecoderLayerParts, ...]
    norm: RMSNorm
