"""Pure: what was seen of each request in, the numbers of a report out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

# The whole window of a peak, in seconds. A shorter run uses its own duration.
PEAK_WINDOW_S = 1.0


class Status(str, Enum):
    """How a request ended. OK and SHORT count as completed, ERROR and STALLED as failed."""

    OK = "ok"
    SHORT = "short"  # a proper end with fewer tokens than were demanded with ignore_eos
    ERROR = "error"  # refused, broken off, aborted, empty, or not understood
    STALLED = "stalled"  # the server went silent and the client gave up


@dataclass
class RequestRecord:
    """What was measured of one request. Times are seconds since the run began, on one clock.

    `chunk_times[i]` is when chunk i of the answer arrived and `chunk_tokens[i]` how many tokens the
    server said it added (0 where it does not say). What one read of the socket returns is one
    chunk, since the client cannot tell apart what came together.
    """

    index: int
    prompt_len: int  # tokens, counted by the client
    requested_len: int  # output tokens asked for
    scheduled_at: float  # when the arrival process wanted it sent
    sent_at: float = 0.0
    ended_at: float = 0.0
    finished_at: float | None = None  # when the server gave its finish reason
    permit_wait: float = 0.0  # held back by --max-concurrency
    streamed: bool = True
    chunk_times: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    input_tokens: int | None = None  # the server's counts; None where it gave none
    output_tokens: int | None = None
    cached_tokens: int | None = None
    retractions: int | None = None
    retokenized_len: int | None = None  # tokens of `text` by our own tokenizer
    text: str = ""
    finish_reason: str | None = None
    status: Status = Status.ERROR
    failure_kind: str | None = None
    error: str | None = None

    @property
    def completed(self) -> bool:
        return self.status in (Status.OK, Status.SHORT)

    @property
    def output_len(self) -> int:
        """Produced tokens: the server's count, else the retokenised one, else the chunks."""
        if self.output_tokens is not None:
            return self.output_tokens
        if self.retokenized_len is not None:
            return self.retokenized_len
        return len(self.chunk_times)

    @property
    def token_source(self) -> str:
        if self.output_tokens is not None:
            return "server"
        return "retokenized" if self.retokenized_len is not None else "chunks"

    @property
    def input_len(self) -> int:
        return self.prompt_len if self.input_tokens is None else self.input_tokens

    @property
    def last_token_at(self) -> float:
        """The OpenAI routes do not show a token without text (a special one behind an ignored end
        of text): the last one has come when the finish reason has, not with the last text."""
        seen = [*self.chunk_times[-1:], *([] if self.finished_at is None else [self.finished_at])]
        return max(seen, default=self.ended_at if self.completed else math.nan)

    @property
    def e2e(self) -> float:
        """Seconds from send to the last token; not a number if a failed request saw none."""
        return self.last_token_at - self.sent_at

    @property
    def ttft(self) -> float | None:
        """Seconds from send to the first token; None when the answer came in one piece
        unstreamed."""
        return self.chunk_times[0] - self.sent_at if self.streamed and self.chunk_times else None

    @property
    def tpot(self) -> float | None:
        """(E2E - TTFT) / (produced - 1) in seconds; None for one token, and where everything came
        in one chunk: no interval was seen, and a 0 would flatter."""
        if not self.streamed or len(self.chunk_times) < 2 or self.output_len < 2:
            return None
        return (self.last_token_at - self.chunk_times[0]) / (self.output_len - 1)

    @property
    def send_lag(self) -> float:
        """Seconds the generator itself was late, without the wait that --max-concurrency asked
        for."""
        return self.sent_at - self.scheduled_at - self.permit_wait


@dataclass(frozen=True)
class Spread:
    """A distribution in milliseconds (percentiles interpolate linearly, std is the
    population's)."""

    mean: float
    median: float
    std: float
    p90: float
    p95: float
    p99: float
    max: float

    @staticmethod
    def of_seconds(values: Sequence[float] | np.ndarray) -> Spread | None:
        """None for no values: there is no mean of nothing."""
        if len(values) == 0:
            return None
        ms = np.asarray(values, dtype=np.float64) * 1000.0
        p50, p90, p95, p99 = np.percentile(ms, [50, 90, 95, 99])
        return Spread(
            float(ms.mean()), float(p50), float(ms.std()), float(p90), float(p95), float(p99),
            float(ms.max()),
        )  # fmt: skip


@dataclass(frozen=True)
class Goodput:
    """Requests that met every objective. Shares are of all requests sent, so a failure is a
    miss."""

    slos_ms: dict[str, float]
    request_goodput: float  # good requests a second
    attainment: float  # [0, 1]
    attainment_by_metric: dict[str, float]


