"""Kernel tests run on the GPU where there is one; elsewhere Triton is interpreted on the CPU.

Interpretation is switched on inside the process, by test/tools/interpreted_triton.py, rather than
by TRITON_INTERPRET: nothing then depends on who imports Triton first (torch._dynamo does), and the
processes that tests start do not inherit it. On a CPU nothing else uses Triton, so other tests are
unaffected.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from srt.native import load_library

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

if not torch.cuda.is_available():
    import interpreted_triton

    interpreted_triton.install()


@pytest.fixture(scope="session")
def kernel_device() -> str:
    """Where kernels run in this session: "cuda", or "cpu" under the interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def portable_kernels(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], ctypes.CDLL]:
    """The CPU kernels without intrinsics, for vectors of so many lanes; each is built once."""
    folder = tmp_path_factory.mktemp("portable")
    return lambda lanes: load_library(folder, [f"-DRG_LANES={lanes}"])
