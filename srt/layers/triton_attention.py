"""Attention on CUDA: the Triton kernels behind the interface that models call."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from srt.device_copy import to_device
from srt.forward_batch import ForwardBatch, ForwardMode
from srt.layers.attention import Attention, HeadNorms
from srt.layers.decode_attention import DecodeScratch, decode_attention, plan_decode
from srt.layers.extend_attention import extend_attention, extend_tile, extend_tiles
from srt.layers.fused_rope_kv import HeadNorm, KVSlots, rotate_and_write_kv
from srt.mem_cache.kv_cache import KVCache

MAX_HEAD_DIM = 256
E4M3_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class GpuFacts:
    """What the kernels' shapes depend on."""

    num_sms: int
    capability: tuple[int, int]

    @classmethod
    def of(cls, device: torch.device) -> GpuFacts:
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.multi_processor_count, (properties.major, properties.minor))


class TritonAttentionBackend:
    """See AttentionBackend. No call waits for the device.

    `dtype` is that of the queries, and of the cache unless that is float8_e4m3fn. `windows` are
    those of the model's layers, None for layers without; `max_batch` rows are the most that a
    decode pass has, padding included. A decode pass reads lengths on the device only, so plan() and
    forward() may be captured in a CUDA graph and replayed for other lengths in the same tensors.
    With `batch_invariant` a request's result does not depend on what else is in the batch, to the
    last bit; that costs some balance at small batches.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        req_to_token: torch.Tensor,
        num_heads: int,
        dtype: torch.dtype,
        windows: Collection[int | None],
        max_batch: int,
        gpu: GpuFacts,
        batch_invariant: bool = False,
    ) -> None:
        """ValueError if the kernels cannot serve this cache on this GPU."""
        _, num_kv_heads, head_dim = kv_cache.get(0)[0].shape
        if head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim is {head_dim}, attention kernels take {MAX_HEAD_DIM}")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads {num_heads} is no multiple of num_kv_heads {num_kv_heads}")
        if kv_cache.dtype not in (dtype, torch.float8_e4m3fn):
            raise ValueError(
                f"kv_cache_dtype {kv_cache.dtype} is neither dtype {dtype} nor float8_e4m3fn"
            )
        if kv_cache.dtype == torch.float8_e4m3fn and gpu.capability < E4M3_CAPABILITY:
            raise ValueError(
                f"kv_cache_dtype float8_e4m3fn needs compute capability {E4M3_CAPABILITY}, "
                f"this GPU has {gpu.capability}"
            )
        self.kv_cache = kv_cache
        self.req_to_token = req_to_token
        self.gpu = gpu
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.max_batch = max_batch
        device = req_to_token.device
        scratch = DecodeScratch.allocate(
            max_batch, num_heads, num_kv_heads, head_dim, gpu.num_sms, batch_invariant, device
        )
        self.scratch = {window: scratch.for_another_window() for window in windows}
        self.tiles = {
            window: extend_tile(
                head_dim, dtype.itemsize, num_heads // num_kv_heads, window, gpu.capability
            )
            for window in windows
        }
        self.batch: ForwardBatch | None = None
        self._tile_list: torch.Tensor | None = None  # [num_tiles, 3] int32, of an extend pass

    def plan(self, batch: ForwardBatch) -> None:
        self.batch = batch
        if batch.mode is ForwardMode.EXTEND:
            self._tile_list = self._list_tiles(batch)
            return
        assert len(batch.seq_lens) <= self.max_batch, (
            f"a decode pass of {len(batch.seq_lens)} rows, at most {self.max_batch} were announced"
        )
        for window, scratch in self.scratch.items():
            plan_decode(batch.seq_lens, scratch, self.num_heads, self.num_kv_heads, window)

    def _list_tiles(self, batch: ForwardBatch) -> torch.Tensor:
        # Rows do not depend on the window, so one list serves all layers.
        (rows,) = {tile.rows for tile in self.tiles.values()}
        tokens = rows // (self.num_heads // self.num_kv_heads)
        tiles = extend_tiles(batch.seq_lens_cpu, batch.extend_lens_cpu, tokens)
        return to_device(tiles, self.req_to_token.device)

    def forward(
        self, layer: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        assert self.batch is not None, "plan() comes before forward()"
        self.kv_cache.set_kv(layer.layer_id, self.batch.out_cache_loc, k, v)
        if q.stride(2) != 1 or q.stride(1) != self.head_dim:
            q = q.contiguous()
        return self.attend(layer, q)

    def forward_heads(
        self,
        layer: Attention,
        heads: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        norms: HeadNorms | None,
    ) -> torch.Tensor:
        """In one launch what comes before the attention; slot 0 is not written."""
        assert self.batch is not None, "plan() comes before forward_heads()"
        k_buffer, v_buffer = self.kv_cache.get(layer.layer_id)
        slots = KVSlots(
            k_buffer,
            v_buffer,
            self.batch.out_cache_loc,
            self.kv_cache.k_scales[layer.layer_id],
            self.kv_cache.v_scales[layer.layer_id],
        )
        norm = None
        if norms is not None:
            norm = HeadNorm(norms.q.weight, norms.k.weight, norms.q.eps, norms.q.adds_one)
        q = rotate_and_write_kv(heads, cos, sin, slots, norm)
        return self.attend(layer, q)

    def attend(self, layer: Attention, q: torch.Tensor) -> torch.Tensor:
        """forward() without the write: the new keys and values are in the cache. q [n, num_heads,
        head_dim] with each token's heads side by side."""
        assert self.batch is not None, "plan() comes before attend()"
        if self.batch.mode is ForwardMode.DECODE:
            return self._decode(layer, self.batch, q)
        return self._extend(layer, self.batch, q)

    def _decode(self, layer: Attention, batch: ForwardBatch, q: torch.Tensor) -> torch.Tensor:
        k_buffer, v_buffer = self.kv_cache.get(layer.layer_id)
        return decode_attention(
            q,
            k_buffer,
            v_buffer,
            self.req_to_token,
            batch.req_pool_indices,
            batch.seq_lens,
            self.scratch[layer.sliding_window],
            scale=layer.scale,
            window=layer.sliding_window,
            logit_cap=layer.logit_cap,
            k_scale=self.kv_cache.k_scales[layer.layer_id],
            v_scale=self.kv_cache.v_scales[layer.layer_id],
        )

    def _extend(self, layer: Attention, batch: ForwardBatch, q: torch.Tensor) -> torch.Tensor:
        k_buffer, v_buffer = self.kv_cache.get(layer.layer_id)
        assert self._tile_list is not None, "plan() of an extend pass lists its tiles"
        return extend_attention(
            q,
            k_buffer,
            v_buffer,
            self.req_to_token,
            batch.req_pool_indices,
            batch.seq_lens,
            batch.extend_lens,
            self._tile_list,
            self.tiles[layer.sliding_window],
            scale=layer.scale,
            window=layer.sliding_window,
            logit_cap=layer.logit_cap,
            k_scale=self.kv_cache.k_scales[layer.layer_id],
            v_scale=self.kv_cache.v_scales[layer.layer_id],
        )
