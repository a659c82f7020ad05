"""Token embedding, and the product that turns hidden states into logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from srt.layers.linear import Product
from srt.layers.quantization.packed_weight import PackedWeight


class Embedding(nn.Module):
    """A matrix [vocab_size, hidden_size], read by row as token embedding, and multiplied with as
    language model head. With tied weights one object is both. A quantised one has `packed` and no
    `weight`."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)
        self.dtype = self.weight.dtype  # of what is looked up, also when packed
        self.packed: PackedWeight | None = None
        self.product: Product = F.linear

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[n] int64 -> [n, hidden_size]"""
        if self.packed is not None:
            return self.packed.rows(input_ids).to(self.dtype)
        return F.embedding(input_ids, self.weight)

    def logits(self, hidden: torch.Tensor, cap: float = 0.0) -> torch.Tensor:
        """[m, hidden_size] -> [m, vocab_size] float32, softly kept in (-cap, cap) if cap > 0."""
        if self.packed is not None:
            logits = self.packed.multiply(hidden).float()
        else:
            logits = self.product(hidden, self.weight, None).float()
        return torch.tanh(logits / cap) * cap if cap else logits
