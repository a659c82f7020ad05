"""What a monitor shows: one screen for people, one JSON object for scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from srt.monitor_alerts import Alert
from srt.monitor_history import Rates, Sample

BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 30
STYLES = {"warning": "yellow", "critical": "bold red"}


def report(
    name: str, sample: Sample | None, rates: Rates, alerts: Sequence[Alert]
) -> dict[str, Any]:
    """For scripts; null where the source does not say."""
    return {
        "source": name,
        "sample": None if sample is None else asdict(sample),
        "rates": asdict(rates),
        "alerts": [asdict(alert) for alert in alerts],
    }


def screen(
    name: str, samples: Sequence[Sample], rates: Rates, alerts: Sequence[Alert]
) -> RenderableType:
    if not samples:
        return Group(Panel(f"{name}\nnothing about the load yet"), *_alert_lines(alerts))
    last = samples[-1]
    table = Table(box=None, show_header=False, padding=(0, 2))
    about = "about " if last.recomputed_is_estimate else ""
    rows: list[tuple[str, str, Callable[[Sample], float | None]]] = [
        ("running", _of(last.running, last.max_running), lambda s: s.running),
        ("queue", f"{_number(last.queued)}  {_blockers(last)}", lambda s: s.queued),
        ("token usage", _percent(last.usage), lambda s: s.usage),
        ("new token ratio", _number(last.ratio, 2), lambda s: s.ratio),
        ("throughput (tok/s)", _throughput(last, rates), lambda s: s.gen_throughput),
    ]
    for label, text, value in rows:
        table.add_row(label, text, sparkline([value(sample) for sample in samples]))
    table.add_row("retractions a minute", _number(rates.retractions_per_minute, 1), "")
    table.add_row("computed again", about + _percent(rates.recomputed_share), "")
    if last.oldest_wait:
        table.add_row("oldest waits (s)", _number(last.oldest_wait, 1), "")
    title = f"{name}, last {rates.seconds:.0f} s"
    return Group(Panel(table, title=title, title_align="left"), *_alert_lines(alerts))


def sparkline(values: Sequence[float | None]) -> str:
    """The last values as bars between 0 and their largest; a gap where one is unknown."""
    shown = values[-SPARK_WIDTH:]
    top = max((value for value in shown if value is not None), default=0.0)
    if top <= 0:
        return ""
    steps = len(BARS) - 1
    return "".join(" " if v is None else BARS[round(max(0.0, v) / top * steps)] for v in shown)


def _alert_lines(alerts: Sequence[Alert]) -> list[Text]:
    lines = []
    for alert in alerts:
        lines.append(Text(f"{alert.level}: {alert.text}", style=STYLES[alert.level]))
        lines.append(Text(f"  {alert.advice}"))
    return lines


def _number(value: float | None, digits: int = 0) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.0f} %"


def _of(value: int | None, limit: int | None) -> str:
    return _number(value) + ("" if limit is None else f" of {limit}")


def _throughput(last: Sample, rates: Rates) -> str:
    return _number(last.gen_throughput if rates.throughput is None else rates.throughput, 1)


def _blockers(sample: Sample) -> str:
    kinds = sorted(sample.blockers.items(), key=lambda item: -item[1])
    return ", ".join(f"{count} {kind}" for kind, count in kinds)
