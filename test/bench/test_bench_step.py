"""`python -m bench.bench_step` on a model small enough for every test run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from bench.bench_step import PARTS, main
from srt.native import native_library


@pytest.mark.parametrize("quantization", ["none", "int8", "w8a8_int8", "int4"])
def test_bench_step_times_every_part_of_a_pass_in_every_quantization(
    quantization: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if quantization != "none" and native_library() is None:
        pytest.skip("needs a C++ compiler")
    arguments = ["--model-path", str(write_tiny_model(tmp_path)), "--quantization", quantization]
    arguments += ["--load-format", "dummy"]
    arguments += ["--running", "2", "--context", "8", "--steps", "4", "--prefill", "16", "--json"]
    assert main(arguments) == 0
    decode, prefill = map(json.loads, capsys.readouterr().out.splitlines())
    assert (decode["running"], decode["new_tokens"]) == (2, 2)
    assert (prefill["running"], prefill["new_tokens"]) == (1, 16)
    for row in (decode, prefill):
        assert all(0 < row[part] < row["total"] for part in PARTS)
