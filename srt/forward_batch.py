"""The device tensors of one pass and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from srt.logprob_query import LogprobQuery
from srt.sampling_batch import SamplingBatch


class ForwardMode(Enum):
    EXTEND = "extend"
    DECODE = "decode"


@dataclass
class ForwardBatch:
    """b requests, n new tokens, packed without padding: request i owns the `extend_lens[i]` rows of
    every [n] tensor that follow those of request i - 1. Decode: n == b, one row a request."""

    mode: ForwardMode
    input_ids: torch.Tensor  # [n] int64
    positions: torch.Tensor  # [n] int64
    req_pool_indices: torch.Tensor  # [b] int64, rows of req_to_token
    seq_lens: torch.Tensor  # [b] int64, tokens with KV once this pass has run
    extend_lens: (
        torch.Tensor
    )  # [b] int64, new tokens of this pass; seq_lens - extend_lens is the prefix
    out_cache_loc: torch.Tensor  # [n] int64, slots this pass writes, in the order of input_ids
    # Host twins of seq_lens and extend_lens, for backends that plan on the host.
    seq_lens_cpu: list[int]
    extend_lens_cpu: list[int]
    # None only when no row needs a token (a pass of inner chunks).
    sampling: SamplingBatch | None
    # None unless somebody wants to know probabilities.
    logprobs: LogprobQuery | None = None

    def followed_by(self, decode: ForwardBatch, sampling: SamplingBatch) -> ForwardBatch:
        """One pass of our rows and then the rows of `decode`, each an extend of one token.
        `sampling` covers both."""

        def both(name: str) -> torch.Tensor:
            return torch.cat([getattr(self, name), getattr(decode, name)])

        return ForwardBatch(
            mode=ForwardMode.EXTEND,
            input_ids=both("input_ids"),
            positions=both("positions"),
            req_pool_indices=both("req_pool_indices"),
            seq_lens=both("seq_lens"),
            extend_lens=both("extend_lens"),
            out_cache_loc=both("out_cache_loc"),
            seq_lens_cpu=self.seq_lens_cpu + decode.seq_lens_cpu,
            extend_lens_cpu=self.extend_lens_cpu + decode.extend_lens_cpu,
            sampling=sampling,
        )
