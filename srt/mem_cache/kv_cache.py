"""The bytes: K and V buffers of each layer."""

from __future__ import annotations

import numpy as np
import torch

from srt.mem_cache import int8_rows


class KVCache:
    """K and V of `num_slots` tokens in every layer, buffers of [num_slots, num_kv_heads, head_dim].
    `num_slots` counts the padding page (slot 0 on) that belongs to nobody. Which slots are in use
    is the business of TokenToKVPool; here a slot is only a row.

    Everything starts as zero, so that a padded read is finite. On CPU a page of memory becomes real
    at its first write: the pool may be sized generously without being paid for.

    With float8_e4m3fn a layer's buffers hold K / k_scales[layer] and V / v_scales[layer]; whoever
    reads them multiplies. A scale is 1 unless somebody sets it before the first write.

    With int8 the buffers are bytes, [num_slots, num_kv_heads, row_bytes] uint8: see int8_rows.
    """

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.num_slots = num_slots
        self.dtype = dtype
        self.head_dim = head_dim
        is_int8 = dtype is torch.int8
        row = int8_rows.row_bytes(head_dim) if is_int8 else head_dim
        shape = (num_slots, num_kv_heads, row)
        stored = torch.uint8 if is_int8 else dtype
        self.k_buffers = [_zeros(shape, stored, device) for _ in range(num_layers)]
        self.v_buffers = [_zeros(shape, stored, device) for _ in range(num_layers)]
        self.k_scales = [1.0] * num_layers
        self.v_scales = [1.0] * num_layers
        self.bytes_per_token = bytes_per_token(num_layers, num_kv_heads, head_dim, dtype)

    def set_kv(self, layer_id: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [n, num_kv_heads, head_dim] at slots `loc` [n] int64."""
        if self.dtype == torch.float8_e4m3fn:
            # Copied as bytes, because index_copy_ knows no 8-bit floats.
            for buffer, x, scale in (
                (self.k_buffers[layer_id], k, self.k_scales[layer_id]),
                (self.v_buffers[layer_id], v, self.v_scales[layer_id]),
            ):
                buffer.view(torch.uint8).index_copy_(0, loc, to_e4m3(x, scale).view(torch.uint8))
            return
        if self.dtype is torch.int8:
            k, v = int8_rows.encode(k), int8_rows.encode(v)
        self.k_buffers[layer_id].index_copy_(0, loc, k.to(self.k_buffers[layer_id].dtype))
        self.v_buffers[layer_id].index_copy_(0, loc, v.to(self.v_buffers[layer_id].dtype))

    def get(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's own buffers, [num_slots, num_kv_heads, head_dim] each; not a copy. Of int8
        they are bytes."""
        return self.k_buffers[layer_id], self.v_buffers[layer_id]

    def gather(
        self, layer_id: int, slots: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `slots` [m] as numbers of `dtype`, [m, num_kv_heads, head_dim] each."""
        k_buffer, v_buffer = self.get(layer_id)
        # As a matrix: few rows are then gathered ten times as fast (torch 2.13, CPU).
        k = k_buffer.flatten(1).index_select(0, slots).view(-1, *k_buffer.shape[1:])
        v = v_buffer.flatten(1).index_select(0, slots).view(-1, *v_buffer.shape[1:])
        if self.dtype is torch.int8:
            return (
                int8_rows.decode(k, self.head_dim, dtype),
                int8_rows.decode(v, self.head_dim, dtype),
            )
        if self.dtype == torch.float8_e4m3fn:
            return k.to(dtype) * self.k_scales[layer_id], v.to(dtype) * self.v_scales[layer_id]
        return k.to(dtype), v.to(dtype)


def to_e4m3(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x / scale as float8_e4m3fn. What is too large becomes the largest, 448: torch's own
    conversion makes NaN of it."""
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """K and V of one token in all layers, with the scales of int8."""
    row = int8_rows.row_bytes(head_dim) if dtype is torch.int8 else head_dim * dtype.itemsize
    return 2 * num_layers * num_kv_heads * row


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every page; numpy asks calloc, which hands out untouched pages of zeros.
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
