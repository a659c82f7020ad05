"""bench_serving --sweep NAME=V1,V2,...: the same load once for each value of a setting.

NAME is an option of bench_serving itself (request-rate, max-concurrency, ...) or else a setting of
the server: changed on the running one through PATCH /v1/scheduler or, with --sweep-launch, given to
a server of its own for each value.
"""

from __future__ import annotations

import csv
import dataclasses
import re
import statistics
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from bench.bench_serving import (
    EXIT_FAILURES,
    EXIT_INTERRUPTED,
    benchmark,
    run_loop,
)
from bench.options import Options, parse_sweep
from bench.result import Run
from bench.result_json import result_object, strict
from bench.server_load import LoadPeaks, sample_load
from bench.server_routes import ServerError, request_headers
from bench.sessions import DatasetError
from bench.sharegpt_file import ShareGptError
from bench.sweep_points import COLUMNS, KEPT_UP, Knee, Point, cells, find_knee, remarks
from bench.sweep_server import launch_arguments, launched, patch_setting, scheduler_state
from bench.tokenizer import TokenizerError

SCHEMA_VERSION = 1
RUN_ERRORS = (ServerError, DatasetError, TokenizerError, ShareGptError)
HEADER = (
    f"{'value':>14} {'tok/s':>8} {'req/s':>7} {'TTFT p50':>9} {'p99':>9} {'ITL p50':>8} "
    f"{'p99':>8} {'retract':>8} {'running':>8} {'queued':>7} {'failed':>7}"
)


@dataclasses.dataclass
class Sweep:
    """What a sweep has found so far. `runs[i]` are the JSON lines of the repeats of `points[i]`."""

    name: str
    points: list[Point] = dataclasses.field(default_factory=list)
    runs: list[list[dict[str, Any]]] = dataclasses.field(default_factory=list)
    interrupted: bool = False
    not_restored: str | None = None  # why the running server kept the last value

    @property
    def knee(self) -> Knee:
        return find_knee(self.points)

    @property
    def remarks(self) -> list[str]:
        found = remarks(self.name, self.points)
        if self.interrupted:
            found.append("interrupted: values are missing, and the last run may be only a part")
        if self.not_restored is not None:
            found.append(f"the server was left with the last value: {self.not_restored}")
        return found


@dataclasses.dataclass(frozen=True)
class Measured:
    """One run, and what the server said beside it."""

    run: Run
    peaks: LoadPeaks
    recomputed_tokens: int | None
    server_output_tokens: int | None


async def measure(options: Options) -> Measured:
    """One run with samples of the server's load. Raises what benchmark does."""
    peaks = LoadPeaks()
    before = await scheduler_state(options)
    run = await benchmark(
        options, lambda: sample_load(options.url, request_headers(options), peaks)
    )
    after = await scheduler_state(options)
    return Measured(
        run,
        peaks,
        _difference(before, after, "recomputed_tokens"),
        _difference(before, after, "generated_tokens"),
    )


def _difference(before: dict[str, Any], after: dict[str, Any], key: str) -> int | None:
    first, last = before.get(key), after.get(key)
    return last - first if isinstance(first, int) and isinstance(last, int) else None


