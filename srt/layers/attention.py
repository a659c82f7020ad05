"""The attention module that models call, and what a backend must offer it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from srt.forward_batch import ForwardBatch


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
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn: AttentionBackend
    ) -> torch.Tensor:
        return attn.forward(self, q, k, v)
