"""The attention module that models call, and what a backend must offer it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import nn

from srt.forward_batch import ForwardBatch
from srt.layers.layernorm import RMSNorm
from srt.layers.rotary_embedding import rotate


class HeadNorms(NamedTuple):
    """Norms of each query and each key head, before they are rotated (Qwen 3, Gemma 3)."""

    q: RMSNorm
    k: RMSNorm


class AttentionBackend(Protocol):
    """Attention over the paged KV cache on one kind of device. A backend is made with the KVCache
    and `req_to_token` [rows + 1, context_len] int32, and is called from one thread."""

    def plan(self, batch: ForwardBatch) -> None:
        """Once a pass, before the first layer: prepare what all layers share. `req_to_token` must
        already hold the slots of this pass."""
        ...

    def forward(
        self, layer: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Write k, v [n, num_kv_heads, head_dim] at `out_cache_loc`, then let each query of
        q [n, num_heads, head_dim] attend to its request's keys up to and including its own
        position, or to the last `sliding_window` of them. Returns [n, num_heads, head_dim]."""
        ...

    def forward_heads(
        self,
        layer: Attention,
        heads: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        norms: HeadNorms | None,
    ) -> torch.Tensor:
        """forward() of what `split_heads` makes of the same arguments."""
        ...


class Attention(nn.Module):
    """One layer's attention: numbers, no weights. `sliding_window` counts the token itself;
    `logit_cap` > 0 passes scores through `cap * tanh(score / cap)` (Gemma 2)."""

    def __init__(
        self,
        layer_id: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        sliding_window: int | None = None,
        logit_cap: float = 0.0,
    ) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.sliding_window = sliding_window
        self.logit_cap = logit_cap

    def forward(
        self,
        heads: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attn: AttentionBackend,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """From the QKV projection `heads` [n, num_heads + 2 * num_kv_heads, head_dim] and the
        angles of its tokens, cos and sin [n, 1, head_dim / 2] float32, to [n, num_heads,
        head_dim]."""
        return attn.forward_heads(self, heads, cos, sin, norms)


def split_heads(
    layer: Attention,
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: HeadNorms | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys, normalised and rotated, and values, of the QKV projection `heads`
    [n, num_heads + 2 * num_kv_heads, head_dim]."""
    num_rotated = layer.num_heads + layer.num_kv_heads
    v = heads[:, num_rotated:]
    if norms is None:
        # Queries and keys lie side by side: one rotation for both.
        rotated = rotate(heads[:, :num_rotated], cos, sin)
        return rotated[:, : layer.num_heads], rotated[:, layer.num_heads :], v
    q, k = heads[:, : layer.num_heads], heads[:, layer.num_heads : num_rotated]
    return rotate(norms.q(q), cos, sin), rotate(norms.k(k), cos, sin), v
