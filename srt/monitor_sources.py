"""A monitor reads a server by its /metrics and /v1/requests."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import replace
from typing import Protocol

from prometheus_client.parser import text_string_to_metric_families

from srt.monitor_history import Sample

TIMEOUT_SECONDS = 5.0


class SourceError(RuntimeError):
    """There is nothing to read; the message says where and why."""


class Source(Protocol):
    name: str

    def poll(self) -> list[Sample]:
        """The samples since the last call, oldest first. Raises SourceError."""


class HttpSource:
    """Asks a server. Any that has SGLang's metrics will do; what a request waits for is only known
    where there is GET /v1/requests."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.name = url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def poll(self) -> list[Sample]:
        text = self._get("/metrics")
        now = time.monotonic()
        if text is None:
            raise SourceError(f"{self.name} has no /metrics (SGLang needs --enable-metrics)")
        try:
            sample = sample_of_metrics(text, now)
        except ValueError as error:
            raise SourceError(
                f"{self.name}/metrics is not in Prometheus' format: {error}"
            ) from None
        if sample.queued:
            # A list of every live request is not free, so only when somebody waits.
            body = self._get("/v1/requests")
            if body is not None:
                sample = with_requests(sample, body)
        return [sample]

    def _get(self, path: str) -> str | None:
        """The body, None where there is no such route. SourceError for anything else."""
        request = urllib.request.Request(self.name + path, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
                body: bytes = response.read()
                return body.decode()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise SourceError(f"GET {self.name}{path}: HTTP {error.code}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise SourceError(f"GET {self.name}{path}: {error}") from None


def sample_of_metrics(text: str, now: float) -> Sample:
    """What SGLang's metrics say, summed over ranks and models. ValueError for another format, or if
    there is none of them."""
    sums: dict[str, float] = {}
    modes: dict[str, float] = {}  # of realtime_tokens_total
    num_ranks: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for metric in family.samples:
            name = metric.name.partition(":")[2]
            sums[name] = sums.get(name, 0.0) + metric.value
            num_ranks[name] += 1
            if name == "realtime_tokens_total":
                mode = metric.labels.get("mode", "")
                modes[mode] = modes.get(mode, 0.0) + metric.value
    if "num_running_reqs" not in sums:
        raise ValueError("it has no sglang:num_running_reqs")

    def whole(*names: str) -> int | None:
        return next((round(sums[name]) for name in names if name in sums), None)

    def mean(name: str) -> float | None:
        return sums[name] / num_ranks[name] if name in sums else None

    generated = whole("generation_tokens_total")
    prompt = whole("prompt_tokens_total")
    computed = None
    if "decode" in modes and "prefill_compute" in modes:
        # Counted as they are computed, the others only when a request has ended.
        generated = round(modes["decode"])
        computed = generated + round(modes["prefill_compute"])
    elif generated is not None and prompt is not None:
        computed = generated + prompt - (whole("cached_tokens_total") or 0)
    recomputed = whole("recomputed_tokens_total")
    given_up = [whole(f"num_retracted_{kind}_tokens_total") for kind in ("input", "output")]
    is_estimate = recomputed is None
    if is_estimate and None not in given_up:
        recomputed = sum(tokens or 0 for tokens in given_up)
    return Sample(
        time=now,
        running=whole("num_running_reqs"),
        queued=whole("num_queue_reqs"),
        max_running=whole("max_running_requests"),
        usage=mean("token_usage"),
        pool_tokens=whole("max_total_num_tokens"),
        ratio=mean("new_token_ratio"),
        gen_throughput=sums.get("gen_throughput"),
        oldest_wait=sums.get("oldest_wait_seconds"),
        retractions=whole("num_retracted_requests_total"),
        recomputed=recomputed,
        recomputed_is_estimate=is_estimate,
        computed=computed,
        generated=generated,
    )


def with_requests(sample: Sample, body: str) -> Sample:
    """`sample` with what the waiting requests of GET /v1/requests wait for, and how long."""
    try:
        requests = json.loads(body)["requests"]
    except (ValueError, KeyError, TypeError):
        return sample
    waiting = [r for r in requests if r.get("state") in ("waiting", "retracted")]
    kinds = Counter(str((r.get("blocker") or {}).get("kind", "its turn")) for r in waiting)
    ages = [float(r.get("waiting_seconds") or 0.0) for r in waiting]
    return replace(sample, blockers=dict(kinds), oldest_wait=max(ages, default=0.0))
