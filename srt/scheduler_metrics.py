"""The scheduler's own figures (InternalStateReq) as Prometheus metrics and as a load report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from srt.managers.io_struct import ReadyMsg

# Every reason a request may wait for, so that a series exists before its first time.
BLOCKERS = ("slots", "kv", "prefill_budget", "prefix", "decode_turn", "batching", "paused")
RETRACTION_CAUSES = ("kv", "forced", "priority", "pause")
PHASES = {"P": "prefill", "D": "decode", "M": "mixed"}
STEP_PARTS = ("receive", "choose", "run", "process")
# A scheduler is one rank here, and says so in the labels dashboards filter by.
RANK_LABELS = {"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}

# Metric name, key of the state, help.
_GAUGES = (
    ("sglang:num_running_reqs", "num_running_reqs", "Requests that hold KV cache."),
    ("sglang:num_queue_reqs", "num_waiting_reqs", "Requests that wait."),
    ("sglang:num_used_tokens", "num_used_tokens", "KV slots of live requests."),
    ("sglang:token_usage", "token_usage", "Share of KV slots that live requests use, 0 to 1."),
    ("sglang:full_token_usage", "token_usage", "The same as token_usage in this server."),
    ("sglang:kv_used_tokens", "num_used_tokens", "KV slots of live requests."),
    ("sglang:kv_available_tokens", "num_free_tokens", "KV slots that are free."),
    ("sglang:kv_evictable_tokens", "num_cached_tokens", "Cached KV slots that nobody uses."),
    ("sglang:num_retracted_reqs", "num_retracted_waiting", "Requests retracted and not back yet."),
    ("sglang:new_token_ratio", "new_token_ratio", "Share of max_new_tokens that is believed."),
    ("sglang:max_total_num_tokens", "max_total_num_tokens", "KV slots in all."),
    ("sglang:page_size", "page_size", "KV slots of a page."),
    ("regather:max_running_requests", "max_running_requests", "Requests that may hold KV cache."),
    ("regather:pending_tokens", "num_waiting_uncached_tokens", "Prompt tokens that wait."),
    ("regather:free_rows", "free_rows", "Requests that could still be admitted."),
    ("regather:oldest_wait_seconds", "oldest_wait_seconds", "Wait of the first in the queue."),
)
_COUNTERS = (
    (
        "sglang:num_retracted_input_tokens",
        "retracted_input_tokens",
        "Prompt tokens of retracted requests.",
    ),
    (
        "sglang:num_retracted_output_tokens",
        "retracted_output_tokens",
        "Tokens that retracted requests had generated.",
    ),
    ("sglang:evicted_tokens", "evicted_tokens", "Cached KV slots that were evicted."),
    (
        "regather:recomputed_tokens",
        "recomputed_tokens",
        "Tokens computed again after a retraction.",
    ),
    (
        "regather:broken_logits_requests",
        "broken_requests",
        "Requests ended because the model computed NaN or infinity for them.",
    ),
    ("regather:scheduler_steps", "num_steps", "Passes chosen."),
)


def scheduler_families(
    state: dict[str, Any], limits: ReadyMsg, labels: dict[str, str]
) -> Iterator[Metric]:
    """Every metric of the scheduler. An empty `state`: it has never answered."""
    labels = {**labels, **RANK_LABELS}
    names, values = list(labels), list(labels.values())

    def gauge(name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=names)
        family.add_metric(values, value)
        return family

    is_stale = bool(state.get("is_stale", not state))
    yield gauge(
        "regather:scheduler_is_stale",
        "1 if the scheduler did not answer the scrape; its figures are then old.",
        float(is_stale),
    )
    yield gauge("sglang:context_len", "Tokens of prompt and output together.", limits.context_len)
    for name, key, text in _GAUGES:
        if key in state:
            yield gauge(name, text, state[key])
    if "paused" in state:
        num_paused = state["num_running_reqs"] if state["paused"] else 0
        yield gauge("sglang:num_paused_reqs", "Running requests that are paused.", num_paused)
        yield gauge("regather:paused", "1 while generation is paused.", float(state["paused"]))
        yield gauge("sglang:utilization", "The fuller of rows and KV.", utilization(state))
    for name, key, text in _COUNTERS:
        if key in state:
            counter = CounterMetricFamily(name, text, labels=names)
            counter.add_metric(values, state[key])
            yield counter
    yield from _labelled_families(state, names, values)


def _labelled_families(
    state: dict[str, Any], names: list[str], values: list[str]
) -> Iterator[Metric]:
    """The metrics with a label of their own."""
    if "blockers" in state:
        blocked = GaugeMetricFamily(
            "regather:blocked_requests",
            "Requests that admission refused at its last try, by what they wait for.",
            labels=[*names, "blocker"],
        )
        for kind in sorted({*BLOCKERS, *state["blockers"]}):
            blocked.add_metric([*values, kind], state["blockers"].get(kind, 0))
        yield blocked
    if "retracted_requests" in state:
        by_cause = state["retracted_requests"]
        total = CounterMetricFamily(
            "sglang:num_retracted_requests", "Requests retracted.", labels=names
        )
        total.add_metric(values, sum(by_cause.values()))
        yield total
        causes = CounterMetricFamily(
            "regather:retractions", "Requests retracted, by cause.", labels=[*names, "cause"]
        )
        for cause in sorted({*RETRACTION_CAUSES, *by_cause}):
            causes.add_metric([*values, cause], by_cause.get(cause, 0))
        yield causes
    if "passes" in state:
        passes = CounterMetricFamily(
            "regather:passes", "Passes that ran, by phase.", labels=[*names, "phase"]
        )
        for letter, phase in PHASES.items():
            passes.add_metric([*values, phase], state["passes"].get(letter, 0))
        yield passes
    if "step_ms" in state:
        seconds = CounterMetricFamily(
            "regather:step_seconds", "Time of each part of a step.", labels=[*names, "part"]
        )
        for part in STEP_PARTS:
            seconds.add_metric([*values, part], state["step_ms"].get(part, 0.0) / 1e3)
        yield seconds
    if "generated_tokens" in state:
        tokens = CounterMetricFamily(
            "sglang:realtime_tokens",
            "Tokens as they are computed.",
            labels=[*names, "mode"],
        )
        tokens.add_metric([*values, "decode"], state["generated_tokens"])
        tokens.add_metric([*values, "prefill_compute"], state["prompt_tokens"])
        yield tokens


def utilization(state: dict[str, Any]) -> float:
    """How full the server is, 0 to 1: the larger of the shares of rows and of KV slots in use."""
    rows = state["num_running_reqs"] / state["max_running_requests"]
    return max(rows, state["token_usage"])


LOAD_SECTIONS = ("core", "memory", "queues")


def load_report(state: dict[str, Any], sections: Sequence[str]) -> dict[str, Any]:
    """`sections` of the load, under SGLang's names."""
    report: dict[str, Any] = {}
    if "core" in sections:
        names = (
            *("num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens"),
            *("num_used_tokens", "max_total_num_tokens", "max_running_requests", "token_usage"),
        )
        report |= {name: state[name] for name in names}
        report["num_total_reqs"] = state["num_running_reqs"] + state["num_waiting_reqs"]
        waiting = state["num_waiting_uncached_tokens"]
        report["num_total_tokens"] = state["num_used_tokens"] + waiting
        report["utilization"] = utilization(state)
    if "memory" in sections:
        parts = ("num_free_tokens", "num_cached_tokens", "num_locked_tokens", "page_size")
        report["memory"] = {name: state[name] for name in parts}
    if "queues" in sections:
        retracted = state["num_retracted_waiting"]
        report["queues"] = {
            "waiting": state["num_waiting_reqs"] - retracted,
            "grammar": 0,
            "paused": state["num_running_reqs"] if state["paused"] else 0,
            "retracted": retracted,
        }
    return report
