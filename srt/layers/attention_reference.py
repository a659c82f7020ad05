"""Attention from its definition, in float64: what every attention kernel is compared with."""

from __future__ import annotations

import torch


def attention_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None = None,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """One request: q [m, num_heads, head_dim] are the last m of the positions of `keys` and
    `values` [seq_len, num_kv_heads, head_dim]. Returns [m, num_heads, head_dim] float64."""
    group_size = q.shape[1] // keys.shape[1]
    keys = keys.double().repeat_interleave(group_size, 1)
    values = values.double().repeat_interleave(group_size, 1)
    scores = torch.einsum("mhd,nhd->hmn", q.double(), keys) * scale
    if logit_cap:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    key_pos = torch.arange(len(keys), device=q.device)
    query_pos = key_pos[len(keys) - len(q) :, None]
    seen = key_pos <= query_pos
    if window:
        seen &= key_pos > query_pos - window
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hmn,nhd->mhd", weights, values)