@dataclass(frozen=True)
class SteadyState:
    """The part of the run [start, end) between the first and the last moment at which concurrency
    was at least `ratio` of its peak, so without filling up and running dry."""

    ratio: float
    start: float
    end: float
    concurrency: float
    request_throughput: float
    output_throughput: float
    ttft: Spread | None  # first tokens that arrived inside
    itl: Spread | None  # gaps that ended inside

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Summary:
    """One run in numbers. Rates are per second of the whole run, latencies over completed
    requests."""

    duration: float
    sent: int
    completed: int
    short: int
    failed: int
    stalled: int
    dropped_arrivals: int
    failures_by_kind: dict[str, int]
    failure_examples: dict[str, str]
    total_input_tokens: int
    total_output_tokens: int
    total_output_tokens_retokenized: int | None
    token_sources: dict[str, int]
    cached_tokens: int | None
    cached_of_input_tokens: int
    retractions: int | None
    request_throughput: float
    input_throughput: float
    output_throughput: float
    total_throughput: float
    concurrency: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    tokens_per_chunk: float | None
    e2e: Spread | None
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    send_lag: Spread | None
    permit_wait: Spread | None
    goodput: Goodput | None
    steady_state: SteadyState | None


def gaps(record: RequestRecord) -> np.ndarray:
    """Seconds between consecutive chunks of one stream, [chunks - 1]."""
    return np.diff(record.chunk_times) if record.streamed else np.empty(0)


def tokens_of_chunks(record: RequestRecord) -> np.ndarray:
    """Tokens of each chunk, [chunks]. A server that counts only at the end (OpenAI usage) leaves
    the split unknown: then every chunk gets the same share."""
    if sum(record.chunk_tokens) == record.output_len:
        return np.asarray(record.chunk_tokens, dtype=np.float64)
    num_chunks = len(record.chunk_times)
    return np.full(num_chunks, record.output_len / num_chunks) if num_chunks else np.empty(0)


def peak_rate(times: np.ndarray, weights: np.ndarray, window: float) -> float:
    """The largest sum of weights in any interval [t, t + window), divided by window. Sliding, not
    in buckets: a bucket border would split a burst or join two."""
    if len(times) == 0 or window <= 0:
        return 0.0
    order = np.argsort(times, kind="stable")
    times, weights = times[order], weights[order]
    total = np.concatenate([[0.0], np.cumsum(weights)])
    ends = np.searchsorted(times, times + window, side="left")
    return float((total[ends] - total[:-1]).max() / window)


def concurrency_steps(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, int]]:
    """[(time, requests running from then on)], ascending. An interval is half open [sent, ended),
    so a request sent the moment another ends does not raise the peak."""
    change: dict[float, int] = {}
    for start, end in intervals:
        change[start] = change.get(start, 0) + 1
        change[end] = change.get(end, 0) - 1
    steps, running = [], 0
    for time in sorted(change):
        running += change[time]
        steps.append((time, running))
    return steps


def steady_state(records: Sequence[RequestRecord], ratio: float) -> SteadyState | None:
    """None when there is no such window (nothing ran, or it has no length)."""
    steps = concurrency_steps((r.sent_at, r.ended_at) for r in records)
    peak = max((running for _, running in steps), default=0)
    # A step holds until the next one; the last is always 0 and never reaches the level.
    reached = [i for i, (_, running) in enumerate(steps) if peak and running >= ratio * peak]
    if not reached:
        return None
    start, end = steps[reached[0]][0], steps[reached[-1] + 1][0]
    if end <= start:
        return None
    inside = [(t, n) for t, n in steps if start <= t <= end]
    area = sum(n * (t2 - t) for (t, n), (t2, _) in itertools.pairwise(inside))
    done = [r for r in records if r.completed]
    tokens, firsts, itls, ends = 0.0, [], [], 0
    for record in done:
        times = np.asarray(record.chunk_times)
        within = (times > start) & (times <= end)
        tokens += float(tokens_of_chunks(record)[within].sum())
        ends += start < record.ended_at <= end
        if record.ttft is not None and within[0]:
            firsts.append(record.ttft)
        itls.append(gaps(record)[within[1:]] if record.streamed else np.empty(0))
    length = end - start
    return SteadyState(
        ratio=ratio,
        start=start,
        end=end,
        concurrency=area / length,
        request_throughput=ends / length,
        output_throughput=tokens / length,
        ttft=Spread.of_seconds(firsts),
        itl=Spread.of_seconds(np.concatenate(itls) if itls else []),
    )


