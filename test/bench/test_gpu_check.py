"""The check of a GPU does on a CPU, interpreted, all that it will do there."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bench import gpu_check
from bench.gpu_accuracy import Check
from bench.gpu_engine import without_graphs

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Row:
    number: int


@pytest.mark.slow
def test_a_dry_run_fills_every_section_and_finds_every_kernel_right(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu_check", "--dry-run", "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["dry_run"] and report["failures"] == []
    for section in ("accuracy", "decode", "extend", "steps", "prefill", "loop"):
        assert report[section], section
    assert len(report["accuracy"]) == 23
    assert all(row["us"] > 0 and row["sdpa_gb_s"] > 0 for row in report["decode"])
    assert all(row["floor_ms"] > 0 and row["host_ms"] > 0 for row in report["steps"])
    assert [row["overlap"] for row in report["loop"]] == [False, True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    assert gpu_check.main(["--json", str(file)]) == 2
    assert "no CUDA device; --dry-run needs none" in capsys.readouterr().err
    assert not file.exists()


def test_a_section_that_fails_keeps_what_it_found_and_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def rows():
        yield Row(1)
        raise ValueError("burnt")

    report = {"failures": []}
    assert gpu_check.collect(report, "decode", rows) == [Row(1)]
    assert report["decode"] == [{"number": 1}]
    assert report["failures"] == ["decode: ValueError: burnt"]
    assert "decode: number\n  1\n" in capsys.readouterr().out


def test_a_kernel_that_is_too_far_off_fails() -> None:
    assert Check("decode", 0.01, 0.02).passed
    assert not Check("decode", 0.03, 0.02).passed
    assert not Check("decode", float("nan"), 0.02).passed


def test_graphs_are_off_for_a_while_and_on_again() -> None:
    class Runner:
        graphs = None

    runner = Runner()
    with without_graphs(runner) as had_graphs:
        assert not had_graphs
    runner.graphs = graphs = object()
    with without_graphs(runner) as had_graphs:
        assert had_graphs and runner.graphs is None
    assert runner.graphs is graphs
