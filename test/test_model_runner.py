"""The runner on a small model with random weights: device, types, memory, passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from srt.forward_batch import ForwardBatch, ForwardMode
from srt.layers.quantization.scheme import packed_bytes
from srt.layers.torch_attention import TorchAttentionBackend
from srt.model_config import load_model_config
from srt.model_runner import ModelRunner
from srt.native import native_library
from srt.sampling_batch import SamplingBatch
from srt.sampling_params import SamplingParams
from srt.server_args import ServerArgs

VOCAB = 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def make_runner(folder: Path, **options: Any) -> ModelRunner:
    options = {"max_total_tokens": 256, "device": "cpu", **options}
    args = ServerArgs(load_format="dummy", **options)
    runner = ModelRunner(folder, load_model_config(folder), args)
    plan = runner.plan_memory()
    table = torch.zeros(plan.max_running_requests + 1, plan.context_len, dtype=torch.int32)
    # Row r owns slots (r - 1) * 60 + 1 on.
    for row in range(1, 5):
        table[row, :60] = torch.arange(60) + (row - 1) * 60 + 1
    runner.init_memory(plan, table)
    return runner


def extend_batch(
    prompts: dict[int, list[int]], prefix_lens: dict[int, int] | None = None
) -> ForwardBatch:
    """Prompts by row; a row with a prefix extends by what lies beyond it."""
    prefix_lens = prefix_lens or {}
    new = {row: ids[prefix_lens.get(row, 0) :] for row, ids in prompts.items()}
    starts = [prefix_lens.get(row, 0) for row in prompts]
    seq_lens = [len(ids) for ids in prompts.values()]
    positions = [torch.arange(s, e) for s, e in zip(starts, seq_lens, strict=True)]
    slots = [p + (row - 1) * 60 + 1 for row, p in zip(prompts, positions, strict=True)]
    extend_lens = [len(ids) for ids in new.values()]
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        input_ids=torch.tensor([i for ids in new.values() for i in ids]),
        positions=torch.cat(positions),
        req_pool_indices=torch.tensor(list(prompts)),
        seq_lens=torch.tensor(seq_lens),
        extend_lens=torch.tensor(extend_lens),
        out_cache_loc=torch.cat(slots),
        seq_lens_cpu=seq_lens,
        extend_lens_cpu=extend_lens,
        sampling=None,
    )


def decode_batch(tokens: dict[int, tuple[int, int]]) -> ForwardBatch:
    """(token, position) by row."""
    positions = torch.tensor([position for _, position in tokens.values()])
    rows = torch.tensor(list(tokens))
    return ForwardBatch(
        mode=ForwardMode.DECODE,
        input_ids=torch.tensor([token for token, _ in tokens.values()]),
        positions=positions,
        req_pool_indices=rows,
        seq_lens=positions + 1,
        extend_lens=torch.ones_like(positions),
        out_cache_loc=positions + (rows - 1) * 60 + 1,
        seq_lens_cpu=(positions + 1).tolist(),
        extend_lens_cpu=[1] * len(tokens),
        sampling=None,
    )


PROMPTS = {
    1: [5, 9, 33, 2, 60],
    2: [7],
    3: list(range(3, 43)),
}


def test_a_request_gives_the_same_logits_in_any_company(folder: Path) -> None:
    alone = {}
    for row, prompt in PROMPTS.items():
        runner = make_runner(folder)
        prefill = runner.forward(extend_batch({row: prompt}))
        decode = runner.forward(decode_batch({row: (11, len(prompt))}))
        alone[row] = torch.cat([prefill, decode])
    runner = make_runner(folder)
    prefill = runner.forward(extend_batch(PROMPTS))
    decode = runner.forward(decode_batch({row: (11, len(p)) for row, p in PROMPTS.items()}))
    for i, row in enumerate(PROMPTS):
        together = torch.stack([prefill[i], decode[i]])
        torch.testing.assert_close(together, alone[row], atol=5e-6, rtol=0)


def test_only_the_last_new_token_of_each_request_gives_logits(folder: Path) -> None:
    runner = make_runner(folder)
    logits = runner.forward(extend_batch(PROMPTS))
    assert logits.shape == (3, VOCAB) and logits.dtype is torch.float32
    # The last token again, over a prefix that is cached.
    prefix_lens = {row: len(prompt) - 1 for row, prompt in PROMPTS.items()}
    again = runner.forward(extend_batch(PROMPTS, prefix_lens))
    torch.testing.assert_close(again, logits, atol=5e-6, rtol=0)


def test_a_step_samples_greedily_what_the_logits_say(folder: Path) -> None:
    runner = make_runner(folder)
    batch = extend_batch(PROMPTS)
    greedy = SamplingParams(temperature=0.0)
    batch.sampling = SamplingBatch.build(
        [greedy] * 3, list(PROMPTS.values()), [[], [], []], [(), (), ()], VOCAB, "cpu"
    )
    next_token_ids = runner.step(batch)
    assert next_token_ids.dtype is torch.int64
    assert torch.equal(next_token_ids, runner.forward(batch).argmax(-1))


def test_a_pass_of_inner_chunks_fills_the_cache_and_gives_no_tokens(folder: Path) -> None:
    runner = make_runner(folder)
    head = {3: PROMPTS[3][:25]}
    assert runner.step(extend_batch(head)).tolist() == [0]
    chunked = runner.forward(extend_batch({3: PROMPTS[3]}, {3: 25}))
    whole = make_runner(folder).forward(extend_batch({3: PROMPTS[3]}))
    torch.testing.assert_close(chunked, whole, atol=5e-6, rtol=0)


@pytest.mark.parametrize(
    ("options", "dtype", "kv_dtype"),
    [
        ({}, torch.float32, torch.float32),
        ({"dtype": "bfloat16"}, torch.bfloat16, torch.bfloat16),
        ({"dtype": "half"}, torch.float16, torch.float16),
        ({"kv_cache_dtype": "bfloat16"}, torch.float32, torch.bfloat16),
        ({"kv_cache_dtype": "int8"}, torch.float32, torch.int8),
    ],
)
def test_types_follow_the_options(
    folder: Path, options: dict[str, str], dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    runner = make_runner(folder, **options)
    assert {parameter.dtype for parameter in runner.model.parameters()} == {dtype}
    assert runner.kv_cache is not None and runner.kv_cache.dtype is kv_dtype
    assert torch.get_default_dtype() is torch.float32
    logits = runner.forward(extend_batch(PROMPTS))
    reference = make_runner(folder).forward(extend_batch(PROMPTS))
    assert float((logits - reference).abs().max()) < 0.1
    decoded = runner.forward(decode_batch({1: (3, 5), 3: (4, 40)}))
    assert bool(decoded.isfinite().all())


@pytest.mark.parametrize(
    ("options", "kv_dtype"),
    [
        ({"quantization": "w8a8_int8"}, torch.int8),
        ({"quantization": "w8a8_int8", "kv_cache_dtype": "float16"}, torch.float16),
        ({"quantization": "int8"}, torch.float16),
        ({"quantization": "none", "dtype": "float32"}, torch.float32),
    ],
)
def test_auto_keeps_an_int8_cache_beside_int8_products_alone(
    folder: Path, options: dict[str, str], kv_dtype: torch.dtype
) -> None:
    if options["quantization"] != "none" and native_library() is None:
        pytest.skip("needs a C++ compiler")
    assert make_runner(folder, **options).kv_dtype is kv_dtype


def test_an_int8_cache_needs_no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = []
    for compiler in (True, False):
        if not compiler:
            monkeypatch.setattr("srt.model_runner.native_library", lambda: None)
        runner = make_runner(folder, kv_cache_dtype="int8")
        runner.forward(extend_batch(PROMPTS))
        logits.append(runner.forward(decode_batch({1: (11, 5), 2: (12, 1), 3: (13, 40)})))
    assert isinstance(runner.attn, TorchAttentionBackend)
    assert (logits[0] - logits[1]).norm() < 0.02 * logits[0].norm()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_the_plan_is_what_is_made(folder: Path, kv_cache_dtype: str) -> None:
    runner = make_runner(
        folder, page_size=16, max_running_requests=5, kv_cache_dtype=kv_cache_dtype
    )
    plan = runner.plan_memory()
    assert (plan.max_total_num_tokens, plan.max_running_requests) == (256, 5)
    assert plan.context_len == 128
    unpacked = sum(p.nbytes for p in runner.model.parameters())
    assert plan.weight_bytes == unpacked + packed_bytes(runner.model)
    cache = runner.kv_cache
    assert cache is not None and cache.num_slots == 256 + 16
    held = sum(buffer.nbytes for buffer in cache.k_buffers + cache.v_buffers)
    assert plan.kv_bytes == held


def test_the_pool_is_sized_from_free_memory_unless_told(folder: Path) -> None:
    args = ServerArgs(load_format="dummy", device="cpu")
    plan = ModelRunner(folder, load_model_config(folder), args).plan_memory()
    assert plan.max_total_num_tokens * 2 * 2 * 2 * 8 * 4 <= plan.available_bytes * 0.1
    assert plan.max_running_requests == 128


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there")
def test_a_device_that_is_not_there_is_an_error(folder: Path) -> None:
    with pytest.raises(ValueError, match="no CUDA device"):
        make_runner(folder, device="cuda")


@pytest.mark.parametrize(
    ("kv_cache_dtype", "most"),
    # Three bits of a mantissa: a value is off by 1/32 of itself in the mean. Seven bits and a sign
    # for what is up to four times as large as the mean.
    [("fp8_e4m3", 0.15), ("int8", 0.02)],
)
def test_a_cache_of_8_bits_changes_logits_little(
    folder: Path, kv_cache_dtype: str, most: float
) -> None:
    exact = {"dtype": "float32", "quantization": "none"}
    batch, after = extend_batch(PROMPTS), decode_batch({1: (11, 5), 2: (12, 1), 3: (13, 40)})
    logits = []
    for dtype in ("float32", kv_cache_dtype):
        runner = make_runner(folder, kv_cache_dtype=dtype, **exact)
        runner.forward(batch)
        logits.append(runner.forward(after))
    assert 0 < (logits[0] - logits[1]).norm() < most * logits[0].norm()


def test_batch_invariance_is_refused_where_products_depend_on_the_batch(folder: Path) -> None:
    with pytest.raises(ValueError, match="--batch-invariant needs our kernels"):
        make_runner(folder, batch_invariant=True, quantization="none", dtype="bfloat16")
    assert make_runner(folder, batch_invariant=True, quantization="int8").graphs is None
