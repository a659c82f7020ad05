"""A pytest plugin that runs tests with the CPU kernels of another build:
`pytest -p other_kernels --kernels LIBRARY.so`, with this folder on the path."""

from __future__ import annotations

from pathlib import Path

import pytest

import srt.native


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels", type=Path, required=True, help="the library to load")


def pytest_configure(config: pytest.Config) -> None:
    # Before any test module asks for the function by name.
    library = srt.native.open_library(config.getoption("kernels"))
    srt.native.native_library = lambda: library
