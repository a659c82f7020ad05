"""Pure: the runs of a sweep in, its knee and what to remark about each value out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

# A value counts as good as the best if its throughput is within this share of it; below that it
# counts as worse. Repeated runs on a quiet machine differ by about half as much.
TOLERANCE = 0.05
# With this much of the pool in use, KV and not rows keeps requests waiting.
FULL_POOL = 0.9
# A run that takes so much longer than its arrivals and a typical request did not keep up.
KEPT_UP = 1.1


@dataclass(frozen=True)
class Point:
    """One value of a sweep. Throughputs in output tokens and requests a second, times in
    milliseconds, `usage_peak` a share of the KV pool; None: not measured, or the run failed with
    `error`. `offered_rate` is None when everything was sent at once."""

    value: int | float | str
    error: str | None = None
    output_throughput: float | None = None
    request_throughput: float | None = None
    median_ttft_ms: float | None = None
    p99_ttft_ms: float | None = None
    median_itl_ms: float | None = None
    p99_itl_ms: float | None = None
    completed: int = 0
    failed: int = 0
    output_tokens: int = 0
    server_output_tokens: int | None = None  # by its own counter, warm-up included
    retractions: int | None = None
    recomputed_tokens: int | None = None
    sent_peak: int | None = None  # requests under way at once, as the client saw it
    running_peak: int | None = None  # of samples of the server's load
    queued_peak: int | None = None
    usage_peak: float | None = None
    offered_rate: float | None = None
    kept_up: bool = False  # the run ended soon after its last arrival
    lowest: float | None = None  # output throughput of the slowest and fastest repeat
    highest: float | None = None


COLUMNS = tuple(Point.__dataclass_fields__)


def cells(point: Point) -> list[Any]:
    """A row of the CSV file, in the order of COLUMNS; what was not measured is empty."""
    return ["" if value is None else value for value in asdict(point).values()]


@dataclass(frozen=True)
class Knee:
    """The smallest value that is as good as the best, and what is to be said if there is none."""

    value: int | float | str | None
    text: str


def find_knee(points: list[Point]) -> Knee:
    """For numbers: the smallest value whose output throughput is within TOLERANCE of the best.
    There is none while the largest value is the only one as good as itself, or there is but one."""
    rates = {p.value: p.output_throughput for p in points if p.output_throughput}
    if len(rates) < 2:
        runs = "only one run" if rates else "no run"
        return Knee(None, f"no knee: {runs} gave a throughput")
    best = max(rates, key=lambda value: rates[value])
    if any(isinstance(value, str) for value in rates):
        return Knee(best, f"best: {best} ({rates[best]:.1f} tok/s); names have no knee")
    knee = min(v for v, rate in rates.items() if rate >= (1 - TOLERANCE) * rates[best])
    if knee == max(rates):
        return Knee(None, f"no knee: throughput still rises at {knee:g}, the largest value")
    share = 100 * rates[knee] / rates[best]
    return Knee(knee, f"knee: {knee:g} has {share:.0f} % of the best throughput (at {best:g})")


def remarks(name: str, points: list[Point]) -> list[str]:
    """What a reader must know about single values, in their order."""
    found = []
    best: Point | None = None
    for point in points:
        texts = [_failure(point), _fall(point, best), _cap(name, point)]
        found += [f"{point.value}: {text}" for text in texts if text]
        if point.output_throughput is not None and (
            best is None or point.output_throughput > (best.output_throughput or 0.0)
        ):
            best = point
    return found


def _failure(point: Point) -> str | None:
    if point.error is not None:
        return point.error
    return f"{point.failed} requests failed" if point.failed else None


def _fall(point: Point, best: Point | None) -> str | None:
    """Is it worse than the best value before it, and did retractions come with that?"""
    if best is None or not best.output_throughput or point.output_throughput is None:
        return None
    fall = 1 - point.output_throughput / best.output_throughput
    if fall <= TOLERANCE:
        return None
    text = f"throughput is {100 * fall:.0f} % below that of {best.value}"
    more = (point.retractions or 0) - (best.retractions or 0)
    if point.retractions is None:
        return f"{text}; the server does not count retractions"
    if more <= 0:
        return f"{text}, not because of retraction ({point.retractions})"
    again = ""
    if point.recomputed_tokens is not None and point.output_tokens:
        share = 100 * point.recomputed_tokens / point.output_tokens
        again = f", {point.recomputed_tokens} tokens computed again ({share:.0f} % of the output)"
    return f"{text} because of retraction: {point.retractions} retractions{again}"


def _cap(name: str, point: Point) -> str | None:
    """Was something else than the swept value the limit?"""
    if point.offered_rate is not None and point.kept_up:
        return (
            f"the offered load was the cap: {point.offered_rate:g} req/s arrived and the server "
            "kept up"
        )
    if name != "max_running_requests" or not isinstance(point.value, int):
        return None
    if point.sent_peak is not None and point.sent_peak < point.value:
        return f"the offered load was the cap: at most {point.sent_peak} requests were under way"
    # Without a sample of somebody waiting nothing is known: a short run falls between two.
    if point.running_peak is None or point.running_peak >= point.value or not point.queued_peak:
        return None
    ran = f"samples saw at most {point.running_peak} of {point.value} run"
    if point.usage_peak is not None and point.usage_peak >= FULL_POOL:
        return f"KV was the cap: {ran}, with {100 * point.usage_peak:.0f} % of the pool in use"
    return f"{ran} although up to {point.queued_peak} waited: admission held them back"
