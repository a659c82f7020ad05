"""The load generator's command, run against a stub server with few short prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from stub_server import StubServer

from bench.bench_serving import main

OUTPUT_LEN = 8
NATIVE = "sglang"


@dataclass
class Outcome:
    code: int
    printed: str
    errors: str
    result: dict[str, Any] | None  # the JSON line, None if there is none


def run_bench(
    server: StubServer,
    file: Path,
    capsys: pytest.CaptureFixture[str],
    *arguments: str,
    bar: bool = False,
) -> Outcome:
    """Later options win over those given here. The JSON line goes to `file`."""
    file.unlink(missing_ok=True)
    code = main(
        [
            "--base-url", server.url, "--dataset-name", "random-ids",
            "--random-input-len", "12", "--random-output-len", str(OUTPUT_LEN),
            "--random-range-ratio", "1", "--num-prompts", "4",
            "--output-file", str(file), "--output-details", *arguments,
            *([] if bar else ["--disable-tqdm"]),
        ]
    )  # fmt: skip
    captured = capsys.readouterr()
    result = None
    if file.exists():
        result = json.loads(file.read_text(), parse_constant=refuse_constant)
    return Outcome(code, captured.out, captured.err, result)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def lines_of(report: str) -> dict[str, str]:
    """label -> value of the printed report."""
    pairs = (line.partition(":") for line in report.splitlines())
    return {label: value.strip() for label, colon, value in pairs if colon}
