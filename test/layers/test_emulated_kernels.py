"""The kernels' code for AVX-512 and VNNI, run where the CPU has neither."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from srt.layers.quantization.packed_weight import PackedFormat, PackedWeight, PanelArena
from srt.native import build_library, native_library, open_library

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Whatever tests the kernels on this CPU tests the emulated ones too.
SUITES = [*sorted(HERE.glob("test_native_*.py")), HERE / "test_packed_weight.py"]
# Defines of the emulation, and the outputs that fill a panel of the code it selects.
EMULATIONS = {"EMULATE_AVX512": 16, "EMULATE_VNNI": 16, "EMULATE_AVX_VNNI": 8}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native_library() is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates x86-64 by x86-64"),
]


@pytest.fixture(scope="module", params=EMULATIONS)
def emulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    simde = pytest.importorskip("simde_py", reason="pip install simde-py, or the extra `test`")
    header = ROOT / "test/tools/emulated_avx512.h"
    # Haswell: the emulation is made of AVX2, also on a CPU that could do without it.
    flags = ["-march=haswell", f"-D{request.param}", f"-I{simde.get_include()}"]
    path = build_library(tmp_path_factory.mktemp("kernels"), [*flags, "-include", str(header)])
    panel = open_library(path).rg_packed_bytes(0, 1, 32)
    assert panel == EMULATIONS[request.param] * 20, "other code was selected than asked for"
    return path


def test_emulated_kernels_pass_the_tests_of_the_kernels(emulated: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "other_kernels"]
    command += ["--kernels", str(emulated), *map(str, SUITES)]
    path = os.pathsep.join([str(ROOT / "test/tools"), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout


@pytest.mark.parametrize("weight_format", [PackedFormat.Q4, PackedFormat.Q8])
def test_int8_products_have_the_same_bits_on_every_cpu(
    emulated: Path, weight_format: PackedFormat
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 576, generator=generator)
    x = torch.randn(13, 576, generator=generator)
    products = []
    for kernels in (native_library(), open_library(emulated)):
        assert kernels is not None
        packed = PackedWeight(kernels, PanelArena(), 70, 576, weight_format, exact=False)
        packed.load_rows(0, weight)
        products.append(packed.multiply(x))
    assert torch.equal(products[0], products[1])
