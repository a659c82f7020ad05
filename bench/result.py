"""One finished run: what was measured, what was found around it, and what to doubt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.metrics import RequestRecord, Summary
from bench.options import Options

# A generator that works this much of the time answers late itself, and its latencies are its own.
CLIENT_CPU_WARNING = 0.8
# In a run this short the share only says that everything was sent at once.
SHORT_RUN_S = 1.0
SEND_LAG_WARNING_MS = 100.0
# Decoding and encoding again moves counts by a few percent; more says that text was lost.
RETOKENIZED_WARNING = 0.2


@dataclass(frozen=True)
class Run:
    """Everything a report needs: the options, what was measured, and what was found around it."""

    options: Options
    summary: Summary
    records: list[RequestRecord]
    model: str
    tokenizer: str
    dataset: str
    client_cpu_share: float
    interrupted: bool
    server_info: dict[str, Any] | None
    retractions_counted: int | None  # by the server's counter, of whatever ran meanwhile
    notes: list[str]  # of preparation: warm-up failures, cache not flushed

    @property
    def accept_length(self) -> float | None:
        """Of speculative decoding, if the server says so."""
        states = (self.server_info or {}).get("internal_states")
        if not isinstance(states, list) or not states or not isinstance(states[0], dict):
            return None
        value = states[0].get("avg_spec_accept_length")
        return float(value) if isinstance(value, (int, float)) else None

    @property
    def retractions(self) -> int | None:
        """Of our completed requests if the answers say so, else by the server's counter."""
        if self.summary.retractions is not None:
            return self.summary.retractions
        return self.retractions_counted

    @property
    def failed_too_often(self) -> bool:
        limit = self.options.max_failures
        return 0 <= limit < self.summary.failed


def cache_report(summary: Summary) -> dict[str, Any]:
    """Shares are over the requests for which the server gave a number."""
    cached, total = summary.cached_tokens, summary.cached_of_input_tokens
    return {
        "total_cached_tokens": cached,
        "total_prompt_tokens": total,
        "cache_hit_rate_pct": 100 * cached / total if cached is not None and total else None,
    }


def warnings(run: Run) -> list[str]:
    """What a reader must know before believing the numbers above."""
    summary, found = run.summary, list(run.notes)
    if run.interrupted:
        found.append("the run was interrupted; these are the numbers until then")
    if run.client_cpu_share > CLIENT_CPU_WARNING and summary.duration > SHORT_RUN_S:
        found.append(
            f"the client was busy {run.client_cpu_share * 100:.0f} % of the time and probably the "
            "bottleneck: send less from here, or run several clients"
        )
    if summary.send_lag is not None and summary.send_lag.p99 > SEND_LAG_WARNING_MS:
        found.append(
            f"1 % of the requests left {summary.send_lag.p99:.0f} ms or more behind schedule: the "
            "load was not the one asked for"
        )
    if summary.short:
        found.append(f"{summary.short} answers ended with fewer tokens than demanded")
    longer = sum(r.completed and r.output_len > r.requested_len for r in run.records)
    if longer:
        found.append(f"{longer} answers had more tokens than demanded")
    retokenized, total = summary.total_output_tokens_retokenized, summary.total_output_tokens
    counted = retokenized is not None and "server" in summary.token_sources
    if counted and abs((retokenized or 0) - total) > RETOKENIZED_WARNING * total:
        found.append(
            f"the texts hold {retokenized} tokens and the server counted {total}: text was "
            "lost, or this is another tokenizer, or tokens without text followed an ignored "
            "end of sequence"
        )
    if run.failed_too_often:
        found.append(
            f"{summary.failed} requests failed, --max-failures is {run.options.max_failures}"
        )
    return found