def goodput(
    records: Sequence[RequestRecord], sent: int, duration: float, slos_ms: dict[str, float]
) -> Goodput:
    """A request without an interval (one token) cannot miss its TPOT; an unstreamed one has no TTFT
    either, which is a miss, since nobody saw the objective met."""
    good, met = 0, dict.fromkeys(slos_ms, 0)
    for record in records:
        if not record.completed:
            continue
        tpot_s = record.tpot if record.tpot is not None else 0.0
        ttft_s = record.ttft if record.ttft is not None else math.inf
        seen_ms = {"ttft": ttft_s * 1000, "tpot": tpot_s * 1000, "e2el": record.e2e * 1000}
        kept = [name for name, limit in slos_ms.items() if seen_ms[name] <= limit]
        for name in kept:
            met[name] += 1
        good += len(kept) == len(slos_ms)
    return Goodput(
        slos_ms=dict(slos_ms),
        request_goodput=good / duration if duration > 0 else 0.0,
        attainment=good / sent if sent else 0.0,
        attainment_by_metric={name: n / sent if sent else 0.0 for name, n in met.items()},
    )


def known_sum(values: Iterable[int | None]) -> int | None:
    """The sum of what is known; None when nothing is, which is not the same as 0."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def summarize(
    records: Sequence[RequestRecord],
    dropped_arrivals: int = 0,
    slos_ms: dict[str, float] | None = None,
    steady_ratio: float = 0.8,
) -> Summary:
    """The numbers of a run whose clock began at 0 and which ended with its last request."""
    duration = max((r.ended_at for r in records), default=0.0)
    done = [r for r in records if r.completed]
    failed = [r for r in records if not r.completed]
    by_kind: dict[str, int] = {}
    examples: dict[str, str] = {}
    for record in failed:
        kind = record.failure_kind or record.status.value
        by_kind[kind] = by_kind.get(kind, 0) + 1
        examples.setdefault(kind, record.error or "")
    sources: dict[str, int] = {}
    for record in done:
        sources[record.token_source] = sources.get(record.token_source, 0) + 1
    input_tokens = sum(r.input_len for r in done)
    output_tokens = sum(r.output_len for r in done)
    num_chunks = sum(len(r.chunk_times) for r in done if r.streamed)
    chunked_tokens = sum(r.output_len for r in done if r.streamed)
    cached = [r for r in done if r.cached_tokens is not None]

    def rate(amount: float) -> float:
        return amount / duration if duration > 0 else 0.0

    def concatenated(arrays: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(arrays) if arrays else np.empty(0)

    return Summary(
        duration=duration,
        sent=len(records),
        completed=len(done),
        short=sum(r.status is Status.SHORT for r in done),
        failed=len(failed),
        stalled=sum(r.status is Status.STALLED for r in failed),
        dropped_arrivals=dropped_arrivals,
        failures_by_kind=by_kind,
        failure_examples=examples,
        total_input_tokens=input_tokens,
        total_output_tokens=output_tokens,
        total_output_tokens_retokenized=known_sum(r.retokenized_len for r in done),
        token_sources=sources,
        cached_tokens=known_sum(r.cached_tokens for r in cached),
        cached_of_input_tokens=sum(r.input_len for r in cached),
        retractions=known_sum(r.retractions for r in done),
        request_throughput=rate(len(done)),
        input_throughput=rate(input_tokens),
        output_throughput=rate(output_tokens),
        total_throughput=rate(input_tokens + output_tokens),
        concurrency=rate(sum(r.e2e for r in done)),
        max_output_tokens_per_s=peak_rate(
            concatenated([np.asarray(r.chunk_times) for r in done]),
            concatenated([tokens_of_chunks(r) for r in done]),
            min(PEAK_WINDOW_S, duration),
        ),
        max_concurrent_requests=max(
            (n for _, n in concurrency_steps((r.sent_at, r.ended_at) for r in records)), default=0
        ),
        tokens_per_chunk=chunked_tokens / num_chunks if num_chunks else None,
        e2e=Spread.of_seconds([r.e2e for r in done]),
        ttft=Spread.of_seconds([r.ttft for r in done if r.ttft is not None]),
        tpot=Spread.of_seconds([r.tpot for r in done if r.tpot is not None]),
        itl=Spread.of_seconds(concatenated([gaps(r) for r in done])),
        send_lag=Spread.of_seconds([r.send_lag for r in records]),
        permit_wait=Spread.of_seconds([r.permit_wait for r in records]),
        goodput=goodput(records, len(records), duration, slos_ms) if slos_ms else None,
        steady_state=steady_state(records, steady_ratio),
    )
