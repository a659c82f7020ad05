"""All layers in one call give the bits of the models' own forward, for every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from srt.forward_batch import ForwardBatch, ForwardMode
from srt.model_config import load_model_config
from srt.model_runner import ModelRunner
from srt.native import native_library
from srt.server_args import ServerArgs

pytestmark = pytest.mark.skipif(native_library() is None, reason="needs a C++ compiler")
VOCAB = 70  # no multiple of a panel
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 5},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 10},
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 4,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "head_dim": 16,
    },
}


def make_runner(folder: Path, family: str, quantization: str, **options: Any) -> ModelRunner:
    config = {
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": 44,  # ends within a block of 32
        "intermediate_size": 52,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        **({} if family == "gemma3_text" else {"hidden_act": "silu"}),
        **FAMILIES[family],
    }
    if "head_dim" not in config:
        config["head_dim"] = 8
    (folder / "config.json").write_text(json.dumps(config))
    args = ServerArgs(
        load_format="dummy",
        device="cpu",
        max_total_tokens=256,
        quantization=quantization,
        **options,
    )
    runner = ModelRunner(folder, load_model_config(folder), args)
    table = torch.zeros(4, 128, dtype=torch.int32)
    for row in range(1, 4):
        table[row, :60] = torch.arange(60) + (row - 1) * 60 + 1
    runner.init_memory(runner.plan_memory(), table)
    return runner


def make_batch(rows: dict[int, tuple[int, int]], mode: ForwardMode) -> ForwardBatch:
    """(prefix_len, extend_len) by row of the table; token ids follow from row and position."""
    positions = [torch.arange(prefix, prefix + new) for prefix, new in rows.values()]
    ids = [(p * 7 + row * 11) % VOCAB for row, p in zip(rows, positions, strict=True)]
    slots = [p + (row - 1) * 60 + 1 for row, p in zip(rows, positions, strict=True)]
    seq_lens = [prefix + new for prefix, new in rows.values()]
    extend_lens = [new for _, new in rows.values()]
    return ForwardBatch(
        mode,
        torch.cat(ids),
        torch.cat(positions),
        torch.tensor(list(rows)),
        torch.tensor(seq_lens),
        torch.tensor(extend_lens),
        torch.cat(slots),
        seq_lens,
        extend_lens,
        None,
    )


PREFILL = {1: (0, 9), 2: (0, 1), 3: (0, 30)}
DECODE = {3: (30, 1), 1: (9, 1)}


@pytest.mark.parametrize("quantization", ["none", "int4", "int8", "w8a8_int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_gives_the_bits_of_the_models_own_forward(
    family: str, quantization: str, tmp_path: Path
) -> None:
    runner = make_runner(tmp_path, family, quantization)
    assert runner.decoder is not None
    batches = [
        make_batch(PREFILL, ForwardMode.EXTEND),
        make_batch(DECODE, ForwardMode.DECODE),
    ]
    fused = [runner.forward(batch) for batch in batches]
    runner.decoder = None
    layered = [runner.forward(batch) for batch in batches]
    for a, b in zip(fused, layered, strict=True):
        assert bool(a.isfinite().all()) and float(a.std()) > 0.05
        assert torch.equal(a, b)


@pytest.mark.parametrize("quantization", ["none", "int4", "int8", "w8a8_int8"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_request_has_the_same_bits_in_any_company_and_any_chunks(
    family: str, quantization: str, tmp_path: Path
) -> None:
    runner = make_runner(tmp_path, family, quantization)
    together = runner.forward(make_batch(PREFILL, ForwardMode.EXTEND))
    decoded = runner.forward(make_batch(DECODE, ForwardMode.DECODE))
    for i, (row, shape) in enumerate(PREFILL.items()):
        other = make_runner(tmp_path, family, quantization)
        alone = other.forward(make_batch({row: shape}, ForwardMode.EXTEND))
        assert torch.equal(alone[0], together[i])
    other = make_runner(tmp_path, family, quantization)
    other.forward(make_batch({3: (0, 13)}, ForwardMode.EXTEND))
    other.forward(make_batch({3: (13, 1)}, ForwardMode.DECODE))
    chunked = other.forward(make_batch({3: (14, 16)}, ForwardMode.EXTEND))
    assert torch.equal(chunked[0], together[2])
    again = other.forward(make_batch({3: (30, 1)}, ForwardMode.EXTEND))
    assert torch.equal(again[0], decoded[0])


@pytest.mark.parametrize(
    ("quantization", "tolerance"), [("int8", 0.06), ("w8a8_int8", 0.1), ("int4", 0.9)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_logits_are_close_to_the_exact_ones(
    family: str, quantization: str, tolerance: float, tmp_path: Path
) -> None:
    exact = make_runner(tmp_path, family, "none")
    rounded = make_runner(tmp_path, family, quantization)
    batch = make_batch(PREFILL, ForwardMode.EXTEND)
    expected = exact.forward(batch)
    error = (rounded.forward(batch) - expected).norm() / expected.norm()
    assert 0 < float(error) < tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_products_of_our_own_are_as_exact_as_those_of_torch(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = make_runner(tmp_path, family, "none")
    assert ours.decoder is not None
    monkeypatch.setattr("srt.model_runner.native_library", lambda: None)
    torchs = make_runner(tmp_path, family, "none")
    assert torchs.decoder is None
    for batch in (make_batch(PREFILL, ForwardMode.EXTEND), make_batch(DECODE, ForwardMode.DECODE)):
        expected = torchs.forward(batch)
        torch.testing.assert_close(ours.forward(batch), expected, atol=2e-5, rtol=0)


def test_sixteen_bit_activations_work_with_packed_weights(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, "llama", "w8a8_int8", dtype="bfloat16")
    assert runner.decoder is None and runner.kv_dtype is torch.bfloat16
    exact = make_runner(tmp_path, "llama", "none")
    batch = make_batch(PREFILL, ForwardMode.EXTEND)
    expected = exact.forward(batch)
    assert float((runner.forward(batch) - expected).norm() / expected.norm()) < 0.15
