"""Gemma 3, text: layers with a sliding window and an own rotation between full ones."""

from __future__ import annotations

import logging
from typing import cast

import torch
from torch import nn

from srt.layers.activation import GatedActivation
from srt.layers.attention import Attention, AttentionBackend, HeadNorms
from srt.layers.decoder_stack import DecoderLayerParts, DecoderStack
from srt.layers.embedding import Embedding
from srt.layers.layernorm import GemmaRMSNorm
from srt.layers.linear import Linear, MergedLinear
from srt.layers.rotary_embedding import RotaryEmbedding
from srt.model_config import ModelConfig
from srt.models.causal_lm import CausalLM

logger = logging.getLogger(__name__)


class Gemma3Attention(nn.Module):
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
        self.q_norm = GemmaRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = GemmaRMSNorm(config.head_dim, config.rms_norm_eps)
        self.attn = Attention(
            layer_id,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.attention_scale,
            config.window_of(layer_id),
            config.attn_logit_cap,
        )

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attn: AttentionBackend
    ) -> torch.Tensor:
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [n, Hq + 2 Hkv, D]
        attended = self.attn(heads, cos, sin, attn, HeadNorms(self.q_norm, self.k_norm))
        out: torch.Tensor = self.o_proj(attended.flatten(1))
        return out


class Gemma3MLP(nn.Module):
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


class Gemma3Layer(nn.Module):
    """Norms before and after each half; both halves are normalised before they are added."""

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.is_sliding = config.sliding_layers[layer_id]
        self.input_layernorm = GemmaRMSNorm(size, eps)
        self.self_attn = Gemma3Attention(config, layer_id)
        self.post_attention_layernorm = GemmaRMSNorm(size, eps)
        self.pre_feedforward_layernorm = GemmaRMSNorm(size, eps)
        self.mlp = Gemma3MLP(config)
        self.post_feedforward_layernorm = GemmaRMSNorm(size, eps)

    def forward(
        self,
        x: torch.Tensor,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attn: AttentionBackend,
        next_norm: GemmaRMSNorm,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` is `hidden` through our input_layernorm; returns what follows through `next_norm`,
        and itself. A sum and the norm of it are one operation."""
        attended = self.post_attention_layernorm(self.self_attn(x, cos, sin, attn))
        x, hidden = self.pre_feedforward_layernorm.add(hidden, attended)
        return next_norm.add(hidden, self.post_feedforward_layernorm(self.mlp(x)))

    def parts(self) -> DecoderLayerParts:
        return DecoderLayerParts(
            input_norm=self.input_layernorm,
            qkv=self.self_attn.qkv_proj,
            attention=self.self_attn.attn,
            o=self.self_attn.o_proj,
            mlp_norm=self.pre_feedforward_layernorm,
            gate_up=self.mlp.gate_up_proj,
            activation=self.mlp.act,
            down=self.mlp.down_proj,
            rotary=1 if self.is_sliding else 0,
            q_norm=self.self_attn.q_norm,
            k_norm=self.self_attn.k_norm,
            post_attention_norm=self.post_attention_layernorm,
            post_mlp_norm=self.post_feedforward_layernorm,
        )


class Gemma3Model(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        # Rounded to the model's type, as in training: 55.5 and not 55.4256 in bfloat16.
        self.embed_scale = float(torch.tensor(config.hidden_size**0.5, device="cpu"))
        self.layers = nn.ModuleList(Gemma3Layer(config, i) for i in range(config.num_layers))
        self.norm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim)
        self.rotary_local = RotaryEmbedding(config.rope_local, config.head_dim)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attn: AttentionBackend
    ) -> torch.Tensor:
        full, local = self.rotary(positions), self.rotary_local(positions)
        hidden: torch.Tensor = self.embed_tokens(input_ids) * self.embed_scale
        layers = cast("list[Gemma3Layer]", list(self.layers))
        norms = [*(layer.input_layernorm for layer in layers), self.norm]
        x: torch.Tensor = norms[0](hidden)
        for layer, next_norm in zip(layers, norms[1:], strict=True):
            cos, sin = local if layer.is_sliding else full
            x, hidden = layer(x, hidden, cos, sin, attn, next_norm)
        return x


class Gemma3ForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.final_logit_cap = config.final_logit_cap
        self.model = Gemma3Model(config)
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
        layers = cast("list[Gemma3Layer]", list(model.layers))
        parts = tuple(layer.parts() for layer in layers)
        return DecoderStack(
            model.embed_tokens,
            model.embed_scale,
            (model.rotary, model.rotary_local),
            parts,
            model.norm,
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head.logits(hidden, self.final_logit_cap)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text part of a checkpoint that has a vision tower beside it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        logger.warning("Gemma3ForConditionalGeneration: serving the text part, images are not read")

    def checkpoint_name(self, name: str) -> str | None:
        # Two spellings in use: before and since transformers moved the text model below `model`.
        if name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector.")):
            return None
        if name.startswith("model.language_model."):
            return "model." + name.removeprefix("model.language_model.")
        return name.removeprefix("language_model.")
