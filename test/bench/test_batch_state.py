"""The three representations of a running batch hold the same requests through any churn."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.batch_rows import KINDS, NUM_DEVICE
from bench.bench_batch_state import PATTERNS, apply, main, measure, plan


def check_columns(batch) -> None:
    order = batch.order()
    columns = batch.device_columns()
    assert len(columns) == NUM_DEVICE
    for k, column in enumerate(columns):
        assert torch.equal(column, torch.tensor(order, dtype=torch.int64) * (k + 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pass_gets_the_columns_of_exactly_who_is_in_it(kind, pattern):
    batch = kind(64)
    first, members = list(range(20)), set(range(20))
    for changes in plan(pattern, 20, 40, seed=3):
        for verb, rids in changes:
            if verb == "join":
                members = members | set(rids)
            elif verb == "leave":
                members -= set(rids)
            elif verb == "resume":
                members = set(rids)
            else:
                members = set()
        apply(batch, changes)
        check_columns(batch)
        assert set(batch.order()) == members
        assert len(batch.order()) == len(first)


@settings(max_examples=40, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_random_joins_and_leaves_never_mix_up_rows(kind, data):
    batch = kind(64)
    members: list[int] = []
    fresh = 1
    for _ in range(8):
        gone = data.draw(st.lists(st.sampled_from(members), unique=True)) if members else []
        members = [rid for rid in members if rid not in gone]
        batch.leave(gone)
        new = list(range(fresh, fresh + data.draw(st.integers(0, 5))))
        fresh += len(new)
        members += new
        batch.join(new)
        check_columns(batch)
        assert sorted(batch.order()) == sorted(members)


def test_rows_moved_tell_the_three_apart_without_a_clock():
    moved = {
        pattern: {row.kind: row.moved for row in measure(pattern, 16, 32, seed=1)}
        for pattern in PATTERNS
    }
    assert moved["steady"] == {"gather": 0.0, "condense": 0.0, "index map": 16.0}
    # Gather copies 15 at the leave and 16 at the join, condense only writes the newcomer.
    assert moved["one-in-one-out"] == {"gather": 31.0, "condense": 1.0, "index map": 17.0}
    # A quarter every 16 steps: 12 and 16, or the 4 newcomers.
    assert moved["bursts"] == {"gather": 28 / 16, "condense": 4 / 16, "index map": 16 + 4 / 16}
    # Another batch is another object for gather; condense must write every row again.
    assert moved["alternating"] == {"gather": 0.0, "condense": 16.0, "index map": 16.0}


def test_the_command_prints_one_row_a_size_and_pattern_and_json_on_demand(capsys):
    assert main(["--rows", "4", "8", "--patterns", "bursts", "--steps", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["bursts", "4"], ["bursts", "8"]]
    assert main(["--rows", "4", "--patterns", "bursts", "--steps", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["kind"] for row in found] == [kind.name for kind in KINDS]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--rows", "1"], "--rows must be at least 2, got 1"),
        (["--steps", "3"], "--steps must be at least 16, got 3"),
    ],
)
def test_sizes_out_of_range_are_refused(arguments, part, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert part in capsys.readouterr().err
