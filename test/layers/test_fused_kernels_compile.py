"""The fused kernels compile for real GPUs, without a spill."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from mutate import ROOT

MODULES = [
    "fused_activation",
    "fused_norm",
    "fused_penalties",
    "fused_rope_kv",
    "fused_sampler",
    "fused_top_sampler",
    "invariant_linear",
]


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile_without_a_spill(module: str) -> None:
    # In a process of its own, because in this one kernels are interpreted,
    # and Triton tells its children so.
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "test/tools/aot_check.py", f"srt.layers.{module}"]
    result = subprocess.run(
        [*command, "--arch", "80,90", "--once", "89,100"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
