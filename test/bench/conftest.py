"""Fixtures of the load generator's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_command import run_bench
from stub_server import StubServer


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Run the command against a stub server: bench(server, *arguments) -> Outcome."""

    def run(server: StubServer, *arguments: str, bar: bool = False):
        return run_bench(server, tmp_path / "out.jsonl", capsys, *arguments, bar=bar)

    return run