def to_point(value: Any, repeats: Sequence[Measured]) -> Point:
    """The repeat with the median output throughput stands for the value."""
    ordered = sorted(repeats, key=lambda m: m.run.summary.output_throughput)
    chosen = ordered[(len(ordered) - 1) // 2]
    run, summary, peaks = chosen.run, chosen.run.summary, chosen.peaks
    rate = run.options.request_rate
    return Point(
        value=value,
        output_throughput=summary.output_throughput,
        request_throughput=summary.request_throughput,
        median_ttft_ms=summary.ttft.median if summary.ttft else None,
        p99_ttft_ms=summary.ttft.p99 if summary.ttft else None,
        median_itl_ms=summary.itl.median if summary.itl else None,
        p99_itl_ms=summary.itl.p99 if summary.itl else None,
        completed=summary.completed,
        failed=summary.failed,
        output_tokens=summary.total_output_tokens,
        server_output_tokens=chosen.server_output_tokens,
        retractions=run.retractions,
        recomputed_tokens=chosen.recomputed_tokens,
        sent_peak=summary.max_concurrent_requests,
        running_peak=peaks.running,
        queued_peak=peaks.queued,
        usage_peak=peaks.usage,
        offered_rate=None if rate == float("inf") else rate,
        kept_up=kept_up(run),
        lowest=ordered[0].run.summary.output_throughput,
        highest=ordered[-1].run.summary.output_throughput,
    )


def kept_up(run: Run) -> bool:
    """Did the run end about when its last request would have if it had met no queue?"""
    done = [record for record in run.records if record.completed]
    if not done:
        return False
    typical = statistics.median(record.e2e for record in done)
    ideal = max(record.sent_at for record in run.records) + typical
    return max(record.ended_at for record in done) <= KEPT_UP * ideal


async def sweep(options: Options, found: Sweep, values: Sequence[Any], prefix: Path) -> None:
    """Run every value into `found`, print a row for each. A value whose run cannot be made gets a
    point with the error; the others go on. Ctrl-C ends the sweep with what there is: during a run
    with the part of it, else by KeyboardInterrupt."""
    is_ours = found.name in {spec.name for spec in dataclasses.fields(Options)}
    old = None
    if not is_ours and options.sweep_launch is None:
        old = (await scheduler_state(options)).get("settings", {}).get(found.name)
    print(HEADER, flush=True)
    try:
        for value in values:
            try:
                repeats = await run_value(options, found.name, value, is_ours, prefix)
            except RUN_ERRORS as error:
                found.points.append(Point(value, error=str(error)))
                found.runs.append([])
                print(f"{value!s:>14} {error}", flush=True)
                continue
            found.points.append(to_point(value, repeats))
            found.runs.append([result_object(measured.run) for measured in repeats])
            print(row(found.points[-1]), flush=True)
            # A sweep takes long: what was measured is kept whatever happens next.
            write_json(found, options, with_ending(prefix, ".json"))
            if repeats[-1].run.interrupted:
                found.interrupted = True
                break
    finally:
        if old is not None:
            try:
                await patch_setting(options, found.name, old)
            except ServerError as error:
                found.not_restored = str(error)


async def run_value(
    options: Options, name: str, value: Any, is_ours: bool, prefix: Path
) -> list[Measured]:
    """All repeats of one value; fewer when one is interrupted. Raises RUN_ERRORS."""
    current = dataclasses.replace(options, **{name: value}) if is_ours else options
    if options.sweep_launch is None:
        if not is_ours:
            await patch_setting(current, name, value)
        return await repeat(current)
    flags = {} if is_ours else {name: value}
    # A value may be a path.
    log = prefix.with_name(f"{prefix.name}_{re.sub(r'[^-.=+@,0-9A-Za-z]+', '_', str(value))}.log")
    async with launched(launch_arguments(options.sweep_launch, flags), log) as url:
        return await repeat(dataclasses.replace(current, base_url=url))


async def repeat(options: Options) -> list[Measured]:
    found: list[Measured] = []
    for _ in range(options.sweep_repeats):
        found.append(await measure(options))
        if found[-1].run.interrupted:
            break
    return found


def row(point: Point) -> str:
    def number(value: float | None, width: int, digits: int = 1) -> str:
        return f"{'n/a':>{width}}" if value is None else f"{value:{width}.{digits}f}"

    return (
        f"{point.value!s:>14} {number(point.output_throughput, 8)} "
        f"{number(point.request_throughput, 7, 2)} {number(point.median_ttft_ms, 9)} "
        f"{number(point.p99_ttft_ms, 9)} {number(point.median_itl_ms, 8)} "
        f"{number(point.p99_itl_ms, 8)} {number(point.retractions, 8, 0)} "
        f"{number(point.running_peak, 8, 0)} {number(point.queued_peak, 7, 0)} {point.failed:7d}"
    )


def with_ending(prefix: Path, ending: str) -> Path:
    """The user's path with an ending behind it, dots in it or not."""
    return prefix.with_name(prefix.name + ending)


def write_csv(found: Sweep, file: Path) -> None:
    with file.open("w", newline="") as output:
        writer = csv.writer(output)
        writer.writerow(COLUMNS)
        writer.writerows(cells(point) for point in found.points)


def write_json(found: Sweep, options: Options, file: Path) -> None:
    body = {
        "schema_version": SCHEMA_VERSION,
        "sweep": found.name,
        "options": dataclasses.asdict(options),
        "interrupted": found.interrupted,
        "knee": dataclasses.asdict(found.knee),
        "remarks": found.remarks,
        "points": [
            {**dataclasses.asdict(point), "runs": runs}
            for point, runs in zip(found.points, found.runs, strict=True)
        ],
    }
    file.write_bytes(orjson.dumps(strict(body), option=orjson.OPT_INDENT_2))


def run_sweep(options: Options) -> int:
    """Run, print and write everything; the exit code, as that of a single run."""
    name, values = parse_sweep(options.sweep or "")
    stamp = datetime.now().strftime("%m%d_%H%M")
    prefix = Path(options.sweep_output or f"sweep_{name}_{stamp}")
    found = Sweep(name)
    try:
        run_loop(sweep(options, found, values, prefix))
    except KeyboardInterrupt:
        found.interrupted = True
    print()
    print(found.knee.text)
    for text in found.remarks:
        print(text)
    files = [with_ending(prefix, ending) for ending in (".csv", ".json")]
    write_csv(found, files[0])
    write_json(found, options, files[1])
    files += _plot(found, prefix)
    print("Written: " + ", ".join(str(file) for file in files))
    if found.interrupted:
        return EXIT_INTERRUPTED
    limit = options.max_failures
    bad = any(p.error is not None or 0 <= limit < p.failed for p in found.points)
    return EXIT_FAILURES if bad or found.not_restored is not None else 0


def _plot(found: Sweep, prefix: Path) -> list[Path]:
    """The pictures, none without matplotlib or without a single good run."""
    if all(point.output_throughput is None for point in found.points):
        return []
    try:
        from bench.sweep_plot import plot
    except ImportError:
        print("No picture: matplotlib is missing (pip install 'regather[plot]')", file=sys.stderr)
        return []
    return plot(found.name, found.points, found.knee, prefix)
