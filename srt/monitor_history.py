"""What a monitor knows: samples of a server's load, and the rates between them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sample:
    """A server at one moment. None: its source does not say. `time`: seconds of any steady clock.
    The second half are sums since the server's start, or the log's beginning."""

    time: float
    running: int | None = None
    queued: int | None = None
    max_running: int | None = None
    usage: float | None = None  # share of the KV pool that live requests hold
    pool_tokens: int | None = None
    ratio: float | None = None
    gen_throughput: float | None = None  # tokens/s, as the server says
    oldest_wait: float | None = None  # seconds
    blockers: dict[str, int] = field(default_factory=dict)  # waiting requests by what they wait for

    retractions: int | None = None
    recomputed: int | None = None  # tokens
    recomputed_is_estimate: bool = False  # from what retraction gave up
    computed: int | None = None  # prompt tokens not from the cache, and generated ones
    generated: int | None = None
    out_of_memory: int | None = None  # requests ended because they did not fit alone


@dataclass(frozen=True)
class Rates:
    """Between the first and the last sample of a window. None: unknown, or no time has passed."""

    seconds: float
    retractions_per_minute: float | None = None
    recomputed_share: float | None = None  # of the tokens computed
    recomputed: int | None = None
    throughput: float | None = None  # generated tokens/s
    computed: int | None = None
    out_of_memory: int | None = None


class History:
    """The samples of the last `window` seconds and the one before, from which rates are taken."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._samples: deque[Sample] = deque()

    def add(self, sample: Sample) -> None:
        """A sample not older than the last. One whose sums are smaller is from a restarted server:
        what was before it is forgotten."""
        if self._samples and _restarted(self._samples[-1], sample):
            self._samples.clear()
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].time <= sample.time - self._window:
            self._samples.popleft()

    @property
    def last(self) -> Sample | None:
        return self._samples[-1] if self._samples else None

    @property
    def samples(self) -> list[Sample]:
        return list(self._samples)

    def rates(self) -> Rates:
        if len(self._samples) < 2:
            return Rates(0.0)
        first, last = self._samples[0], self._samples[-1]
        seconds = last.time - first.time
        retractions = _grown(first.retractions, last.retractions)
        recomputed = _grown(first.recomputed, last.recomputed)
        computed = _grown(first.computed, last.computed)
        generated = _grown(first.generated, last.generated)
        share = None
        if recomputed is not None and computed:
            share = min(1.0, recomputed / computed)
        return Rates(
            seconds,
            60 * retractions / seconds if retractions is not None and seconds > 0 else None,
            share,
            recomputed,
            generated / seconds if generated is not None and seconds > 0 else None,
            computed,
            _grown(first.out_of_memory, last.out_of_memory),
        )


def _grown(first: int | None, last: int | None) -> int | None:
    return None if first is None or last is None else last - first


def _restarted(before: Sample, after: Sample) -> bool:
    sums = ("retractions", "recomputed", "computed", "generated")
    return any((_grown(getattr(before, s), getattr(after, s)) or 0) < 0 for s in sums)
