"""The numbers of a report, computed by hand."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from bench.arrivals import Ramp, arrival_times, trace_times
from bench.metrics import (
    RequestRecord,
    Spread,
    Status,
    concurrency_steps,
    peak_rate,
    steady_state,
    summarize,
    tokens_of_chunks,
)


def record(
    sent: float = 0.0,
    chunks: list[float] | None = None,
    tokens: int | None = None,
    status: Status = Status.OK,
    **more: object,
) -> RequestRecord:
    """A request whose chunks bring one token each, unless `tokens` says otherwise."""
    times = [1.0] if chunks is None else chunks
    made = RequestRecord(
        index=0, prompt_len=10, requested_len=5, scheduled_at=sent, sent_at=sent,
        ended_at=times[-1] if times else sent, chunk_times=times, chunk_tokens=[1] * len(times),
        output_tokens=len(times) if tokens is None else tokens, status=status,
    )  # fmt: skip
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_latencies_of_one_request_follow_their_definitions():
    seen = record(sent=2.0, chunks=[2.5, 2.6, 2.8, 3.3])
    assert seen.ttft == pytest.approx(0.5)
    assert seen.e2e == pytest.approx(1.3)
    assert seen.tpot == pytest.approx((1.3 - 0.5) / 3)
    summary = summarize([seen])
    assert summary.itl is not None
    assert summary.itl.mean == pytest.approx(800 / 3)
    assert summary.itl.median == pytest.approx(200)
    assert summary.itl.max == pytest.approx(500)


def test_tpot_uses_the_produced_length_and_not_the_requested_one():
    seen = record(chunks=[0.1, 0.2, 0.3, 0.4, 0.5], requested_len=100, status=Status.SHORT)
    assert seen.tpot == pytest.approx(0.1)  # 0.4 s over 5 - 1 tokens, not over 99
    summary = summarize([seen])
    assert summary.total_output_tokens == 5
    assert summary.completed == 1
    assert summary.short == 1
    assert summary.failed == 0


def test_tpot_of_an_answer_in_one_token_or_one_chunk_is_left_out_and_not_zero():
    one_token = record(chunks=[0.5])
    one_chunk = record(chunks=[0.5], tokens=8)
    two = record(chunks=[0.5, 0.75])
    summary = summarize([one_token, one_chunk, two])
    assert one_token.tpot is None
    assert one_chunk.tpot is None
    assert summary.tpot == Spread.of_seconds([0.25])


def test_tokens_behind_the_last_text_count_until_the_finish_reason():
    seen = record(chunks=[0.2, 0.4], tokens=5, finished_at=1.0, ended_at=1.5)
    assert seen.e2e == pytest.approx(1.0)
    assert seen.tpot == pytest.approx((1.0 - 0.2) / 4)
    assert record(chunks=[], tokens=5, finished_at=1.0).e2e == pytest.approx(1.0)
    assert record(chunks=[], tokens=5, ended_at=1.5).e2e == pytest.approx(1.5)


def test_an_unstreamed_answer_has_no_ttft_tpot_or_itl():
    summary = summarize([record(chunks=[0.5], tokens=8, streamed=False)])
    assert summary.ttft is None
    assert summary.tpot is None
    assert summary.itl is None
    assert summary.tokens_per_chunk is None
    assert summary.e2e is not None
    assert summary.e2e.mean == pytest.approx(500)


def test_percentiles_interpolate_linearly():
    spread = Spread.of_seconds([i / 1000 for i in range(101)])
    assert spread is not None
    assert (spread.median, spread.p90, spread.p95, spread.p99) == pytest.approx((50, 90, 95, 99))
    assert spread.mean == pytest.approx(50)
    assert spread.max == pytest.approx(100)
    assert spread.std == pytest.approx(np.std(np.arange(101)))
    assert Spread.of_seconds([]) is None


def test_a_run_in_which_everything_failed_has_counts_and_no_latencies():
    failed = [
        record(chunks=[], status=Status.ERROR, failure_kind="http_503", error="full"),
        record(chunks=[], status=Status.ERROR, failure_kind="http_503", error="still full"),
        record(chunks=[0.2], status=Status.STALLED, failure_kind="stalled", error="silent"),
    ]
    summary = summarize(failed, dropped_arrivals=4, slos_ms={"ttft": 100.0})
    assert (summary.sent, summary.completed, summary.failed, summary.stalled) == (3, 0, 3, 1)
    assert summary.dropped_arrivals == 4
    assert summary.failures_by_kind == {"http_503": 2, "stalled": 1}
    assert summary.failure_examples == {"http_503": "full", "stalled": "silent"}
    assert (summary.e2e, summary.ttft, summary.tpot, summary.itl) == (None, None, None, None)
    assert summary.total_output_tokens == 0
    assert summary.output_throughput == 0
    assert summary.goodput is not None
    assert summary.goodput.attainment == 0


def test_a_run_without_any_request_divides_nothing_by_zero():
    summary = summarize([])
    assert (summary.sent, summary.duration, summary.concurrency) == (0, 0.0, 0.0)
    assert summary.steady_state is None


def test_throughput_counts_completed_requests_over_the_whole_run():
    done = record(sent=0.0, chunks=[1.0, 2.0], input_tokens=30)
    failed = record(sent=0.0, chunks=[3.0], status=Status.ERROR, ended_at=4.0)
    summary = summarize([done, failed])
    assert summary.duration == 4.0
    assert summary.request_throughput == 0.25
    assert summary.input_throughput == 7.5
    assert summary.output_throughput == 0.5
    assert summary.total_throughput == 8.0
    assert summary.concurrency == pytest.approx(2.0 / 4.0)


def test_the_server_counts_go_before_the_clients():
    unknown = record(output_tokens=None, chunk_tokens=[0])
    assert (unknown.output_len, unknown.token_source, unknown.input_len) == (1, "chunks", 10)
    unknown.retokenized_len = 7
    assert (unknown.output_len, unknown.token_source) == (7, "retokenized")
    unknown.output_tokens, unknown.input_tokens = 8, 11
    assert (unknown.output_len, unknown.token_source, unknown.input_len) == (8, "server", 11)
    assert summarize([unknown]).token_sources == {"server": 1}


def test_tokens_counted_only_at_the_end_are_spread_over_the_chunks():
    late = record(chunks=[1.0, 2.0, 3.0, 4.0], tokens=10, chunk_tokens=[0, 0, 0, 0])
    assert tokens_of_chunks(late).tolist() == [2.5] * 4
    told = record(chunks=[1.0, 2.0], tokens=5, chunk_tokens=[4, 1])
    assert tokens_of_chunks(told).tolist() == [4, 1]
    assert summarize([late, told]).tokens_per_chunk == pytest.approx(15 / 6)


def test_the_peak_concurrency_is_exact_when_one_request_replaces_another():
    steps = concurrency_steps([(0.0, 1.0), (1.0, 2.0), (0.5, 1.5)])
    assert steps == [(0.0, 1), (0.5, 2), (1.0, 2), (1.5, 1), (2.0, 0)]
    back_to_back = [record(sent=i * 0.1, chunks=[(i + 1) * 0.1]) for i in range(10)]
    for earlier, later in itertools.pairwise(back_to_back):
        later.sent_at = earlier.ended_at
    assert summarize(back_to_back).max_concurrent_requests == 1


def test_the_peak_rate_slides_over_bucket_borders():
    times = np.array([0.9, 1.1, 1.2, 5.0])
    assert peak_rate(times, np.ones(4), 1.0) == 3.0  # whole-second buckets would say 2
    assert peak_rate(times[::-1], np.ones(4), 1.0) == 3.0
    assert peak_rate(np.array([0.0, 1.0]), np.ones(2), 1.0) == 1.0  # [t, t + 1) is half open
    assert peak_rate(np.empty(0), np.empty(0), 1.0) == 0.0


def test_the_steady_window_leaves_out_filling_up_and_running_dry():
    # Concurrency: 1 in [0, 1), 2 in [1, 2), 3 in [2, 6), 2 in [6, 8), 1 in [8, 10).
    records = [
        record(sent=0.0, chunks=[1.0, 3.0, 6.0]),
        record(sent=1.0, chunks=[2.5, 5.0, 8.0]),
        record(sent=2.0, chunks=[4.0, 9.0, 10.0]),
    ]
    steady = steady_state(records, 0.9)
    assert steady is not None
    assert (steady.start, steady.end, steady.duration) == (2.0, 6.0, 4.0)
    assert steady.concurrency == 3.0
    assert steady.output_throughput == 5 / 4  # chunks at 2.5, 3, 4, 5, 6
    assert steady.request_throughput == 1 / 4
    assert steady.ttft == Spread.of_seconds([1.5, 2.0])
    assert steady.itl == Spread.of_seconds([2.0, 3.0, 2.5])
    wider = steady_state(records, 0.6)
    assert wider is not None
    assert (wider.start, wider.end) == (1.0, 8.0)
    assert wider.concurrency == pytest.approx((2 * 1 + 3 * 4 + 2 * 2) / 7)


def test_goodput_needs_every_objective_and_counts_failures_as_misses():
    records = [
        record(sent=0.0, chunks=[0.1, 0.2]),
        record(sent=0.0, chunks=[0.4, 0.5]),  # TTFT too late
        record(sent=0.0, chunks=[0.1]),  # one token has no TPOT to miss
        record(sent=0.0, chunks=[0.1], status=Status.ERROR, ended_at=2.0),
    ]
    goodput = summarize(records, slos_ms={"ttft": 300.0, "tpot": 150.0}).goodput
    assert goodput is not None
    assert goodput.request_goodput == 1.0  # 2 good ones in 2 s
    assert goodput.attainment == 0.5
    assert goodput.attainment_by_metric == {"ttft": 0.5, "tpot": 0.75}


def test_send_lag_leaves_out_the_wait_for_a_permit():
    held = record(sent=1.0, scheduled_at=0.25, permit_wait=0.5)
    assert held.send_lag == pytest.approx(0.25)
    summary = summarize([held])
    assert summary.send_lag is not None
    assert summary.permit_wait is not None
    assert summary.send_lag.p99 == pytest.approx(250)
    assert summary.permit_wait.p99 == pytest.approx(500)


def test_unknown_cache_and_retraction_counts_stay_unknown():
    summary = summarize([record(), record()])
    assert (summary.retractions, summary.cached_tokens) == (None, None)
    summary = summarize([record(retractions=0, cached_tokens=4), record()])
    assert (summary.retractions, summary.cached_tokens) == (0, 4)
    assert summary.cached_of_input_tokens == 10


def test_an_infinite_rate_sends_everything_at_once():
    assert arrival_times(3, float("inf"), 1.0, None, random.Random(0)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (16.0, 0.25)])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness, variation):
    times = arrival_times(20001, 4.0, burstiness, None, random.Random(1))
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_a_seed_decides_the_arrivals():
    first, again, other = (arrival_times(9, 2.0, 1.0, None, random.Random(s)) for s in (5, 5, 6))
    assert first == again
    assert first != other


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_moves_the_rate_from_start_to_end(strategy):
    ramp = Ramp(strategy, 1.0, 100.0)
    assert ramp.rate(0.0) == pytest.approx(1.0)
    assert ramp.rate(1.0) == pytest.approx(100.0)
    assert ramp.rate(0.5) == pytest.approx(50.5 if strategy == "linear" else 10.0)
    # So even that only the rate remains: the first gap is 1 s, the last 10 ms.
    gaps = np.diff(arrival_times(50, float("inf"), 1e6, ramp, random.Random(0)))
    assert gaps[0] == pytest.approx(1.0, rel=0.01)
    assert gaps[-1] == pytest.approx(0.01, rel=0.01)


def test_trace_times_begin_at_zero_and_stretch():
    assert trace_times([5000.0, 4000.0, 6500.0], 2.0) == [2.0, 0.0, 5.0]
