"""Host time of three ways to hold a running batch: `python -m bench.bench_batch_state`.

The same churn on the same columns: gather and concat (what this engine does), persistent rows that
are condensed, and rows that never move behind an index map. See bench/batch_rows.py. Times are
those of a step's changes and of the columns of its pass; `moved` are entries of a column copied a
step, which no other load on the machine can change.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

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
    us: float  # of a step: medians of those with and without a change, weighed
    change_us: float  # median of a step with a change; 0 if there was none
    moved: float  # mean of a step


Change = tuple[Literal["join", "leave", "park", "resume"], list[int]]


def plan(pattern: str, rows: int, steps: int, seed: int) -> list[list[Change]]:
    """The changes before each pass, [steps + 1]; the first builds the batch."""
    rng = random.Random(seed)
    first, second = list(range(rows)), list(range(rows, 2 * rows))
    next_rid = 2 * rows
    planned: list[list[Change]] = [[("join", first)]]
    if pattern == "alternating":
        planned[0] += [("park", []), ("join", second)]
    for step in range(steps):
        count = 0
        if pattern == "one-in-one-out":
            count = 1
        elif pattern == "bursts" and step % BURST_PERIOD == 0:
            count = max(1, rows // BURST_SHARE)
        changes: list[Change] = []
        if pattern == "alternating":
            changes = [("resume", first if step % 2 == 0 else second)]
        elif count:
            gone = set(rng.sample(first, count))
            fresh = list(range(next_rid, next_rid + count))
            next_rid += count
            changes = [("leave", sorted(gone)), ("join", fresh)]
            first = [rid for rid in first if rid not in gone] + fresh
        planned.append(changes)
    return planned


def apply(batch: BatchRows, changes: Sequence[Change]) -> None:
    for verb, rids in changes:
        if verb == "join":
            batch.join(rids)
        elif verb == "leave":
            batch.leave(rids)
        elif verb == "resume":
            batch.resume(rids)
        else:
            batch.park()


def measure(pattern: str, rows: int, steps: int, seed: int) -> list[Row]:
    """Every kind, step by step in turn, so that a noisy moment of the machine hits all of them."""
    batches: list[BatchRows] = [kind(3 * rows) for kind in KINDS]
    planned = plan(pattern, rows, steps, seed)
    for batch in batches:
        apply(batch, planned[0])
        batch.device_columns()
        batch.rows_moved = 0
    changed: list[list[float]] = [[] for _ in batches]
    unchanged: list[list[float]] = [[] for _ in batches]
    for changes in planned[1:]:
        for number, batch in enumerate(batches):
            begin = time.perf_counter()
            apply(batch, changes)
            batch.device_columns()
            elapsed = (time.perf_counter() - begin) * 1e6
            (changed if changes else unchanged)[number].append(elapsed)
    sets = [sorted(batch.order()) for batch in batches]
    assert all(members == sets[0] for members in sets), f"{pattern}: the kinds disagree"
    return [
        Row(
            pattern,
            rows,
            batch.name,
            _typical(changed[number], unchanged[number]),
            statistics.median(changed[number] or [0.0]),
            batch.rows_moved / steps,
        )
        for number, batch in enumerate(batches)
    ]


def _typical(changed: list[float], unchanged: list[float]) -> float:
    """The medians of both sorts of steps, weighed by how many there were: a mean that is not
    moved by moments in which the machine did something else."""
    parts = [(statistics.median(times), len(times)) for times in (changed, unchanged) if times]
    return sum(median * count for median, count in parts) / sum(count for _, count in parts)


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
    heads = "".join(f" {name + ' us':>13} {'change':>8} {'moved':>8}" for name in names)
    print(f"{'churn':15} {'rows':>5}{heads}")
    for start in range(0, len(found), len(names)):
        group = found[start : start + len(names)]
        cells = "".join(f" {r.us:13.1f} {r.change_us:8.1f} {r.moved:8.1f}" for r in group)
        print(f"{group[0].pattern:15} {group[0].rows:5d}{cells}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
