"""Log-probabilities of tokens from logits, a block of rows at a time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

import numpy as np
import torch

from srt.device_copy import to_device
from srt.layers.sampler import MAX_BLOCK_ELEMENTS
from srt.logprob_query import LogprobAnswer, LogprobQuery

LogitsOf = Callable[[torch.Tensor], torch.Tensor]  # hidden [b, size] -> [b, vocab] float32


def answer_query(
    query: LogprobQuery,
    hidden: torch.Tensor,
    logits_of: LogitsOf,
    logits: torch.Tensor | None,
    next_token_ids: torch.Tensor,
    vocab_size: int,
) -> LogprobAnswer:
    """`hidden` [n, size] of all new tokens; `logits` [b, vocab] of each request's last one, None if
    nothing was sampled; `next_token_ids` [b]. Never holds more than one block of [rows, vocab]
    beside `logits`."""
    block = max(1, MAX_BLOCK_ELEMENTS // vocab_size)
    # Nobody will read the answer about a row that gave no token.
    sampled = next_token_ids[query.sampled_rows].clamp_(min=0)
    targets = torch.cat([query.targets, sampled])
    num_prompt = len(query.targets)

    def blocks() -> Iterator[torch.Tensor]:
        for start in range(0, num_prompt, block):
            yield logits_of(hidden[query.hidden_rows[start : start + block]])
        for start in range(0, len(query.sampled_rows), block):
            assert logits is not None, "sampled without logits"
            yield logits[query.sampled_rows[start : start + block]]

    chosen, top, top_ids, extra = [], [], [], []
    begin = 0
    for rows in blocks():
        end = begin + len(rows)
        norm = rows.logsumexp(dim=-1)
        chosen.append(rows.gather(1, targets[begin:end, None])[:, 0] - norm)
        best = rows.topk(min(query.num_top, vocab_size), dim=-1)
        top.append(best.values - norm[:, None])
        top_ids.append(best.indices)
        if len(query.extra_ids):
            # Found on the host: a mask would wait for the device to count it.
            first = bisect_left(query.extra_questions, begin)
            last = bisect_left(query.extra_questions, end)
            questions = np.array(query.extra_questions[first:last], dtype=np.int64) - begin
            question = to_device(questions, rows.device)
            extra.append(rows[question, query.extra_ids[first:last]] - norm[question])
        begin = end
    return LogprobAnswer(
        torch.cat(chosen),
        torch.cat(top),
        torch.cat(top_ids),
        torch.cat(extra) if extra else targets.new_zeros(0, dtype=torch.float32),
    )
