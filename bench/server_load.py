"""What a server says about its load in /metrics, sampled while a run is on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from bench.server_routes import ASK_TIMEOUT

# Often enough to see a peak, seldom enough not to be a load itself (6 ms of our server each).
SAMPLE_PERIOD_S = 0.25
RUNNING = ("sglang:num_running_reqs", "vllm:num_requests_running")
QUEUED = ("sglang:num_queue_reqs", "vllm:num_requests_waiting")
USAGE = ("sglang:token_usage", "vllm:kv_cache_usage_perc")


@dataclass
class LoadPeaks:
    """The largest samples of a run; None where the server does not say. `usage` is a share of the
    KV pool."""

    running: int | None = None
    queued: int | None = None
    usage: float | None = None
    num_samples: int = 0

    def add(self, values: dict[str, float]) -> None:
        self.num_samples += 1
        running, queued = _first(values, RUNNING), _first(values, QUEUED)
        usage = _first(values, USAGE)
        if running is not None:
            self.running = max(self.running or 0, round(running))
        if queued is not None:
            self.queued = max(self.queued or 0, round(queued))
        if usage is not None:
            self.usage = max(self.usage or 0.0, usage)


def read_values(metrics: str) -> dict[str, float]:
    """The metrics named above, of the Prometheus text format, summed over label sets. ValueError if
    they are not in that format."""
    # Parsing all of 500 lines would stop the event loop of the load for 13 ms.
    lines = (line for line in metrics.splitlines() if line.startswith(RUNNING + QUEUED + USAGE))
    values: dict[str, float] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


@contextmanager
def sample_load(url: str, headers: dict[str, str], peaks: LoadPeaks) -> Iterator[None]:
    """Sample `url`/metrics into `peaks` on the running event loop until the context ends. A server
    that does not answer is asked again; the peaks then stay None, as in a context shorter than one
    period."""
    task = asyncio.get_running_loop().create_task(_keep_sampling(url, headers, peaks))
    try:
        yield
    finally:
        task.cancel()


async def _keep_sampling(url: str, headers: dict[str, str], peaks: LoadPeaks) -> None:
    # A session of its own: the pool of the load generator is for the load.
    async with aiohttp.ClientSession(timeout=ASK_TIMEOUT, headers=headers) as http:
        while True:
            # First, since nothing runs yet when a run begins.
            await asyncio.sleep(SAMPLE_PERIOD_S)
            try:
                async with http.get(f"{url}/metrics") as response:
                    if response.status == 200:
                        peaks.add(read_values(await response.text()))
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError):
                pass  # not up yet, or not of this kind: the peaks stay what they are


def _first(values: dict[str, float], names: tuple[str, ...]) -> float | None:
    return next((values[name] for name in names if name in values), None)
