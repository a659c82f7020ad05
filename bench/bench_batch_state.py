"""Host time of three ways to hold a running batch: `python -m bench.bench_batch_state`.

The same churn on the same columns: gather and concat (what this engine does), persistent rows that
are condensed, and rows that never move behind an index map. See bench/batch_rows.py. Times are
medians of a step's changes and the columns of its pass; `moved` are entries of a column copied a
step, which no other load on the machine can change.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from bench.batch_rows import KINDS, BatchRows

PATTERNS = ("steady", "one-in-one-out", "bursts", "alternating")
BURST_PERIOD = 16
BURST_SHARE = 4  # a quarter leaves and as many come


@dataclass(frozen=True)
class Row:
    pattern: str
    rows: int
    kind: str
    us: float  # median of a step
    us_p90: float
    moved: float  # mean of a step


def churn(pattern: str, rows: int, steps: int, seed: int, batch: BatchRows) -> Iterator[None]:
    """One change of `batch` at a time; after each, its columns are to be taken. The same seed gives
    the same requests in the same order for every kind."""
    rng = random.Random(seed)
    first, second = list(range(rows)), list(range(rows, 2 * rows))
    next_rid = 2 * rows
    batch.join(first)
    if pattern == "alternating":
        batch.park()
        batch.join(second)
    yield
    for step in range(steps):
        if pattern == "alternating":
            batch.resume(first if step % 2 == 0 else second)
        count = 0
        if pattern == "one-in-one-out":
            count = 1
        elif pattern == "bursts" and step % BURST_PERIOD == 0:
            count = max(1, rows // BURST_SHARE)
        if count:
            gone = rng.sample(range(rows), count)
            batch.leave([first[i] for i in gone])
            fresh = list(range(next_rid, next_rid + count))
            next_rid += count
            batch.join(fresh)
            kept = set(gone)
            first = [rid for i, rid in enumerate(first) if i not in kept] + fresh
        yield


def measure(pattern: str, rows: int, steps: int, seed: int) -> list[Row]:
    """Every kind, step by step in turn, so that a noisy moment of the machine hits all of them."""
    batches = [kind(2 * rows + rows) for kind in KINDS]
    churns = [churn(pattern, rows, steps, seed, batch) for batch in batches]
    for turn, batch in zip(churns, batches, strict=True):
        next(turn)
        batch.device_columns()
        batch.rows_moved = 0
    times: list[list[float]] = [[] for _ in batches]
    for _ in range(steps):
        for number, (turn, batch) in enumerate(zip(churns, batches, strict=True)):
            begin = time.perf_counter()
            next(turn)
            batch.device_columns()
            times[number].append((time.perf_counter() - begin) * 1e6)
    sets = [sorted(batch.order()) for batch in batches]
    assert all(members == sets[0] for members in sets), f"{pattern}: the kinds disagree"
    return [
        Row(
            pattern,
            rows,
            batch.name,
            statistics.median(taken),
            sorted(taken)[int(0.9 * len(taken))],
            batch.rows_moved / steps,
        )
        for batch, taken in zip(batches, times, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.bench_batch_state",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", type=int, nargs="+", default=[8, 32, 128, 512, 1024])
    add("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    add("--steps", type=int, default=320)
    add("--seed", type=int, default=1)
    add("--json", action="store_true", help="one JSON array instead of the table")
    args = parser.parse_args(argv)
    if min(args.rows) < 2:
        parser.error(f"--rows must be at least 2, got {min(args.rows)}")
    if args.steps < BURST_PERIOD:
        parser.error(f"--steps must be at least {BURST_PERIOD}, got {args.steps}")
    torch.set_num_threads(1)
    found = [
        row
        for pattern in args.patterns
        for rows in args.rows
        for row in measure(pattern, rows, args.steps, args.seed)
    ]
    if args.json:
        print(json.dumps([asdict(row) for row in found]))
        return 0
    names = [kind.name for kind in KINDS]
    heads = "".join(f" {name + ' us':>13} {'p90':>8} {'moved':>8}" for name in names)
    print(f"{'churn':15} {'rows':>5}{heads}")
    for start in range(0, len(found), len(names)):
        group = found[start : start + len(names)]
        cells = "".join(f" {r.us:13.1f} {r.us_p90:8.1f} {r.moved:8.1f}" for r in group)
        print(f"{group[0].pattern:15} {group[0].rows:5d}{cells}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
