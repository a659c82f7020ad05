"""What a pass is asked about probabilities, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LogprobAnswer:
    """Natural logarithms of the model's own probabilities, of logits before penalties, biases and
    temperature; on the device. m questions, k = `num_top`, e extra ids in all."""

    chosen: torch.Tensor  # [m] float32
    top: torch.Tensor  # [m, k] float32, falling
    top_ids: torch.Tensor  # [m, k] int64
    extra: torch.Tensor  # [e] float32


@dataclass
class LogprobQuery:
    """First p questions about prompt tokens, then r about the tokens that this pass samples: m = p
    + r. The runner puts the answer here; on a GPU before it is computed."""

    hidden_rows: torch.Tensor  # [p] int64, new tokens of the pass, by what follows each of them
    targets: torch.Tensor  # [p] int64, the prompt tokens that follow them
    sampled_rows: torch.Tensor  # [r] int64, requests of the pass
    num_top: int  # 0: none
    extra_questions: list[int]  # e of them, ascending; which question wants each of ...
    extra_ids: torch.Tensor  # [e] int64, ... these tokens
    answer: LogprobAnswer | None = None
