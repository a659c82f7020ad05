"""Qwen2 and Qwen2.5: like Llama, with biases on queries, keys and values only."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from srt.layers.activation import GatedActivation
from srt.layers.attention import Attention, AttentionBackend
from srt.layers.decoder_stack import DecoderLayerParts, DecoderStack
from srt.layers.embedding import Embedding
from srt.layers.layernorm import RMSNorm
from srt.layers.linear import Linear, MergedLinear
from srt.layers.rotary_embedding import RotaryEmbedding
from srt.model_config import ModelConfig
from srt.models.causal_lm import CausalLM


class Qwen2Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.qkv_proj = MergedLinear(
            config.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=config.qkv_bias,
        )
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.o_bias)
        self.attn = Attention(
            layer_id,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.attention_scale,
            config.window_of(layer_id),
        )

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attn: AttentionBackend
    ) -> torch.Tensor:
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [n, Hq + 2 Hkv, D]
        attended = self.attn(heads, cos, sin, attn)
        out: torch.Tensor = self.o_proj(attended.flatten(1))
        return out


class Qwen2MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = MergedLinear(
            config.hidden_size,
            {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
            bias=config.mlp_bias,
        )
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)
        self.act = GatedActivation(config.activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act(self.gate_up_proj(x)))
        return out


class Qwen2Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Qwen2Attention(config, layer_id)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Qwen2MLP(config)

    def forward(
        self,
        x: torch.Tensor,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attn: AttentionBackend,
        next_norm: RMSNorm,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` is `hidden` through our input_layernorm; returns what follows through `next_norm`,
        and itself. A sum and the norm of it are one operation."""
        attended = self.self_attn(x, cos, sin, attn)
        x, hidden = self.post_attention_layernorm.add(hidden, attended)
        return next_norm.add(hidden, self.mlp(x))

    def parts(self) -> DecoderLayerParts:
        return DecoderLayerParts(
            input_norm=self.input_layernorm,
            qkv=self.self_attn.qkv_proj,
            attention=self.self_attn.attn,
            o=self.self_attn.o_proj,
            mlp_norm=self.post_attention_layernorm,
            gate_up=self.mlp.gate_up_proj,
            activation=self.mlp.act,
            down=self.mlp.down_proj,
        )


class Qwen2Model(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Qwen2Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attn: AttentionBackend
    ) -> torch.Tensor:
        cos, sin = self.rotary(positions)
        hidden: torch.Tensor = self.embed_tokens(input_ids)
        layers = cast("list[Qwen2Layer]", list(self.layers))
        norms = [*(layer.input_layernorm for layer in layers), self.norm]
        x: torch.Tensor = norms[0](hidden)
        for layer, next_norm in zip(layers, norms[1:], strict=True):
            x, hidden = layer(x, hidden, cos, sin, attn, next_norm)
        return x


class Qwen2ForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = Qwen2Model(config)
        self.lm_head = (
            self.model.embed_tokens
            if config.tie_word_embeddings
            else Embedding(config.vocab_size, config.hidden_size)
        )

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attn: AttentionBackend
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids, positions, attn)
        return hidden

    def decoder_stack(self) -> DecoderStack:
        model = self.model
        layers = cast("list[Qwen2Layer]", list(model.layers))
        parts = tuple(layer.parts() for layer in layers)
        return DecoderStack(model.embed_tokens, 1.0, (model.rotary,), parts, model.norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head.logits(hidden)
