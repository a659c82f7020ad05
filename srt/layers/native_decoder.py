"""All layers of a decoder in one call of the C++ kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from srt.forward_batch import ForwardBatch
from srt.layers import native_ops
from srt.layers.decoder_stack import DecoderLayerParts, DecoderStack
from srt.layers.layernorm import RMSNorm
from srt.layers.linear import Linear
from srt.layers.native_attention import NativeAttentionBackend, NativeLayer
from srt.layers.quantization.packed_weight import NativeWeight


class NativeDecoderLayer(ctypes.Structure):
    """DecoderLayer in csrc/decoder.h."""

    _fields_ = (
        ("qkv", ctypes.POINTER(NativeWeight)),
        ("o", ctypes.POINTER(NativeWeight)),
        ("gate_up", ctypes.POINTER(NativeWeight)),
        ("down", ctypes.POINTER(NativeWeight)),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("post_attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("post_mlp_norm", ctypes.c_void_p),
        ("next_norm", ctypes.c_void_p),
        ("attention", NativeLayer),
        ("eps", ctypes.c_float),
        ("norm_adds_one", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("exact", ctypes.c_int32),
        ("rotary", ctypes.c_int32),
        ("padding", ctypes.c_int32),
    )


class NativeRotary(ctypes.Structure):
    """Rotary in csrc/decoder.h."""

    _fields_ = (("cos", ctypes.c_void_p), ("sin", ctypes.c_void_p))


class NativeTimes(ctypes.Structure):
    """DecoderTimes in csrc/decoder.h: seconds in each part, added up over passes."""

    _fields_ = (
        ("linear", ctypes.c_double),
        ("attention", ctypes.c_double),
        ("rest", ctypes.c_double),
    )


class NativeDecoder:
    """Computes the hidden states of a model whose linears are packed. The same kernels in the same
    order as the model's own forward, so the same bits, without a dozen calls a layer."""

    def __init__(self, stack: DecoderStack, attention: NativeAttentionBackend) -> None:
        """The weights must be loaded, and stay where they are: the kernels keep pointers."""
        assert can_run(stack), "every linear must be packed and every norm float32"
        self.stack = stack
        self.attention = attention
        # Filled if set: for measuring.
        self.times: NativeTimes | None = None
        self._decoder = attention.library.rg_decoder
        next_norms = [*(layer.input_norm for layer in stack.layers[1:]), stack.norm]
        layers = [
            _describe(layer, next_norm, attention)
            for layer, next_norm in zip(stack.layers, next_norms, strict=True)
        ]
        self._layers = (NativeDecoderLayer * len(layers))(*layers)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [n, hidden_size] float32, normalised; the batch must be planned."""
        stack = self.stack
        hidden = stack.embedding(batch.input_ids)
        if stack.embed_scale != 1.0:
            hidden = hidden * stack.embed_scale
        x = stack.layers[0].input_norm(hidden)
        tables = [rotary(batch.positions) for rotary in stack.rotaries]
        rotaries = (NativeRotary * len(tables))(
            *(NativeRotary(cos.data_ptr(), sin.data_ptr()) for cos, sin in tables)
        )
        self._decoder(
            self._layers,
            len(self._layers),
            ctypes.byref(self.attention.native_pass),
            rotaries,
            hidden.shape[1],
            hidden.data_ptr(),
            x.data_ptr(),
            None if self.times is None else ctypes.byref(self.times),
        )
        return x


def can_run(stack: DecoderStack) -> bool:
    """Whether the kernels take this model as it is now."""
    return all(
        all(linear.packed is not None for linear in _linears(layer))
        and all(norm.weight.dtype is torch.float32 for norm in _norms(layer))
        for layer in stack.layers
    )


def _linears(layer: DecoderLayerParts) -> tuple[Linear, ...]:
    return (layer.qkv, layer.o, layer.gate_up, layer.down)


def _norms(layer: DecoderLayerParts) -> Iterator[RMSNorm]:
    norms = (
        layer.input_norm,
        layer.mlp_norm,
        layer.q_norm,
        layer.k_norm,
        layer.post_attention_norm,
        layer.post_mlp_norm,
    )
    return (norm for norm in norms if norm is not None)


def _describe(
    layer: DecoderLayerParts, next_norm: RMSNorm, attention: NativeAttentionBackend
) -> NativeDecoderLayer:
    def weight(linear: Linear) -> ctypes._Pointer[NativeWeight]:
        assert linear.packed is not None
        return ctypes.pointer(linear.packed.native)

    def norm(module: RMSNorm | None) -> int | None:
        return None if module is None else module.weight.data_ptr()

    assert layer.qkv.packed is not None
    return NativeDecoderLayer(
        *(weight(linear) for linear in _linears(layer)),
        norm(layer.q_norm),
        norm(layer.k_norm),
        norm(layer.post_attention_norm),
        norm(layer.mlp_norm),
        norm(layer.post_mlp_norm),
        norm(next_norm),
        attention.describe(layer.attention, torch.float32),
        layer.mlp_norm.eps,
        layer.mlp_norm.adds_one,
        native_ops.ACTIVATIONS[layer.activation.name],
        layer.qkv.packed.exact,
        layer.rotary,
    )
