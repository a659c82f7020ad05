"""How long running requests will still be, from the lengths of those that have finished.

Source: "Past-Future Scheduler for LLM Serving under SLA Guarantees" (ASPLOS 2025).
"""

from __future__ import annotations

from collections import deque

import numpy as np

from srt.mem_cache.token_to_kv_pool import Int64Array

# Lengths remembered, and how many must be there before they are believed.
WINDOW = 1000
MIN_SAMPLES = 16


class LengthPredictor:
    """The distribution of output lengths over the last WINDOW requests that ended by themselves."""

    def __init__(self, quantile: float = 0.5) -> None:
        """`quantile` of the conditional distribution that is taken for the prediction, in (0,
        1)."""
        self._quantile = quantile
        self._lengths: deque[int] = deque(maxlen=WINDOW)
        self._sorted: Int64Array = np.empty(0, dtype=np.int64)
        self._fresh = True

    def observe(self, output_len: int) -> None:
        self._lengths.append(output_len)
        self._fresh = False

    @property
    def is_ready(self) -> bool:
        return len(self._lengths) >= MIN_SAMPLES

    def remaining(self, produced: Int64Array, limits: Int64Array) -> Int64Array:
        """[b] tokens each request still produces: the quantile of the lengths above what it has
        `produced` [b], less that, at least 1 and at most `limits` [b]. A request longer than all
        that were seen gets its limit."""
        if not self._fresh:
            self._sorted = np.sort(np.array(self._lengths, dtype=np.int64))
            self._fresh = True
        total = len(self._sorted)
        longer = np.searchsorted(self._sorted, produced, side="right")  # [b] first one above
        index = longer + ((total - longer) * self._quantile).astype(np.int64)
        known = longer < total
        predicted = np.where(known, self._sorted[np.minimum(index, total - 1)] - produced, limits)
        return np.clip(predicted, 1, np.maximum(limits, 1))
