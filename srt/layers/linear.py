"""Matrix products with weights, and several of them fused into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from srt.layers.quantization.packed_weight import PackedWeight

# (x [n, in_size], weight [out_size, in_size], bias [out_size] or None) -> [n, out_size]
Product = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


class Linear(nn.Module):
    """`x @ weight.T + bias`. The weights are not initialised: a checkpoint fills them. A quantised
    linear has `packed` and no `weight`; see quantization/scheme.py."""

    def __init__(self, in_size: int, out_size: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_size), requires_grad=False) if bias else None
        self.packed: PackedWeight | None = None
        self.product: Product = F.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in_size] -> [n, out_size]"""
        if self.packed is not None:
            return self.packed.multiply(x)
        return self.product(x, self.weight, self.bias)


class MergedLinear(Linear):
    """Linears of one input stacked into one product. `parts` maps the name each has in checkpoints,
    where this module has its own, to its out size; output columns are in this order."""

    def __init__(self, in_size: int, parts: Mapping[str, int], bias: bool = False) -> None:
        super().__init__(in_size, sum(parts.values()), bias)
        self.parts = dict(parts)

    def part_rows(self) -> Iterator[tuple[str, slice]]:
        """Each part's name and its rows of `weight` and `bias`."""
        start = 0
        for name, size in self.parts.items():
            yield name, slice(start, start + size)
            start += size
