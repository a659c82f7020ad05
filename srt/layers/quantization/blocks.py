"""Weights as a quantised checkpoint holds them: blocks of 32 with a scale each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 32
# Bytes of one block, by GGML's name of the layout.
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


@dataclass(frozen=True)
class QuantizedBlocks:
    """A matrix of `shape` (rows, columns) in GGML's layout `kind`: `data` [rows, bytes of a row]
    uint8, in host memory."""

    kind: str
    shape: tuple[int, int]
    data: torch.Tensor

    def __post_init__(self) -> None:
        rows, columns = self.shape
        expected = (rows, columns // BLOCK * BLOCK_BYTES[self.kind])
        if columns % BLOCK or tuple(self.data.shape) != expected:
            raise ValueError(
                f"{self.kind} blocks of {list(self.shape)} values must be "
                f"{list(expected)} bytes, got {list(self.data.shape)}"
            )

    def dequantize(self) -> torch.Tensor:
        """The values [rows, columns] float32."""
        blocks = self.data.view(-1, BLOCK_BYTES[self.kind])

        def factor(start: int) -> torch.Tensor:
            return blocks[:, start : start + 2].contiguous().view(torch.float16).float()  # [m, 1]

        if self.kind == "Q8_0":
            values = blocks[:, 2:].view(torch.int8).float() * factor(0)
            return values.view(self.shape)
        nibbles = blocks[:, 2 if self.kind == "Q4_0" else 4 :]
        codes = torch.cat([nibbles & 15, nibbles >> 4], dim=1).float()
        if self.kind == "Q4_0":
            return ((codes - 8) * factor(0)).view(self.shape)
        return (codes * factor(0) + factor(2)).view(self.shape)
