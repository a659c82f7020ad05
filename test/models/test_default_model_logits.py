"""The default model, from its GGUF file, beside transformers' own reading of the same file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from srt.forward_batch import ForwardBatch, ForwardMode
from srt.model_config import load_model_config
from srt.model_runner import ModelRunner
from srt.server_args import ServerArgs
from srt.tokenizer import load_tokenizer

TEXT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
NUM_NEW = 24


@pytest.mark.slow
def test_h52_the_default_model_generates_what_transformers_generates(default_model: Path) -> None:
    """H52: a GGUF without output.weight."""
    config = load_model_config(default_model)
    assert config.tie_word_embeddings
    runner = ModelRunner(
        default_model, config, ServerArgs(device="cpu", max_total_tokens=512, quantization="none")
    )
    table = torch.zeros(2, config.context_len, dtype=torch.int32)
    slots = torch.randperm(512, generator=torch.Generator().manual_seed(0)) + 1
    table[1, :512] = slots.int()
    runner.init_memory(runner.plan_memory(), table)

    tokens = load_tokenizer(default_model).encode(TEXT)
    prompt_len = len(tokens)
    logits = []
    new = tokens
    for _ in range(NUM_NEW):
        start, end = len(tokens) - len(new), len(tokens)
        batch = ForwardBatch(
            mode=ForwardMode.DECODE if start else ForwardMode.EXTEND,
            input_ids=torch.tensor(new),
            positions=torch.arange(start, end),
            req_pool_indices=torch.tensor([1]),
            seq_lens=torch.tensor([end]),
            extend_lens=torch.tensor([end - start]),
            out_cache_loc=slots[start:end],
            seq_lens_cpu=[end],
            extend_lens_cpu=[end - start],
            sampling=None,
        )
        logits.append(runner.forward(batch)[0])
        new = [int(logits[-1].argmax())]
        tokens = tokens + new

    # What from_pretrained does with a GGUF file, without the package it wants beside.
    read = load_gguf_checkpoint(str(default_model), return_tensors=False)
    reference = LlamaForCausalLM(LlamaConfig(**read["config"])).eval()
    loaded = load_gguf_checkpoint(
        str(default_model), return_tensors=True, model_to_load=reference, torch_dtype=torch.float32
    )
    problems = reference.load_state_dict(loaded["tensors"], strict=False)
    assert problems.missing_keys == ["lm_head.weight"] and not problems.unexpected_keys
    reference.tie_weights()
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens[:-1]])).logits[0, prompt_len - 1 :]
    torch.testing.assert_close(torch.stack(logits), expected, atol=1e-3, rtol=0)
    assert expected.argmax(-1).tolist() == tokens[prompt_len:]
