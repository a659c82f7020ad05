"""The padding tax in row-steps, which need no clock."""

from __future__ import annotations

import json

import pytest

from bench.batching_modes import (
    LENGTHS,
    Load,
    main,
    newcomer,
    padding_tax,
    run_load,
    static_curve,
)


def test_eight_answers_of_which_one_is_long_use_a_quarter_of_a_static_batch():
    assert (len(LENGTHS), max(LENGTHS), sum(LENGTHS)) == (8, 1024, 1968)
    continuous, static, dynamic = padding_tax(queued=1)
    assert (static.row_steps, static.useful, static.passes) == (8192, 1968, 1024)
    assert round(static.utilisation, 3) == 0.240
    assert (dynamic.row_steps, dynamic.useful) == (8192, 1968)
    assert (continuous.row_steps, continuous.useful) == (1968, 1968)


def test_a_queue_behind_them_costs_static_batching_more_passes_than_continuous():
    short = [max(1, length // 16) for length in LENGTHS]
    continuous, static, _ = padding_tax(short, queued=3)
    assert static.passes == 3 * max(short)
    assert continuous.passes < 0.6 * static.passes
    assert static.row_steps == 3 * 8 * max(short)


def test_a_newcomer_waits_for_one_row_or_for_the_whole_batch():
    continuous, static, dynamic = newcomer()
    assert continuous.wait_passes[-1] < 20
    assert 900 < static.wait_passes[-1] < 1024
    assert 900 < dynamic.wait_passes[-1] < 1024
    assert static.waits[-1] > 50 * continuous.waits[-1]


def test_a_dynamic_batch_starts_at_its_timeout_of_virtual_time():
    load = Load([4, 4, 4], [0.0, 0.05, 5.0])
    outcome = run_load("dynamic", load, rows=8, timeout=0.1)
    assert outcome.waits[0] == pytest.approx(0.1, abs=0.02)
    assert outcome.waits[1] == pytest.approx(0.05, abs=0.02)
    assert outcome.waits[2] == pytest.approx(0.1, abs=0.02)


def test_used_rows_of_a_static_batch_follow_b_over_h_b():
    [point] = static_curve([16], mean=16, batches=40, seed=1)
    assert point.static == pytest.approx(point.theory, rel=0.1)
    assert point.theory == pytest.approx(16 / 3.3807, rel=1e-3)
    assert point.continuous > 13


def test_theory_says_5_3_times_from_32_to_256_rows():
    harmonic = {b: sum(1 / i for i in range(1, b + 1)) for b in (32, 256)}
    assert (256 / harmonic[256]) / (32 / harmonic[32]) == pytest.approx(5.30, abs=0.005)


def test_the_command_prints_a_table_or_json(capsys):
    arguments = ["curve", "--rows", "2", "4", "--mean", "4", "--batches", "3"]
    assert main(arguments) == 0
    assert "2 -> 4 rows: x " in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    assert [point["rows"] for point in json.loads(capsys.readouterr().out)] == [2, 4]


@pytest.mark.parametrize("arguments", [["curve", "--rows", "0"], ["padding", "--queued", "0"]])
def test_numbers_below_one_are_refused_by_name(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert f"{arguments[1]} must be at least 1, got 0" in capsys.readouterr().err
