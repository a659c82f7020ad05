"""A runner without a model whose tokens depend on every token the KV slots hold.

A pass writes each token at its slot; a row's next token is a hash of the tokens read back through
req_to_token, so a slot that is lost, shared by mistake or overwritten changes what comes out.
"""

from __future__ import annotations

import numpy as np
import torch

from srt.forward_batch import ForwardBatch
from srt.mem_cache.req_to_token_pool import ReqToTokenPool
from srt.sampling_batch import BROKEN

MODULUS = 1_000_003


def next_token(tokens: np.ndarray, vocab_size: int) -> int:
    """The token after `tokens`: a polynomial hash of all of them."""
    weights = np.arange(1, len(tokens) + 1, dtype=np.int64) * 7919 % MODULUS
    return int((tokens.astype(np.int64) + 1) @ weights % MODULUS % vocab_size)


class FakeRunner:
    def __init__(self, rows: ReqToTokenPool, num_slots: int, vocab_size: int) -> None:
        self.rows = rows
        self.vocab_size = vocab_size
        self.kv = np.full(num_slots, -1, dtype=np.int64)  # token at each slot
        self.batches: list[ForwardBatch] = []
        # Tokens after which nothing means anything, as those whose weights hold NaN.
        self.poison: set[int] = set()

    def step(self, batch: ForwardBatch) -> torch.Tensor:
        self.batches.append(batch)
        slots = batch.out_cache_loc.numpy()
        assert len(set(slots.tolist())) == len(slots), "two tokens of a pass share a slot"
        assert (slots >= self.rows.table.dtype.type(1)).all(), "a token was written to padding"
        self.kv[slots] = batch.input_ids.numpy()
        ids = []
        for row, seq_len in zip(batch.req_pool_indices.tolist(), batch.seq_lens_cpu, strict=True):
            tokens = self.kv[self.rows.table[row, :seq_len]]
            is_broken = not self.poison.isdisjoint(tokens.tolist())
            ids.append(BROKEN if is_broken else next_token(tokens, self.vocab_size))
        assert batch.seq_lens.tolist() == batch.seq_lens_cpu
        return torch.tensor(ids, dtype=torch.int64)


def tokens_alone(prompt: list[int], max_new: int, vocab_size: int, stop_ids: set[int]) -> list[int]:
    """What one request produces when nobody else is there."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_new:
        tokens.append(next_token(np.array(tokens), vocab_size))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]
