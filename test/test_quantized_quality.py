"""What quantisation costs the default model: perplexity and likeliest tokens beside float32.

The text is the openings of Moby-Dick, Pride and Prejudice, Alice's Adventures in Wonderland and A
Tale of Two Cities, all in the public domain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from srt.forward_batch import ForwardBatch, ForwardMode
from srt.model_config import load_model_config
from srt.model_runner import ModelRunner
from srt.native import native_library
from srt.server_args import ServerArgs
from srt.tokenizer import load_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native_library() is None, reason="needs a C++ compiler"),
]
TEXT = Path(__file__).parent / "data" / "novels.txt"
WINDOW = 350
MAX_PERPLEXITY_RATIO = 1.02
MIN_AGREEMENT = 0.93


@dataclass(frozen=True)
class Reading:
    """Of a whole text, read in windows of tokens."""

    perplexity: float
    likeliest: torch.Tensor  # [tokens], the greedy choice at each place


def read_text(model: Path, quantization: str, kv_cache_dtype: str = "auto") -> Reading:
    config = load_model_config(model)
    args = ServerArgs(
        device="cpu",
        max_total_tokens=WINDOW,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
    )
    runner = ModelRunner(model, config, args)
    table = torch.arange(1, config.context_len + 1, dtype=torch.int32).expand(2, -1).contiguous()
    runner.init_memory(runner.plan_memory(), table)
    tokens = load_tokenizer(model).encode(TEXT.read_text(encoding="utf-8"))
    total, likeliest = 0.0, []
    for start in range(0, len(tokens) - 1, WINDOW):
        window = tokens[start : start + WINDOW + 1]
        logits = window_logits(runner, window[:-1])
        target = torch.tensor(window[1:])
        total += float(torch.nn.functional.cross_entropy(logits, target, reduction="sum"))
        likeliest.append(logits.argmax(-1))
    return Reading(math.exp(total / (len(tokens) - 1)), torch.cat(likeliest))


@torch.inference_mode()
def window_logits(runner: ModelRunner, ids: list[int]) -> torch.Tensor:
    """Logits after every token of `ids`, [len(ids), vocab]."""
    n = len(ids)
    batch = ForwardBatch(
        mode=ForwardMode.EXTEND,
        input_ids=torch.tensor(ids),
        positions=torch.arange(n),
        req_pool_indices=torch.tensor([1]),
        seq_lens=torch.tensor([n]),
        extend_lens=torch.tensor([n]),
        out_cache_loc=torch.arange(1, n + 1),
        seq_lens_cpu=[n],
        extend_lens_cpu=[n],
        sampling=None,
    )
    assert runner.attn is not None
    runner.attn.plan(batch)
    if runner.decoder is not None:
        hidden = runner.decoder.forward(batch)
    else:
        hidden = runner.model(batch.input_ids, batch.positions, runner.attn)
    return runner.model.logits(hidden)


@pytest.fixture(scope="module")
def exact(default_model: Path) -> Reading:
    return read_text(default_model, "none")


@pytest.mark.parametrize(
    ("quantization", "kv_cache_dtype"),
    [
        ("auto", "auto"),
        ("auto", "int8"),
        ("auto", "float16"),
        ("none", "int8"),
        ("int4", "auto"),
        ("int8", "auto"),
        ("int8", "int8"),
        ("w8a8_int8", "auto"),
    ],
)
def test_quantization_keeps_perplexity_and_choices(
    quantization: str, kv_cache_dtype: str, exact: Reading, default_model: Path
) -> None:
    rounded = read_text(default_model, quantization, kv_cache_dtype)
    agreement = float((rounded.likeliest == exact.likeliest).double().mean())
    assert rounded.perplexity / exact.perplexity < MAX_PERPLEXITY_RATIO
    assert agreement > MIN_AGREEMENT
    # Nothing was rounded at all if everything agrees.
    assert rounded.perplexity != exact.perplexity
