"""How often a scheduler was replaced, and what became of its requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from prometheus_client.core import CounterMetricFamily, Metric

_HELP = {
    "scheduler_restarts": "Scheduler processes that were replaced.",
    "resumed_requests": "Requests submitted again to a new scheduler.",
    "quarantined_requests": "Requests ended because the scheduler crashed with them.",
}


@dataclass
class RestartCounts:
    """Since the server's start."""

    scheduler_restarts: int = 0
    resumed_requests: int = 0
    quarantined_requests: int = 0

    def families(self, labels: dict[str, str]) -> Iterator[Metric]:
        """`labels` are put on every sample."""
        for each in fields(self):
            name = f"regather:{each.name}"
            family = CounterMetricFamily(name, _HELP[each.name], labels=list(labels))
            family.add_metric(list(labels.values()), getattr(self, each.name))
            yield family
