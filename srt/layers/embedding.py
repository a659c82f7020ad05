"""Token embedding, and the product that turns hidden states into logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Embedding(nn.Module):
    """A matrix [vocab_size, hidden_size], read by row as token embedding, and multiplied with as
    language model head. With tied weights one object is both."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[n] int64 -> [n, hidden_size]"""
        return F.embedding(input_ids, self.weight)

    def logits(self, hidden: torch.Tensor, cap: float = 0.0) -> torch.Tensor:
        """[m, hidden_size] -> [m, vocab_size] float32, softly kept in (-cap, cap) if cap > 0."""
        logits = F.linear(hidden, self.weight).float()
        return torch.tanh(logits / cap) * cap if cap else logits
