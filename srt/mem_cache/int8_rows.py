"""How K and V lie in an int8 cache: codes in blocks of 32 elements, with a scale each.

A row is one head of one token: the codes of its blocks, then their bfloat16 scales. An element is
code * scale. The last block of a head is filled up with zeros. As blocks of Q8_0 in GGML, but codes
are side by side, as a row is what a kernel reads at once. csrc/attention_int8.h writes and reads
the same bytes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

BLOCK = 32
BLOCK_BYTES = BLOCK + 2
LARGEST_CODE = 127


def row_bytes(head_dim: int) -> int:
    """Bytes of one head of one token."""
    return -(-head_dim // BLOCK) * BLOCK_BYTES


def encode(x: torch.Tensor) -> torch.Tensor:
    """Rows [..., row_bytes] uint8 of x [..., head_dim]. A block with something that is not finite
    is NaN wherever it is read."""
    padded = F.pad(x.float(), (0, -x.shape[-1] % BLOCK))
    blocks = padded.reshape(*x.shape[:-1], padded.shape[-1] // BLOCK, BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True) / LARGEST_CODE
    scales = torch.where(scales.isfinite(), scales, torch.nan).bfloat16()
    # The codes are for the scales as they are stored.
    inverse = torch.where(scales > 0, 1.0 / scales.float(), 0.0)
    codes = (blocks * inverse).round().clamp(-LARGEST_CODE, LARGEST_CODE).nan_to_num(0.0)
    return torch.cat(
        (codes.to(torch.int8).view(torch.uint8).flatten(-2), scales.squeeze(-1).view(torch.uint8)),
        dim=-1,
    )


def decode(rows: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """The elements [..., head_dim] of rows [..., row_bytes] uint8."""
    blocks = rows.shape[-1] // BLOCK_BYTES
    num_codes = blocks * BLOCK
    codes = rows[..., :num_codes].view(torch.int8).reshape(*rows.shape[:-1], blocks, BLOCK)
    scales = rows[..., num_codes:].contiguous().view(torch.bfloat16).float()
    return (codes * scales[..., None]).flatten(-2)[..., :head_dim].to(dtype)
