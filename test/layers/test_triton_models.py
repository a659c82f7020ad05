"""Whole models over the Triton backend give the logits that they give over plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from srt.forward_batch import ForwardBatch, ForwardMode
from srt.layers.attention import AttentionBackend
from srt.layers.torch_attention import TorchAttentionBackend
from srt.layers.triton_attention import GpuFacts, TritonAttentionBackend
from srt.mem_cache.kv_cache import KVCache
from srt.model_config import ModelConfig, load_model_config
from srt.models.causal_lm import CausalLM
from srt.models.registry import create_model
from srt.weights import fill_with_random_weights

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "sliding_window": 5,
        "sliding_window_pattern": 2,
    },
}
# Requests of 1, 9 and 20 tokens, in slots apart from each other.
LENS = [1, 9, 20]


def make_backends(
    config: ModelConfig, device: str
) -> tuple[TorchAttentionBackend, TritonAttentionBackend]:
    table = torch.zeros(4, 64, dtype=torch.int32)
    for row in range(1, 4):
        table[row, :30] = torch.arange(30) * 3 + row
    table = table.to(device)

    def cache() -> KVCache:
        return KVCache(
            100, config.num_layers, config.num_kv_heads, config.head_dim, torch.float32, device
        )

    windows = {config.window_of(i) for i in range(config.num_layers)}
    triton = TritonAttentionBackend(
        cache(), table, config.num_heads, torch.float32, windows, 4, GpuFacts(2, (9, 0))
    )
    return TorchAttentionBackend(cache(), table), triton


def batch_of(mode: ForwardMode, prefix_lens: list[int], seq_lens: list[int]) -> ForwardBatch:
    spans = [torch.arange(a, b) for a, b in zip(prefix_lens, seq_lens, strict=True)]
    slots = [span * 3 + row for row, span in enumerate(spans, start=1)]
    positions = torch.cat(spans)
    extend_lens = [len(span) for span in spans]
    return ForwardBatch(
        mode=mode,
        input_ids=(positions * 7 + torch.cat(slots)) % SIZES["vocab_size"],
        positions=positions,
        req_pool_indices=torch.arange(1, 4),
        seq_lens=torch.tensor(seq_lens),
        extend_lens=torch.tensor(extend_lens),
        out_cache_loc=torch.cat(slots),
        seq_lens_cpu=seq_lens,
        extend_lens_cpu=extend_lens,
        sampling=None,
    )


def run(model: CausalLM, backend: AttentionBackend, batch: ForwardBatch) -> torch.Tensor:
    with torch.inference_mode():
        backend.plan(batch)
        return model.logits(model(batch.input_ids, batch.positions, backend))


@pytest.mark.skipif(torch.cuda.is_available(), reason="compares on the CPU, interpreted")
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_give_the_same_logits_as_plain_torch(
    family: str, tmp_path: Path
) -> None:
    config_json = {**SIZES, "model_type": family, **FAMILIES[family]}
    (tmp_path / "config.json").write_text(json.dumps(config_json))
    config = load_model_config(tmp_path)
    model = create_model(config)
    fill_with_random_weights(model, 0)
    plain, triton = make_backends(config, "cpu")
    for batch in (
        batch_of(ForwardMode.EXTEND, [0, 0, 0], LENS),
        batch_of(ForwardMode.DECODE, LENS, [n + 1 for n in LENS]),
    ):
        expected = run(model, plain, batch)
        torch.testing.assert_close(run(model, triton, batch), expected, atol=1e-5, rtol=1e-5)
    for name in ("k_buffers", "v_buffers"):
        ours, theirs = getattr(triton.kv_cache, name), getattr(plain.kv_cache, name)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
