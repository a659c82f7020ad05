"""Counts of HTTP requests by route, and GET /metrics, which asks the scheduler at every scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from srt.managers.tokenizer_manager import TokenizerManager
from srt.request_error import RequestError
from srt.scheduler_metrics import scheduler_families
from srt.slow_clients import SlowClients

# A scrape does not wait for a long pass; it then gets the last figures and is told so.
SCRAPE_SECONDS = 1.0
# Clients can send any word as a method, and each label is a time series for ever.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_UNKNOWN = "(unknown)"


def exposition(families: Iterable[Metric]) -> bytes:
    """The metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families:
    """A collector of metrics that exist already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> list[Metric]:
        return self._families


class HttpMetrics:
    def __init__(
        self,
        model_name: str,
        find_manager: Callable[[], TokenizerManager | None],
        slow_clients: SlowClients,
    ) -> None:
        self.labels = {"model_name": model_name, "engine_type": "unified"}
        self._find_manager = find_manager
        self._slow_clients = slow_clients
        self._requests: Counter[tuple[str, str]] = Counter()
        self._responses: Counter[tuple[str, str, str]] = Counter()
        self._active: Counter[tuple[str, str]] = Counter()

    def on_request(self, request: web.Request) -> tuple[str, str]:
        """Its labels; give them to on_response, if there is one, and to on_end."""
        resource = request.match_info.route.resource
        endpoint = _UNKNOWN if resource is None else resource.canonical
        key = endpoint, request.method if request.method in _METHODS else _UNKNOWN
        self._requests[key] += 1
        self._active[key] += 1
        return key

    def on_response(self, key: tuple[str, str], status: int) -> None:
        endpoint, method = key
        self._responses[endpoint, method, str(status)] += 1

    def on_end(self, key: tuple[str, str]) -> None:
        self._active[key] -= 1

    async def serve(self, request: web.Request) -> web.Response:
        """GET /metrics. While the server starts, only what HTTP itself knows."""
        families = list(self._http_families())
        if manager := self._find_manager():
            families += manager.request_metrics(self.labels)
            try:
                state = await manager.control.internal_state(SCRAPE_SECONDS)
            except RequestError:
                state = {}  # the scheduler is dead, which `up` and is_stale tell
            families += scheduler_families(state, manager.limits, self.labels)
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=exposition(families), headers=headers)

    def _http_families(self) -> Iterator[Metric]:
        names, values = list(self.labels), list(self.labels.values())
        by_route = [*names, "endpoint", "method"]
        requests = CounterMetricFamily("sglang:http_requests", "HTTP requests.", labels=by_route)
        for key, count in self._requests.items():
            requests.add_metric([*values, *key], count)
        yield requests
        responses = CounterMetricFamily(
            "sglang:http_responses", "HTTP responses.", labels=[*by_route, "status_code"]
        )
        for labels, count in self._responses.items():
            responses.add_metric([*values, *labels], count)
        yield responses
        active = GaugeMetricFamily(
            "sglang:http_requests_active", "HTTP requests not answered yet.", labels=by_route
        )
        for key, count in self._active.items():
            active.add_metric([*values, *key], count)
        yield active
        slow = CounterMetricFamily(
            "regather:slow_clients", "Clients that did not read their answers.", labels=names
        )
        slow.add_metric(values, self._slow_clients.num_ended)
        yield slow
