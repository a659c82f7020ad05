"""The JSON line of a run."""

from __future__ import annotations

import math
from dataclasses import asdict
from datetime import datetime
from typing import Any

import orjson

from bench.metrics import RequestRecord, Spread, SteadyState, gaps
from bench.options import Options
from bench.result import Run, cache_report, warnings

SCHEMA_VERSION = 1


def strict(value: Any) -> Any:
    """The value with what JSON has no word for made a string ("inf") or null (not a number)."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return value


def spread_keys(name: str, spread: Spread | None) -> dict[str, float | None]:
    values = asdict(spread) if spread is not None else {}
    keys = ("mean", "median", "std", "p90", "p95", "p99")
    return {f"{key}_{name}_ms": values.get(key) for key in keys}


def steady_object(steady: SteadyState | None) -> dict[str, Any] | None:
    if steady is None:
        return None
    return {
        "ratio": steady.ratio,
        "start": steady.start,
        "end": steady.end,
        "duration": steady.duration,
        "concurrency": steady.concurrency,
        "request_throughput": steady.request_throughput,
        "output_throughput": steady.output_throughput,
        **spread_keys("ttft", steady.ttft),
        **spread_keys("itl", steady.itl),
    }


def result_object(run: Run) -> dict[str, Any]:
    """The JSON line: SGLang's keys (null where nothing was measured), then ours."""
    options, summary = run.options, run.summary
    goodput = summary.goodput
    result: dict[str, Any] = {
        "tag": options.tag,
        "backend": options.backend,
        "dataset_name": options.dataset_name,
        "request_rate": "trace" if options.use_trace_timestamps else options.request_rate,
        "max_concurrency": options.max_concurrency,
        "sharegpt_output_len": options.sharegpt_output_len,
        "random_input_len": options.random_input_len,
        "random_output_len": options.random_output_len,
        "random_range_ratio": options.random_range_ratio,
        "server_info": run.server_info,
        "duration": summary.duration,
        "completed": summary.completed,
        "total_input_tokens": summary.total_input_tokens,
        "total_input_text_tokens": summary.total_input_tokens,
        "total_input_vision_tokens": 0,
        "total_output_tokens": summary.total_output_tokens,
        "total_output_tokens_retokenized": summary.total_output_tokens_retokenized,
        "request_throughput": summary.request_throughput,
        "input_throughput": summary.input_throughput,
        "output_throughput": summary.output_throughput,
        "total_throughput": summary.total_throughput,
        **spread_keys("e2e_latency", summary.e2e),
        **spread_keys("ttft", summary.ttft),
        **spread_keys("tpot", summary.tpot),
        **spread_keys("itl", summary.itl),
        "concurrency": summary.concurrency,
        "accept_length": run.accept_length,
        "max_output_tokens_per_s": summary.max_output_tokens_per_s,
        "max_concurrent_requests": summary.max_concurrent_requests,
    }
    if goodput is not None:
        result["goodput_slos_ms"] = goodput.slos_ms
        result["request_goodput"] = goodput.request_goodput
        result["slo_attainment"] = goodput.attainment
        result["slo_attainment_by_metric"] = goodput.attainment_by_metric
    if options.cache_report:
        result["cache_report"] = cache_report(summary)
    lag, wait = summary.send_lag, summary.permit_wait
    result |= {
        "schema_version": SCHEMA_VERSION,
        "model": run.model,
        "base_url": options.url,
        "seed": options.seed,
        "burstiness": options.burstiness,
        "ramp": asdict(options.ramp) if options.ramp else None,
        "failed": summary.failed,
        "short": summary.short,
        "stalled": summary.stalled,
        "failures_by_kind": summary.failures_by_kind,
        "failure_examples": summary.failure_examples,
        "dropped_arrivals": summary.dropped_arrivals,
        "interrupted": run.interrupted,
        "max_itl_ms": summary.itl and summary.itl.max,
        "tokens_per_chunk": summary.tokens_per_chunk,
        "token_sources": summary.token_sources,
        "tokenizer": run.tokenizer,
        "prompts": run.dataset,
        "send_lag_ms_median": lag and lag.median,
        "send_lag_ms_p99": lag and lag.p99,
        "send_lag_ms_max": lag and lag.max,
        "concurrency_wait_ms_p99": wait and wait.p99,
        "client_cpu_share": run.client_cpu_share,
        "retractions": run.retractions,
        "steady_state": steady_object(summary.steady_state),
        "warnings": warnings(run),
    }
    if options.output_details:
        result |= details(run.records)
    return {key: strict(value) for key, value in result.items()}


def details(records: list[RequestRecord]) -> dict[str, list[Any]]:
    """One entry a request, in the order of sending; failed ones have an error and what had come."""
    return {
        "input_lens": [r.input_len for r in records],
        "output_lens": [r.output_len for r in records],
        "ttfts": [r.ttft for r in records],
        "itls": [gaps(r).tolist() for r in records],
        "generated_texts": [r.text for r in records],
        "errors": [r.error or "" for r in records],
        "statuses": [r.status.value for r in records],
        "requested_lens": [r.requested_len for r in records],
        "start_times": [r.sent_at for r in records],
        "e2e_latencies": [r.e2e for r in records],
        "finish_reasons": [r.finish_reason for r in records],
    }


def json_line(run: Run) -> bytes:
    """One line of strict JSON, with its newline."""
    return orjson.dumps(result_object(run), option=orjson.OPT_APPEND_NEWLINE)


def default_output_file(options: Options, num_prompts: int, now: datetime) -> str:
    date = now.strftime("%m%d")
    sizes = options.dataset_name
    if options.dataset_name.startswith("random"):
        sizes = f"{options.random_input_len}_{options.random_output_len}"
    return f"{options.backend}_{date}_{num_prompts}_{sizes}.jsonl"
