"""How long running requests will still be, from the lengths of those that have finished.

Source: "Past-Future Scheduler for LLM Serving under SLA Guarantees" (ASPLOS 2025). Ours adds that
the running requests count, too, as lengths that are only known to be longer than what they have
produced (the estimator of Kaplan and Meier, 1958): under a fresh load the short ones finish first,
and a distribution of finished requests alone would promise far too little.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from srt.mem_cache.token_to_kv_pool import Int64Array

# Lengths remembered, and how many must be there before they are believed.
WINDOW = 1000
MIN_SAMPLES = 16


class LengthPredictor:
    """The distribution of output lengths over the last WINDOW requests that ended by themselves."""

    def __init__(self, quantile: float = 0.55) -> None:
        """`quantile` of the conditional distribution that is taken for the prediction, in (0,
        1)."""
        self._quantile = quantile
        self._lengths: deque[int] = deque(maxlen=WINDOW)
        self._times: Int64Array = np.empty(0, dtype=np.int64)  # [k] lengths at which some ended
        self._survival: npt.NDArray[np.float64] = np.empty(
            0
        )  # [k] share of requests that are longer

    def observe(self, output_len: int) -> None:
        """A request ended by itself after `output_len` tokens."""
        self._lengths.append(output_len)

    @property
    def is_ready(self) -> bool:
        return len(self._lengths) >= MIN_SAMPLES

    def fit(self, running: Int64Array) -> None:
        """Estimate the distribution, given what the running requests have produced [b] so far."""
        ended = np.array(self._lengths, dtype=np.int64)
        self._times, counts = np.unique(ended, return_counts=True)
        known = np.sort(np.concatenate([ended, running]))
        at_risk = len(known) - np.searchsorted(known, self._times, side="left")
        self._survival = np.cumprod(1.0 - counts / at_risk, dtype=np.float64)

    def remaining(self, produced: Int64Array, limits: Int64Array) -> Int64Array:
        """[b] tokens each request still produces: the quantile of the lengths above what it has
        `produced` [b], less that, at least 1 and at most `limits` [b]. A request longer than all
        that were seen gets its limit."""
        before = np.searchsorted(self._times, produced, side="right")  # [b] lengths it is beyond
        survived = np.append(1.0, self._survival)[before]
        target = survived * (1.0 - self._quantile)
        at = np.searchsorted(-self._survival, -target, side="left")  # [b] first one as rare as that
        at[before == len(self._times)] = len(self._times)
        ends = np.append(self._times, np.iinfo(np.int64).max // 2)[at]
        return np.clip(ends - produced, 1, np.maximum(limits, 1))
