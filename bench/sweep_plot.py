"""The picture of a sweep: throughput, latencies and retractions over the swept values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from bench.sweep_points import Knee, Point

# Of the colour-blind safe palette by Okabe and Ito.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"


def plot(name: str, points: list[Point], knee: Knee, prefix: Path) -> list[Path]:
    """Write PREFIX.png and PREFIX.svg. Values stand at equal distances in the order given, since
    they usually grow by factors."""
    good = [point for point in points if point.output_throughput is not None]
    places = list(range(len(good)))
    # Text stays text, and the same runs give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sweep"}):
        figure = Figure(figsize=(7, 8), layout="constrained")
        axes = figure.subplots(3, 1, sharex=True)
        _throughput(axes[0], places, good, knee)
        _latencies(axes[1], places, good)
        _retractions(axes[2], places, good)
        axes[2].set_xticks(places, [str(point.value) for point in good])
        axes[2].set_xlabel(name.replace("_", "-"))
        files = [prefix.with_name(prefix.name + ending) for ending in (".png", ".svg")]
        figure.savefig(files[0], dpi=110)
        figure.savefig(files[1], metadata={"Date": None})
    return files


def _throughput(axis: Any, places: list[int], good: list[Point], knee: Knee) -> None:
    rates = [point.output_throughput or 0.0 for point in good]
    below = [rate - (p.lowest or rate) for rate, p in zip(rates, good, strict=True)]
    above = [(p.highest or rate) - rate for rate, p in zip(rates, good, strict=True)]
    axis.errorbar(places, rates, yerr=[below, above], color=BLUE, marker="o", capsize=3)
    axis.set_ylabel("output tok/s")
    axis.set_ylim(bottom=0)
    at = next((i for i, point in enumerate(good) if point.value == knee.value), None)
    if at is not None:
        axis.axvline(at, color=GREEN, linestyle="--", linewidth=1)
        axis.plot([at], [rates[at]], marker="o", markersize=12, fillstyle="none", color=GREEN)
    axis.set_title(knee.text, fontsize=10)


def _latencies(axis: Any, places: list[int], good: list[Point]) -> None:
    for key, label, color, style in (
        ("median_ttft_ms", "TTFT median", ORANGE, "-"),
        ("p99_ttft_ms", "TTFT p99", ORANGE, ":"),
        ("median_itl_ms", "ITL median", BLUE, "-"),
        ("p99_itl_ms", "ITL p99", BLUE, ":"),
    ):
        times = [getattr(point, key) for point in good]
        heights = [float("nan") if time is None else time for time in times]
        axis.plot(places, heights, style, color=color, marker=".", label=label)
    axis.set_yscale("log")
    axis.set_ylabel("ms")
    axis.legend(fontsize=8)


def _retractions(axis: Any, places: list[int], good: list[Point]) -> None:
    axis.bar(places, [point.retractions or 0 for point in good], 0.4, color=RED)
    axis.set_ylabel("retractions")
    axis.set_ylim(bottom=0, top=None if any(point.retractions for point in good) else 1)
    peaks = [point.running_peak for point in good]
    if any(peak is not None for peak in peaks):
        twin = axis.twinx()
        heights = [float("nan") if peak is None else peak for peak in peaks]
        twin.plot(places, heights, color=GREEN, marker="o")
        twin.set_ylabel("running, peak", color=GREEN)
        twin.set_ylim(bottom=0)
