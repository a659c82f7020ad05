"""The printed report of a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bench.metrics import Goodput, Spread, SteadyState, Summary
from bench.options import Options
from bench.result import Run, cache_report, warnings

WIDTH = 50
LABEL_WIDTH = 40


def title(text: str, fill: str = "-") -> str:
    return f"{text:{fill}^{WIDTH}}"


def line(label: str, value: Any) -> str:
    if value is None:
        text = "n/a"
    elif isinstance(value, float):
        text = f"{value:.2f}"
    else:
        text = str(value)
    return f"{label + ':':<{LABEL_WIDTH}} {text}"


def spread_lines(heading: str, name: str, spread: Spread | None, with_max: bool) -> list[str]:
    values = asdict(spread) if spread is not None else {}
    keys = ["mean", "median", "p90", "p95", "p99"] + (["max"] if with_max else [])
    lines = [title(heading)]
    for key in keys:
        label = key.upper() if key.startswith("p9") else key.capitalize()
        lines.append(line(f"{label} {name} (ms)", values.get(key)))
    return lines


def rate_text(options: Options) -> str:
    if options.use_trace_timestamps:
        return f"trace timestamps x {options.mooncake_slowdown_factor:g}"
    if options.ramp is not None:
        ramp = options.ramp
        return f"{ramp.strategy} ramp {ramp.start_rps:g} -> {ramp.end_rps:g}"
    return f"{options.request_rate:g}"


def goodput_lines(goodput: Goodput) -> list[str]:
    slos = " ".join(f"{name}:{limit:g}" for name, limit in goodput.slos_ms.items())
    lines = [
        title("Goodput"),
        line("SLOs (ms)", slos),
        line("Request goodput (req/s)", goodput.request_goodput),
        line("SLO attainment (%)", goodput.attainment * 100),
    ]
    for name, share in goodput.attainment_by_metric.items():
        lines.append(line(f"{name.upper()} SLO attainment (%)", share * 100))
    return lines


def steady_lines(steady: SteadyState | None) -> list[str]:
    if steady is None:
        return []
    return [
        title(f"Steady State (>= {steady.ratio * 100:g}% of peak)"),
        line("Window (s)", f"{steady.start:.2f} - {steady.end:.2f}"),
        line("Steady concurrency", steady.concurrency),
        line("Steady request throughput (req/s)", steady.request_throughput),
        line("Steady output throughput (tok/s)", steady.output_throughput),
        line("Steady median TTFT (ms)", steady.ttft and steady.ttft.median),
        line("Steady p99 TTFT (ms)", steady.ttft and steady.ttft.p99),
        line("Steady median ITL (ms)", steady.itl and steady.itl.median),
        line("Steady p99 ITL (ms)", steady.itl and steady.itl.p99),
    ]


def client_lines(run: Run) -> list[str]:
    summary, lag = run.summary, run.summary.send_lag
    lines = [
        title("Load Generator"),
        line("Median send lag (ms)", lag and lag.median),
        line("P99 send lag (ms)", lag and lag.p99),
        line("Max send lag (ms)", lag and lag.max),
    ]
    if run.options.max_concurrency is not None:
        wait = summary.permit_wait
        lines.append(line("P99 wait for concurrency (ms)", wait and wait.p99))
    return [
        *lines,
        line("Dropped arrivals", summary.dropped_arrivals),
        line("Client CPU (% of one core)", run.client_cpu_share * 100),
        line("Tokens per chunk", summary.tokens_per_chunk),
        line("Tokens counted by", sources_text(summary)),
        line("Tokenizer", run.tokenizer),
        line("Prompts", run.dataset),
    ]


def sources_text(summary: Summary) -> str | None:
    names = {"server": "server", "retokenized": "retokenising", "chunks": "chunks"}
    parts = [f"{names[source]} ({n})" for source, n in sorted(summary.token_sources.items())]
    return ", ".join(parts) or None


def failure_lines(summary: Summary) -> list[str]:
    if not summary.failures_by_kind:
        return []
    lines = [title("Failures")]
    for kind, count in sorted(summary.failures_by_kind.items(), key=lambda item: -item[1]):
        lines.append(line(kind, count))
        lines.append(f"  e.g. {summary.failure_examples[kind]}")
    return lines


def format_report(run: Run) -> str:
    """For people; the labels are those of SGLang's benchmark, so that scripts read it too."""
    options, summary = run.options, run.summary
    lines = [
        title(" Serving Benchmark Result ", "="),
        line("Backend", options.backend),
        line("Traffic request rate", rate_text(options)),
        line("Max request concurrency", options.max_concurrency or "not set"),
        line("Successful requests", summary.completed),
        line("Failed requests", summary.failed),
    ]
    if summary.short:
        lines.append(line("Short requests (of the successful)", summary.short))
    if summary.stalled:
        lines.append(line("Stalled requests (of the failed)", summary.stalled))
    lines += [
        line("Benchmark duration (s)", summary.duration),
        line("Total input tokens", summary.total_input_tokens),
        line("Total input text tokens", summary.total_input_tokens),
        line("Total generated tokens", summary.total_output_tokens),
        line(
            "Total generated tokens (retokenized)", summary.total_output_tokens_retokenized
        ),
        line("Request throughput (req/s)", summary.request_throughput),
        line("Input token throughput (tok/s)", summary.input_throughput),
        line("Output token throughput (tok/s)", summary.output_throughput),
        line("Peak output token throughput (tok/s)", summary.max_output_tokens_per_s),
        line("Peak concurrent requests", summary.max_concurrent_requests),
        line("Total token throughput (tok/s)", summary.total_throughput),
        line("Concurrency", summary.concurrency),
    ]  # fmt: skip
    if run.accept_length is not None:
        lines.append(line("Accept length", run.accept_length))
    if run.retractions is not None:
        lines.append(line("Retractions", run.retractions))
    if summary.goodput is not None:
        lines += goodput_lines(summary.goodput)
    lines += spread_lines("End-to-End Latency", "E2E Latency", summary.e2e, False)
    lines += spread_lines("Time to First Token", "TTFT", summary.ttft, False)
    tpot_title = "Time per Output Token (excl. 1st token)"
    lines += spread_lines(tpot_title, "TPOT", summary.tpot, False)
    lines += spread_lines("Inter-Token Latency", "ITL", summary.itl, True)
    if options.cache_report:
        report = cache_report(summary)
        lines += [
            title("Prefix Cache"),
            line("Total cached tokens", report["total_cached_tokens"]),
            line("Cache hit rate (%)", report["cache_hit_rate_pct"]),
        ]
    lines += steady_lines(summary.steady_state)
    lines += client_lines(run)
    lines += failure_lines(summary)
    lines.append("=" * WIDTH)
    lines += [f"WARNING: {text}" for text in warnings(run)]
    return "\n".join(lines)
