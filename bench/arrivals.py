"""Pure: when each request is to be sent, in seconds after the run begins."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ramp:
    """The request rate moves from `start_rps` to `end_rps` over the requests of the run."""

    strategy: str  # linear, exponential
    start_rps: float
    end_rps: float

    def rate(self, progress: float) -> float:
        """Requests a second at `progress` in [0, 1]: 0 is the first gap of the run, 1 the last."""
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return self.start_rps * math.pow(self.end_rps / self.start_rps, progress)


def arrival_times(
    num: int, request_rate: float, burstiness: float, ramp: Ramp | None, rng: random.Random
) -> list[float]:
    """Ascending times [num], the first 0. Gaps follow a gamma distribution of shape `burstiness`
    and the mean that the rate demands: 1 is a Poisson process, below 1 comes in bursts, above 1 is
    more even (the parameter as in vLLM's benchmark). An infinite rate sends everything at once."""
    times, now = [], 0.0
    for i in range(num):
        times.append(now)
        rate = ramp.rate(min(1.0, i / max(num - 2, 1))) if ramp else request_rate
        if not math.isinf(rate):
            now += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return times


def trace_times(timestamps_ms: Sequence[float], slowdown: float) -> list[float]:
    """The recorded times, the earliest becoming 0, stretched by `slowdown`."""
    first = min(timestamps_ms, default=0.0)
    return [(t - first) / 1000.0 * slowdown for t in timestamps_ms]
