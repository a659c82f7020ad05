"""What the HTTP process counts about requests, and its Prometheus form.

Names, labels and buckets are SGLang's where it has the metric, so that its dashboards work; finer
buckets come in front. What only this server has begins with `regather:`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from srt.histogram import Histogram
from srt.managers.io_struct import FinishType
from srt.managers.req_state import ReqState

_LONG = (1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
TTFT_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, *_LONG)
E2E_BUCKETS = (*TTFT_BUCKETS, 600, 1200, 1800, 2400)
ITL_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04),
    *(0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
TPOT_BUCKETS = ITL_BUCKETS
QUEUE_BUCKETS = (
    *(0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, 30, 40, 50, 60),
    *(70, 80, 90, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000, 1200, 1400, 1600, 1800),
    *(2000, 2200, 2400, 2600, 2800, 3000),
)
TOKENS_BUCKETS = (1, 10, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 20_000, 50_000, 100_000)
# Clients choose tenants' names, and each name is a time series for ever.
MAX_TENANTS = 100
OTHER_TENANTS = "(other)"
# The window of gen_throughput.
RATE_SECONDS = 10.0


class _Tokens:
    """Sums over requests that have ended, by whether they streamed or by tenant."""

    __slots__ = ("cached", "generated", "prompt", "requests")

    def __init__(self) -> None:
        self.requests = self.prompt = self.generated = self.cached = 0

    def add(self, state: ReqState) -> None:
        """Add a request that has ended, or that runs and has got so far."""
        self.requests += 1
        self.prompt += len(state.request.input_ids)
        self.generated += len(state.output_ids)
        self.cached += state.cached_tokens

    def copy(self) -> _Tokens:
        other = _Tokens()
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        return other


class RequestMetrics:
    """Counts the clients' requests (not the server's own probes). Token counters of a request are
    added to at every scrape while it runs, not in one lump at its end.

    started = finished + aborted + live, at any moment.
    """

    def __init__(self) -> None:
        self.num_started = {False: 0, True: 0}  # by is_streaming, as below
        self.num_finished = {False: 0, True: 0}
        self.num_aborted = {False: 0, True: 0}
        self._tokens = {False: _Tokens(), True: _Tokens()}
        self._tenants: dict[str, _Tokens] = {}
        self._ttft = {False: Histogram(TTFT_BUCKETS), True: Histogram(TTFT_BUCKETS)}
        self._e2e = {False: Histogram(E2E_BUCKETS), True: Histogram(E2E_BUCKETS)}
        self._tpot = {False: Histogram(TPOT_BUCKETS), True: Histogram(TPOT_BUCKETS)}
        self.itl = Histogram(ITL_BUCKETS)
        self._queue = Histogram(QUEUE_BUCKETS)
        self._prompt = Histogram(TOKENS_BUCKETS)
        self._uncached = Histogram(TOKENS_BUCKETS)
        self._generation = Histogram(TOKENS_BUCKETS)
        self.num_tokens = 0  # given out by the scheduler since the start
        # Time and num_tokens before the first pass of each of the last seconds that had any.
        self._rate_marks: deque[tuple[float, int]] = deque()

    # --- what happens ---

    def on_pass(self, num_tokens: int, now: float) -> None:
        """The scheduler gave out tokens; `now` is `time.monotonic()`."""
        marks = self._rate_marks
        if not marks or now - marks[-1][0] >= 1.0:
            marks.append((now, self.num_tokens))
            if len(marks) > 2 * RATE_SECONDS:
                marks.popleft()
        self.num_tokens += num_tokens

    def on_start(self, is_stream: bool) -> None:
        self.num_started[is_stream] += 1

    def on_first_token(self, state: ReqState, is_stream: bool) -> None:
        assert state.first_token_time is not None, f"{state.rid} has no token"
        self._ttft[is_stream].observe(state.first_token_time - state.created_time)

    def on_admitted(self, state: ReqState) -> None:
        """Of the first admission only."""
        if state.queue_time is not None:
            self._queue.observe(state.queue_time)

    def on_end(self, state: ReqState, is_stream: bool) -> None:
        """The request leaves the table: it has ended, or its client has left."""
        reason = state.finish_reason
        is_finished = reason is not None and reason.type is not FinishType.ABORT
        counts = self.num_finished if is_finished else self.num_aborted
        counts[is_stream] += 1
        self._tokens[is_stream].add(state)
        self._of_tenant(self._tenants, state.request.tenant).add(state)
        if not is_finished:
            return
        assert state.finished_time is not None, f"{state.rid} ended at no time"
        seconds, num_out = state.finished_time - state.created_time, len(state.output_ids)
        self._e2e[is_stream].observe(seconds)
        self._prompt.observe(len(state.request.input_ids))
        self._uncached.observe(len(state.request.input_ids) - state.cached_tokens)
        self._generation.observe(num_out)
        if state.first_token_time is not None and num_out > 1:
            per_token = (state.finished_time - state.first_token_time) / (num_out - 1)
            self._tpot[is_stream].observe(per_token)

    # --- what is told ---

    def gen_throughput(self) -> float:
        """Tokens/s given out over the last RATE_SECONDS, or since the first of them."""
        now = time.monotonic()
        recent = next((mark for mark in self._rate_marks if mark[0] > now - RATE_SECONDS), None)
        if recent is None:
            return 0.0
        begin, count = recent
        return (self.num_tokens - count) / max(now - begin, 1.0)

    def cache_hit_rate(self) -> float:
        """Cached prompt tokens of all prompt tokens, of the requests that have ended."""
        prompt = sum(tokens.prompt for tokens in self._tokens.values())
        cached = sum(tokens.cached for tokens in self._tokens.values())
        return cached / prompt if prompt else 0.0

    def families(
        self, labels: dict[str, str], live: Iterable[tuple[ReqState, bool]]
    ) -> Iterator[Metric]:
        """Every metric of requests; `live` are those in the table and whether they stream."""
        tokens = {is_stream: self._tokens[is_stream].copy() for is_stream in (False, True)}
        tenants = {name: sums.copy() for name, sums in self._tenants.items()}
        num_live = 0
        for state, is_stream in live:
            num_live += 1
            if state.queue_time is not None or state.finish_reason is not None:
                tokens[is_stream].add(state)
                self._of_tenant(tenants, state.request.tenant).add(state)
        names, values = list(labels), list(labels.values())
        streaming = [*names, "is_streaming"]
        for name, text, counts in (
            ("num_requests", "Requests that finished.", self.num_finished),
            ("num_aborted_requests", "Requests that were aborted or left.", self.num_aborted),
            (
                "prompt_tokens",
                "Prompt tokens of requests since their admission.",
                {key: value.prompt for key, value in tokens.items()},
            ),
            (
                "generation_tokens",
                "Tokens generated.",
                {key: value.generated for key, value in tokens.items()},
            ),
        ):
            family = CounterMetricFamily(f"sglang:{name}", text, labels=streaming)
            for is_stream, count in counts.items():
                family.add_metric([*values, _flag(is_stream)], count)
            yield family
        started = CounterMetricFamily(
            "regather:num_started_requests",
            "Requests accepted: finished, aborted and live together.",
            labels=streaming,
        )
        for is_stream, count in self.num_started.items():
            started.add_metric([*values, _flag(is_stream)], count)
        yield started
        live_now = GaugeMetricFamily(
            "regather:live_requests", "Requests not answered to their end.", labels=names
        )
        live_now.add_metric(values, num_live)
        yield live_now
        for name, text, value in (
            ("gen_throughput", "Tokens/s generated in the last seconds.", self.gen_throughput()),
            ("cache_hit_rate", "Cached share of all prompt tokens.", self.cache_hit_rate()),
        ):
            gauge = GaugeMetricFamily(f"sglang:{name}", text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        cached = CounterMetricFamily(
            "sglang:cached_tokens",
            "Prompt tokens found in the cache.",
            labels=[*names, "cache_source"],
        )
        cached.add_metric([*values, "device"], sum(t.cached for t in tokens.values()))
        yield cached
        yield from self._tenant_families(names, values, tenants)
        yield from self._histogram_families(names, values)

    def _tenant_families(
        self, names: list[str], values: list[str], tenants: dict[str, _Tokens]
    ) -> Iterator[Metric]:
        for name, text in (
            ("requests", "Requests of a tenant that were admitted."),
            ("prompt", "Prompt tokens of a tenant."),
            ("generated", "Tokens generated for a tenant."),
        ):
            suffix = "requests" if name == "requests" else f"{name}_tokens"
            family = CounterMetricFamily(
                f"regather:tenant_{suffix}", text, labels=[*names, "tenant"]
            )
            for tenant, sums in tenants.items():
                family.add_metric([*values, tenant], getattr(sums, name))
            yield family

    def _histogram_families(self, names: list[str], values: list[str]) -> Iterator[Metric]:
        for name, text, by_stream in (
            ("time_to_first_token_seconds", "From arrival to the first token.", self._ttft),
            ("e2e_request_latency_seconds", "From arrival to the end.", self._e2e),
            (
                "request_time_per_output_token_seconds",
                "Mean time of a token after the first.",
                self._tpot,
            ),
        ):
            family = HistogramMetricFamily(f"sglang:{name}", text, labels=[*names, "is_streaming"])
            for is_stream, histogram in by_stream.items():
                histogram.add_to(family, [*values, _flag(is_stream)])
            yield family
        for name, text, histogram in (
            ("inter_token_latency_seconds", "Between two tokens of a request.", self.itl),
            ("queue_time_seconds", "From arrival to the first admission.", self._queue),
            ("prompt_tokens_histogram", "Prompt tokens of a request.", self._prompt),
            (
                "uncached_prompt_tokens_histogram",
                "Prompt tokens not found in the cache.",
                self._uncached,
            ),
            ("generation_tokens_histogram", "Tokens generated by a request.", self._generation),
        ):
            family = HistogramMetricFamily(f"sglang:{name}", text, labels=names)
            histogram.add_to(family, values)
            yield family

    @staticmethod
    def _of_tenant(tenants: dict[str, _Tokens], tenant: str | None) -> _Tokens:
        name = tenant or "default"
        if name not in tenants and len(tenants) >= MAX_TENANTS:
            name = OTHER_TENANTS
        return tenants.setdefault(name, _Tokens())


def _flag(value: bool) -> str:
    """A boolean label as SGLang writes it."""
    return "true" if value else "false"
