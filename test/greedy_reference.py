"""Judges greedy answers of a real model: is each token the best one after those before it?"""

from __future__ import annotations

from pathlib import Path

import torch

from srt.forward_batch import ForwardBatch, ForwardMode
from srt.mem_cache.req_to_token_pool import ReqToTokenPool
from srt.model_config import load_model_config
from srt.model_runner import ModelRunner
from srt.server_args import ServerArgs

# Logits that differ by less are a tie: float32 sums in another order decide which one wins.
TIE = 2e-3


class GreedyReference:
    """One request at a time, whole in one pass, float32: nothing of batches, chunks or caches."""

    def __init__(
        self, model_path: Path, quantization: str = "auto", max_tokens: int = 4096
    ) -> None:
        config = load_model_config(model_path)
        args = ServerArgs(
            max_total_tokens=max_tokens, dtype="float32", device="cpu", quantization=quantization
        )
        self.runner = ModelRunner(model_path, config, args)
        rows = ReqToTokenPool(1, max_tokens)
        self.runner.init_memory(self.runner.plan_memory(), rows.device_table)
        rows.table[1] = torch.arange(1, max_tokens + 1).numpy()

    @torch.inference_mode()
    def logits(self, tokens: list[int], start: int = 0) -> torch.Tensor:
        """[len(tokens) - start, vocab]: of the token after each prefix longer than `start`."""
        n = len(tokens)
        one = torch.tensor([n])
        batch = ForwardBatch(
            mode=ForwardMode.EXTEND,
            input_ids=torch.tensor(tokens),
            positions=torch.arange(n),
            req_pool_indices=torch.tensor([1]),
            seq_lens=one,
            extend_lens=one,
            out_cache_loc=torch.arange(1, n + 1),
            seq_lens_cpu=[n],
            extend_lens_cpu=[n],
            sampling=None,
        )
        self.runner.attn.plan(batch)
        hidden = self.runner.model(batch.input_ids, batch.positions, self.runner.attn)
        return self.runner.model.logits(hidden[start:])

    def assert_greedy(self, prompt: list[int], outputs: list[int]) -> None:
        """Every output is the argmax after what precedes it, up to ties."""
        if not outputs:
            return
        logits = self.logits(prompt + outputs[:-1], len(prompt) - 1)
        chosen = logits.gather(1, torch.tensor(outputs)[:, None])[:, 0]
        behind = logits.max(1).values - chosen
        worst = int(behind.argmax())
        assert behind[worst] < TIE, (
            f"token {worst} of {len(outputs)}, {outputs[worst]}, is {behind[worst]:.4f} behind the "
            f"best after a prompt of {len(prompt)}"
        )
