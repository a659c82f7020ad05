"""Each family beside transformers' own implementation, on the same weights, through real files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from srt.forward_batch import ForwardBatch, ForwardMode
from srt.model_config import load_model_config
from srt.model_runner import ModelRunner
from srt.server_args import ServerArgs

PROMPT_LEN = 45
NUM_NEW = 64
NUM_ROWS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARN_ODD = {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3}
# Name -> family, settings beside SIZES, number of weight files at least.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("Llama", {}, 1),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}, 1),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}, 1),
    "llama-wide-heads": ("Llama", {"head_dim": 16, "num_key_value_heads": 6}, 1),
    "llama-llama3-rope": ("Llama", {"rope_scaling": LLAMA3, "rope_theta": 500.0}, 1),
    "llama-linear-rope": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}, 1),
    "llama-yarn-rope": ("Llama", {"rope_scaling": YARN}, 1),
    "llama-odd-yarn-rope": ("Llama", {"rope_scaling": YARN_ODD}, 1),
    "mistral-window": ("Mistral", {"sliding_window": 16}, 1),
    "mistral-no-window": ("Mistral", {"sliding_window": None, "head_dim": 12}, 1),
    "qwen2-sharded": ("Qwen2", {"tie_word_embeddings": True}, 3),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        1,
    ),
    "qwen3": ("Qwen3", {"head_dim": 16, "attention_bias": True}, 1),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 12,
            "num_hidden_layers": 4,
            "sliding_window": 16,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 20,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
        1,
    ),
    "gemma3-capped-untied": (
        "Gemma3",
        {"head_dim": 8, "final_logit_softcapping": 3.0, "tie_word_embeddings": False},
        1,
    ),
}


def reference_model(case: str) -> transformers.PreTrainedModel:
    family, settings, _ = CASES[case]
    name = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **settings})
    torch.manual_seed(len(case))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases, which start as ones and zeros
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def save(model: transformers.PreTrainedModel, folder: Path, num_files: int = 1) -> None:
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=num_bytes // num_files + 1)


def make_runner(folder: Path, **options: Any) -> ModelRunner:
    args = ServerArgs(model_path=str(folder), device="cpu", max_total_tokens=511, **options)
    runner = ModelRunner(folder, load_model_config(folder), args)
    plan = runner.plan_memory()
    table = torch.zeros(NUM_ROWS + 1, plan.context_len, dtype=torch.int32)
    runner.init_memory(plan, table)
    return runner


class Request:
    """A row of the table with scattered slots, and the passes of one request."""

    def __init__(self, runner: ModelRunner, row: int, seed: int) -> None:
        self.runner = runner
        self.row = row
        generator = torch.Generator().manual_seed(seed)
        self.slots = torch.randperm(511, generator=generator)[: PROMPT_LEN + NUM_NEW] + 1
        table = runner.attn.req_to_token
        table[row, : len(self.slots)] = self.slots.int()
        # What lies beyond the sequence is stale, and must not be read.
        table[row, len(self.slots) :] = 511
        self.tokens: list[int] = []

    def batch(self, new: list[int]) -> ForwardBatch:
        start, end = len(self.tokens), len(self.tokens) + len(new)
        self.tokens += new
        return ForwardBatch(
            mode=ForwardMode.DECODE if start and len(new) == 1 else ForwardMode.EXTEND,
            input_ids=torch.tensor(new),
            positions=torch.arange(start, end),
            req_pool_indices=torch.tensor([self.row]),
            seq_lens=torch.tensor([end]),
            extend_lens=torch.tensor([len(new)]),
            out_cache_loc=self.slots[start:end],
            seq_lens_cpu=[end],
            extend_lens_cpu=[len(new)],
            sampling=None,
        )

    @torch.inference_mode()
    def extend(self, new: list[int]) -> torch.Tensor:
        """Logits [len(new), vocab] after every new token."""
        batch = self.batch(new)
        self.runner.attn.plan(batch)
        hidden = self.runner.model(batch.input_ids, batch.positions, self.runner.attn)
        return self.runner.model.logits(hidden)

    def generate(self, prompt: list[int], chunks: list[int]) -> torch.Tensor:
        """Logits [PROMPT_LEN + NUM_NEW - 1, vocab] of a greedy generation."""
        ends = torch.tensor(chunks).cumsum(0).tolist()
        rows = [
            self.extend(prompt[end - chunk : end]) for chunk, end in zip(chunks, ends, strict=True)
        ]
        for _ in range(NUM_NEW - 1):
            rows.append(self.runner.forward(self.batch([int(rows[-1][-1].argmax())])))
        return torch.cat(rows)


def prompt_of(seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SIZES["vocab_size"], (PROMPT_LEN,), generator=generator).tolist()


@torch.inference_mode()
def reference_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


def assert_same_generation(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Logits within 1e-4 everywhere, so that every prompt position agrees; and each generated token
    is the one the reference would have chosen after the same tokens."""
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    start = PROMPT_LEN - 1
    assert ours[start:].argmax(-1).tolist() == theirs[start:].argmax(-1).tolist()


@pytest.mark.parametrize("case", CASES)
def test_a_family_generates_what_transformers_generates(case: str, tmp_path: Path) -> None:
    num_files = CASES[case][2]
    reference = reference_model(case)
    save(reference, tmp_path, num_files)
    assert len(list(tmp_path.glob("*.safetensors"))) >= num_files
    runner = make_runner(tmp_path)
    prompt = prompt_of(1)

    whole = Request(runner, row=2, seed=1)
    logits = whole.generate(prompt, [PROMPT_LEN])
    expected = reference_logits(reference, whole.tokens)
    assert_same_generation(logits, expected)
    # A model that says one thing for ever would prove little.
    assert len(set(whole.tokens[PROMPT_LEN:])) > 2

    for row, chunks in ((1, [20, 25]), (3, [17, 1, 27])):
        chunked = Request(runner, row=row, seed=row + 10)
        assert_same_generation(chunked.generate(prompt, chunks), expected)
        assert chunked.tokens == whole.tokens


def test_a_multimodal_gemma_checkpoint_serves_its_text_part(tmp_path: Path) -> None:
    reference = reference_model("gemma3")
    save(reference, tmp_path)
    text_config = json.loads((tmp_path / "config.json").read_text())
    expected = reference_logits(reference, prompt_of(1))
    tensors = load_file(tmp_path / "model.safetensors")
    for spelling in ("language_model.model.", "model.language_model."):
        renamed = {name.replace("model.", spelling, 1): t for name, t in tensors.items()}
        renamed["vision_tower.patches.weight"] = torch.zeros(3)
        renamed["model.multi_modal_projector.weight"] = torch.zeros(3)
        folder = tmp_path / spelling.rstrip(".")
        folder.mkdir()
        save_file(renamed, folder / "model.safetensors")
        outer = {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": text_config,
        }
        (folder / "config.json").write_text(json.dumps(outer))
        logits = Request(make_runner(folder), row=1, seed=1).extend(prompt_of(1))
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
