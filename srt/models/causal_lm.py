"""What every model family offers the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from srt.layers.attention import AttentionBackend
from srt.layers.decoder_stack import DecoderStack


class CausalLM(nn.Module, ABC):
    """A language model over packed tokens, made from a ModelConfig. Its parameters are named as in
    the family's checkpoints, but for MergedLinear, which knows the names of its parts."""

    @abstractmethod
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attn: AttentionBackend
    ) -> torch.Tensor:
        """input_ids and positions [n] int64 -> hidden states [n, hidden_size], normalised."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[m, hidden_size] -> [m, vocab_size] float32."""

    @abstractmethod
    def decoder_stack(self) -> DecoderStack:
        """The parts that `forward` computes with."""

    def checkpoint_name(self, name: str) -> str | None:
        """Our name for a checkpoint's tensor; None if the family knowingly leaves it out."""
        return name
