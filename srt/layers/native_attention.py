"""The CPU attention backend on the C++ kernels: ragged, without padding or gathered copies."""

from __future__ import annotations

import ctypes

import torch

from srt.forward_batch import ForwardBatch
from srt.layers.attention import Attention, HeadNorms, split_heads
from srt.mem_cache.kv_cache import KVCache
from srt.native import DTYPE_CODES


class NativePass(ctypes.Structure):
    """AttentionPass in csrc/attention.h."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("table_rows", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("extend_lens", ctypes.c_void_p),
        ("out_loc", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("num_requests", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
    )


class NativeLayer(ctypes.Structure):
    """AttentionLayer in csrc/attention.h."""

    _fields_ = (
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
        ("kv_dtype", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


class NativeAttentionBackend:
    """See AttentionBackend. What a query attends to is computed in an order that depends on its own
    request only: the same bits in any batch, decoded or prefilled, in chunks or whole."""

    def __init__(self, library: ctypes.CDLL, kv_cache: KVCache, req_to_token: torch.Tensor) -> None:
        """Only for a KV cache of float32, float16, bfloat16 or int8 in host memory."""
        assert kv_cache.dtype in DTYPE_CODES, f"no kernel for a KV cache of {kv_cache.dtype}"
        assert req_to_token.is_cpu and req_to_token.dtype is torch.int32
        self.library = library
        self.kv_cache = kv_cache
        self.req_to_token = req_to_token
        self.batch: ForwardBatch | None = None
        self.native_pass = NativePass()
        # By the layer object: two layers may share a layer_id in tests, with other windows.
        self._layers: dict[tuple[Attention, torch.dtype], NativeLayer] = {}

    def plan(self, batch: ForwardBatch) -> None:
        # The kernels read these as they lie; the batch keeps them alive during the pass.
        for tensor in (
            batch.req_pool_indices,
            batch.seq_lens,
            batch.extend_lens,
            batch.out_cache_loc,
        ):
            assert tensor.dtype is torch.int64 and tensor.is_contiguous(), tensor
        self.batch = batch
        self.native_pass = NativePass(
            self.req_to_token.data_ptr(),
            batch.req_pool_indices.data_ptr(),
            batch.seq_lens.data_ptr(),
            batch.extend_lens.data_ptr(),
            batch.out_cache_loc.data_ptr(),
            self.req_to_token.stride(0),
            len(batch.seq_lens_cpu),
            len(batch.out_cache_loc),
        )

    def forward(
        self, layer: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        assert self.batch is not None, "plan() comes before forward()"
        key = (layer, q.dtype)
        native = self._layers.get(key)
        if native is None:
            native = self._layers[key] = self.describe(layer, q.dtype)
        q, k, v = (_packed_heads(x) for x in (q, k, v))
        out = torch.empty(q.shape, dtype=q.dtype)
        self.library.rg_attention(
            ctypes.byref(self.native_pass),
            ctypes.byref(native),
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            out.data_ptr(),
        )
        return out

    def forward_heads(
        self,
        layer: Attention,
        heads: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        norms: HeadNorms | None,
    ) -> torch.Tensor:
        return self.forward(layer, *split_heads(layer, heads, cos, sin, norms))

    def describe(self, layer: Attention, dtype: torch.dtype) -> NativeLayer:
        """The layer for the kernels, with activations of `dtype`."""
        keys, values = self.kv_cache.get(layer.layer_id)
        return NativeLayer(
            keys.data_ptr(),
            values.data_ptr(),
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.sliding_window or 0,
            layer.scale,
            layer.logit_cap,
            DTYPE_CODES[self.kv_cache.dtype],
            DTYPE_CODES[dtype],
        )


def _packed_heads(x: torch.Tensor) -> torch.Tensor:
    """x [n, heads, head_dim] with each token's heads side by side; a slice of more heads is."""
    if x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x
    return x.contiguous()
